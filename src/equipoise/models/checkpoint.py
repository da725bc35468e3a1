"""Weights on disk: one safetensors file that says what it is, read strictly and written atomically.

The metadata hold `arch`, `num_classes`, `image_shape` ("3,32,32") and any further facts as text. Weights
may be half precision and are used in fp32. State dicts of torch (`.pt`, `.pth`) are read too, weights only;
they do not say what they are, so the caller does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from equipoise.core import checks
from equipoise.core.checks import InputError
from equipoise.models import formats, zoo
from equipoise.models.normalize import Normalized

TORCH_SUFFIXES = (".pt", ".pth")
IDENTITY = ("arch", "num_classes", "image_shape")
_COUNTER = "num_batches_tracked"


def save(path: str | Path, model: nn.Module, facts: Mapping[str, str], *, half: bool = False) -> None:
    """Write the weights and facts of a model; the file is whole or not there at all.

    The same weights and facts give the same bytes.

    Args:
        path: a `.safetensors` file; replaced if it exists.
        model: built by the zoo, or any module whose `facts` hold `arch`, `num_classes`, `image_shape`.
        facts: how it was made, as text.
        half: store weights of two and more dimensions in fp16; batch norm, biases, mean and std stay.
    """
    path = Path(path)
    checks.require(path.suffix == ".safetensors", "path", "end with .safetensors", str(path))
    identity = model.identity if isinstance(model, Normalized) else {}
    for key in IDENTITY:
        checks.require(key in identity or key in facts, "facts", f"hold {key}", dict(facts))
        known = identity.get(key, facts.get(key))
        said = facts.get(key, known)
        checks.require(said == known, key, f"be {known!r}, as the model has it", said)
    state = {key: value.detach().cpu().contiguous() for key, value in sorted(model.state_dict().items())}
    if half:
        state = {key: _halved(key, value) for key, value in state.items()}
    formats.write_safetensors(path, state, {**facts, **identity})


def load(
    path: str | Path, arch: str | None = None, *, num_classes: int | None = None,
    image_shape: tuple[int, int, int] | None = None, mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Normalized:
    """The model of a checkpoint in fp32, in evaluation mode, on the CPU.

    Whatever the file says and the caller says must agree. Nothing is guessed, with one exception: a
    `.pt` file without `image_shape` is taken to be for (3, 32, 32), which weights of another shape refuse.

    Args:
        path: `.pt` and `.pth` are state dicts of torch, anything else is safetensors.
        arch: needed for a state dict.
        num_classes: for a state dict, else that of its last layer `fc`.
        image_shape: (C, H, W).
        mean, std: needed for a file that has none; [0, …] and [1, …] say that images go in as they are.
    """
    path = Path(path)
    if path.suffix in TORCH_SUFFIXES:
        state = formats.read_torch(path)
        checks.require(arch is not None, "arch", f"be given, because {path} does not say it", arch)
        found_arch, found_shape = str(arch), (3, 32, 32) if image_shape is None else image_shape
        found_classes = _last_layer(path, state) if num_classes is None else num_classes
    else:
        state, metadata = formats.read_safetensors(path)
        found_arch, found_classes, found_shape = _identity(path, metadata)
        for name, said, found in (("arch", arch, found_arch), ("num_classes", num_classes, found_classes),
                                  ("image_shape", image_shape, found_shape)):
            checks.require(said is None or said == found, name, f"be {found!r}, as {path} says", said)
    try:
        model = zoo.blank(found_arch, num_classes=found_classes, image_shape=found_shape, mean=mean, std=std)
    except InputError as error:
        raise InputError(f"{error}, for {path}") from None
    _settle(path, state, "mean", mean)
    _settle(path, state, "std", std)
    _fill(path, model, state)
    return model.eval()


def facts(path: str | Path) -> dict[str, str]:
    """The metadata of a checkpoint, without its weights; a state dict of torch has none."""
    path = Path(path)
    if path.suffix in TORCH_SUFFIXES:
        formats.need_file(path)
        return {}
    return formats.read_safetensors(path, weights=False)[1]


def digest(path: str | Path) -> str:
    """SHA-256 of the file, in hex."""
    path = Path(path)
    formats.need_file(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def weights_digest(module: nn.Module) -> str:
    """SHA-256 over names, types, shapes and values of the state dict, in the order of the names."""
    sha = hashlib.sha256()
    for key, value in sorted(module.state_dict().items()):
        if isinstance(value, Tensor):
            sha.update(f"{key}:{value.dtype}:{tuple(value.shape)};".encode())
            sha.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def model_identity(model: nn.Module) -> str:
    """The digest of a model's weights, and the settings it tells of itself that are no weights."""
    said = model.extra_repr()
    return weights_digest(model)[:32] + (f" ({said})" if said else "")


