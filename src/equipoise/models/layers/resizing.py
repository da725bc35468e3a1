"""Resizing and cropping as differentiable layers, so that an attacker perturbs the pixels of the
image itself."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.core import checks
from equipoise.models.inspection import Described
from equipoise.models.layers.normalization import Normalized

MAX_SIDE = 2**14
INTERPOLATIONS = ("bilinear", "bicubic", "nearest")
_PRESET = re.compile(
    r"(Bilinear|Bicubic|Nearest)?(?:Res(\d{1,5})(?:x(\d{1,5}))?|Fit(\d{1,5}))?"
    r"(?:Crop(\d{1,5})(?:x(\d{1,5}))?)?",
    re.ASCII,
)


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """Resizing, cropping and normalisation that a network was trained with, in this order.

    Args:
        resize: the shorter side in pixels, or (H, W) whatever the aspect; None leaves the size.
        fit: resize the longer side instead, so that nothing lies outside of a crop of that size.
        crop: (H, W) of the central part that is kept, with `fill` where the image is smaller; None
            keeps all.
        fill: the colour of pixels that are added, per channel in [0, 1]; None is black.
        interpolation: bilinear, bicubic or nearest.
        antialias: filter before shrinking, as Pillow and torchvision do.
        mean, std: per channel, of images in [0, 1]; None is 0 and 1.
        origin: where the mean and the standard deviation come from, such as config.json.
    """

    resize: int | tuple[int, int] | None = None
    fit: bool = False
    crop: tuple[int, int] | None = None
    fill: tuple[float, ...] | None = None
    interpolation: str = "bilinear"
    antialias: bool = True
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    origin: str = ""

    def __post_init__(self) -> None:
        checks.one_of("interpolation", self.interpolation, INTERPOLATIONS)
        for name in ("resize", "crop"):
            sides = getattr(self, name)
            for side in sides if isinstance(sides, tuple) else () if sides is None else (sides,):
                checks.whole(name, side, least=1, most=MAX_SIDE)

    def __str__(self) -> str:
        """The sizes, as in :func:`preset`."""
        resize = self.resize if isinstance(self.resize, tuple) else (self.resize,)
        sides = (
            ""
            if self.resize is None
            else ("Fit" if self.fit else "Res") + "x".join(map(str, resize))
        )
        crop = (
            ""
            if self.crop is None
            else f"Crop{self.crop[0]}"
            + (f"x{self.crop[1]}" if self.crop[0] != self.crop[1] else "")
        )
        how = (
            "" if self.interpolation == "bilinear" or not sides else self.interpolation.capitalize()
        )
        return f"{how}{sides}{crop}" or "none"

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """The size of an image after resizing; the longer side is rounded down, as torchvision
        does."""
        if self.resize is None or isinstance(self.resize, tuple):
            return self.resize or (height, width)
        short, long = min(height, width), max(height, width)
        if self.fit:
            other = max(1, round(self.resize * short / long))  # as timm does
            return (other, self.resize) if height <= width else (self.resize, other)
        other = max(1, self.resize * long // short)
        return (self.resize, other) if height <= width else (other, self.resize)


def preset(name: str) -> Preprocessing:
    """The sizes of a preset: `none`, or as RobustBench writes it, Res256Crop224,
    BicubicRes256Crop224, Crop288.

    `Res224` resizes the shorter side to 224 pixels, `Fit224` the longer one, `Res224x224` both.

    >>> preset("BicubicRes256Crop224").crop
    (224, 224)
    >>> str(preset("Res256Crop224")), str(preset("none"))
    ('Res256Crop224', 'none')
    """
    match = _PRESET.fullmatch(name)
    checks.require(
        name == "none" or (match is not None and any((match[2], match[4], match[5]))),
        "preset",
        "be none or like Res256Crop224, BicubicRes256Crop224, Crop288, Res224x224, Fit224Crop224",
        name,
    )
    if match is None or name == "none":
        return Preprocessing()
    how, height, width, longer, top, left = match.groups()
    side = height or longer
    return Preprocessing(
        resize=None if side is None else int(side) if width is None else (int(side), int(width)),
        fit=longer is not None,
        crop=None if top is None else (int(top), int(left or top)),
        interpolation=(how or "Bilinear").lower(),
    )


class Preprocess(Described, Normalized):
    """Preprocessing as a layer: (B, C, H, W) in [0, 1] → the input of a network.

    Every row and column is resized by a matrix of torch's own interpolation weights, because the
    gradient of torch's interpolation is not reproducible on a GPU. Bicubic values are clipped to
    [0, 1], as in Pillow.
    """

    description: tuple[str, ...] = ("preprocess", "resize", "crop", "interpolation", "antialias")

    def __init__(self, settings: Preprocessing, channels: int | None = None) -> None:
        numbers = settings.mean or settings.std or (0.0,) * 3
        Normalized.__init__(self, channels or len(numbers), settings.mean, settings.std)
        self.settings = settings
        self.resize, self.crop, self.interpolation = (
            settings.resize,
            settings.crop,
            settings.interpolation,
        )
        self.antialias, self.fit, self.fill = settings.antialias, settings.fit, settings.fill
        if self.fit or self.fill is not None:
            self.description = (*self.description, "fit", "fill")
        self._matrices: dict[
            Any, Tensor
        ] = {}  # no buffers: functions of the settings and the size of the images

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) in [0, 1] → (B, C, H', W'), normalised."""
        x = self.to_size(x)
        return x if self.settings.mean is None and self.settings.std is None else self.normalize(x)

    def to_size(self, x: Tensor) -> Tensor:
        """Resize and crop."""
        if self.resize is None:
            return x if self.crop is None else center_crop(x, *self.crop)
        height, width = self.settings.resized(*x.shape[2:])
        down, across = self._matrix(x, 2, height), self._matrix(x, 3, width)
        with torch.autocast(x.device.type, enabled=False):  # pixels keep their precision
            flat = x.float().flatten(
                0, 1
            )  # one product per image and channel: rounding does not depend on the batch
            count = flat.shape[0]  # len() would make the batch size a constant of torch.export
            flat = torch.bmm(
                torch.bmm(down.expand(count, -1, -1), flat), across.T.expand(count, -1, -1)
            )
            if self.interpolation == "bicubic":
                flat = flat.clamp(0, 1)
            resized = flat.view(*x.shape[:2], *flat.shape[1:])
            if self.fill is not None:
                inside = (down != 0).any(1).unsqueeze(1) & (across != 0).any(1)
                resized = torch.where(
                    inside, resized, torch.tensor(self.fill, device=x.device).view(1, -1, 1, 1)
                )
        return resized.to(x.dtype)

    def _matrix(self, x: Tensor, axis: int, size: int) -> Tensor:
        """The weights (size after cropping, size before resizing) of one axis."""
        before = x.shape[axis]
        if torch.compiler.is_exporting():  # a cached tensor of the trace would be useless after it
            return self._new_matrix(x, axis, size)
        key = axis, before, size, x.device
        if key not in self._matrices:
            with torch.inference_mode(False), torch.no_grad():  # a gradient may be asked for later
                self._matrices[key] = self._new_matrix(x, axis, size)
        return self._matrices[key]

    def _new_matrix(self, x: Tensor, axis: int, size: int) -> Tensor:
        before = x.shape[axis]
        how: dict[str, Any] = (
            {}
            if self.interpolation == "nearest"
            else {"align_corners": False, "antialias": self.antialias}
        )
        mode = "nearest-exact" if self.interpolation == "nearest" else self.interpolation
        unit = torch.eye(before, device=x.device)[None, None]
        weights = F.interpolate(unit, size=(size, before), mode=mode, **how)
        if self.crop is not None:
            weights = center_crop(weights, self.crop[axis - 2], before)
        return weights[0, 0]


def center_crop(x: Tensor, height: int, width: int) -> Tensor:
    """The central part of images (B, C, H, W), with zeros where it is larger than they are; as
    torchvision rounds."""
    (before, after), (left, right) = (
        _margins(size, part) for size, part in ((x.shape[2], height), (x.shape[3], width))
    )
    return F.pad(x, (left, right, before, after))


def _margins(size: int, part: int) -> tuple[int, int]:
    """What `F.pad` adds on both sides (or, negative, removes) to make `size` into `part`."""
    if part >= size:
        return (part - size) // 2, (part - size + 1) // 2
    start = round((size - part) / 2)
    return -start, -(size - part - start)
