from __future__ import annotations

from typing import Any

import pytest

from equipoise.core.checks import InputError
from equipoise.models.sources.hf_processors import processor_settings

NUMBERS = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


@pytest.mark.parametrize(
    ("kind", "table", "words"),
    [
        ("ViTFeatureExtractor", {"size": 224}, "Res224x224"),
        ("ViTImageProcessorFast", {"size": 224}, "Res224x224"),
        (
            "ViTImageProcessor",
            {"size": {"height": 224, "width": 192}, "resample": 3},
            "BicubicRes224x192",
        ),
        ("DeiTFeatureExtractor", {"size": 256, "crop_size": 224}, "BicubicRes256x256Crop224"),
        (
            "BeitFeatureExtractor",
            {"size": 224, "do_center_crop": False, "resample": 2},
            "Res224x224",
        ),
        (
            "BitImageProcessor",
            {"size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 224}},
            "BicubicRes256Crop224",
        ),
        ("CLIPFeatureExtractor", {"size": 224}, "BicubicRes224Crop224"),
        (
            "ConvNextImageProcessor",
            {"size": {"shortest_edge": 224}, "crop_pct": 0.875, "resample": 3},
            "BicubicRes256Crop224",
        ),
        ("ConvNextFeatureExtractor", {"size": 224}, "Res256Crop224"),
        ("ConvNextImageProcessor", {"size": {"shortest_edge": 384}, "crop_pct": 1.0}, "Res384x384"),
        ("ViTImageProcessor", {"do_resize": False}, "none"),
        ("ConvNextImageProcessor", {"do_resize": False}, "none"),
    ],
)
def test_sizes_depend_on_the_class(kind: str, table: dict[str, Any], words: str) -> None:
    key = "feature_extractor_type" if "Extractor" in kind else "image_processor_type"
    assert str(processor_settings({**table, **NUMBERS, key: kind})) == words


@pytest.mark.parametrize(
    ("model_type", "words"),
    [("vit", "Res224x224"), ("swin", "Res224x224"), ("resnet", "Res256Crop224")],
)
def test_the_model_decides_where_the_file_names_no_class(model_type: str, words: str) -> None:
    assert str(processor_settings({"size": 224, **NUMBERS}, model_type)) == words


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"resample": 1}, "`resample of preprocessor_config.json` must be 0"),
        ({"do_rescale": False}, "be true"),
        ({"rescale_factor": 1 / 127.5}, "must be 1/255"),
        ({"rescale_offset": True}, "not implemented"),
        ({"include_top": True}, "not implemented"),
        ({"do_flip_channel_order": True}, "not implemented"),
        ({"size": {"longest_edge": 224}}, "must be height and width"),
        ({"size": {"shortest_edge": 224}}, "height and"),
        ({"do_center_crop": True}, "be left out or false"),
        ({"size": "x"}, "`size of preprocessor_config.json` must"),
        ({"size": []}, "must be height and width"),
        ({"size": float("inf")}, "whole number"),
        ({"size": True}, "whole"),
        ({"size": None}, "whole number"),
        ({"size": {"height": "x", "width": 3}}, "`height of size of preproc"),
        ({"image_mean": "x"}, "one number per channel"),
        ({"image_mean": ["x"] * 3}, "be a number"),
        ({"image_std": [float("inf")] * 3}, "be finite"),
        ({"image_std": [0.0] * 3}, "be positive"),
        ({"image_std": [0.5]}, "one for each of image_mean"),
        ({"image_mean": None}, "one number per channel"),
        ({"do_resize": "x"}, "true or false"),
        ({"resample": []}, "must be 0"),
        ({"rescale_factor": "x"}, "be positive"),
        (
            {"image_processor_type": "EfficientNetImageProcessor"},
            "got 'EfficientNetImageProcessor'",
        ),
        ({"image_processor_type": []}, "must be the image processor of"),
        ({"image_processor_type": None}, "got 'none"),
    ],
)
def test_what_is_not_implemented_or_odd_is_one_sentence(
    table: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        processor_settings(
            {"image_processor_type": "ViTImageProcessor", "size": 224, **NUMBERS, **table}
        )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("share", ["x", [], float("inf"), 0, -1, 1e-310])
def test_odd_shares_are_one_sentence(share: object) -> None:
    with pytest.raises(InputError, match="`crop_pct of preprocessor_config"):
        processor_settings(
            {
                "feature_extractor_type": "ConvNextFeatureExtractor",
                "size": 224,
                **NUMBERS,
                "crop_pct": share,
            }
        )
