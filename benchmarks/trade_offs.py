"""Draw the trade-off of every kept comparison: attacked against clean accuracy, one panel per pair
of models.

    python benchmarks/trade_offs.py [--out docs/images] [--png]

writes trade-offs.svg and trade-offs-dark.svg. A further source is one more line of SOURCES. The
robust model has exact 95 % intervals; those of a mixture are of its difference to the robust model
of the same source, image by image.
"""

from __future__ import annotations

import argparse
import csv
import gzip
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox

from equipoise.core import stats
from equipoise.core.aggregation import CLEAN, ROBUST, WORST, compared_lines
from equipoise.reporting.charts import DARK, LIGHT, Palette, styled
from equipoise.studies.comparison_table import METHODS, read_export

RESULTS = Path(__file__).parents[1] / "docs" / "results"
ACCURATE = "accurate"


@dataclass(frozen=True)
class Source:
    """Kept rows under docs/results: an export of `compare-rules`, of `evaluation_rows.py` or of
    `mixednuts_rows.py`."""

    panel: str  # title
    folder: str
    detail: str = ""  # added to the names of the methods, such as "6 views"; if empty, the views that their rows name
    only: tuple[str, ...] = ()  # families to draw; all if empty
    part: str = "main"  # of a study of MixedNUTS: `main`, or `curves`, whose points are joined


SOURCES = (
    Source("CIFAR-10, two ResNet-18", "mixtures/resnet18-plain"),
    Source(
        "CIFAR-10, two ResNet-18",
        "mixtures/resnet18",
        only=("MixedNUTS", "NUTS map (ours)", "gate", "gate on the NUTS map (ours)"),
    ),
    Source(
        "CIFAR-10, two ResNet-18",
        "mixtures/resnet18-gates",
        only=("gate on the confidence switch",),
    ),
    Source(
        "CIFAR-10, two ResNet-18", "mixtures/resnet18-views", detail="6 views", only=("robust",)
    ),
    Source(
        "CIFAR-10, two ResNet-18",
        "mixtures/resnet18-views",
        only=("confidence switch", "cascade of views"),
    ),
    Source("CIFAR-100, two ResNet-18", "mixtures/cifar100"),
    Source(
        "CIFAR-100, two ResNet-18",
        "mixtures/cifar100-views",
        detail="6 views",
        only=("robust", "confidence switch"),
    ),
    Source(
        "CIFAR-100, two ResNet-18",
        "mixednuts/cifar100",
        detail="β = 0.985",
        only=("MixedNUTS", "confidence switch"),
    ),
    Source("CIFAR-100, another pair", "mixtures/cifar100-one-view"),
    Source(
        "CIFAR-100, another pair", "mixtures/cifar100-six-views", detail="6 views", only=("robust",)
    ),
    Source(
        "CIFAR-100, another pair",
        "mixtures/cifar100-six-views",
        detail="6 views of both",
        only=("confidence switch",),
    ),
    Source("CIFAR-100, another pair", "mixtures/cifar100-cascade", only=("cascade of views",)),
    Source(
        "CIFAR-100, another pair",
        "mixtures/cifar100-cascade-more-views",
        only=("cascade of views",),
    ),
)


@dataclass(frozen=True)
class Style:
    """How a family of methods is drawn."""

    color: str
    marker: str
    bold: bool = False


STYLES = {  # by the beginning of a family's name, the longest first
    "accurate": Style("accurate", "s"),
    "robust": Style("robust", "s"),
    "plain mixing": Style("muted", "D"),
    "MixedNUTS": Style("other_0", "o"),
    "NUTS map": Style("other_1", "^"),
    "gate on": Style("other_2", "v"),
    "gate": Style("other_2", "v"),
    "confidence switch": Style("mixed", "o", bold=True),
    "cascade": Style("mixed", "*", bold=True),
}
SHORT = {
    "gate on the confidence switch": "gate on the switch",
    "gate on the NUTS map (ours)": "gate on the NUTS map",
}
# Places of a label around its point, in points, the nearest first; none lies on the interval to the
# right or left.
OFFSETS = tuple(
    (x * far, y * far - 3)
    for far in (7, 12, 18, 25, 33, 42, 52, 64)
    for x, y in ((0.7, 1), (-0.7, 1), (0.7, -1.2), (-0.7, -1.2), (0, 1.4), (0, -1.6))
)
LEADER = 16  # a label farther away than this has a line to its point


