"""Numbers, names and tables of results as text, in reports and on the terminal.

Names of models, classes and files are data: no table, bar or chart interprets them as markup.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from equipoise.core.aggregation import CLEAN, WORST
from equipoise.core.radius_curves import RadiusCurve
from equipoise.core.results import Result, SanityCheck, SelectedAlpha, Summary
from equipoise.core.rows import Mixture
from equipoise.core.stats import Estimate
from equipoise.core.text import is_reference
from equipoise.core.text import literal as literal
from equipoise.core.text import short_names as short_names
from equipoise.core.threat import SIGNS

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

WIDTH = 80  # characters of a table
LONGEST_NAME = 24  # characters of a model in a table; longer ones are shortened
# Metrics that are no shares of images, and the digits they are shown with.
DIGITS = {
    "acr": 3,
    "samples": 0,
    "ratio": 3,
    "lipschitz": 3,
    "margin": 3,
    "attacked-margin": 3,
    "radius": 6,
}


def percent(value: float) -> str:
    """A share as percent, such as "82.6 %"."""
    return f"{number(100 * value, 1)} %"


def interval(low: float, high: float) -> str:
    """An interval of shares in percent, such as "[80.1, 84.9]"."""
    return f"[{number(100 * low, 1)}, {number(100 * high, 1)}]"


def points(value: float) -> str:
    """A difference of two shares in percentage points, with its sign, such as "+9.7"."""
    text = number(100 * value, 1)
    return text if text == "0.0" or text.startswith("−") else f"+{text}"


def number(value: float, digits: int) -> str:
    """A number with a fixed number of decimals, a proper minus sign, and no negative zero."""
    return f"{round(value, digits) + 0.0:.{digits}f}".replace("-", "−")


def two_decimals(value: float) -> str:
    """A number with two decimals, or with all of them if it has more."""
    return f"{value:.2f}" if round(value, 2) == value else f"{value}"


def value(result: Result) -> str:
    """The value of a result: in percent, unless its metric is no share of images."""
    digits = DIGITS.get(result.metric)
    return percent(result.value) if digits is None else number(result.value, digits)


def bounds(result: Estimate | SelectedAlpha) -> str:
    """The 95 % interval of a result, in the units of :func:`value`; none of a number of samples
    that was fixed."""
    if isinstance(result, Result) and result.metric == "samples" and result.low == result.high:
        return ""
    digits = DIGITS.get(result.metric) if isinstance(result, Result) else None
    if digits is None:
        return interval(result.low, result.high)
    return f"[{number(result.low, digits)}, {number(result.high, digits)}]"


def estimate(result: Result) -> str:
    """A result with its interval and the number of images.

    >>> estimate(Result(model="mixed", metric="clean", value=0.826, low=0.801, high=0.849, n=1000))
    '82.6 % [80.1, 84.9], n = 1000'
    """
    return f"{value(result)} {bounds(result)}, n = {result.n}"


def class_name(names: Sequence[str], label: int) -> str:
    """The name of a class, shown literally; its number if it has none.

    >>> class_name(("cat", "dog"), 1), class_name((), 1)
    ('dog', 'class 1')
    """
    return literal(names[label]) if 0 <= label < len(names) else f"class {label}"


def counts(numbers: Iterable[int]) -> str:
    """One number if all are equal, else their range, such as "8 to 9"."""
    distinct = sorted(set(numbers))
    return str(distinct[0]) if len(distinct) == 1 else f"{distinct[0]} to {distinct[-1]}"


def label(model: str, alpha: float | None, digits: int = 4) -> str:
    """The name of a model, with its alpha where it is one of several mixtures: "mixed (alpha
    0.75)"."""
    return model if alpha is None else f"{model} (alpha {alpha:.{digits}g})"


def mixture_names(mixtures: Iterable[Mixture]) -> dict[Mixture, str]:
    """Short names of models and mixtures; alphas have four digits, or as many as distinguish the
    mixtures.

    >>> list(mixture_names([("m", 0.81234), ("m", 0.81233)]).values())
    ['m (alpha 0.81234)', 'm (alpha 0.81233)']
    """
    distinct = list(dict.fromkeys(mixtures))
    for digits in range(4, 18):  # 17 digits distinguish any two numbers
        labels = {mixture: label(*mixture, digits) for mixture in distinct}
        if len(set(labels.values())) == len(distinct):
            break
    names = short_names(labels.values())
    return {mixture: names[own] for mixture, own in labels.items()}


