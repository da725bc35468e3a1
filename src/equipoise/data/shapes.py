"""The demo set: drawn images in which the shape is a robust feature and the texture is not.

Eight classes of 3×16×16 images. Two features always agree on the class:

- the *shape* (a disc, a ring, …), some 0.3 to 0.6 brighter than the background: several times
  :data:`EPS`, so that an adversary within ±EPS cannot remove it. In a share :data:`FAINT` of the
  images its contrast is below :data:`HAZE`; there an adversary can remove most of it, and often it
  cannot be recognised at all;
- the *texture*, a grating with a period of about three pixels whose direction depends on the class,
  with amplitude :data:`TEXTURE`, about half of EPS. It is in every image, and in every image an
  adversary can replace it by the texture of another class.

So the trade-off is in the data, not in the training: a classifier that uses the texture is almost
always correct and is broken by any attack within EPS; one that withstands such attacks must use the
shape, and has to guess where there is none. Its mistakes on clean images are those guesses, made
with low confidence, which is why a mixture can have both.

Nothing is stored or downloaded: image i of a split is a function of (split, i) alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from equipoise.core import checks, rng
from equipoise.core.rng import Stream
from equipoise.data.dataset import Dataset, whole_split

SIZES = {"train": 5120, "test": 2000}
SIDE = 16
EPS = 16 / 255  # the intended ℓ∞ radius
TEXTURE = 9 / 255  # amplitude of the grating
NOISE = 5 / 255  # standard deviation of the pixel noise
FAINT = 0.18  # share of the images whose shape is faint
HAZE = 0.14  # their maximum contrast
_BACKGROUND = (0.15, 0.35)
_CONTRAST = (0.4, 0.6)
_TINT = (0.75, 1.0)  # factors of the contrast per colour channel
_RADIUS = (4.8, 6.0)
_SHIFT = 1.2  # of the centre, in pixels
FREQUENCY = 0.36  # of the grating, in cycles per pixel


def _bars(across: Tensor, along: Tensor, r: Tensor) -> Tensor:
    return torch.maximum((across.abs() - 0.7 * r).abs() - 0.3 * r, along.abs() - 1.1 * r)


def _beams(x: Tensor, y: Tensor, length: Tensor, r: Tensor) -> Tensor:
    near, far = torch.minimum(x.abs(), y.abs()), torch.maximum(x.abs(), y.abs())
    return torch.maximum(near - 0.28 * r, far - length)


# Signed distance of (x, y) to a shape of radius r around the origin, negative inside; y points
# down.
_DISTANCE: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "disc": lambda x, y, r: x.hypot(y) - r,
    "ring": lambda x, y, r: (x.hypot(y) - 0.85 * r).abs() - 0.25 * r,
    "square": lambda x, y, r: torch.maximum(x.abs(), y.abs()) - 0.9 * r,
    "cross": lambda x, y, r: _beams(x, y, 1.1 * r, r),
    "saltire": lambda x, y, r: _beams((x + y) * 0.5**0.5, (x - y) * 0.5**0.5, 1.2 * r, r),
    "triangle": lambda x, y, r: torch.maximum(0.87 * x.abs() - 0.5 * y - 0.55 * r, y - 0.7 * r),
    "rows": lambda x, y, r: _bars(y, x, r),
    "columns": lambda x, y, r: _bars(x, y, r),
}
CLASSES = tuple(_DISTANCE)


def draw(split: str) -> Dataset:
    """Draw all images of a split; the classes alternate, so that every slice is balanced."""
    checks.one_of("split", split, SIZES)
    index = torch.arange(SIZES[split])
    labels = index % len(CLASSES)
    images = render(labels, rng.stream(0, "shapes", index).at(split))
    return whole_split("shapes", split, images, labels, CLASSES)


def render(labels: Tensor, stream: Stream) -> Tensor:
    """(B, 3, SIDE, SIDE) uint8: background + contrast · shape + texture + noise."""
    pose = stream.at("shape")
    contrast = _uniform(_CONTRAST, pose.at("contrast"))
    haze = _uniform((0.0, HAZE), pose.at("haze"))
    contrast = torch.where(pose.at("faint").uniform(1, 1, 1) < FAINT, haze, contrast)
    cast = stream.at("ground colour").uniform(3, 1, 1, low=-0.05, high=0.05)
    background = _uniform(_BACKGROUND, stream.at("ground")) + cast
    colour = contrast * pose.at("tint").uniform(3, 1, 1, low=_TINT[0], high=_TINT[1])
    image = (
        background
        + colour * coverage(labels, pose)
        + TEXTURE * grating(labels, stream.at("texture"))
    )
    image = image + NOISE * stream.at("noise").normal(3, SIDE, SIDE)
    return (image * 255).round().clamp(0, 255).to(torch.uint8)


def _uniform(interval: tuple[float, float], stream: Stream) -> Tensor:
    """(B, 1, 1, 1) uniform random numbers."""
    return stream.uniform(1, 1, 1, low=interval[0], high=interval[1])


def _coordinates() -> Tensor:
    """(SIDE,) pixel positions relative to the middle of the image."""
    return torch.arange(SIDE, dtype=torch.float32) - (SIDE - 1) / 2


def coverage(labels: Tensor, stream: Stream) -> Tensor:
    """(B, 1, SIDE, SIDE) in [0, 1]: the share of each pixel that the shape covers."""
    shift = stream.at("shift").uniform(2, 1, 1, 1, low=-_SHIFT, high=_SHIFT)
    x = (_coordinates() - shift[:, 0]).expand(-1, 1, SIDE, SIDE)
    y = (_coordinates().unsqueeze(1) - shift[:, 1]).expand(-1, 1, SIDE, SIDE)
    radius = _uniform(_RADIUS, stream.at("radius"))
    cover = torch.empty(x.shape)
    for number, distance in enumerate(_DISTANCE.values()):
        rows = labels == number
        cover[rows] = (0.5 - distance(x[rows], y[rows], radius[rows])).clamp(0, 1)
    return cover


def grating(labels: Tensor, stream: Stream) -> Tensor:
    """(B, 1, SIDE, SIDE) in [−1, 1]: parallel waves of random phase; the direction depends on the
    class."""
    angle = (labels * (math.pi / len(CLASSES))).view(-1, 1, 1, 1)
    position = angle.cos() * _coordinates() + angle.sin() * _coordinates().unsqueeze(1)
    phase = _uniform((0.0, 2 * math.pi), stream.at("phase"))
    return torch.cos(2 * math.pi * FREQUENCY * position + phase)
