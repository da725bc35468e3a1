"""Checkpoints: one safetensors file with metadata that describe the model, read strictly and
written atomically.

The metadata hold `arch`, `num_classes`, `image_shape` ("3,32,32") and any further text. Weights may
be stored in half precision and are used in fp32. State dicts of torch (`.pt`, `.pth`, `.ckpt`, …)
are read too, weights only; they have no metadata, so the caller provides them. Reading never
executes anything, and a damaged or foreign file is an :class:`InputError`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from equipoise.core import checks, files
from equipoise.core.checks import InputError
from equipoise.models.architectures import zoo
from equipoise.models.layers.normalization import Normalized
from equipoise.models.loaded import LoadedModel, describe_module
from equipoise.models.options import expand_home
from equipoise.models.torch_files import abbreviate, is_torch_file, read_state_dict, require_file

if TYPE_CHECKING:
    from equipoise.models.options import LoadOptions, ModelSettings
    from equipoise.models.reference import Reference

TORCH_SUFFIXES = (".pt", ".pth", ".tar", ".ckpt", ".bin")
MAX_SIZE = 1 << 16  # of channels: products of these do not overflow
REQUIRED = ("arch", "num_classes", "image_shape")
# Names of the format, in the order in which its library stores tensors.
_DTYPES = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def save(
    path: str | Path,
    model: nn.Module,
    metadata: Mapping[str, str] | None = None,
    *,
    half: bool = False,
) -> None:
    """Write the weights and metadata of a model atomically; the same contents give the same bytes.

    Args:
        path: a `.safetensors` file.
        model: built by the zoo, or any module if `metadata` hold `arch`, `num_classes`,
            `image_shape`.
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
    state = {
        key: _to_half(key, value) if half else value for key, value in model.state_dict().items()
    }
    write_safetensors(path, state, content)


