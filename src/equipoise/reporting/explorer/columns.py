"""Columns of numbers, one after the other, compressed: what a report carries for its script.

The decompressed bytes are the length of a JSON header (4 bytes, little-endian), the header, and the
columns, each at a multiple of 4 bytes. The header says where each column begins; further values of
it are free.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from equipoise.core.arrays import Array

TYPES = {"u1": "Uint8Array", "u2": "Uint16Array", "u4": "Uint32Array", "i2": "Int16Array"}
MARGIN_STEPS = 10_000  # per unit of a margin


def pack(header: Mapping[str, Any], columns: Mapping[str, Array]) -> str:
    """The header and the columns as base64 text."""
    places, body, offset = {}, [], 0
    for name, values in columns.items():
        content = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<")).tobytes()
        places[name] = {
            "type": TYPES[f"{values.dtype.kind}{values.dtype.itemsize}"],
            "offset": offset,
            "length": int(values.size),
        }
        body.append(content + bytes(-len(content) % 4))
        offset += len(body[-1])
    # Text that ends a script element stays inside a string.
    head = json.dumps(
        {**header, "columns": places}, ensure_ascii=True, separators=(",", ":")
    ).encode()
    head += b" " * (-len(head) % 4)
    return base64.b64encode(
        zlib.compress(len(head).to_bytes(4, "little") + head + b"".join(body), 9)
    ).decode()


def whole(values: Array) -> Array:
    """Non-negative whole numbers in as few bytes as hold the largest."""
    largest = int(values.max()) if values.size else 0
    return values.astype(
        np.uint8 if largest < 1 << 8 else np.uint16 if largest < 1 << 16 else np.uint32
    )


def margins(values: Array) -> Array:
    """Margins as multiples of 1e-4, rounded up: above a threshold with four digits exactly where
    the margin is.

    >>> margins(np.array([0.05, 0.05001, -0.3])).tolist()
    [500, 501, -3000]
    """
    scaled = np.round(values.astype(np.float64) * MARGIN_STEPS, 6)  # 0.05 is not a binary number
    rounded: Array = np.ceil(scaled.clip(-MARGIN_STEPS, MARGIN_STEPS)).astype(np.int16)
    return rounded


def changes(values: Array) -> Array:
    """(T, N) whole numbers → the first row, then what changes from row to row (exclusive or):
    mostly zeros."""
    stepped = values.copy()
    stepped[1:] ^= values[:-1]
    return stepped
