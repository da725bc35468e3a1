"""Figures of the report: the colours, and charts that are described before they are drawn.

A colour is a key of a palette, so that one description serves the light and the dark report.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, replace
from itertools import cycle
from typing import TYPE_CHECKING, Any

from equipoise.core.aggregation import MODELS as MODELS
from equipoise.core.results import Result
from equipoise.core.stats import Estimate
from equipoise.core.text import literal

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OTHERS = ("other_0", "other_1", "other_2")
WIDTH = 5.6  # inches; at 9 pt the text of a figure stays legible on a phone
CORRECT = "classified correctly, %"
LineStyle = str | tuple[int, tuple[int, ...]]

# Colours that colour-blind readers can distinguish.
Palette = Mapping[str, str]
LIGHT: Palette = {
    "paper": "#ffffff",
    "ink": "#1f2328",
    "muted": "#636c76",
    "rule": "#d8dde3",
    "accurate": "#0072b2",
    "robust": "#d55e00",
    "mixed": "#009e73",
    "wrong": "#b3123a",
    "other_0": "#8a5a83",
    "other_1": "#8c6d1f",
    "other_2": "#5b6770",
}
DARK: Palette = {
    "paper": "#15181c",
    "ink": "#e4e7eb",
    "muted": "#98a2ad",
    "rule": "#343a41",
    "accurate": "#56b4e9",
    "robust": "#f28e4b",
    "mixed": "#3cc79a",
    "wrong": "#ff7d92",
    "other_0": "#cc9fc6",
    "other_1": "#d8bb62",
    "other_2": "#a9b4bd",
}


def model_colors(models: Iterable[str]) -> dict[str, str]:
    """Colour of every model: the base models and the mixture have their own, others take turns."""
    others = cycle(OTHERS)
    return {model: model if model in MODELS else next(others) for model in models}


def styled(palette: Palette) -> AbstractContextManager[None]:
    """A context with the matplotlib settings of the report; the caller's settings are restored
    afterwards.

    Draw with `matplotlib.figure.Figure`, not with pyplot and its global list of figures.
    """
    import matplotlib.style

    paper, ink, muted, rule = (palette[name] for name in ("paper", "ink", "muted", "rule"))
    return matplotlib.style.context(
        [
            "default",
            {
                "figure.facecolor": paper,
                "savefig.facecolor": paper,
                "axes.facecolor": paper,
                "text.color": ink,
                "axes.labelcolor": muted,
                "axes.edgecolor": rule,
                "xtick.color": rule,
                "xtick.labelcolor": muted,
                "xtick.labelsize": 8,
                "ytick.color": rule,
                "ytick.labelcolor": muted,
                "ytick.labelsize": 8,
                "font.family": ["DejaVu Sans"],
                "font.size": 9,
                "axes.labelsize": 9,
                "axes.titlesize": 9,
                "axes.titleweight": "normal",
                "axes.spines.top": False,
                "axes.spines.right": False,
                "axes.linewidth": 0.8,
                "axes.grid": True,
                "axes.grid.axis": "y",
                "axes.axisbelow": True,
                "grid.color": rule,
                "grid.linewidth": 0.5,
                "lines.linewidth": 1.8,
                "lines.markersize": 4.5,
                "legend.frameon": False,
                "legend.fontsize": 8,
                "figure.constrained_layout.use": True,
                "savefig.dpi": 200,
                # Reproducible bytes; and a model called "$x" is a name, not a formula.
                "svg.hashsalt": "equipoise",
                "svg.fonttype": "path",
                "text.parse_math": False,
            },
        ]
    )


@dataclass(frozen=True, kw_only=True)
class Line:
    """A curve, with an interval around every point if `low` and `high` are given; without a label
    it has no key."""

    x: Sequence[float]
    y: Sequence[float]
    color: str
    label: str = ""
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    linestyle: LineStyle = "-"
    marker: str = "o"
    width: float = 1.8
    opacity: float = 1.0
    steps: bool = False  # constant between points
    bars: bool = False  # intervals as error bars instead of a band
    x_low: Sequence[float] = ()  # of points with an interval in x as well
    x_high: Sequence[float] = ()
    texts: Sequence[str] = ()  # beside each point

    @classmethod
    def of(
        cls,
        x: Sequence[float],
        results: Sequence[Result | Estimate],
        color: str,
        label: str = "",
        *,
        interval: bool = True,
        **options: Any,
    ) -> Line:
        """Results in percent, with their intervals or without."""
        low, y, high = (
            [100 * getattr(result, name) for result in results] for name in ("low", "value", "high")
        )
        return cls(
            x=x,
            y=y,
            low=low if interval else (),
            high=high if interval else (),
            color=color,
            label=label,
            **options,
        )

    def draw(self, axes: Axes, palette: Palette) -> None:
        """Add the curve and its intervals to the axes."""
        axes.plot(
            self.x,
            self.y,
            drawstyle="steps-pre" if self.steps else "default",
            **self._style(palette),
        )
        if len(self.low) and self.bars:
            spread = [
                [abs(y - end) for y, end in zip(self.y, ends, strict=True)]
                for ends in (self.low, self.high)
            ]
            axes.errorbar(
                self.x,
                self.y,
                spread,
                fmt="none",
                ecolor=palette[self.color],
                elinewidth=0.6,
                capsize=2,
            )
        elif len(self.low):
            axes.fill_between(
                self.x,
                self.low,
                self.high,
                color=palette[self.color],
                alpha=0.13,
                linewidth=0,
                step="pre" if self.steps else None,
            )
        if len(self.x_low):
            axes.hlines(
                self.y, self.x_low, self.x_high, color=palette[self.color], linewidth=0.6, alpha=0.5
            )
        for x, y, text in zip(self.x, self.y, self.texts, strict=False):
            axes.annotate(
                text,
                (x, y),
                xytext=(5, 4),
                textcoords="offset points",
                fontsize=7,
                color=palette["ink"],
            )

    def key(self, palette: Palette) -> Artist:
        """Its entry in the legend."""
        from matplotlib.lines import Line2D

        return Line2D([], [], **self._style(palette))

    def _style(self, palette: Palette) -> dict[str, Any]:
        return {
            "color": palette[self.color],
            "linestyle": self.linestyle,
            "marker": self.marker or "None",
            "linewidth": self.width,
            "alpha": self.opacity,
            "label": self.label or "_",
        }


def percent_range(lines: Iterable[Line]) -> tuple[float, float]:
    """The part of 0 to 100 % that curves and their intervals need, so that differences can be
    judged."""
    values = [
        value
        for line in lines
        for own in (line.y, line.low, line.high)
        for value in own
        if math.isfinite(value)
    ]
    low, high = (min(values), max(values)) if values else (0.0, 100.0)
    spare = max(0.06 * (high - low), 1.0)
    return max(0.0, low - spare), min(103.0, high + spare)


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """Counts of values in bins, filled or as an outline."""

    values: Sequence[float]
    bins: Sequence[float]
    color: str
    label: str
    filled: bool = True
    linestyle: LineStyle = "-"
    density: bool = False

    def draw(self, axes: Axes, palette: Palette) -> None:
        """Add the bars to the axes."""
        options: dict[str, Any] = (
            {"alpha": 0.35}
            if self.filled
            else {"histtype": "step", "linewidth": 1.4, "linestyle": self.linestyle}
        )
        axes.hist(
            self.values, bins=self.bins, color=palette[self.color], density=self.density, **options
        )
        if not self.density:
            axes.locator_params(axis="y", nbins=3, integer=True)

    def key(self, palette: Palette) -> Artist:
        """Its entry in the legend."""
        from matplotlib.patches import Patch

        color = palette[self.color]
        options: dict[str, Any] = (
            {"facecolor": color, "alpha": 0.35}
            if self.filled
            else {
                "facecolor": "none",
                "edgecolor": color,
                "linewidth": 1.4,
                "linestyle": self.linestyle,
            }
        )
        return Patch(label=self.label, **options)


@dataclass(frozen=True, kw_only=True)
class ReferenceLine:
    """A dotted line at x or at y with a text beside it; at x perhaps with an interval."""

    x: float | None = None
    y: float | None = None
    text: str = ""
    interval: tuple[float, float] | None = None

    def draw(self, axes: Axes, palette: Palette) -> None:
        """Add the line to the axes."""
        options: dict[str, Any] = {
            "color": palette["muted"],
            "linewidth": 0.9,
            "linestyle": (0, (1, 2)),
            "label": "_",
        }
        place: dict[str, Any]
        if self.x is not None:
            axes.axvline(self.x, **options)
            is_left = self.x <= sum(axes.get_xlim()) / 2  # the text stays inside the axes
            place = {
                "xy": (self.x, 1),
                "xycoords": ("data", "axes fraction"),
                "xytext": (4 if is_left else -4, -10),
                "ha": "left" if is_left else "right",
            }
        else:
            axes.axhline(self.y or 0.0, **options)
            place = {"xy": (0, self.y), "xycoords": ("axes fraction", "data"), "xytext": (2, 2)}
        if self.interval is not None:
            axes.axvspan(*self.interval, color=palette["muted"], alpha=0.10, linewidth=0)
        axes.annotate(
            self.text, textcoords="offset points", color=palette["muted"], fontsize=7, **place
        )


@dataclass(frozen=True, kw_only=True)
class Point:
    """A square with its name above it."""

    x: float
    y: float
    text: str
    color: str

    def draw(self, axes: Axes, palette: Palette) -> None:
        """Add the square and its name to the axes."""
        color = palette[self.color]
        axes.plot(self.x, self.y, "s", color=color, markersize=7, label="_")
        axes.annotate(
            self.text,
            (self.x, self.y),
            xytext=(0, 8),
            ha="center",
            textcoords="offset points",
            color=color,
            fontsize=8,
        )


@dataclass(frozen=True)
class Panel:
    """One pair of axes with everything drawn in it."""

    marks: Sequence[Line | Histogram | ReferenceLine | Point]
    _: KW_ONLY
    title: str = ""
    title_color: str = "ink"
    y_label: str = ""
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None
    x_ticks: Mapping[float, str] | None = None

    def draw(self, axes: Axes, palette: Palette) -> None:
        """Draw all marks, then title, ranges and ticks."""
        for mark in self.marks:
            mark.draw(axes, palette)
        axes.set_title(self.title, loc="left", color=palette[self.title_color])
        axes.set_ylabel(self.y_label)
        if self.x_range is not None:
            axes.set_xlim(self.x_range)
        if self.y_range is not None:
            axes.set_ylim(self.y_range)
        if self.x_ticks is not None:
            axes.set_xticks(
                list(self.x_ticks), [literal(text, keep="\n") for text in self.x_ticks.values()]
            )


@dataclass(frozen=True)
class Picture:
    """Any other figure; `draw` is called once per palette. `name` and `alt` are as for
    :class:`Chart`."""

    name: str
    alt: str
    draw: Callable[[Palette], Figure]


@dataclass(frozen=True)
class Chart:
    """Panels below each other, or side by side with a common y axis, and one legend below all of
    them."""

    name: str  # of the file in `figures/`
    alt: str
    panels: Sequence[Panel]
    _: KW_ONLY
    x_label: str
    y_label: str = ""
    height: float = 3.1
    side_by_side: bool = False

    def draw(self, palette: Palette) -> Figure:
        """Draw the panels, the labels of the axes and the legend."""
        from matplotlib.figure import Figure

        handles = _legend_keys(palette, self.panels)
        longest = max((len(str(handle.get_label())) for handle in handles), default=0)
        rows = math.ceil(len(handles) / max(1, min(4, 90 // (longest + 8))))
        figure = Figure(figsize=(WIDTH, self.height + 0.17 * rows))
        count = len(self.panels)
        shared = len({panel.x_range for panel in self.panels}) == 1
        grid = figure.subplots(
            *((1, count) if self.side_by_side else (count, 1)),
            sharey=self.side_by_side,
            sharex=shared and not self.side_by_side,
            squeeze=False,
        )
        for axes, panel in zip(grid.flat, self.panels, strict=True):
            panel.draw(axes, palette)
        for axes in grid[-1]:
            axes.set_xlabel(self.x_label)
        if self.y_label and len(grid) == 1:
            grid[0, 0].set_ylabel(self.y_label)
        elif self.y_label:
            figure.supylabel(self.y_label, fontsize=9, color=palette["muted"])
        if handles:
            figure.legend(
                handles=handles,
                loc="outside lower center",
                ncols=math.ceil(len(handles) / rows),
                labelcolor=palette["ink"],
                handlelength=2.6,
            )
        return figure


def _legend_keys(palette: Palette, panels: Sequence[Panel]) -> list[Artist]:
    """One legend entry per label, grey where its colour differs between panels."""
    marks: dict[str, list[Line | Histogram]] = {}
    for panel in panels:
        for mark in panel.marks:
            if isinstance(mark, Line | Histogram) and mark.label:
                marks.setdefault(mark.label, []).append(mark)
    return [
        (
            same[0] if len({mark.color for mark in same}) == 1 else replace(same[0], color="muted")
        ).key(palette)
        for same in marks.values()
    ]
