"""Examples of attacked images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import synthetic_run
from matplotlib.colors import to_hex

from equipoise.core.arrays import ExampleArrays
from equipoise.reporting import accuracy
from equipoise.reporting.charts import LIGHT, styled
from equipoise.reporting.section import read_run


def _examples(change: int, channels: int = 1) -> ExampleArrays:
    clean = np.full((2, channels, 5, 7), 100, dtype=np.uint8)
    return ExampleArrays(
        clean=clean,
        attacked=clean + np.uint8(change),
        label=np.array([0, 1]),
        predicted=np.array([[1, 0, 0], [1, 1, 0]]),
        class_names=("cat", "dog"),
    )


@pytest.mark.parametrize(("change", "expected"), [(8, 127 / 8), (0, 1.0), (150, 1.0)])
def test_amplified_differences_stay_in_the_range_of_a_pixel(change: int, expected: float) -> None:
    assert accuracy.amplification(_examples(change)) == expected


@pytest.mark.parametrize("channels", [1, 3])
def test_predictions_are_marked_correct_or_wrong(channels: int) -> None:
    with styled(LIGHT):
        figure = accuracy.draw_examples(LIGHT, _examples(8, channels))
    marked = [
        (text.get_text(), to_hex(text.get_color()))
        for axes in figure.axes[3::4]
        for text in axes.texts
        if text.get_text()[0] in "✓✗"
    ]
    ink, wrong = LIGHT["ink"], LIGHT["wrong"]
    assert marked == [
        ("✗ dog", wrong),
        ("✓ cat", ink),
        ("✓ cat", ink),
        ("✓ dog", ink),
        ("✓ dog", ink),
        ("✗ cat", wrong),
    ]


def test_clean_attacked_and_difference_are_drawn() -> None:
    with styled(LIGHT):
        figure = accuracy.draw_examples(LIGHT, _examples(8))
    shown = [np.asarray(axes.images[0].get_array()) for axes in figure.axes[:3]]
    assert [int(image.flat[0]) for image in shown] == [100, 108, 254]


def test_the_section_names_threat_and_amplification(tmp_path: Path) -> None:
    section = accuracy.examples(
        read_run(synthetic_run.make(tmp_path / "run", n=6, with_sweep=False))
    )
    assert section is not None
    assert section.prose[0].startswith("5 examples:") and "within ℓ∞ ≤ 8/255" in section.prose[0]
    assert "amplified ×16" in section.prose[0]
