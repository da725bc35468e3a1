"""Every data set by name.

    digits, shapes                          embedded, nothing to download
    mnist, fashion-mnist, cifar10, cifar100 official files in the data directory, downloaded where absent
    folder:PATH, npz:PATH                   your own

The data directory is the one given, else $EQUIPOISE_DATA, else ~/.cache/equipoise.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from equipoise.core import checks
from equipoise.data import arrays, cifar, digits, folder, idx
from equipoise.data.dataset import Dataset

SPLITS = ("train", "test")


def _shapes(split: str, root: Path) -> Dataset:
    from equipoise.data import shapes

    return shapes.draw(split)


SOURCES: dict[str, Callable[[str, Path], Dataset]] = {
    "digits": lambda split, root: digits.read(split),
    "shapes": _shapes,
    "mnist": lambda split, root: idx.read(idx.MNIST, split, root),
    "fashion-mnist": lambda split, root: idx.read(idx.FASHION_MNIST, split, root),
    "cifar10": lambda split, root: cifar.read(cifar.CIFAR10, split, root),
    "cifar100": lambda split, root: cifar.read(cifar.CIFAR100, split, root),
}

PATHS: dict[str, Callable[[Path, str], Dataset]] = {"folder": folder.read, "npz": arrays.read}


def data_directory(given: Path | str | None) -> Path:
    """The directory given, else $EQUIPOISE_DATA, else ~/.cache/equipoise."""
    return Path(given or os.environ.get("EQUIPOISE_DATA") or "~/.cache/equipoise").expanduser()


def load(name: str, *, split: str, data_dir: Path | str | None = None, start: int = 0,
         count: int | None = None) -> Dataset:
    """A split, or exactly `count` images of it from `start` on.

    Args:
        name: a key of :data:`SOURCES`, or `folder:PATH` or `npz:PATH`.
        split: train or test; `folder:` and `npz:` may have further ones.
        data_dir: where the official files are, or are put.
        start: first image of the slice.
        count: number of images; None is all from `start` on.
    """
    kind, colon, path = name.partition(":")
    if colon and kind in PATHS:
        checks.require(bool(path), "data", f"name a path, {kind}:PATH", name)
        dataset = PATHS[kind](Path(path).expanduser(), split)
    else:
        checks.one_of("data", name, [*SOURCES, *(f"{kind}:PATH" for kind in PATHS)])
        checks.one_of("split", split, SPLITS)
        dataset = SOURCES[name](split, data_directory(data_dir))
    if start == 0 and count is None:
        return dataset
    checks.whole("start", start)
    return dataset.slice(start, max(len(dataset) - start, 1) if count is None else count)