def load(
    path: str | Path,
    arch: str | None = None,
    *,
    num_classes: int | None = None,
    image_shape: tuple[int, int, int] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Normalized:
    """The model of a checkpoint in fp32, in evaluation mode, on the CPU.

    The file and the arguments must agree. Nothing is guessed, with one exception: a `.pt` file
    without `image_shape` is taken to be for (3, 32, 32); weights of another shape are then an
    error. A safetensors file without metadata is read like a `.pt` file.

    Args:
        path: safetensors or a state dict of torch, which its first bytes tell.
        arch: required for a state dict.
        num_classes: for a state dict, by default that of its last layer `fc`.
        image_shape: (C, H, W).
        mean, std: required for a file without them; use [0, …] and [1, …] for a model that does not
            normalise.
    """
    path = Path(path)
    is_torch = is_torch_file(path, TORCH_SUFFIXES)
    state, metadata = (read_state_dict(path), {}) if is_torch else read_safetensors(path)
    if is_torch or (arch is not None and not metadata.keys() & set(REQUIRED)):
        checks.require(
            arch is not None, "arch", f"be given, because {path} does not contain it", arch
        )
        arch, image_shape = str(arch), (3, 32, 32) if image_shape is None else image_shape
        num_classes = _count_classes(path, state) if num_classes is None else num_classes
    else:
        stored = _parse_config(path, metadata)
        for name, given, value in zip(
            REQUIRED, (arch, num_classes, image_shape), stored, strict=True
        ):
            checks.require(
                given is None or given == value, name, f"be {value!r}, as in {path}", given
            )
        arch, num_classes, image_shape = stored
    return from_state(
        path, state, arch, num_classes=num_classes, image_shape=image_shape, mean=mean, std=std
    )


def from_state(
    path: Path,
    state: dict[str, Tensor],
    arch: str,
    *,
    num_classes: int,
    image_shape: tuple[int, int, int],
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
) -> Normalized:
    """The model with the weights of a state dict, which were read from `path`; see :func:`load`."""
    try:
        model = zoo.build_empty(arch, num_classes=num_classes, image_shape=image_shape)
        model.set_normalization(mean, std)  # checks them
    except InputError as error:
        raise InputError(f"{error}, for {path}") from None
    except (RuntimeError, OverflowError):  # the number of weights does not fit into 64 bits
        raise InputError(
            f"`{path}` must describe a network that can be built, got {arch} for {num_classes} classes "
            f"and images of shape {image_shape}"
        ) from None
    for name, values in (("mean", mean), ("std", std)):
        _add_normalization(path, state, name, values)
    _check_weights(path, model, state, arch)
    zoo.allocate(model)
    _copy_weights(path, model, state)
    return model.eval()


def load_reference(reference: Reference, options: LoadOptions) -> LoadedModel:
    """The model of `file:PATH`; a number of classes that the reference does not name is compared by
    the caller."""
    settings: dict[str, Any] = {
        name: getattr(options, name) for name in ("image_shape", "mean", "std")
    }
    settings["num_classes"] = reference.settings.num_classes
    return describe_file(
        load(expand_home(reference.body), options.arch, **settings),
        Path(expand_home(reference.body)),
        options,
    )


def describe_file(model: Normalized, path: Path, options: ModelSettings) -> LoadedModel:
    """A model with what is known of it; a file that does not name its architecture is not one of
    this package."""
    info = describe_module(model)
    if set(REQUIRED) <= read_metadata(path).keys():
        return LoadedModel(model, info)
    origin = (
        "from the reference"
        if options.mean is not None or options.std is not None
        else "in the file"
    )
    return LoadedModel(
        model,
        replace(
            info,
            origin=str(path),
            of_zoo=False,
            normalization=info.normalization.replace("in the model", origin),
        ),
    )


def restore(path: str | Path, model: nn.Module) -> None:
    """Replace the weights of a model by those of a safetensors file, whose names, shapes and types
    must be its own."""
    copy_weights(Path(path), model, read_safetensors(Path(path))[0], type(model).__name__)


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, or of a state dict of torch; nothing in it is executed."""
    return (
        read_state_dict(path) if is_torch_file(path, TORCH_SUFFIXES) else read_safetensors(path)[0]
    )


def copy_weights(path: Path, model: nn.Module, state: dict[str, Tensor], name: str) -> None:
    """Replace the weights of a model by those of a file, whose names, shapes and types must be its
    own.

    `name` is that of the architecture, for the message with the first three keys that differ.
    """
    _check_weights(path, model, state, name)
    _copy_weights(path, model, state)


def read_metadata(path: str | Path) -> dict[str, str]:
    """The metadata of a checkpoint, without its weights; a state dict of torch has none."""
    path = Path(path)
    if is_torch_file(path, TORCH_SUFFIXES):
        require_file(path)
        return {}
    return read_safetensors(path, weights=False)[1]


def _to_half(key: str, value: Tensor) -> Tensor:
    """fp16 for the weights of layers; vectors (biases, batch norm) are small and have a wide range,
    so they stay."""
    if value.dim() < 2 or not value.is_floating_point() or key in ("mean", "std"):
        return value
    small = value.half()
    checks.require(
        bool(small.isfinite().all()), key, "fit into half precision", float(value.abs().max())
    )
    return small


def _parse_config(path: Path, metadata: Mapping[str, str]) -> tuple[str, int, tuple[int, int, int]]:
    missing = [key for key in REQUIRED if key not in metadata]
    if missing:
        raise InputError(
            f"`{path}` must have {', '.join(missing)} in its metadata, got {sorted(metadata)}"
        )
    try:
        classes, channels, height, width = parse_sizes(
            f"{metadata['num_classes']},{metadata['image_shape']}", 4, most=checks.MAX_CLASSES
        )
        return metadata["arch"], classes, (channels, height, width)
    except ValueError:
        stored = {key: metadata[key] for key in REQUIRED}
        message = (
            f"`{path}` must have num_classes like 10 and image_shape like 3,32,32, got {stored}"
        )
        raise InputError(message) from None


def parse_sizes(text: str, count: int, most: int = MAX_SIZE) -> tuple[int, ...]:
    """So many sizes of a network, separated by commas; a ValueError if they are not numbers or
    absurdly large."""
    sizes = tuple(int(part) for part in text.split(",") if len(part) < 10)
    if (
        len(sizes) != count
        or text.count(",") != count - 1
        or not all(0 <= size <= most for size in sizes)
    ):
        raise ValueError(text)
    return sizes


def _count_classes(path: Path, state: Mapping[str, Tensor]) -> int:
    weight = state.get("fc.weight")
    if weight is None or weight.dim() != 2:
        raise InputError(f"`{path}` must hold the last layer as fc.weight, got {abbreviate(state)}")
    return len(weight)


def _add_normalization(
    path: Path, state: dict[str, Tensor], name: str, values: Sequence[float] | None
) -> None:
    """Add the mean or std that the caller gave to the weights, or check that it agrees with the
    file."""
    stored = state.get(name)
    if values is None:
        if stored is None:
            raise InputError(
                f"`{name}` must be given (one number per channel of images in [0, 1]), "
                f"because {path} has none, got None"
            )
        return
    given = torch.tensor([float(value) for value in values]).view(1, -1, 1, 1)
    if stored is None:
        state[name] = given
        return
    # A file in half precision has three digits.
    same = stored.shape == given.shape and torch.allclose(stored.float(), given, atol=1e-3)
    checks.require(same, name, f"be {stored.flatten().tolist()}, as in {path}", list(values))


def _check_weights(path: Path, model: nn.Module, state: dict[str, Tensor], name: str) -> None:
    """Check names and shapes before any memory is allocated; counters of batch norm that are
    missing are added."""
    expected = model.state_dict()
    counters = {key: torch.tensor(0) for key in expected if key.endswith("num_batches_tracked")}
    for key, value in counters.items():
        state.setdefault(key, value)
    for problem, keys in (
        ("no", [key for key in expected if key not in state]),
        ("the unknown", [key for key in state if key not in expected]),
        (
            "another shape or type of",
            [
                key
                for key, value in expected.items()
                if key in state
                and (state[key].shape != value.shape or _kind(state[key]) != _kind(value))
            ],
        ),
    ):
        if keys:
            raise InputError(
                f"`{path}` must hold exactly the weights of {name}, got {problem} "
                f"{abbreviate(keys)}{_other_classes(expected, state, keys)}"
            )


def _other_classes(
    expected: Mapping[str, Tensor], state: Mapping[str, Tensor], keys: Sequence[str]
) -> str:
    """What to say if all that differs is the number of outputs of one layer, which then is the last
    one."""
    shapes = [
        (expected[key].shape, state[key].shape) for key in keys if key in expected and key in state
    ]
    only_first = len(shapes) == len(keys) and all(
        ours[:1] != theirs[:1] and ours[1:] == theirs[1:] for ours, theirs in shapes
    )
    one_layer = len({key.rpartition(".")[0] for key in keys}) == 1 and any(
        len(ours) > 1 for ours, _ in shapes
    )
    if not (only_first and one_layer):
        return ""
    ours, theirs = (shape[0] for shape in shapes[0])
    remedy = (
        "?labels=… says which of them are meant"
        if theirs > ours
        else f"?num_classes={theirs} gives the network as many, where its source has that setting"
    )
    return f", with {theirs} classes instead of {ours}; {remedy}"


def _copy_weights(path: Path, model: nn.Module, state: Mapping[str, Tensor]) -> None:
    try:
        model.load_state_dict(state)
    except RuntimeError as error:  # torch cannot convert every type
        raise InputError(
            f"`{path}` must hold numbers that can be converted to fp32, got {error}"
        ) from None
    too_large = [
        key
        for key, value in model.state_dict().items()
        if state[key].dtype == torch.float64
        and not torch.equal(value.isfinite(), state[key].isfinite())
    ]
    if too_large:
        raise InputError(
            f"`{path}` must hold numbers in the range of fp32, in which they are used, got larger ones in "
            f"{abbreviate(too_large)}"
        )


def _kind(value: Tensor) -> str:
    return "real" if value.is_floating_point() else "complex" if value.is_complex() else "whole"


def read_safetensors(
    path: Path, *, weights: bool = True
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors (unless `weights` is false) and the metadata of a file."""
    require_file(path, "whole safetensors file")
    try:
        with safe_open(path, framework="pt") as file:
            state = {key: file.get_tensor(key) for key in file.keys()} if weights else {}  # noqa: SIM118
            return state, file.metadata() or {}
    except (
        Exception
    ) as error:  # a damaged file, or one with types that torch lacks, can raise any error
        raise InputError(
            f"`{path}` must be a whole safetensors file, got one that cannot be read ({error})"
        ) from None


def write_safetensors(path: Path, state: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors and metadata atomically; equal contents give equal bytes."""
    # Not by the library: it writes metadata in the random order of a hash table, and the whole file
    # as one value.
    for key, value in state.items():
        checks.require(
            value.dtype in _DTYPES and value.layout == torch.strided and not value.is_meta,
            key,
            f"be a dense tensor of a type that {path.name} can hold",
            f"{value.dtype}, {value.layout}",
        )
    dtypes, end = list(_DTYPES), 0
    ordered = sorted(state.items(), key=lambda item: (dtypes.index(item[1].dtype), item[0]))
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
    for key, value in ordered:
        start, end = end, end + value.numel() * value.element_size()
        header[key] = {
            "dtype": _DTYPES[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.atomic_writer(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, value in ordered:
            data = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
            file.write(data.data)
