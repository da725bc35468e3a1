"""Checkpoints: one safetensors file with metadata that describe the model, read strictly and written atomically.

The metadata hold `arch`, `num_classes`, `image_shape` ("3,32,32") and any further text. Weights may be stored in half
precision and are used in fp32. State dicts of torch (`.pt`, `.pth`) are read too, weights only; they have no metadata,
so the caller provides them. Reading never executes anything, and a damaged or foreign file is an :class:`InputError`.
"""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialize
from torch import Tensor, nn

from equipoise.core import checks, files
from equipoise.core.checks import InputError
from equipoise.models import zoo
from equipoise.models.preprocessing import Normalized

TORCH_SUFFIXES = (".pt", ".pth")
REQUIRED = ("arch", "num_classes", "image_shape")


def save(path: str | Path, model: nn.Module, metadata: Mapping[str, str] | None = None, *, half: bool = False) -> None:
    """Write the weights and metadata of a model atomically; the same contents give the same bytes.

    Args:
        path: a `.safetensors` file.
        model: built by the zoo, or any module if `metadata` hold `arch`, `num_classes`, `image_shape`.
        metadata: how it was trained, as text.
        half: store weights of two and more dimensions in fp16, but not mean and std.
    """
    path, metadata = Path(path), metadata or {}
    checks.require(path.suffix == ".safetensors", "path", "end with .safetensors", str(path))
    config = model.config if isinstance(model, Normalized) else {}
    content = {**metadata, **config}
    for key in REQUIRED:
        checks.require(key in content, "metadata", f"hold {key}", dict(metadata))
        given = metadata.get(key, content[key])
        checks.require(given == content[key], key, f"be {content[key]!r}, as in the model", given)
    state = {key: _to_half(key, value) if half else value for key, value in model.state_dict().items()}
    write_safetensors(path, state, content)


def load(path: str | Path, arch: str | None = None, *, num_classes: int | None = None,
         image_shape: tuple[int, int, int] | None = None, mean: Sequence[float] | None = None,
         std: Sequence[float] | None = None) -> Normalized:
    """The model of a checkpoint in fp32, in evaluation mode, on the CPU.

    The file and the arguments must agree. Nothing is guessed, with one exception: a `.pt` file without `image_shape`
    is taken to be for (3, 32, 32); weights of another shape are then an error.

    Args:
        path: `.pt` and `.pth` are state dicts of torch, anything else is safetensors.
        arch: required for a state dict.
        num_classes: for a state dict, by default that of its last layer `fc`.
        image_shape: (C, H, W).
        mean, std: required for a file without them; use [0, …] and [1, …] for a model that does not normalise.
    """
    path = Path(path)
    if path.suffix in TORCH_SUFFIXES:
        state = _read_torch(path)
        checks.require(arch is not None, "arch", f"be given, because {path} does not contain it", arch)
        arch, image_shape = str(arch), (3, 32, 32) if image_shape is None else image_shape
        num_classes = _count_classes(path, state) if num_classes is None else num_classes
    else:
        state, metadata = read_safetensors(path)
        stored = _parse_config(path, metadata)
        for name, given, value in zip(REQUIRED, (arch, num_classes, image_shape), stored, strict=True):
            checks.require(given is None or given == value, name, f"be {value!r}, as in {path}", given)
        arch, num_classes, image_shape = stored
    try:
        model = zoo.build_empty(arch, num_classes=num_classes, image_shape=image_shape)
        model.set_normalization(mean, std)  # checks them
    except InputError as error:
        raise InputError(f"{error}, for {path}") from None
    for name, values in (("mean", mean), ("std", std)):
        _add_normalization(path, state, name, values)
    _load_weights(path, model, state)
    return model.eval()


def read_metadata(path: str | Path) -> dict[str, str]:
    """The metadata of a checkpoint, without its weights; a state dict of torch has none."""
    path = Path(path)
    if path.suffix in TORCH_SUFFIXES:
        _require_file(path)
        return {}
    return read_safetensors(path, weights=False)[1]


def _to_half(key: str, value: Tensor) -> Tensor:
    """fp16 for the weights of layers; vectors (biases, batch norm) are small and have a wide range, so they stay."""
    if value.dim() < 2 or not value.is_floating_point() or key in ("mean", "std"):
        return value
    small = value.half()
    checks.require(bool(small.isfinite().all()), key, "fit into half precision", float(value.abs().max()))
    return small


