"""The preprocessing of `preprocessor_config.json`, which means something else for every class of
transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from equipoise.core import checks
from equipoise.core.checks import InputError
from equipoise.models.layers.resizing import MAX_SIDE, Preprocessing
from equipoise.models.sources.config_table import ConfigTable

FILE = "preprocessor_config.json"
_RESAMPLING = {0: "nearest", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers
_REFUSED = (
    "include_top",
    "rescale_offset",
    "do_flip_channel_order",
    "do_pad",
    "do_color_quantize",
    "do_thumbnail",
    "do_align_long_axis",
)
_FROM_SHARE = 384  # ConvNeXT resizes to larger sizes than this without a crop


@dataclass(frozen=True)
class Processor:
    """How a class of transformers reads its file.

    Args:
        is_square: one number is both sides; otherwise it is the shorter one.
        resample: Pillow's number, where the file has none.
        crops: whether it crops, where the file does not say so; None if it cannot.
        has_share: it crops by `crop_pct`, as ConvNeXT does.
    """

    is_square: bool
    resample: int
    crops: bool | None
    has_share: bool = False


PROCESSORS = {
    "ViT": Processor(True, 2, None),
    "Pvt": Processor(True, 2, None),
    "Siglip": Processor(True, 3, None),
    "DeiT": Processor(True, 3, True),
    "Beit": Processor(True, 3, True),
    "CLIP": Processor(False, 3, True),
    "Bit": Processor(False, 3, True),
    "MobileNetV1": Processor(False, 2, True),
    "MobileNetV2": Processor(False, 2, True),
    "ConvNext": Processor(False, 2, None, has_share=True),
}
# By the `model_type` of config.json, for files that name no class.
_OF_MODELS = {
    "vit": "ViT",
    "vit_msn": "ViT",
    "swin": "ViT",
    "swinv2": "ViT",
    "deit": "DeiT",
    "beit": "Beit",
    "data2vec-vision": "Beit",
    "convnext": "ConvNext",
    "convnextv2": "ConvNext",
    "resnet": "ConvNext",
    "regnet": "ConvNext",
    "dinov2": "Bit",
    "bit": "Bit",
    "clip": "CLIP",
    "siglip": "Siglip",
    "pvt": "Pvt",
    "mobilenet_v1": "MobileNetV1",
    "mobilenet_v2": "MobileNetV2",
}


def processor_settings(values: Mapping[str, Any], model_type: object = None) -> Preprocessing:
    """The preprocessing of a table; `model_type` decides if it names no class of its own."""
    table = ConfigTable(values, FILE)
    kind = _kind(table, model_type)
    for key in _REFUSED:
        checks.require(
            not table.get(key),
            table.name(key),
            "be left out or false: it is not implemented",
            table.get(key),
        )
    factor = table.positive("rescale_factor", 1 / 255)
    checks.require(table.flag("do_rescale", True), table.name("do_rescale"), "be true", False)
    checks.require(
        math.isclose(factor, 1 / 255, rel_tol=1e-4),
        table.name("rescale_factor"),
        "be 1/255",
        factor,
    )
    resample = table.get("resample", kind.resample)
    checks.require(
        type(resample) is int and resample in _RESAMPLING,
        table.name("resample"),
        "be 0 (nearest), 2 (bilinear) or 3 (bicubic)",
        resample,
    )
    resize, crop = _sizes(table, kind)
    mean, std = (
        table.normalization("image_mean", "image_std")
        if table.flag("do_normalize", True)
        else (None, None)
    )
    return Preprocessing(
        resize=resize,
        crop=crop,
        interpolation=_RESAMPLING[resample],
        mean=mean,
        std=std,
        origin=FILE,
    )


def _kind(table: ConfigTable, model_type: object) -> Processor:
    given = table.get("image_processor_type", table.get("feature_extractor_type"))
    name = (
        _OF_MODELS.get(str(model_type))
        if given is None
        else str(given)
        .removesuffix("Fast")
        .removesuffix("ImageProcessor")
        .removesuffix("FeatureExtractor")
    )
    if name not in PROCESSORS:
        got = given if given is not None else f"none and the model_type {model_type}"
        raise InputError(
            f"`{table.name('image_processor_type')}` must be the image processor of "
            f"{', '.join(PROCESSORS)}, got {checks.shown(got)}"
        )
    return PROCESSORS[name]


def _sizes(
    table: ConfigTable, kind: Processor
) -> tuple[int | tuple[int, int] | None, tuple[int, int] | None]:
    """What is resized to and what is cropped."""
    resizes = table.flag("do_resize", True)
    resize = _side(table, "size", kind.is_square) if resizes else None
    if kind.has_share:
        if not isinstance(resize, int):
            checks.require(
                resize is None, table.name("size"), "be the shorter side", table.get("size")
            )
            return None, None
        share = table.share("crop_pct", 224 / 256)
        return (
            (int(resize / share), (resize, resize))
            if resize < _FROM_SHARE
            else ((resize, resize), None)
        )
    cropped = table.flag("do_center_crop", bool(kind.crops))
    checks.require(
        not cropped or kind.crops is not None,
        table.name("do_center_crop"),
        "be left out or false for this image processor",
        cropped,
    )
    crop = _side(table, "crop_size", True, 224) if cropped else None
    return resize, crop if isinstance(crop, tuple) else None


def _side(
    table: ConfigTable, key: str, is_square: bool, default: int | None = None
) -> int | tuple[int, int]:
    """A size: height and width, or one number, which is the shorter side or both."""
    size = table.get(key, default)
    if isinstance(size, dict):
        inner = ConfigTable(size, f"{key} of {table.origin}")
        if size.keys() == {"height", "width"}:
            return inner.whole("height"), inner.whole("width")
        checks.require(
            size.keys() == {"shortest_edge"} and not is_square,
            table.name(key),
            "be height and width" if is_square else "be shortest_edge, or height and width",
            size,
        )
        return inner.whole("shortest_edge")
    if isinstance(size, list):
        checks.require(len(size) == 2, table.name(key), "be height and width", size)
        height, width = (
            checks.whole(table.name(key), side, least=1, most=MAX_SIDE) for side in size
        )
        return height, width
    side = table.whole(key, default)
    return (side, side) if is_square else side