def notes(summary: Summary) -> list[str]:
    """What belongs below a table of accuracies: rules of mixtures, promises, notes on the images,
    audits, and failed sanity checks with what to do next. Models have their names of
    the table."""
    summary = _with_names_of_table(summary)
    promises = [f"{item.model}: {item.explanation}" for item in summary.promises]
    audits = [f"{item.model}: {item.explanation}" for item in summary.audits if item.survivors]
    rounded = [
        f"{item.model}: {item.count} of {item.n} images that {item.metric} broke are still misclassified after "
        "rounding to bytes"
        for item in summary.as_bytes
        if item.count < item.n
    ]
    failed = failed_checks(summary.sanity_checks)
    title = (
        ["Failed sanity checks, so that attacked accuracies may be overstated:"] if failed else []
    )
    methods = [f"{model}: {method}" for model, method in summary.methods.items()]
    return [*methods, *promises, *data_notes(summary), *audits, *rounded, *title, *failed]


def _with_names_of_table(summary: Summary) -> Summary:
    """The parts of a summary that :func:`notes` shows, with models by the names of
    :func:`accuracy_table`."""
    models = dict.fromkeys(result.model for result in summary.results)
    names = {
        model: name
        for (model, _), name in _fitting_names((model, None) for model in models).items()
    }

    listed: dict[str, Any] = {
        field: tuple(
            replace(item, model=names.get(item.model, item.model))
            for item in getattr(summary, field)
        )
        for field in ("promises", "audits", "as_bytes", "sanity_checks")
    }
    return replace(
        summary,
        **listed,
        methods={names.get(model, model): own for model, own in summary.methods.items()},
        overlap={names.get(model, model): own for model, own in summary.overlap.items()},
    )


def data_notes(summary: Summary) -> list[str]:
    """Why the images may give accuracies other than those on new ones."""
    return [
        *(f"note: {overlap(name, both)}" for name, both in summary.overlap.items()),
        *(f"note: {note}" for note in summary.notes),
    ]


def overlap(model: str, images: Sequence[str]) -> str:
    """That a model was fitted on some of the images, given as ranges."""
    return (
        f"{model} was fitted on images {', '.join(images[:5])}{' …' * (len(images) > 5)} of these, so its accuracy "
        "on them is overstated"
    )


def failed_checks(checks: Sequence[SanityCheck]) -> list[str]:
    """One line per model and failed check: the attacks, what was measured, and what to do next."""
    covered = covered_by_adaptive(checks)
    lines: dict[tuple[str, str, str], list[str]] = {}
    for check in (check for check in checks if check.alarm):
        advice = (
            "The adaptive attacks of this run are there for it."
            if check.model in covered
            else check.advice or ""
        )
        measured = f"{check.value:.3g}, {check.explanation}. {advice}".rstrip()
        lines.setdefault((check.name, check.model, measured), []).append(check.attack)
    return [
        f"- {name} ({model}, {', '.join(attacks)}): {measured}"
        for (name, model, measured), attacks in lines.items()
    ]


def covered_by_adaptive(checks: Sequence[SanityCheck]) -> set[str]:
    """Models with alarms whose adaptive attacks, which use the structure of a mixture, raise
    none."""
    adaptive = [check for check in checks if check.attack.startswith("adaptive")]
    return {check.model for check in checks if check.alarm} & {
        check.model for check in adaptive
    } - {check.model for check in adaptive if check.alarm}


def new_table(title: str, first: str, *columns: str) -> Table:
    """A table whose first column is text and whose other columns are numbers; nothing in it is
    markup."""
    from rich import box
    from rich.table import Table

    class PlainTable(Table):
        """A table that shows its cells as they are."""

        def add_row(self, *cells: Any, **options: Any) -> None:
            super().add_row(
                *(_plain(cell) if isinstance(cell, str) else cell for cell in cells), **options
            )

    table = PlainTable(
        box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1), title=_plain(title)
    )
    table.add_column(_plain(first), overflow="fold")
    for column in columns:
        table.add_column(_plain(column), justify="right")
    return table


