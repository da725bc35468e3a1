"""Pictures of the attacked images of an evaluation."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.colors import to_hex

from equipoise.core.arrays import AttackedArrays
from equipoise.reporting.attacked import draw_attacked
from equipoise.reporting.charts import LIGHT, styled


def _arrays(channels: int) -> AttackedArrays:
    clean = np.full((2, channels, 4, 8), 0.5)
    attacked = clean.copy()
    attacked[0] += 0.02
    return AttackedArrays(
        clean=clean,
        attacked=attacked,
        index=np.array([3, 5]),
        label=np.array([0, 1]),
        predicted=np.array([1, 1]),
        model="m",
        attack="fast",
        class_names=("aquarium_fish", "sunflower"),
    )


@pytest.mark.parametrize("channels", [1, 3])
def test_rows_are_clean_perturbation_and_attacked(channels: int) -> None:
    with styled(LIGHT):
        axes = draw_attacked(LIGHT, _arrays(channels)).axes[0]
    values = [float(np.asarray(image.get_array()).flat[0]) for image in axes.images]
    assert values == pytest.approx([0.5, 0.5, 0.7, 0.5, 0.52, 0.5])
    assert [text.get_text() for text in axes.get_yticklabels()] == [
        "clean",
        "perturbation\n×10",
        "attacked",
    ]
    places = [image.get_extent() for image in axes.images]  # left, right, bottom, top
    assert all(
        bottom - top == pytest.approx((right - left) / 2) for left, right, bottom, top in places
    )
    assert len({(left, top) for left, _, _, top in places}) == 6


def test_predictions_that_are_wrong_are_marked() -> None:
    with styled(LIGHT):
        axes = draw_attacked(LIGHT, _arrays(3)).axes[0]
    below = [(text.get_text(), to_hex(text.get_color())) for text in axes.get_xticklabels()]
    assert below == [("✗ sunflower", LIGHT["wrong"]), ("sunflower", LIGHT["ink"])]
    assert [text.get_text() for text in axes.child_axes[0].get_xticklabels()] == [
        "aquarium\nfish",
        "sunflower",
    ]
