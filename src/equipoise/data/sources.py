"""Data sets by name.

    digits, shapes                          nothing to download
    mnist, fashion-mnist, cifar10, cifar100 official files in the data directory, downloaded if
    missing folder:PATH, npz:PATH                   your own images

The data directory is the one given, else $EQUIPOISE_DATA, else ~/.cache/equipoise.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from equipoise.core import checks
from equipoise.core.registry import Registry
from equipoise.core.settings import Settings, setting
from equipoise.data import cifar, mnist, shapes, user_files
from equipoise.data.dataset import Dataset, whole_split
from equipoise.data.sampling import FIRST, SAMPLES, STRATIFIED, Part

SPLITS = ("train", "test")
PATHS: dict[str, Callable[[Path, str], Dataset]] = {
    "folder": user_files.read_folder,
    "npz": user_files.read_npz,
}


def _digits(split: str, root: Path) -> Dataset:
    """scikit-learn's digits, 8 × 8: 1442 train or 355 test images.

    Every fifth image of each digit is a test image, starting with the fifth. (Every fifth image of
    the file would give some digits twice as often as others, because they are in the order 0 … 9.)
    The values 0 … 16 become round(v · 255 / 16).
    """
    from sklearn.datasets import load_digits

    values, labels = load_digits(return_X_y=True)
    occurrence = np.empty(len(labels), np.int64)
    for digit in range(10):
        occurrence[labels == digit] = np.arange(np.count_nonzero(labels == digit))
    rows = (occurrence % 5 == 4) == (split == "test")
    images = np.rint(values[rows].reshape(-1, 1, 8, 8) * 255 / 16).astype(np.uint8)
    return whole_split(
        "digits",
        split,
        torch.from_numpy(images),
        torch.from_numpy(labels[rows]),
        tuple("0123456789"),
    )


Reader = Callable[
    [str, Path], Dataset
]  # split (train or test) and data directory → all images of the split
DATASETS: Registry[Reader] = Registry(
    "equipoise.datasets",
    "data",
    {
        "digits": _digits,
        "shapes": lambda split, root: shapes.draw(split),
        "mnist": partial(mnist.read, mnist.MNIST),
        "fashion-mnist": partial(mnist.read, mnist.FASHION_MNIST),
        "cifar10": partial(cifar.read, cifar.CIFAR10),
        "cifar100": partial(cifar.read, cifar.CIFAR100),
    },
)


def data_directory(given: Path | str | None) -> Path:
    """The directory given, else $EQUIPOISE_DATA, else ~/.cache/equipoise."""
    return Path(given or os.environ.get("EQUIPOISE_DATA") or "~/.cache/equipoise").expanduser()


def is_own_data(name: str) -> bool:
    """Whether a name is `folder:PATH` or `npz:PATH`, whose images may be sorted by class."""
    scheme, colon, _ = name.partition(":")
    return bool(colon) and scheme in PATHS


def default_sample(name: str) -> str:
    """Stratified for the user's own images; first for the data sets by name, which are shuffled and
    cited that way."""
    return STRATIFIED if is_own_data(name) else FIRST


def load_data(
    name: str,
    split: str = "test",
    start: int = 0,
    count: int | None = None,
    every: int = 1,
    data_dir: Path | str | None = None,
    sample: str | None = None,
    sample_seed: int = 0,
) -> Dataset:
    """Load a split of a data set, or a part of it.

    Args:
        name: a key of :data:`DATASETS`, or `folder:PATH` or `npz:PATH`.
        split: train or test; `folder:` and `npz:` may have others.
        start, count, every: exactly `count` images (all if None) from `start` on, and every N-th of
            those.
        data_dir: where the official files are, or are downloaded to.
        sample: the order that `start` and `count` refer to: `first` (that of the split), `random`
            or `stratified`; by default `stratified` for `folder:` and `npz:`, else `first`. See
            :class:`~equipoise.data.sampling.Part`.
        sample_seed: seed of that order; parts of one order have no image in common unless they
            overlap.
    """
    checks.require(isinstance(name, str), "data", "be the name of a data set", name)
    checks.require(isinstance(split, str), "split", "be the name of a split", split)
    checks.require(
        data_dir is None or isinstance(data_dir, str | Path), "data_dir", "be a path", data_dir
    )
    part = Part(
        start, count, every, default_sample(name) if sample is None else sample, sample_seed
    )
    scheme, _, path = name.partition(":")
    if is_own_data(name):
        checks.require(bool(path), "data", f"name a path, {scheme}:PATH", name)
        dataset = PATHS[scheme](Path(path).expanduser(), split)
    else:
        if name not in DATASETS:
            checks.one_of("data", name, [*DATASETS, *(f"{scheme}:PATH" for scheme in PATHS)])
        checks.one_of("split", split, SPLITS)
        dataset = DATASETS[name](split, data_directory(data_dir))
    return part.of(dataset)


@dataclass(frozen=True, kw_only=True)
class DataSettings(Settings):
    """The images that a command works on."""

    data: str = setting(
        "cifar10",
        "shapes, digits, mnist, fashion-mnist, cifar10, cifar100, folder:PATH or npz:PATH.",
    )
    split: str = setting("test", "train or test.")
    start: int = setting(
        0, "First image, by its position in the sample.", least=0, most=checks.MAX_COUNT
    )
    count: int | None = setting(
        None, "Number of images; all if not given.", least=1, most=checks.MAX_COUNT
    )
    every: int = setting(1, "Take every N-th image of those.", least=1, most=checks.MAX_COUNT)
    sample: str | None = setting(
        None,
        "Order that start and count refer to: first (that of the split), random or "
        "stratified (class shares of the split); if not given, stratified for folder: and "
        "npz:, else first.",
        among=SAMPLES,
    )
    sample_seed: int = setting(
        0, "Seed of a random or stratified sample.", least=0, most=checks.MAX_COUNT
    )
    data_dir: Path | None = setting(  # noqa: RUF009
        None, "Where the data are or are downloaded to; else $EQUIPOISE_DATA."
    )

    def load(self) -> Dataset:
        """The images."""
        return load_data(
            self.data,
            self.split,
            self.start,
            self.count,
            self.every,
            self.data_dir,
            self.sample,
            self.sample_seed,
        )
