"""Limits on what is read, so that a small or damaged file cannot exhaust memory or time."""

from __future__ import annotations

import gzip
import math
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from equipoise.core import checks

MAX_PIXELS = 2**24  # of one image
MAX_COMPRESSION = (
    100  # times smaller than its content is a large array; images are ten times smaller at most
)
_SMALL = 2**26  # bytes, for which any compression is allowed
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def numbered_classes(count: int, name: str = "labels") -> tuple[str, ...]:
    """The classes "0" … of labels that have no names."""
    checks.require(
        count <= checks.MAX_CLASSES, name, f"be less than {checks.MAX_CLASSES}", count - 1
    )
    return tuple(str(number) for number in range(count))


def read_bytes(path: Path, most: int) -> bytes:
    """The content of a file that is known to have at most so many bytes."""
    size = path.stat().st_size
    checks.require(size <= most, str(path), f"hold at most {most} bytes", size)
    return path.read_bytes()


def read_exactly(file: IO[bytes] | gzip.GzipFile, path: Path, count: int, most: int) -> bytes:
    """The `count` bytes that a header announces, out of a file that may be compressed and hold more
    or fewer."""
    checks.require(count <= most, str(path), f"hold at most {most} values", count)
    data = file.read(count + 1)  # the rest is never decompressed
    if len(data) != count:
        raise checks.InputError(
            f"`{path}` must hold {count} values, as its header says, got {len(data)}"
            f"{' or more' if len(data) > count else ''}"
        )
    return data


def read_array(archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    """An array of an .npz file; ValueError if its header or its compression claims what the file
    cannot hold."""
    entry = archive.getinfo(f"{name}.npy")
    with archive.open(entry) as file:
        read_header = _HEADERS.get(np.lib.format.read_magic(file))
        if read_header is None:
            raise ValueError(f"an unknown version of the format in `{name}`")
        shape, _, dtype = read_header(file)
        size, there = math.prod(shape) * dtype.itemsize, entry.file_size - file.tell()
    if not dtype.hasobject and size != there:
        raise ValueError(f"`{name}` with {there} bytes instead of the {size} of its shape {shape}")
    if size > max(_SMALL, MAX_COMPRESSION * entry.compress_size):
        raise ValueError(f"`{name}` with {size} bytes, compressed to {entry.compress_size}")
    with archive.open(entry) as file:
        array: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
        return array