@dataclass(frozen=True)
class Point:
    """Accuracies of one method, in percent."""

    family: str
    clean: float
    attacked: float
    clean_interval: tuple[float, float] | None = None
    attacked_interval: tuple[float, float] | None = None
    detail: str = ""
    joined: bool = False  # to the other points of its family

    @property
    def label(self) -> str:
        """Family and detail."""
        family = SHORT.get(self.family, self.family)
        return f"{family}, {self.detail}" if self.detail else family

    @property
    def style(self) -> Style:
        """That of its family."""
        fitting = [name for name in STYLES if self.family.startswith(name)]
        return STYLES[max(fitting, key=len)] if fitting else Style("ink", "o")


def read_points(source: Source) -> list[Point]:
    """The points of a source."""
    folder = RESULTS / source.folder
    points = _compared(folder) if (folder / METHODS).exists() else _of_study(folder, source.part)
    return [
        replace(point, detail=source.detail or point.detail)
        for point in points
        if point.family in source.only or not source.only
    ]


def _compared(folder: Path) -> Iterator[Point]:
    """Every different method of an export of `compare-rules`."""
    summary = read_export(folder)
    gained = {
        (item.model, item.metric): item for item in summary.differences if item.versus == ROBUST
    }
    for line in compared_lines(summary):
        name = line.method.name
        if name == line.method.measured_as:
            point = _point(
                line.method.family,
                line.clean,
                line.attacked,
                gained.get((name, CLEAN)),
                gained.get((name, WORST)),
            )
            views = line.method.views
            yield point if views is None else replace(point, detail=f"{views:.3g} views")


def _of_study(folder: Path, part: str) -> Iterator[Point]:
    """Models of one part of a study of MixedNUTS; those of a curve belong to one family."""
    correct: dict[str, dict[bool, dict[str, bool]]] = defaultdict(lambda: {True: {}, False: {}})
    with gzip.open(folder / "rows.csv.gz", "rt", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["part"] == part:
                correct[row["model"]][row["attack"] == CLEAN][row["index"]] = row["correct"] == "1"
    robust = correct.get(ROBUST)
    for model, own in correct.items():
        family, _, setting = model.rpartition(", ")
        joined = setting.startswith(("alpha ", "beta "))
        estimates = [stats.share(own[is_clean].values()) for is_clean in (True, False)]
        gained = [
            None
            if robust is None or model == ROBUST
            else stats.paired_difference(
                sum(
                    own[is_clean][index] and not robust[is_clean][index] for index in own[is_clean]
                ),
                sum(
                    robust[is_clean][index] and not own[is_clean][index] for index in own[is_clean]
                ),
                len(own[is_clean]),
            )
            for is_clean in (True, False)
        ]
        yield replace(_point(family if joined else model, *estimates, *gained), joined=joined)


def _point(
    family: str,
    clean: stats.Estimate,
    attacked: stats.Estimate,
    clean_gain: stats.Estimate | None,
    attacked_gain: stats.Estimate | None,
) -> Point:
    """Intervals are those of the gains over the robust model, which itself has exact ones."""
    own = family == ROBUST
    intervals = [
        (100 * value.low, 100 * value.high)
        if own
        else None
        if gain is None
        else (
            100 * (value.value - gain.value + gain.low),
            100 * (value.value - gain.value + gain.high),
        )
        for value, gain in ((clean, clean_gain), (attacked, attacked_gain))
    ]
    return Point(family, 100 * clean.value, 100 * attacked.value, *intervals)


def draw(panels: dict[str, list[Point]], palette: Palette) -> Figure:
    """One panel per pair, two in a row; the first has a row of its own where their number is odd.

    Methods are named beside their points.
    """
    titles = list(panels)
    rows = [titles[:1] * 2] if len(titles) % 2 else []
    rows += [titles[at : at + 2] for at in range(len(titles) % 2, len(titles), 2)]
    figure = Figure(figsize=(9.8, 4.3 * len(rows)), layout="constrained")
    for title, axes in figure.subplot_mosaic(rows).items():
        _draw_panel(axes, panels[title], palette)
        axes.set_title(title, loc="left", color=palette["ink"], fontsize=10)
        axes.set_xlabel("clean accuracy, %")
        if title in [row[0] for row in rows]:
            axes.set_ylabel("accuracy under attack, %")
    figure.draw_without_rendering()
    for axes in figure.axes:
        _place_labels(axes)
    return figure


def _draw_panel(axes: Axes, points: Sequence[Point], palette: Palette) -> None:
    """The points with thin intervals; an accurate model far below the others stands at the
    bottom."""
    shown = [point for point in points if point.family != ACCURATE]
    families: dict[str, list[Point]] = defaultdict(list)
    for point in shown:
        families[point.label].append(point)
    for label, own in families.items():
        style, joined, thin = (
            own[0].style,
            own[0].joined,
            {"linewidth": 0.8, "alpha": 0.5, "zorder": 1},
        )
        color, x, y = (
            palette[style.color],
            [point.clean for point in own],
            [point.attacked for point in own],
        )
        hollow = (
            {"markerfacecolor": palette["paper"], "markeredgewidth": 1.6} if own[0].detail else {}
        )
        axes.plot(
            x,
            y,
            color=color,
            marker=style.marker,
            markersize=3 if joined else 11 if style.marker == "*" else 7,
            linestyle="-" if joined else "",
            linewidth=1.0,
            alpha=0.6 if joined else 1.0,
            zorder=3,
            **hollow,
        )
        for point in own if not joined else ():
            if point.clean_interval is not None and point.attacked_interval is not None:
                axes.hlines(point.attacked, *point.clean_interval, color=color, **thin)
                axes.vlines(point.clean, *point.attacked_interval, color=color, **thin)
        text = axes.annotate(
            label,
            (sum(x) / len(x), sum(y) / len(y)),
            xytext=OFFSETS[0],
            color=color,
            fontsize=8.5,
            textcoords="offset points",
            fontweight="bold" if style.bold else "normal",
            zorder=4,
            arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.6, "shrinkB": 4},
            bbox={"facecolor": palette["paper"], "edgecolor": "none", "pad": 0.5, "alpha": 0.7},
        )
        text.set_in_layout(False)
    heights, widths = [point.attacked for point in shown], [point.clean for point in points]
    axes.set_ylim(min(heights) - 2.2, max(heights) + 1.3)  # intervals may end outside
    spare = 0.08 * (max(widths) - min(widths)) + 0.5
    axes.set_xlim(min(widths) - spare, max(widths) + spare)
    for point in points:
        if point.family == ACCURATE:
            _mark_below(axes, point, palette)


