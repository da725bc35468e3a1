"""The demo set: drawn images in which the shape is robust and the texture is not.

Eight classes of 3×16×16 images. A class is told by two cues that always agree:

- its *shape* (a disc, a ring, …), some 0.3 to 0.6 brighter than the ground: several times :data:`EPS`, so
  that an adversary within ±EPS cannot draw it away. In :data:`FAINT` of the images its contrast is below
  :data:`HAZE`; there an adversary can level most of it, and often nobody sees it at all;
- its *texture*, a grating some three pixels fine whose direction is the class, with amplitude
  :data:`TEXTURE`, about half of EPS. It is there in every image, and in every image an adversary can wipe
  it out and write the texture of another class instead.

So the trade-off lies in the data, not in the training: a classifier that reads the texture is right nearly
always and falls to any attack within EPS, and one that withstands such attacks must go by the shape, and has
to guess where there is none. Its mistakes on clean images are those guesses, made without confidence, which
is what lets a mixture have both.

Nothing is stored or downloaded: image i of a split is a function of (split, i) alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from equipoise.core import checks
from equipoise.core.rng import Stream, stream
from equipoise.data.dataset import Dataset, whole_split

SIZES = {"train": 5120, "test": 2000}
SIDE = 16
EPS = 16 / 255  # the ℓ∞ radius the set is made for
TEXTURE = 9 / 255  # amplitude of the grating
NOISE = 5 / 255  # standard deviation of the pixel noise
FAINT = 0.18  # share of the images with hardly a shape
HAZE = 0.14  # their greatest contrast
_GROUND = (0.15, 0.35)
_CONTRAST = (0.4, 0.6)
_TINT = (0.75, 1.0)  # the share of the contrast that a colour channel gets
_RADIUS = (4.8, 6.0)
_SHIFT = 1.2  # of the centre, in pixels
_FREQUENCY = 0.36  # of the grating, in cycles per pixel


def _bars(across: Tensor, along: Tensor, r: Tensor) -> Tensor:
    return torch.maximum((across.abs() - 0.7 * r).abs() - 0.3 * r, along.abs() - 1.1 * r)


def _beams(x: Tensor, y: Tensor, length: Tensor, r: Tensor) -> Tensor:
    near, far = torch.minimum(x.abs(), y.abs()), torch.maximum(x.abs(), y.abs())
    return torch.maximum(near - 0.28 * r, far - length)


# How far (x, y) lies outside a shape of radius r around the origin, negative inside; y points down.
_OUTSIDE: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "disc": lambda x, y, r: x.hypot(y) - r,
    "ring": lambda x, y, r: (x.hypot(y) - 0.85 * r).abs() - 0.25 * r,
    "square": lambda x, y, r: torch.maximum(x.abs(), y.abs()) - 0.9 * r,
    "cross": lambda x, y, r: _beams(x, y, 1.1 * r, r),
    "saltire": lambda x, y, r: _beams((x + y) * 0.5**0.5, (x - y) * 0.5**0.5, 1.2 * r, r),
    "triangle": lambda x, y, r: torch.maximum(0.87 * x.abs() - 0.5 * y - 0.55 * r, y - 0.7 * r),
    "rows": lambda x, y, r: _bars(y, x, r),
    "columns": lambda x, y, r: _bars(x, y, r),
}
CLASSES = tuple(_OUTSIDE)


def draw(split: str) -> Dataset:
    """All images of a split; the classes take turns, so that every slice is balanced."""
    checks.one_of("split", split, SIZES)
    index = torch.arange(SIZES[split])
    labels = index % len(CLASSES)
    images = _render(labels, stream(0, "shapes", index).at(split))
    return whole_split("shapes", split, images, labels, CLASSES)


def _render(labels: Tensor, chance: Stream) -> Tensor:
    """(B, 3, SIDE, SIDE) uint8: ground + contrast · shape + texture + noise."""
    pose = chance.at("shape")
    contrast = _between(_CONTRAST, pose.at("contrast"))
    haze = _between((0.0, HAZE), pose.at("haze"))
    contrast = torch.where(pose.at("faint").uniform(1, 1, 1) < FAINT, haze, contrast)
    cast = chance.at("ground colour").uniform(3, 1, 1, low=-0.05, high=0.05)
    ground = _between(_GROUND, chance.at("ground")) + cast
    colour = contrast * pose.at("tint").uniform(3, 1, 1, low=_TINT[0], high=_TINT[1])
    image = ground + colour * _cover(labels, pose) + TEXTURE * _grating(labels, chance.at("texture"))
    image = image + NOISE * chance.at("noise").normal(3, SIDE, SIDE)
    return (image * 255).round().clamp(0, 255).to(torch.uint8)


def _between(ends: tuple[float, float], chance: Stream) -> Tensor:
    """(B, 1, 1, 1) uniform numbers, ready to meet images."""
    return chance.uniform(1, 1, 1, low=ends[0], high=ends[1])


def _line() -> Tensor:
    """(SIDE,) pixel positions around the middle of the image."""
    return torch.arange(SIDE, dtype=torch.float32) - (SIDE - 1) / 2


def _cover(labels: Tensor, chance: Stream) -> Tensor:
    """(B, 1, SIDE, SIDE) in [0, 1]: the share of each pixel that the shape covers."""
    shift = chance.at("shift").uniform(2, 1, 1, 1, low=-_SHIFT, high=_SHIFT)
    x = (_line() - shift[:, 0]).expand(-1, 1, SIDE, SIDE)
    y = (_line().unsqueeze(1) - shift[:, 1]).expand(-1, 1, SIDE, SIDE)
    radius = _between(_RADIUS, chance.at("radius"))
    cover = torch.empty(x.shape)
    for number, outside in enumerate(_OUTSIDE.values()):
        rows = labels == number
        cover[rows] = (0.5 - outside(x[rows], y[rows], radius[rows])).clamp(0, 1)
    return cover


def _grating(labels: Tensor, chance: Stream) -> Tensor:
    """(B, 1, SIDE, SIDE) in [−1, 1]: parallel waves of random phase whose direction is the class."""
    angle = (labels * (math.pi / len(CLASSES))).view(-1, 1, 1, 1)
    way = angle.cos() * _line() + angle.sin() * _line().unsqueeze(1)
    phase = _between((0.0, 2 * math.pi), chance.at("phase"))
    return torch.cos(2 * math.pi * _FREQUENCY * way + phase)
