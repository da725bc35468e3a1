"""Bundles: mixture folders that hold the weights of both bases, so that they move between machines
and load alone."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from equipoise import models
from equipoise.core import checks, files
from equipoise.core.modes import inference
from equipoise.models import Normalized, RandomlySmoothedClassifier, TTAClassifier, checkpoint
from equipoise.models.inspection import one_line
from equipoise.models.layers.labels import SelectClasses
from equipoise.models.options import escape, expand_home
from equipoise.models.reference import Scheme, innermost

COPIED = ("exported", "onnx")  # schemes of models that are one file
BATCH = 2  # images of the batch with which a network is traced


def bundle_base(
    folder: Path, side: str, base: nn.Module, image_shape: tuple[int, int, int] | None = None
) -> tuple[str, str]:
    """Write the base of one side into the folder; its reference, relative to the folder, and the
    digest it loads with.

    A network of the zoo becomes a safetensors file, also inside test-time augmentation or
    smoothing; a model that is a file of its own is copied; anything else is traced by
    `torch.export` for images of one shape.
    """
    prefix, inner = _unwrap(base)
    if isinstance(inner, Normalized) and inner.config:
        checkpoint.save(folder / f"{side}.safetensors", inner)
        return f"{prefix}file:{side}.safetensors", models.weights_digest(base)
    body = _copy(folder, side, base) or _export(
        folder, side, inner, image_shape or _shape(base, inner)
    )
    return f"{prefix}{body}", models.weights_digest(
        models.load(_absolute(folder, f"{prefix}{body}"))
    )


def _unwrap(base: nn.Module) -> tuple[str, nn.Module]:
    """How a reference to the base begins, and the network inside of its wrappers."""
    if isinstance(base, TTAClassifier):
        prefix, inner = _unwrap(base.model)
        return f"tta:{base.count}:{prefix}", inner
    if isinstance(base, RandomlySmoothedClassifier):
        checks.require(base.seed == 0, "seed", "be 0 for a smoothed base of a bundle", base.seed)
        prefix, inner = _unwrap(base.model)
        return f"smoothed:{base.sigma!r},{base.samples}{',fresh' * base.fresh}:{prefix}", inner
    return "", base


def shape_of_zoo_base(*bases: nn.Module) -> tuple[int, int, int] | None:
    """The shape of the images of a mixture, if one of its bases is a network of the zoo, which was
    built for it."""
    for _, inner in map(_unwrap, bases):
        if isinstance(inner, Normalized) and inner.config:
            channels, height, width = map(int, inner.config["image_shape"].split(","))
            return channels, height, width
    return None


def _shape(*known: nn.Module) -> tuple[int, int, int]:
    shapes = [
        info.input_shape for model in known if (info := models.info_of(model)) and info.input_shape
    ]
    if not shapes:
        raise checks.InputError(
            f"`image_shape` must be given to bundle a {type(known[-1]).__name__}, which is traced "
            "for images of one shape, got None"
        )
    return shapes[0]


def _copy(folder: Path, side: str, base: nn.Module) -> str | None:
    """Copy the file of a model that is one; the last part of its reference, or None."""
    reference = models.full_reference_of(base)
    if reference is None:
        return None
    model = innermost(models.parse(reference))
    if model.scheme in ("http", "https"):
        raise checks.InputError(
            f"`bundle` must be left out for {reference}, which runs on a server, got True"
        )
    if model.scheme not in COPIED:
        return None
    path = Path(expand_home(model.body))
    target = folder / f"{side}{path.suffix}"
    folder.mkdir(parents=True, exist_ok=True)
    with path.open("rb") as source, files.atomic_writer(target) as copy:
        shutil.copyfileobj(source, copy)
    labels = [
        ",".join(map(str, part.classes))
        for part in base.modules()
        if isinstance(part, SelectClasses)
    ]
    # Numbers: a file of labels stays behind
    settings = replace(model.settings, labels=labels[0] if labels else None)
    return str(replace(model, body=target.name, settings=settings))


def _export(folder: Path, side: str, network: nn.Module, image_shape: tuple[int, int, int]) -> str:
    """Trace a network for any number of images of one shape, and check that it still computes the
    same."""
    checks.require(
        isinstance(models.SCHEMES.get("exported"), Scheme),
        side,
        "be a network of the zoo, to be bundled",
        type(network).__name__,
    )
    device = next((weight.device for weight in network.parameters()), torch.device("cpu"))
    x = torch.rand(BATCH, *image_shape, generator=torch.Generator().manual_seed(0))
    path = folder / f"{side}.pt2"
    folder.mkdir(parents=True, exist_ok=True)
    network.cpu()  # a program of a GPU does not load without one
    try:
        with inference(network):
            program = torch.export.export(
                network, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},), strict=False
            )
            expected = network(x)
        with files.atomic_writer(path) as file:
            torch.export.save(program, file)
    except OSError:
        raise
    except Exception as error:  # the network is the user's own, and tracing can fail in any way
        raise checks.InputError(
            f"`{side}` must be a network that torch.export can trace, got "
            f"{type(network).__name__}, which raised {one_line(error)}"
        ) from error
    finally:
        network.to(device)
    loaded = models.load(f"exported:{escape(str(path))}")
    with torch.no_grad():
        same = torch.allclose(loaded(x), expected, rtol=1e-4, atol=1e-5)
    checks.require(same, side, "compute the same after torch.export", type(network).__name__)
    return f"exported:{path.name}"


def _absolute(folder: Path, reference: str) -> str:
    return models.relocate(reference, lambda path: str(folder / path))
