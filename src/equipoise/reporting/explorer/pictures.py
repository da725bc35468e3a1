"""Pictures of an evaluation as two sprites: clean images, and how an attack changed them."""

from __future__ import annotations

import base64
import io
import math
import zlib

import numpy as np

from equipoise.core.arrays import Array, PictureArrays

MIDDLE = 128  # no change, in the sprite of changes


def sprites(pictures: PictureArrays) -> dict[str, str | int]:
    """Both sprites as data URIs, with the size of a picture and the number of pictures in a row.

    A change is attacked − clean + 128 modulo 256: every byte comes back, and small changes compress
    well.
    """
    change: Array = pictures.attacked - pictures.clean + np.uint8(MIDDLE)
    columns = math.ceil(math.sqrt(len(pictures.clean)))
    _, _, height, width = pictures.clean.shape
    return {
        "clean": _sprite(pictures.clean, columns),
        "change": _sprite(change, columns),
        "height": height,
        "width": width,
        "perRow": columns,
    }


def _sprite(images: Array, columns: int) -> str:
    from PIL import Image

    count, channels, height, width = images.shape
    rows = math.ceil(count / columns)
    sheet = np.full((rows * columns, channels, height, width), MIDDLE, dtype=np.uint8)
    sheet[:count] = images
    whole = sheet.reshape(rows, columns, channels, height, width).transpose(0, 3, 1, 4, 2)
    pixels = whole.reshape(rows * height, columns * width, channels)
    buffer = io.BytesIO()
    # Runs of equal bytes alone: other repetitions take long to find and save little.
    Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels).save(
        buffer, "PNG", compress_type=zlib.Z_RLE
    )
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
