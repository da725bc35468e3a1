"""CIFAR-10 and CIFAR-100 in their two official layouts [Krizhevsky2009].

The Python layout (pickles, read safely) is taken where it is complete for the split, then the binary one;
both hold the same images in the same order. Where neither is there, the Python archive is downloaded.
Labels of CIFAR-100 are the 100 fine ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from equipoise.core import checks
from equipoise.data import download, pickles
from equipoise.data.dataset import Dataset, whole_split

_ADDRESS = "https://www.cs.toronto.edu/~kriz/"
_SHAPE = (3, 32, 32)
_PIXELS = 3 * 32 * 32

CLASSES_10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
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
    """What differs between the two sets."""

    name: str
    classes: tuple[str, ...]
    archive: download.Remote
    pickled_in: str
    binary_in: str
    files: dict[str, tuple[str, ...]]  # per split; the binary ones end in .bin
    label_key: bytes  # of the pickles
    label_bytes: int  # before the pixels of a binary record; the last one is the label


CIFAR10 = Cifar(
    "cifar10", CLASSES_10,
    download.Remote(f"{_ADDRESS}cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a"),
    "cifar-10-batches-py", "cifar-10-batches-bin",
    {"train": tuple(f"data_batch_{number}" for number in range(1, 6)), "test": ("test_batch",)},
    b"labels", 1,
)
CIFAR100 = Cifar(
    "cifar100", CLASSES_100,
    download.Remote(f"{_ADDRESS}cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85"),
    "cifar-100-python", "cifar-100-binary",
    {"train": ("train",), "test": ("test",)},
    b"fine_labels", 2,
)


def read(cifar: Cifar, split: str, root: Path) -> Dataset:
    """A split out of DIR/<layout> or out of DIR itself."""
    files = cifar.files[split]
    found = _find(cifar, files, root)
    if found is None:
        download.unpack(cifar.archive, root, cifar.pickled_in, needed=files)
        found = root / cifar.pickled_in, ""
    folder, suffix = found
    parts = [_read_file(cifar, folder / (file + suffix)) for file in files]
    images = torch.from_numpy(np.concatenate([pixels for pixels, _ in parts])).view(-1, *_SHAPE)
    labels = torch.from_numpy(np.concatenate([labels for _, labels in parts]))
    return whole_split(cifar.name, split, images, labels, cifar.classes)


def _find(cifar: Cifar, files: tuple[str, ...], root: Path) -> tuple[Path, str] | None:
    """The first folder that holds every file of the split, and how its files end."""
    layouts = ((root / cifar.pickled_in, ""), (root / cifar.binary_in, ".bin"), (root, ""), (root, ".bin"))
    for folder, suffix in layouts:
        if all((folder / (file + suffix)).is_file() for file in files):
            return folder, suffix
    return None


def _read_file(cifar: Cifar, path: Path) -> Arrays:
    pixels, labels = _read_binary(cifar, path) if path.suffix == ".bin" else _read_pickle(cifar, path)
    checks.labels(torch.from_numpy(labels), len(cifar.classes), len(pixels), name=f"labels in {path}")
    return pixels, labels


def _read_binary(cifar: Cifar, path: Path) -> Arrays:
    record = cifar.label_bytes + _PIXELS
    data = np.fromfile(path, np.uint8)
    checks.require(len(data) > 0 and len(data) % record == 0, str(path),
                   f"hold whole records of {record} bytes", f"{len(data)} bytes")
    rows = data.reshape(-1, record)
    return rows[:, cifar.label_bytes:], rows[:, cifar.label_bytes - 1].copy()


def _read_pickle(cifar: Cifar, path: Path) -> Arrays:
    content = pickles.load(path)
    pixels, labels = content.get(b"data"), content.get(cifar.label_key)
    if not isinstance(pixels, np.ndarray) or pixels.ndim != 2 or pixels.shape[1] != _PIXELS:
        raise checks.InputError(f"`{path}` must hold `data` of shape (N, {_PIXELS}), "
                                f"got {getattr(pixels, 'shape', type(pixels).__name__)}")
    if not isinstance(labels, list) or not all(type(label) is int and 0 <= label < 256 for label in labels):
        raise checks.InputError(f"`{path}` must hold `{cifar.label_key.decode()}`, a list of whole numbers "
                                f"in 0..{len(cifar.classes) - 1}, got another {type(labels).__name__}")
    return pixels, np.array(labels, np.uint8)