def _parse_config(path: Path, metadata: Mapping[str, str]) -> tuple[str, int, tuple[int, int, int]]:
    missing = [key for key in REQUIRED if key not in metadata]
    if missing:
        raise InputError(f"`{path}` must have {', '.join(missing)} in its metadata, got {sorted(metadata)}")
    try:
        channels, height, width = map(int, metadata["image_shape"].split(","))
        return metadata["arch"], int(metadata["num_classes"]), (channels, height, width)
    except ValueError:
        stored = {key: metadata[key] for key in REQUIRED}
        message = f"`{path}` must have num_classes like 10 and image_shape like 3,32,32, got {stored}"
        raise InputError(message) from None


def _count_classes(path: Path, state: Mapping[str, Tensor]) -> int:
    weight = state.get("fc.weight")
    if weight is None or weight.dim() != 2:
        raise InputError(f"`{path}` must hold the last layer as fc.weight, got {_abbreviate(state)}")
    return len(weight)


def _add_normalization(path: Path, state: dict[str, Tensor], name: str, values: Sequence[float] | None) -> None:
    """Add the mean or std that the caller gave to the weights, or check that it agrees with the file."""
    stored = state.get(name)
    if values is None:
        if stored is None:
            raise InputError(f"`{name}` must be given (one number per channel of images in [0, 1]), "
                             f"because {path} has none, got None")
        return
    given = torch.tensor([float(value) for value in values]).view(1, -1, 1, 1)
    if stored is None:
        state[name] = given
        return
    # A file in half precision has three digits.
    same = stored.shape == given.shape and torch.allclose(stored.float(), given, atol=1e-3)
    checks.require(same, name, f"be {stored.flatten().tolist()}, as in {path}", list(values))


def _load_weights(path: Path, model: Normalized, state: Mapping[str, Tensor]) -> None:
    """Check names and shapes before any memory is allocated, then copy."""
    expected = model.state_dict()
    counters = {key: torch.tensor(0) for key in expected if key.endswith("num_batches_tracked")}
    state = {**counters, **state}
    for problem, keys in (
        ("no", [key for key in expected if key not in state]),
        ("the unknown", [key for key in state if key not in expected]),
        ("another shape or type of", [key for key, value in expected.items() if key in state and (
            state[key].shape != value.shape or state[key].is_floating_point() != value.is_floating_point())]),
    ):
        if keys:
            raise InputError(f"`{path}` must hold exactly the weights of {model.config['arch']}, got {problem} "
                             f"{_abbreviate(keys)}")
    model.to_empty(device="cpu")
    model.load_state_dict(state)


def _abbreviate(keys: Iterable[str]) -> str:
    names = list(keys)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _require_file(path: Path) -> None:
    """Raise an :class:`InputError` unless the path is a file."""
    if not path.is_file():
        raise InputError(f"`{path}` must be a file{', got a folder' if path.is_dir() else ' that exists'}")


def read_safetensors(path: Path, *, weights: bool = True) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors (unless `weights` is false) and the metadata of a file."""
    _require_file(path)
    try:
        with safe_open(path, framework="pt") as file:
            state = {key: file.get_tensor(key) for key in file.keys()} if weights else {}  # noqa: SIM118
            return state, file.metadata() or {}
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"`{path}` must be a whole safetensors file, got one that cannot be read ({error})") from None


def _read_torch(path: Path) -> dict[str, Tensor]:
    """The state dict of a torch file, unwrapped; nothing in the file is executed."""
    _require_file(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about old pickles; the errors below are clearer
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise InputError(f"`{path}` must hold weights only, got other content, of which nothing was executed") from None
    except Exception as error:  # a damaged file can raise any error
        raise InputError(f"`{path}` must be a whole torch file, got one that cannot be read "
                         f"({type(error).__name__})") from None
    for wrapper in ("state_dict", "model", "model_state_dict"):
        if isinstance(content, Mapping) and isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
    if not isinstance(content, Mapping) or not content or not all(
            isinstance(key, str) and isinstance(value, Tensor) for key, value in content.items()):
        raise InputError(f"`{path}` must hold weights only (tensors by name), got {type(content).__name__}")
    prefix = "module." if all(key.startswith("module.") for key in content) else ""
    return {key.removeprefix(prefix): value for key, value in content.items()}


def write_safetensors(path: Path, state: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors and metadata atomically; equal contents give equal bytes."""
    serialized = serialize({key: value.detach().cpu().contiguous() for key, value in sorted(state.items())},
                           dict(metadata))
    size = int.from_bytes(serialized[:8], "little")
    header = json.loads(serialized[8 : 8 + size])
    # The library writes metadata in the random order of a hash table.
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_atomic(path, b"".join((len(text).to_bytes(8, "little"), text, memoryview(serialized)[8 + size :])))
