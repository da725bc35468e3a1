"""Names and shapes of the weights in RobustBench's files, written down from its public code, and
made-up values."""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

Shapes = dict[str, tuple[int, ...]]


def norm(name: str, channels: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from (
        (f"{name}.{part}", (channels,))
        for part in ("weight", "bias", "running_mean", "running_var")
    )
    yield f"{name}.num_batches_tracked", ()


def blocks(
    widths: Sequence[int], counts: Sequence[int], stem: int
) -> Iterator[tuple[int, int, int, int]]:
    """Stage, block, input channels and output channels."""
    for stage, (width, count) in enumerate(zip(widths, counts, strict=True)):
        for block in range(count):
            yield stage, block, stem if block == 0 else width, width
        stem = width


def layer(name: str, outputs: int, inputs: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (outputs, inputs)
    yield f"{name}.bias", (outputs,)


def deepmind(
    widths: Sequence[int], counts: Sequence[int], classes: int, stem: int = 16, se: bool = False
) -> Shapes:
    shapes: Shapes = {"init_conv.weight": (stem, 3, 3, 3)}
    for stage, block, inputs, outputs in blocks(widths, counts, stem):
        prefix = f"layer.{stage}.block.{block}"
        shapes.update(norm(f"{prefix}.batchnorm_0", inputs))
        shapes[f"{prefix}.conv_0.weight"] = (outputs, inputs, 3, 3)
        shapes.update(norm(f"{prefix}.batchnorm_1", outputs))
        shapes[f"{prefix}.conv_1.weight"] = (outputs, outputs, 3, 3)
        if inputs != outputs:
            shapes[f"{prefix}.shortcut.weight"] = (outputs, inputs, 1, 1)
        if se:
            reduced = round(outputs / 4)
            for name, first, second in (("fc1", reduced, outputs), ("fc2", outputs, reduced)):
                shapes[f"{prefix}.se.{name}.weight"] = (first, second, 1, 1)
                shapes[f"{prefix}.se.{name}.bias"] = (first,)
    shapes.update(norm("batchnorm", widths[-1]))
    shapes.update(layer("logits", classes, widths[-1]))
    return shapes


def deepmind_preact(
    widths: Sequence[int], counts: Sequence[int], classes: int, stem: int = 64
) -> Shapes:
    shapes: Shapes = {"conv_2d.weight": (stem, 3, 3, 3)}
    for stage, block, inputs, outputs in blocks(widths, counts, stem):
        prefix = f"layer_{stage}.{block}"
        shapes.update(norm(f"{prefix}.batchnorm_0", inputs))
        shapes[f"{prefix}.conv_2d_1.weight"] = (outputs, inputs, 3, 3)
        shapes.update(norm(f"{prefix}.batchnorm_1", outputs))
        shapes[f"{prefix}.conv_2d_2.weight"] = (outputs, outputs, 3, 3)
        if inputs != outputs:
            shapes[f"{prefix}.shortcut.weight"] = (outputs, inputs, 3, 3)
    shapes.update(norm("batchnorm", widths[-1]))
    shapes.update(layer("logits", classes, widths[-1]))
    return shapes


def trades(widths: Sequence[int], counts: Sequence[int], classes: int) -> Shapes:
    shapes: Shapes = {"conv1.weight": (16, 3, 3, 3)}
    for stage, block, inputs, outputs in blocks(widths, counts, 16):
        prefix = f"block{stage + 1}.layer.{block}"
        shapes.update(norm(f"{prefix}.bn1", inputs))
        shapes[f"{prefix}.conv1.weight"] = (outputs, inputs, 3, 3)
        shapes.update(norm(f"{prefix}.bn2", outputs))
        shapes[f"{prefix}.conv2.weight"] = (outputs, outputs, 3, 3)
        if inputs != outputs:
            shapes[f"{prefix}.convShortcut.weight"] = (outputs, inputs, 1, 1)
    shapes.update(norm("bn1", widths[-1]))
    shapes.update(layer("fc", classes, widths[-1]))
    return shapes


def preact(
    widths: Sequence[int], counts: Sequence[int], classes: int, *, final_norm: bool
) -> Shapes:
    shapes: Shapes = {"conv1.weight": (64, 3, 3, 3)}
    for stage, block, inputs, outputs in blocks(widths, counts, 64):
        prefix = f"layer{stage + 1}.{block}"
        shapes.update(norm(f"{prefix}.bn1", inputs))
        shapes[f"{prefix}.conv1.weight"] = (outputs, inputs, 3, 3)
        shapes.update(norm(f"{prefix}.bn2", outputs))
        shapes[f"{prefix}.conv2.weight"] = (outputs, outputs, 3, 3)
        if inputs != outputs:
            shapes[f"{prefix}.shortcut.0.weight"] = (outputs, inputs, 1, 1)
    if final_norm:
        shapes.update(norm("bn", widths[-1]))
    shapes.update(layer("linear", classes, widths[-1]))
    return shapes


def resnet(
    widths: Sequence[int], counts: Sequence[int], classes: int, *, bottleneck: bool
) -> Shapes:
    shapes: Shapes = {"conv1.weight": (64, 3, 3, 3), **dict(norm("bn1", 64))}
    for stage, block, inputs, outputs in blocks(widths, counts, 64):
        prefix, inner = f"layer{stage + 1}.{block}", outputs // 4
        convolutions = (
            [(inner, inputs, 1), (inner, inner, 3), (outputs, inner, 1)]
            if bottleneck
            else [(outputs, inputs, 3), (outputs, outputs, 3)]
        )
        for number, (first, second, side) in enumerate(convolutions, start=1):
            shapes[f"{prefix}.conv{number}.weight"] = (first, second, side, side)
            shapes.update(norm(f"{prefix}.bn{number}", first))
        if inputs != outputs:
            shapes[f"{prefix}.shortcut.0.weight"] = (outputs, inputs, 1, 1)
            shapes.update(norm(f"{prefix}.shortcut.1", outputs))
    shapes.update(layer("linear", classes, widths[-1]))
    return shapes


def bit(width: int, counts: Sequence[int], classes: int) -> Shapes:
    shapes: Shapes = {"root.conv.weight": (64 * width, 3, 7, 7)}
    for stage, block, inputs, outputs in blocks(
        [side * width for side in (256, 512, 1024, 2048)], counts, 64 * width
    ):
        prefix, inner = f"body.block{stage + 1}.unit{block + 1:02d}", outputs // 4
        for number, (first, second, side) in enumerate(
            [(inner, inputs, 1), (inner, inner, 3), (outputs, inner, 1)], start=1
        ):
            shapes[f"{prefix}.gn{number}.weight"] = shapes[f"{prefix}.gn{number}.bias"] = (second,)
            shapes[f"{prefix}.conv{number}.weight"] = (first, second, side, side)
        if inputs != outputs:
            shapes[f"{prefix}.downsample.weight"] = (outputs, inputs, 1, 1)
    shapes["head.gn.weight"] = shapes["head.gn.bias"] = (2048 * width,)
    shapes["head.conv.weight"], shapes["head.conv.bias"] = (classes, 2048 * width, 1, 1), (classes,)
    return shapes


def wide(depth: int, width: int) -> tuple[list[int], list[int]]:
    return [16 * width, 32 * width, 64 * width], [(depth - 4) // 6] * 3


def published_shapes(arch: str, classes: int) -> Shapes:
    """The names and shapes of a RobustBench file, by the name of our architecture."""
    numbers = arch.rpartition("resnet")[2]
    if arch == "robust_wide_resnet70_16":
        return deepmind((216, 432, 864), (30, 31, 10), classes, stem=96, se=True)
    if arch == "bit_resnet152x2":
        return bit(2, (3, 8, 36, 3), classes)
    if "wide" in arch:
        depth, size = map(int, numbers.split("_"))
        return (deepmind if arch.startswith("deepmind") else trades)(*wide(depth, size), classes)
    if arch == "deepmind_preact_resnet18":
        return deepmind_preact((64, 128, 256, 512), (2, 2, 2, 2), classes)
    if arch.startswith("preact"):
        return preact(
            (64, 128, 256, 512), (2, 2, 2, 2), classes, final_norm=not arch.endswith("raw")
        )
    if arch == "resnet50":
        return resnet((256, 512, 1024, 2048), (3, 4, 6, 3), classes, bottleneck=True)
    assert arch == "resnet18"
    return resnet((64, 128, 256, 512), (2, 2, 2, 2), classes, bottleneck=False)


def digest(shapes: Mapping[str, tuple[int, ...]]) -> str:
    text = ";".join(f"{name}:{','.join(map(str, shape))}" for name, shape in sorted(shapes.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def made_up_state(shapes: Shapes) -> dict[str, Tensor]:
    """Weights by a formula of their name and position, of the size that keeps activations near
    1."""
    state = {}
    for name, shape in shapes.items():
        if name.endswith("num_batches_tracked"):
            state[name] = torch.tensor(0)
            continue
        count = math.prod(shape)
        waves = torch.cos(
            torch.arange(count, dtype=torch.float64) * 1.7 + zlib.crc32(name.encode()) % 1000
        ).view(shape)
        if len(shape) > 1:
            waves = waves * math.sqrt(2 / math.prod(shape[1:]))
        elif name.endswith(("running_var", "weight")):
            waves = 1 + 0.5 * waves
        state[name] = (
            waves.float()
            if len(shape) > 1 or name.endswith(("running_var", "weight"))
            else waves.float() / 4
        )
    return state


def made_up_images(count: int = 2, side: int = 32) -> Tensor:
    return (
        torch.cos(torch.arange(count * 3 * side * side, dtype=torch.float64) * 0.37).view(
            count, 3, side, side
        )
        / 2
        + 0.5
    ).float()
