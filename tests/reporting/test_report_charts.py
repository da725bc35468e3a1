"""Charts and colours."""

from __future__ import annotations

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from equipoise.reporting.charts import (
    DARK,
    LIGHT,
    Chart,
    Histogram,
    Line,
    Palette,
    Panel,
    ReferenceLine,
    model_colors,
    styled,
)


def _draw(*panels: Panel, side_by_side: bool = False) -> Figure:
    with styled(LIGHT):
        return Chart("chart", "", panels, x_label="x", y_label="y", side_by_side=side_by_side).draw(
            LIGHT
        )


@pytest.mark.parametrize("palette", [LIGHT, DARK])
def test_models_keep_their_colours_and_others_take_turns(palette: Palette) -> None:
    colors = model_colors(["x", "mixed", "y", "accurate"])
    assert colors["mixed"] == "mixed" and colors["accurate"] == "accurate"
    assert len({palette[name] for name in colors.values()}) == 4


def test_a_label_that_occurs_twice_has_one_grey_key() -> None:
    panels = [
        Panel([Histogram(values=[0.2], bins=[0, 1], color=model, label="clean")])
        for model in ("accurate", "robust")
    ]
    legend = _draw(*panels).legends[0]
    assert [text.get_text() for text in legend.get_texts()] == ["clean"]
    assert to_hex(legend.get_patches()[0].get_facecolor()) == LIGHT["muted"]


def test_lines_without_a_label_have_no_key() -> None:
    assert (
        _draw(
            Panel([Line(x=[0, 1], y=[0, 1], color="ink"), ReferenceLine(x=0.5, text="half")])
        ).legends
        == []
    )


def test_intervals_are_a_band_or_bars() -> None:
    marks = [
        Line(x=[0, 1], y=[2, 3], low=[1, 2], high=[3, 4], color="ink", bars=bars)
        for bars in (False, True)
    ]
    band, bars = (_draw(Panel([mark])).axes[0] for mark in marks)
    assert len(band.collections) == 1 and len(bars.containers) == 1


def test_panels_share_the_axis_they_have_in_common() -> None:
    panels = [Panel([Line(x=[0, end], y=[0, end], color="ink")]) for end in (1, 2)]
    below, beside = _draw(*panels).axes, _draw(*panels, side_by_side=True).axes
    assert below[0].get_xlim() == below[1].get_xlim() and below[0].get_ylim() != below[1].get_ylim()
    assert (
        beside[0].get_ylim() == beside[1].get_ylim()
        and beside[0].get_xlim() != beside[1].get_xlim()
    )