def _plain(text: str) -> Text:
    """Text without markup; it may have several lines."""
    from rich.text import Text

    return Text(literal(text, keep="\n"))


def render(table: Table) -> str:
    """The table as text without colours, under its title."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=WIDTH, color_system=None, highlight=False)
    title, table.title = (
        table.title,
        None,
    )  # a title inside the table would wrap at the width of the table
    console.print(title, table, sep="\n")
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines())


def accuracy_table(results: Sequence[Result], under: str) -> str:
    """One line per model, one column per metric, each with its 95 % interval; `under` ends the
    title.

    Results at several alphas are shown where there are no others.
    """
    shown = [result for result in results if result.alpha is None] or list(results)
    metrics = sorted(
        dict.fromkeys(result.metric for result in shown), key=lambda m: (m == WORST, m != CLEAN)
    )
    count = counts(result.n for result in shown)
    # Attack names break at hyphens, so that six columns fit into a terminal of eighty.
    passes = [result.passes for result in shown if result.passes is not None]
    each = f", {counts(passes)} passes each" if passes else ""
    table = new_table(
        f"Accuracy on {count} images{each}, 95 % intervals, {under}",
        "model",
        *(metric.replace("-", "-\n") for metric in metrics),
    )
    groups = dict.fromkeys((result.model, result.alpha) for result in shown)
    names = _fitting_names(groups)
    one_model = len({name for name, _ in groups}) == 1
    for name, alpha in groups:
        cells = {
            result.metric: f"{value(result)}\n{bounds(result)}"
            for result in shown
            if (result.model, result.alpha) == (name, alpha)
        }
        first = f"alpha {alpha:.4g}" if one_model and alpha is not None else names[name, alpha]
        table.add_row(first, *(cells.get(metric, "") for metric in metrics))
    return render(table)


def _fitting_names(mixtures: Iterable[Mixture]) -> dict[Mixture, str]:
    """Names as they are, but long paths and references such as `file:PATH` shortened, unless two
    would be the same."""
    labels = {mixture: literal(label(*mixture)) for mixture in mixtures}
    short = mixture_names(labels)
    names = {
        mixture: short[mixture] if len(own) > LONGEST_NAME and is_reference(own) else own
        for mixture, own in labels.items()
    }
    return names if len(set(names.values())) == len(names) else labels


def radius(value: float, norm: str) -> str:
    """A radius: in steps of 1/255 for ℓ∞, as a number for others.

    >>> radius(8 / 255, "linf"), radius(0.0071, "linf"), radius(0.5, "l2")
    ('8/255', '1.81/255', '0.5')
    """
    return f"{255 * value:.3g}/255" if norm == "linf" else f"{value:.3g}"


def median_radius(curve: RadiusCurve) -> str:
    """The median radius of a model, or the largest radius if more than half of the images survive
    it."""
    largest = radius(curve.points[-1].radius, curve.norm)
    return f"> {largest}" if curve.median is None else radius(curve.median, curve.norm)


def radius_table(curves: Sequence[RadiusCurve]) -> str:
    """One line per model: the median radius, and accuracy at a quarter, a half, three quarters and
    all of the largest.

    Below it, how many images have which kind of radius.
    """
    chosen = [(len(curves[0].points) - 1) * quarter // 4 for quarter in (1, 2, 3, 4)]
    table = new_table(
        f"Accuracy by radius ({SIGNS[curves[0].norm]}), 95 % intervals; radii are upper bounds",
        "model",
        "median",
        *(radius(curves[0].points[at].radius, curves[0].norm) for at in chosen),
    )
    names = _fitting_names((curve.model, None) for curve in curves)
    for curve in curves:
        points = [curve.points[at] for at in chosen]
        table.add_row(
            names[curve.model, None],
            median_radius(curve),
            *(f"{percent(point.value)}\n{interval(point.low, point.high)}" for point in points),
        )
    largest = radius(curves[0].points[-1].radius, curves[0].norm)
    counted = [
        f"{names[curve.model, None]}: {curve.wrong} of {curve.n} images misclassified without a perturbation, "
        f"{curve.broken} with one, {curve.survived} not up to {largest}"
        for curve in curves
    ]
    return "\n".join([render(table), *counted])
