"""Odd values of the config.json of a timm model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stand_in_packages import SOURCES, installed, weights, write

from equipoise.core.checks import InputError
from equipoise.models import load

ODD: tuple[Any, ...] = ("x", [], {}, float("inf"), float("nan"), True, -1, 10**30)


@pytest.mark.parametrize("value", ODD)
def test_an_odd_value_is_one_sentence(tmp_path: Path, value: Any) -> None:
    write(tmp_path / "model.safetensors", "model.safetensors", weights())
    with installed(tmp_path / "packages", *SOURCES):
        for key in (
            "num_classes",
            "input_size",
            "mean",
            "std",
            "crop_pct",
            "crop_mode",
            "interpolation",
        ):
            for odd in (
                [value]
                if key != "mean"
                else [value, [value] * 3 if value not in (-1, 10**30) else "x"]
            ):
                config = {
                    "architecture": "tiny_net",
                    "num_classes": 12,
                    "pretrained_cfg": {"input_size": [3, 24, 24], key: odd},
                }
                if key == "num_classes":
                    config[key] = odd
                write(tmp_path / "config.json", "config.json", config)
                with pytest.raises(InputError, match=key) as caught:
                    load(f"hf:{tmp_path}")
                assert "\n" not in str(caught.value)


def test_class_names_of_another_type_are_left_out(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", "model.safetensors", weights())
    write(
        tmp_path / "config.json",
        "config.json",
        {
            "architecture": "tiny_net",
            "num_classes": 12,
            "label_names": 3,
            "pretrained_cfg": {"input_size": [3, 24, 24]},
        },
    )
    with installed(tmp_path / "packages", *SOURCES):
        load(f"hf:{tmp_path}")
