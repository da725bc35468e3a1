"""The figures of a report as Vega-Lite specifications, made with Altair.

A colour is the name of a CSS variable, so that one specification follows the light and the dark page;
files get the light palette. Error bars and bands are always 95 % intervals.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import altair as alt
import numpy as np
import vl_convert

from equipoise.core.stats import Estimate
from equipoise.core.text import literal
from equipoise.reporting.section import Figure, Records

WIDTH = 620  # of a figure outside of a page
POINTS_OF_A_CURVE = 240  # more cannot be told apart on a screen

DATA = alt.NamedData(name="records")
DASHES = [[1, 0], [6, 4], [2, 3], [9, 3, 2, 3]]
DECADES = (10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000)

# Colours that colour-blind readers can tell apart.
LIGHT = {
    "paper": "#ffffff",
    "ink": "#1f2328",
    "muted": "#5f6872",
    "line": "#dfe3e8",
    "accurate": "#0072b2",
    "robust": "#c04f00",
    "mixed": "#00845f",
    "wrong": "#b3123a",
    "other-1": "#8a4a9e",
    "other-2": "#8c6d1f",
    "other-3": "#c2407e",
    "other-4": "#5b6770",
    "other-5": "#3a7d8c",
    "other-6": "#7a4a2b",
}
DARK = {
    "paper": "#15181c",
    "ink": "#e4e7eb",
    "muted": "#98a2ad",
    "line": "#343a41",
    "accurate": "#56b4e9",
    "robust": "#f28e4b",
    "mixed": "#3cc79a",
    "wrong": "#ff7d92",
    "other-1": "#c99be0",
    "other-2": "#d8bb62",
    "other-3": "#f29cc4",
    "other-4": "#a9b4bd",
    "other-5": "#7cc7d6",
    "other-6": "#d3a283",
}
_AXIS = {
    "labelColor": "var(--muted)",
    "titleColor": "var(--ink)",
    "gridColor": "var(--line)",
    "domainColor": "var(--line)",
    "tickColor": "var(--line)",
    "labelFontSize": 12,
    "titleFontSize": 12,
    "titleFontWeight": 500,
    "labelLimit": 230,
}
THEME = {
    "background": None,
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": _AXIS,
    "axisX": {"grid": False},
    "legend": {
        "labelColor": "var(--ink)",
        "titleColor": "var(--ink)",
        "labelFontSize": 12,
        "labelLimit": 220,
        "orient": "top",
        "title": None,
        "symbolStrokeWidth": 3,
        "symbolOpacity": 1,
    },
    "title": {"color": "var(--ink)", "anchor": "start", "fontSize": 14, "fontWeight": 600},
    "text": {"fontSize": 12, "color": "var(--ink)"},
    "rule": {"strokeWidth": 2},
    "line": {"strokeWidth": 2},
}

Palette = Mapping[str, str]  # model → colour
Range = tuple[float, float]
PERCENT = alt.Axis(format="%", tickCount=6)


def colour(name: str) -> str:
    """A colour of the palette in a specification."""
    return f"var(--{name})"


def fields(estimate: Estimate, name: str) -> dict[str, float]:
    """A share and its interval as three numbers of a record."""
    return {
        name: round(estimate.value, 5),
        f"{name}_low": round(estimate.low, 5),
        f"{name}_high": round(estimate.high, 5),
    }


def thin(count: int) -> list[int]:
    """Positions of at most so many of `count` points of a curve, the first and the last among
    them."""
    if count <= POINTS_OF_A_CURVE:
        return list(range(count))
    positions: list[int] = np.linspace(0, count - 1, POINTS_OF_A_CURVE).round().astype(int).tolist()
    return positions


def cumulative(model: str, values: Sequence[float], kind: str = "") -> Records:
    """The share of values at or below each value, as records of :func:`curves`."""
    ordered = np.sort(values)
    records: Records = []
    for position in thin(len(ordered)):
        below = round((position + 1) / len(ordered), 4)
        x = round(float(ordered[position]), 4)
        records.append({"model": model, "kind": kind, "x": x, "y": below})
    return records


def curves(
    name: str,
    title: str,
    records: Records,
    palette: Palette,
    *,
    x: str,
    y: str,
    is_share: bool = True,
    x_range: Range | None = None,
    logarithmic: bool = False,
    steps: bool = False,
    dots: bool = False,
    dashes: Sequence[str] = (),
    rule: float | None = None,
    height: int = 250,
) -> Figure:
    """Lines of `y` against `x` of several models, with bands where records have an interval.

    Args:
        name: of the files.
        title: what the figure shows.
        records: `model`, `x`, `y`, and perhaps `y_low`, `y_high` and the `kind` of a line.
        palette: model → colour.
        x, y: titles of the axes, with units.
        is_share: y is a share, shown from 0 to 100 %.
        x_range: the ends of the x axis.
        logarithmic: a logarithmic x axis that has a zero.
        steps: a value holds until the next x.
        dots: mark the points.
        dashes: the kinds in order; the first is a whole line.
        rule: an x to be marked.
    """
    x_scale, x_axis = alt.Scale(nice=False), alt.Axis()
    y_scale, y_axis, y_format = alt.Scale(zero=False), alt.Axis(tickCount=5), ".4~g"
    if x_range is not None:
        x_scale = alt.Scale(domain=list(x_range), nice=False)
    if logarithmic:
        largest = max(_values(records, "x"))
        x_scale = alt.Scale(type="symlog", nice=False)
        x_axis = alt.Axis(values=[0, 1, 3] + [at for at in DECADES if at <= largest])
    if is_share:
        y_scale, y_axis, y_format = alt.Scale(domain=[0, 1], nice=False), PERCENT, ".1%"

    base = _base(height, palette, records, symbol="stroke").encode(
        x=alt.X("x:Q", title=x, scale=x_scale, axis=x_axis),
        y=alt.Y("y:Q", title=y, scale=y_scale, axis=y_axis),
        detail="kind:N" if dashes else alt.Undefined,
    )
    shape: Literal["step-after", "linear"] = "step-after" if steps else "linear"
    layers = []
    if _values(records, "y_low"):
        low = alt.Y("y_low:Q", title=y, scale=y_scale)
        band = base.mark_area(interpolate=shape, opacity=0.16, strokeWidth=0)
        layers.append(band.encode(y=low, y2="y_high:Q"))
    if rule is not None:
        mark = alt.Chart(alt.InlineData(values=[{"at": rule}])).mark_rule(strokeDash=[4, 4])
        layers.append(mark.encode(x=alt.X("at:Q", scale=x_scale), color=alt.value(colour("muted"))))
    line = base.mark_line(interpolate=shape, point=dots).encode(
        tooltip=[
            "model:N",
            alt.Tooltip("x:Q", title=x, format=".4~g"),
            alt.Tooltip("y:Q", title=y, format=y_format),
        ]
    )
    if dashes:
        scale = alt.Scale(domain=list(dashes), range=DASHES[: len(dashes)])
        line = line.encode(
            strokeDash=alt.StrokeDash(
                "kind:N", scale=scale, sort=None, legend=alt.Legend(orient="bottom")
            )
        )
    return _figure(name, title, records, alt.layer(*layers, line))


def trade_off(
    name: str,
    title: str,
    records: Records,
    palette: Palette,
    *,
    y: str = "robust accuracy",
    floor: float | None = None,
    joined: bool = False,
    slider: str = "",
    height: int = 320,
) -> Figure:
    """Robust accuracy against clean accuracy, with intervals in both directions.

    Args:
        name, title, palette: as in :func:`curves`.
        records: `model`, `clean`, `robust`, each perhaps with its interval; of a line also `step`
            and `label`.
        y: what is measured of robustness.
        floor: the robust accuracy that was promised.
        joined: join the points of a model by a line, in order of `step`.
        slider: title of a slider that chooses a `step`, whose point is marked and described.
    """
    x_scale = alt.Scale(domain=_room(records, "clean"), nice=False)
    y_scale = alt.Scale(domain=_room(records, "robust", floor), nice=False)
    named = not joined and len(records) <= 5  # beside the points; a legend is for many of them
    base = _base(height, palette, records, symbol="" if named else "circle").encode(
        x=alt.X("clean:Q", title="clean accuracy", scale=x_scale, axis=PERCENT),
        y=alt.Y("robust:Q", title=y, scale=y_scale, axis=PERCENT),
    )
    layers = []
    if floor is not None:
        promised = alt.Chart(
            alt.InlineData(values=[{"floor": floor, "text": "promised: at least"}])
        )
        promised = promised.encode(
            y=alt.Y("floor:Q", title=y, scale=y_scale), color=alt.value(colour("muted"))
        )
        words = promised.mark_text(align="left", dx=4, dy=11).encode(text="text:N", x=alt.value(0))
        layers = [promised.mark_rule(strokeDash=[4, 4], strokeWidth=1.5), words]
    marked = base
    if slider:
        count = max(_values(records, "step"))
        bind = alt.binding_range(min=1, max=count, step=1, name=f"{slider} ")
        chosen = alt.param(name="chosen", value=1, bind=bind)
        marked = base.transform_filter("datum.step == chosen")
    if _values(records, "clean_low"):
        across = alt.X("clean_low:Q", title="clean accuracy", scale=x_scale)
        up = alt.Y("robust_low:Q", title=y, scale=y_scale)
        layers.append(marked.mark_rule().encode(x=across, x2="clean_high:Q"))
        layers.append(marked.mark_rule().encode(y=up, y2="robust_high:Q"))
    if joined:
        layers.append(base.mark_line(strokeWidth=1.5).encode(order="step:Q"))
    dots = base.mark_point(filled=True, size=45 if joined else 130, opacity=1)
    layers.append(
        dots.encode(
            tooltip=[
                "model:N",
                alt.Tooltip("clean:Q", format=".1%"),
                alt.Tooltip("robust:Q", format=".1%"),
            ]
        )
    )
    if named:
        # The third below, because a mixture may be where its robust model is.
        names = base.transform_window(row="row_number()").encode(text="model:N")
        for test, dy in (("!= 3", -12), ("== 3", 16)):
            words = names.mark_text(dx=-9, dy=dy, align="right", fontWeight=600, fontSize=13)
            layers.append(words.transform_filter(f"datum.row {test}"))
    if slider:
        words = marked.mark_text(align="left", fontWeight=600, fontSize=13)
        words = words.encode(text="label:N", x=alt.value(8), y=alt.value(height - 14))
        layers += [marked.mark_point(size=320, strokeWidth=3, filled=False), words]
        return _figure(name, title, records, alt.layer(*layers).add_params(chosen))
    return _figure(name, title, records, alt.layer(*layers))


def dots(
    name: str, title: str, records: Records, palette: Palette, *, x: str, rows: Sequence[str]
) -> Figure:
    """A row for each thing that was measured, and in it a dot with its interval for each model.

    Args:
        name, title, palette: as in :func:`curves`.
        records: `row`, `model`, and the `value` with its interval.
        x: what is measured.
        rows: what the rows are called, in order.
    """
    scale = alt.Scale(domain=[0, 1], nice=False)
    base = _rows(records, palette, rows)
    value = alt.X(
        "value:Q", title=x, scale=scale, axis=alt.Axis(format="%", grid=True, tickCount=6)
    )
    low = alt.X("value_low:Q", title=x, scale=scale)
    tooltip = ["row:N", "model:N", alt.Tooltip("value:Q", title=x, format=".1%"), "n:Q"]
    rule = base.mark_rule().encode(x=low, x2="value_high:Q")
    point = base.mark_point(filled=True, size=55, opacity=1).encode(x=value, tooltip=tooltip)
    return _figure(name, title, records, alt.layer(rule, point))


def bars(
    name: str, title: str, records: Records, palette: Palette, *, x: str, rows: Sequence[str]
) -> Figure:
    """A bar for each `row` and `model`, as long as its `count`."""
    axis = alt.Axis(format="d", tickMinStep=1, tickCount=6, grid=True)
    chart = _rows(records, palette, rows).mark_bar()
    chart = chart.encode(
        x=alt.X("count:Q", title=x, axis=axis), tooltip=["row:N", "model:N", "count:Q"]
    )
    return _figure(name, title, records, chart)


def heat(
    name: str,
    title: str,
    records: Records,
    *,
    x: str,
    y: str,
    value: str,
    choice: str,
    columns: Sequence[str],
    rows: Sequence[str],
) -> Figure:
    """Squares coloured by `value`, of which those of one `choice` are shown at a time.

    Args:
        name, title: as in :func:`curves`.
        records: `x`, `y`, `value`, `choice`.
        x, y, value, choice: what these are.
        columns, rows: the values of x and of y, in order.
    """
    options = list(dict.fromkeys(_values(records, "choice")))
    bind = alt.binding_select(options=options, name=f"{choice} ")
    chosen = alt.param(name="chosen", value=options[0], bind=bind)
    chart = alt.Chart(DATA, width="container", height=max(200, 22 * len(rows))).mark_rect()
    chart = chart.encode(
        x=alt.X("x:N", title=x, sort=list(columns), axis=alt.Axis(labelAngle=-40, labelLimit=90)),
        y=alt.Y("y:N", title=y, sort=list(rows), axis=alt.Axis(grid=False, labelLimit=90)),
        color=alt.Color("value:Q", title=value, scale=alt.Scale(scheme="viridis", reverse=True)),
        tooltip=["y:N", "x:N", alt.Tooltip("value:Q", title=value, format=".3~g")],
    )
    return _figure(
        name, title, records, chart.transform_filter("datum.choice == chosen").add_params(chosen)
    )


def page_specification(figure: Figure) -> str:
    """JSON that can stand inside a script element of a page."""
    text = json.dumps({**figure.specification, "config": THEME}, allow_nan=False)
    return text.replace("<", "\\u003c")


def static_svg(figure: Figure, width: int = 480) -> str:
    """The figure for a page, to be seen before a script has drawn it."""
    svg: str = vl_convert.vegalite_to_svg({**figure.specification, "width": width, "config": THEME})
    return svg


def light_svg(figure: Figure, title: str = "") -> str:
    """The figure in the light palette, as it stands alone."""
    config = {**THEME, "background": LIGHT["paper"]}
    specification = {**figure.specification, "width": WIDTH, "config": config}
    if title:
        specification["title"] = title
    text = re.sub(
        r"var\(--([a-z0-9-]+)\)", lambda match: LIGHT[match[1]], json.dumps(specification)
    )
    svg: str = vl_convert.vegalite_to_svg(text)
    return svg


def _base(height: int, palette: Palette, records: Records, symbol: str = "circle") -> alt.Chart:
    """A chart of the records with one colour per model, everywhere; a single model needs no
    legend."""
    models = list(dict.fromkeys(_values(records, "model")))
    colours = [colour(palette[model]) for model in models]
    shown = alt.Legend(symbolType=symbol) if symbol and len(models) > 1 else None
    scale = alt.Scale(domain=models, range=colours)
    chart = alt.Chart(DATA, width="container", height=height)
    return chart.encode(color=alt.Color("model:N", scale=scale, sort=None, legend=shown))


def _rows(records: Records, palette: Palette, rows: Sequence[str]) -> alt.Chart:
    """A chart with a row for each thing, and in it a place for each model."""
    models = list(dict.fromkeys(_values(records, "model")))
    height = 30 + len(rows) * (10 + 10 * len(models))
    axis = alt.Axis(grid=False, ticks=False)
    return _base(height, palette, records).encode(
        y=alt.Y("row:N", sort=list(rows), title=None, axis=axis),
        yOffset=alt.YOffset("model:N", sort=models),
    )


def _figure(name: str, title: str, records: Records, chart: alt.TopLevelMixin) -> Figure:
    shown: Records = []
    for record in records:
        shown.append({key: _literal(value) for key, value in record.items()})
    specification = chart.to_dict()
    datasets = {**specification.get("datasets", {}), "records": shown}
    description = f"{title}: {len(shown)} numbers, to be saved as CSV."
    return Figure(name, title, {**specification, "datasets": datasets, "description": description})


def _values(records: Records, name: str) -> list[Any]:
    """The values of all records that have one."""
    return [record[name] for record in records if name in record]


def _literal(value: Any) -> Any:
    return literal(value) if isinstance(value, str) else value


def _room(records: Records, name: str, *others: float | None) -> list[float]:
    """The range of an axis of shares: all values and intervals, with room for names."""
    values = []
    for other in others:
        if other is not None:
            values.append(other)
    for key in (name, f"{name}_low", f"{name}_high"):
        values += _values(records, key)
    room = max(0.03, 0.12 * (max(values) - min(values)))
    return [max(0.0, min(values) - room), min(1.0, max(values) + room)]
