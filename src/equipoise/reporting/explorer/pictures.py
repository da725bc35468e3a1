"""Pictures of an evaluation as two sprites: clean images, and how an attack changed them."""

from __future__ import annotations

import base64
import io
import math

import numpy as np

from equipoise.core.arrays import Array, PictureArrays

MIDDLE = 128  # no change, in the sprite of changes


def sprites(pictures: PictureArrays) -> dict[str, str | int]:
    """Both sprites as data URIs, with the size of a picture and the number of pictures in a row.

    A change is stored as a byte, 128 for none. One beyond ±127 is cut off, which attacks of up to half the range of a
    pixel never reach.
    """
    change = np.clip(pictures.attacked.astype(np.int16) - pictures.clean + MIDDLE, 0, 255).astype(np.uint8)
    columns = math.ceil(math.sqrt(len(pictures.clean)))
    _, _, height, width = pictures.clean.shape
    return {"clean": _sprite(pictures.clean, columns), "change": _sprite(change, columns), "height": height,
            "width": width, "perRow": columns}


def _sprite(images: Array, columns: int) -> str:
    from PIL import Image

    count, channels, height, width = images.shape
    rows = math.ceil(count / columns)
    sheet = np.full((rows * columns, channels, height, width), MIDDLE, dtype=np.uint8)
    sheet[:count] = images
    whole = sheet.reshape(rows, columns, channels, height, width).transpose(0, 3, 1, 4, 2)
    pixels = whole.reshape(rows * height, columns * width, channels)
    buffer = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels).save(buffer, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
