"""CIFAR-10 and CIFAR-100 in their two official layouts [Krizhevsky2009].

The Python layout (pickles, read safely) is used if it is complete for the split, else the binary
one; both hold the same images in the same order. If neither is there, the Python archive is
downloaded. CIFAR-100 has its 100 fine labels.

A pickle is a program that may call any function it can name. :func:`load_pickle` lets it name only
what arrays of bytes need, and replaces numpy's own classes: a crafted state of a numpy dtype would
make it follow pointers that the file contains.
"""

from __future__ import annotations

import codecs
import io
import math
import pickle
import pickletools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from equipoise.core import checks
from equipoise.data import download, limits
from equipoise.data.dataset import Dataset, whole_split

_ADDRESS = "https://www.cs.toronto.edu/~kriz/"
_PIXELS = 3 * 32 * 32
_MAX_BYTES = 50_000 * 3200  # of a file

CLASSES_10 = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
_NAMES_100 = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
    castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur
    dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion
    lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree
    pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea
    seal shark shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank
    telephone television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman
    worm
"""
CLASSES_100 = tuple(_NAMES_100.split())

Arrays = tuple[NDArray[np.uint8], NDArray[np.uint8]]  # (N, 3072) pixels, (N,) labels


@dataclass(frozen=True)
class Cifar:
    """CIFAR-10 or CIFAR-100."""

    name: str
    classes: tuple[str, ...]
    archive: download.Remote
    python_folder: str
    binary_folder: str
    files: dict[str, tuple[str, ...]]  # per split; the binary ones end in .bin
    label_key: bytes  # of the pickles
    label_bytes: int  # before the pixels of a binary record; the last one is the label

    def layouts(self, root: Path) -> tuple[tuple[Path, str], ...]:
        """The folders that may hold the files, in order of preference, and the suffix of the files
        there."""
        return (
            (root / self.python_folder, ""),
            (root / self.binary_folder, ".bin"),
            (root, ""),
            (root, ".bin"),
        )


CIFAR10 = Cifar(
    "cifar10",
    CLASSES_10,
    download.Remote(
        f"{_ADDRESS}cifar-10-python.tar.gz",
        "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
    ),
    "cifar-10-batches-py",
    "cifar-10-batches-bin",
    {"train": tuple(f"data_batch_{number}" for number in range(1, 6)), "test": ("test_batch",)},
    b"labels",
    1,
)
CIFAR100 = Cifar(
    "cifar100",
    CLASSES_100,
    download.Remote(
        f"{_ADDRESS}cifar-100-python.tar.gz",
        "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
    ),
    "cifar-100-python",
    "cifar-100-binary",
    {"train": ("train",), "test": ("test",)},
    b"fine_labels",
    2,
)


def read(cifar: Cifar, split: str, root: Path) -> Dataset:
    """Read a split from DIR/<layout> or from DIR itself."""
    files = cifar.files[split]
    layout = _find(cifar, files, root)
    if layout is None:
        download.unpack(cifar.archive, root, cifar.python_folder, needed=files)
        layout = root / cifar.python_folder, ""
    folder, suffix = layout
    parts = [_read_file(cifar, folder / (file + suffix)) for file in files]
    images = torch.from_numpy(np.concatenate([pixels for pixels, _ in parts])).view(-1, 3, 32, 32)
    labels = torch.from_numpy(np.concatenate([labels for _, labels in parts]))
    return whole_split(cifar.name, split, images, labels, cifar.classes)


def _find(cifar: Cifar, files: tuple[str, ...], root: Path) -> tuple[Path, str] | None:
    """The first folder that has every file of the split, and the suffix of its files."""
    for folder, suffix in cifar.layouts(root):
        if all((folder / (file + suffix)).is_file() for file in files):
            return folder, suffix
    return None


def _read_file(cifar: Cifar, path: Path) -> Arrays:
    pixels, labels = (
        _read_binary(cifar, path) if path.suffix == ".bin" else _read_pickle(cifar, path)
    )
    checks.labels(
        torch.from_numpy(labels), len(cifar.classes), len(pixels), name=f"labels in {path}"
    )
    return pixels, labels


def _read_binary(cifar: Cifar, path: Path) -> Arrays:
    record = cifar.label_bytes + _PIXELS
    data = np.frombuffer(limits.read_bytes(path, _MAX_BYTES), np.uint8)
    checks.require(
        len(data) > 0 and len(data) % record == 0,
        str(path),
        f"hold whole records of {record} bytes",
        f"{len(data)} bytes",
    )
    rows = data.reshape(-1, record)
    return rows[:, cifar.label_bytes :], rows[:, cifar.label_bytes - 1].copy()


def _read_pickle(cifar: Cifar, path: Path) -> Arrays:
    content = load_pickle(path)
    pixels, labels = content.get(b"data"), content.get(cifar.label_key)
    if not isinstance(pixels, np.ndarray) or pixels.ndim != 2 or pixels.shape[1] != _PIXELS:
        raise checks.InputError(
            f"`{path}` must hold `data` of shape (N, {_PIXELS}), "
            f"got {getattr(pixels, 'shape', type(pixels).__name__)}"
        )
    if not isinstance(labels, list) or not all(
        type(label) is int and 0 <= label < 256 for label in labels
    ):
        raise checks.InputError(
            f"`{path}` must hold `{cifar.label_key.decode()}`, a list of integers "
            f"in 0..{len(cifar.classes) - 1}, got another {type(labels).__name__}"
        )
    return pixels, np.array(labels, np.uint8)


class _Dtype:
    """Replaces numpy.dtype; only uint8 is allowed."""

    def __init__(self, code: bytes | str, align: object = None, copy: object = None) -> None:
        text = code.decode("ascii") if isinstance(code, bytes) else code
        if text != "u1":
            raise checks.InputError(f"arrays of uint8, got an array of {text!r}")

    def __setstate__(self, state: object) -> None:
        """Byte order and fields do not matter for single bytes."""


class _Array:
    """Replaces numpy's `_reconstruct`; the state of an array is (version, shape, dtype, fortran,
    bytes)."""

    values: NDArray[np.uint8] = np.zeros(0, np.uint8)

    def __init__(self, *arguments: object) -> None:
        """The arguments always describe an empty array."""

    def __setstate__(self, state: tuple[object, tuple[int, ...], _Dtype, bool, bytes]) -> None:
        _, shape, _, fortran, data = state
        if not isinstance(data, bytes) or len(data) != math.prod(shape):
            raise checks.InputError(
                f"arrays with as many bytes as their shape {shape}, got another number"
            )
        self.values = np.frombuffer(data, np.uint8).reshape(shape, order="F" if fortran else "C")


_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): None,  # only the first argument of `_reconstruct`, which is not used
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): codecs.encode,
}


class _Unpickler(pickle.Unpickler):
    """Finds nothing but what is allowed."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in _ALLOWED:
            raise checks.InputError(
                f"plain arrays and lists, got a call for {module}.{name} (refused)"
            )
        return _ALLOWED[module, name]


def _check_opcodes(data: bytes) -> None:
    """Refuse lengths and memo positions beyond the file, for which the unpickler would allocate
    memory first."""
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name.endswith("PUT") and int(argument or 0) > len(data):
            raise ValueError(f"a memo of {argument} entries")


def load_pickle(path: Path) -> dict[bytes, object]:
    """The dict that a pickle of Python 2 or 3 holds; its arrays are uint8 and its text is bytes."""
    try:
        data = limits.read_bytes(path, _MAX_BYTES)
        _check_opcodes(data)
        content = _Unpickler(io.BytesIO(data), encoding="bytes").load()
    except checks.InputError as problem:
        raise checks.InputError(f"`{path}` must hold {problem}") from None
    except Exception as problem:  # a damaged pickle program can fail in any way
        raise checks.InputError(
            f"`{path}` must be a pickle, got a damaged file ({problem})"
        ) from None
    checks.require(isinstance(content, dict), str(path), "hold a dict", type(content).__name__)
    return {
        key: value.values if isinstance(value, _Array) else value for key, value in content.items()
    }