def _mark_below(axes: Axes, point: Point, palette: Palette) -> None:
    """An arrow at the bottom, with the accuracies in words."""
    color, x = palette[point.style.color], point.clean
    axes.annotate(
        "",
        (x, 0),
        (x, 0.12),
        xycoords=("data", "axes fraction"),
        textcoords=("data", "axes fraction"),
        arrowprops={"arrowstyle": "->", "color": color},
    )
    axes.annotate(
        f"{point.label}\n{x:.1f} / {point.attacked:.1f}",
        (x, 0.13),
        ha="center",
        color=color,
        xycoords=("data", "axes fraction"),
        fontsize=8.5,
        gid="fixed",
    )


def _place_labels(axes: Axes) -> None:
    """Move every label to the nearest place where it covers neither points nor other labels, and
    stays in the axes."""
    labels = [text for text in axes.texts if isinstance(text, Annotation) and text.get_text()]
    taken = [text.get_window_extent() for text in labels if text.get_gid() == "fixed"]
    for line in axes.lines:
        centers = axes.transData.transform(line.get_xydata())
        taken += [Bbox.from_extents(x - 6, y - 6, x + 6, y + 6) for x, y in centers]
    for text in (text for text in labels if text.get_gid() != "fixed"):
        for offset in OFFSETS:
            text.xyann = offset
            text.set_horizontalalignment(
                "left" if offset[0] > 0 else "right" if offset[0] < 0 else "center"
            )
            box = Text.get_window_extent(text)
            inside = axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1 and axes.bbox.y0 <= box.y0
            if (
                inside
                and box.y1 <= axes.bbox.y1
                and not any(box.overlaps(other) for other in taken)
            ):
                break
        text.arrow_patch.set_visible(max(map(abs, offset)) > LEADER)
        taken.append(Text.get_window_extent(text))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS.parent / "images")
    parser.add_argument("--png", action="store_true", help="pictures to look at in place of SVG")
    args = parser.parse_args()
    panels: dict[str, list[Point]] = {}
    for source in SOURCES:
        panels.setdefault(source.panel, []).extend(read_points(source))
    for name, palette in (("trade-offs", LIGHT), ("trade-offs-dark", DARK)):
        with styled(palette):
            args.out.mkdir(parents=True, exist_ok=True)
            path = args.out / f"{name}.{'png' if args.png else 'svg'}"
            draw(panels, palette).savefig(
                path, **({"dpi": 100} if args.png else {"metadata": {"Date": None}})
            )
            print(path)


if __name__ == "__main__":
    main()
