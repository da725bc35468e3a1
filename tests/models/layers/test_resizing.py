from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from equipoise.core.checks import InputError
from equipoise.models.layers.resizing import Preprocess, Preprocessing, center_crop, preset

SIZES = [(40, 60), (60, 40), (31, 31), (20, 90)]


def picture(height: int, width: int, seed: int = 0) -> Tensor:
    """A smooth picture with a sharp edge, as bytes / 255, (1, 3, H, W)."""
    small = torch.rand(1, 3, 7, 7, generator=torch.Generator().manual_seed(seed))
    x = F.interpolate(small, size=(height, width), mode="bicubic").clamp(0, 1)
    x[..., height // 3 :, width // 2 :] = 1 - x[..., height // 3 :, width // 2 :]
    return (x * 255).round() / 255


@pytest.mark.parametrize(
    ("name", "resize", "crop", "interpolation"),
    [
        ("Res256Crop224", 256, (224, 224), "bilinear"),
        ("BicubicRes256Crop224", 256, (224, 224), "bicubic"),
        ("Crop288", None, (288, 288), "bilinear"),
        ("Res224", 224, None, "bilinear"),
        ("none", None, None, "bilinear"),
        ("Res384x384", (384, 384), None, "bilinear"),
        ("NearestRes32", 32, None, "nearest"),
        ("Fit24Crop24", 24, (24, 24), "bilinear"),
    ],
)
def test_presets(name: str, resize: object, crop: object, interpolation: str) -> None:
    settings = preset(name)
    assert (settings.resize, settings.crop, settings.interpolation) == (resize, crop, interpolation)
    assert str(settings) == name


@pytest.mark.parametrize("size", [(20, 40), (40, 20), (31, 31), (90, 20)])
@pytest.mark.parametrize("crop", [24, 36])
def test_the_longer_side_is_resized_and_a_border_added(size: tuple[int, int], crop: int) -> None:
    """As timm's crop_mode "border": nothing of the image is lost, and the border has the mean
    colour."""
    x, fill = picture(*size), (0.25, 0.5, 0.75)
    layer = Preprocess(Preprocessing(resize=24, fit=True, crop=(crop, crop), fill=fill))
    height, width = (round(24 * side / max(size)) for side in size)
    small = F.interpolate(
        x, size=(height, width), mode="bilinear", antialias=True, align_corners=False
    )
    expected = torch.tensor(fill).view(1, 3, 1, 1).repeat(1, 1, crop, crop)
    top, left = (crop - height) // 2, (crop - width) // 2
    expected[..., top : top + height, left : left + width] = small
    torch.testing.assert_close(layer(x), expected, atol=1e-6, rtol=0)
    plain = Preprocess(Preprocessing(resize=24, crop=(crop, crop)))
    assert layer.describe()["fit"] is True and "fit" not in plain.describe(), (
        "other models keep their identity"
    )


@pytest.mark.parametrize(
    "name",
    ["", "Bicubic", "Crop", "Res256crop224", "Res0", "Crop99999", "Res256Crop224 ", "Fit24x24"],
)
def test_other_names_are_one_sentence(name: str) -> None:
    with pytest.raises(InputError, match=r"`(preset|resize|crop)` must be"):
        preset(name)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_resizing_is_that_of_torch(size: tuple[int, int], interpolation: str) -> None:
    x = picture(*size)
    settings = Preprocessing(resize=24, interpolation=interpolation)
    expected = F.interpolate(
        x, size=settings.resized(*size), mode=interpolation, antialias=True, align_corners=False
    )
    torch.testing.assert_close(Preprocess(settings)(x), expected.clamp(0, 1), atol=1e-6, rtol=0)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("interpolation", "filter"),
    [("bilinear", Image.Resampling.BILINEAR), ("bicubic", Image.Resampling.BICUBIC)],
)
@pytest.mark.parametrize("side", [24, 48])
def test_resizing_and_cropping_are_those_of_pillow(
    size: tuple[int, int], interpolation: str, filter: int, side: int
) -> None:
    """Pillow rounds to bytes after each of the two directions, the second of which amplifies an
    error by up to 1.5."""
    x = ((0.2 + 0.6 * picture(*size)) * 255).round() / 255  # no value is clipped in between
    settings = Preprocessing(resize=side, crop=(20, 20), interpolation=interpolation)
    height, width = settings.resized(*size)
    image = Image.fromarray((x[0] * 255).round().byte().permute(1, 2, 0).numpy()).resize(
        (width, height), filter
    )
    top, left = round((height - 20) / 2), round((width - 20) / 2)
    expected = np.asarray(image.crop((left, top, left + 20, top + 20)), np.float32) / 255
    difference = (
        (Preprocess(settings)(x)[0].permute(1, 2, 0) - torch.from_numpy(expected)).abs().max()
    )
    assert difference <= 1.25 / 255


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((300, 500), (256, 426)),
        ((500, 300), (426, 256)),
        ((64, 64), (256, 256)),
        ((1, 16_384), (256, 256 * 16_384)),
    ],
)
def test_the_longer_side_is_rounded_down(size: tuple[int, int], expected: tuple[int, int]) -> None:
    assert preset("Res256").resized(*size) == expected


@pytest.mark.parametrize(("size", "part"), [(7, 4), (8, 4), (7, 3), (5, 5), (3, 8), (4, 7)])
def test_center_crop(size: int, part: int) -> None:
    x = torch.arange(1.0, size + 1).expand(1, 1, size, size)
    row = center_crop(x, part, part)[0, 0, part // 2]
    if part <= size:
        start = round((size - part) / 2)
        assert row.tolist() == x[0, 0, 0, start : start + part].tolist()
    else:
        before = (part - size) // 2
        assert row.tolist() == [0.0] * before + x[0, 0, 0].tolist() + [0.0] * (part - size - before)


def test_gradients_reach_the_pixels_of_the_image() -> None:
    layer = Preprocess(
        Preprocessing(resize=12, crop=(8, 8), interpolation="bicubic", mean=(0.5,), std=(0.25,))
    )
    x = picture(16, 20)[:, :1].double().mul(0.5).add(0.25).float().requires_grad_()
    direction = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    (gradient,) = torch.autograd.grad((layer(x) * direction).sum(), x)
    step = torch.randn(x.shape, generator=torch.Generator().manual_seed(2)) * 1e-3
    with torch.no_grad():
        change = ((layer(x + step) - layer(x - step)) * direction).double().sum() / 2
    assert abs(float(change) - float((gradient * step).sum())) <= 1e-2 * abs(float(change))
    assert (gradient != 0).float().mean() > 0.5


def test_rounding_does_not_depend_on_the_batch() -> None:
    layer = Preprocess(preset("BicubicRes32Crop28"))
    x = torch.cat([picture(50, 70, seed) for seed in range(9)])
    whole = layer(x)
    for rows in (slice(0, 1), slice(3, 5), slice(2, 9)):
        assert torch.equal(layer(x[rows]), whole[rows])


def test_pixels_keep_their_precision_under_autocast() -> None:
    layer, x = Preprocess(preset("Res24Crop20")), picture(40, 60)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), layer(x)) and layer(x).dtype == torch.float32
        inside = layer(x)
    assert torch.equal(inside, layer(x))


def test_a_first_call_in_inference_mode_leaves_gradients_possible() -> None:
    layer, x = Preprocess(preset("Res24")), picture(40, 60)
    with torch.inference_mode():
        layer(x)
    layer(x.requires_grad_()).sum().backward()
    assert x.grad is not None and bool(x.grad.any())