def _halved(key: str, value: Tensor) -> Tensor:
    """fp16 for weights of layers; small vectors stay, because their bytes are few and their range wide."""
    if value.dim() < 2 or not value.is_floating_point() or key in ("mean", "std"):
        return value
    small = value.half()
    checks.require(bool(small.isfinite().all()), key, "fit into half precision", float(value.abs().max()))
    return small


def _identity(path: Path, metadata: Mapping[str, str]) -> tuple[str, int, tuple[int, int, int]]:
    missing = [key for key in IDENTITY if key not in metadata]
    if missing:
        raise InputError(f"`{path}` must say {', '.join(missing)} in its metadata, got {sorted(metadata)}")
    try:
        channels, height, width = map(int, metadata["image_shape"].split(","))
        return metadata["arch"], int(metadata["num_classes"]), (channels, height, width)
    except ValueError:
        got = {key: metadata[key] for key in IDENTITY}
        message = f"`{path}` must say num_classes as 10 and image_shape as 3,32,32, got {got}"
        raise InputError(message) from None


def _last_layer(path: Path, state: Mapping[str, Tensor]) -> int:
    weight = state.get("fc.weight")
    if weight is None or weight.dim() != 2:
        raise InputError(f"`{path}` must hold the last layer as fc.weight, got {_few(state)}")
    return len(weight)


def _settle(path: Path, state: dict[str, Tensor], name: str, said: Sequence[float] | None) -> None:
    """Put what the caller says of mean or std into the weights, unless the file says otherwise."""
    found = state.get(name)
    if said is None:
        if found is None:
            raise InputError(f"`{name}` must be given (one number per channel of images in [0, 1]), "
                             f"because {path} has none, got None")
        return
    given = torch.tensor([float(value) for value in said]).view(1, -1, 1, 1)
    if found is None:
        state[name] = given
        return
    # A file in half precision knows three digits.
    same = found.shape == given.shape and torch.allclose(found.float(), given, atol=1e-3)
    checks.require(same, name, f"be {found.flatten().tolist()}, as {path} has it", list(said))


def _fill(path: Path, model: Normalized, state: Mapping[str, Tensor]) -> None:
    """Check names and shapes before any memory is taken, then copy."""
    wanted = model.state_dict()
    counters = {key: torch.tensor(0) for key in wanted if key.endswith(_COUNTER)}
    state = {**counters, **state}
    arch = model.identity["arch"]
    for trouble, keys in (
        ("no", [key for key in wanted if key not in state]),
        ("the unknown", [key for key in state if key not in wanted]),
        ("another shape or type of", [
            key for key, value in wanted.items() if key in state and _kind(state[key]) != _kind(value)
        ]),
    ):
        if keys:
            raise InputError(f"`{path}` must hold exactly the weights of {arch}, got {trouble} {_few(keys)}")
    model.to_empty(device="cpu")
    model.load_state_dict(state)


def _kind(value: Tensor) -> tuple[torch.Size, bool]:
    return value.shape, value.is_floating_point()


def _few(keys: Mapping[str, Tensor] | Sequence[str]) -> str:
    names = list(keys)
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest
