"""What the explorer of an evaluation shows, as columns over its images."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from equipoise.core import format, stats
from equipoise.core.aggregation import CLEAN, WORST
from equipoise.core.arrays import Array, FrontierArrays, PictureArrays
from equipoise.core.rows import AttackRow
from equipoise.reporting.charts import MODELS, model_colors
from equipoise.reporting.explorer import columns
from equipoise.reporting.explorer.pictures import sprites
from equipoise.reporting.section import Explorer, RunView, Section

COMMANDS = ("evaluate", "demo")
SHOWN = 3  # models
STANDS, WRONG_CLEAN = 0, 1  # codes of what broke an image; those of attacks follow
NO_MARGIN = -32768
SYMBOLS = {"accurate": "g", "robust": "h", "mixed": "mixture"}
Rows = dict[str, dict[int, list[AttackRow]]]  # model → image → rows, the clean one first


def explorer(run: RunView) -> Section | None:
    """The images of an evaluation with everything that was measured on them, to search and to filter."""
    if run.summary.command not in COMMANDS:
        return None
    rows = _complete_rows(run)
    if not rows:
        return None
    index = sorted(set.intersection(*(set(own) for own in rows.values())))
    pictures, frontier = PictureArrays.load(run.folder), FrontierArrays.load(run.folder)
    if frontier is not None and (sorted(frontier.index.tolist()) != index or not set(frontier.names) <= rows.keys()):
        frontier = None
    names = pictures.class_names if pictures is not None else ()
    header, values = _header(run, rows, index, names), _columns(rows, index, _attack_names(rows))
    if frontier is not None:
        steps, more = _frontier(frontier, values["label"])
        header, values = {**header, "steps": steps}, {**values, **more}
    picture = None
    if pictures is not None:
        picture, more = _pictures(pictures, index)
        header, values = {**header, "pictures": {"count": len(pictures.index), "model": pictures.model, "models": [
            list(rows).index(name) if name in rows else -1 for name in pictures.models]}}, {**values, **more}
    prose = [f"All n = {len(index)} images of the run. Choose a row to see an image; every filter is part of the "
             "address, so a link leads to what you see."]
    return Section("Explore", prose, explorer=Explorer(columns.pack(header, values), picture or {}))


def _complete_rows(run: RunView) -> Rows:
    """Rows of up to three models that were measured clean and under attacks; the mixture is among them."""
    table: Rows = {}
    for row in run.rows:
        if isinstance(row, AttackRow) and row.alpha is None and row.predicted is not None:
            own = table.setdefault(row.model, {}).setdefault(row.index, [])
            own.insert(0, row) if row.attack == CLEAN else own.append(row)
    listed = sorted(table, key=lambda model: MODELS.index(model) if model in MODELS else len(MODELS))
    attacks = {model: max(map(len, table[model].values())) for model in listed}
    complete = {model: {index: rows for index, rows in table[model].items()
                        if len(rows) == attacks[model] and rows[0].attack == CLEAN} for model in listed}
    return {model: own for model, own in list(complete.items())[:SHOWN] if own and attacks[model] > 1}


def _worst(rows: Sequence[AttackRow]) -> AttackRow:
    """The row of the attack that is worst for an image: one that broke it, and of those the smallest margin."""
    return min(rows, key=lambda row: (row.correct, 1.0 if row.margin is None else row.margin))


def _breaker(row: AttackRow) -> str:
    """The attack, and for a suite its stage, of a row that is not correct."""
    stage = row.broken_by
    return row.attack if not stage else f"{row.attack}: {stage}"


def _attack_names(rows: Rows) -> list[str]:
    """What broke images, in the order of how often."""
    counts: dict[str, int] = {}
    for own in rows.values():
        for listed in own.values():
            if listed[0].correct and not (worst := _worst(listed)).correct:
                counts[_breaker(worst)] = counts.get(_breaker(worst), 0) + 1
    return sorted(counts, key=lambda name: (-counts[name], name))


def _header(run: RunView, rows: Rows, index: Sequence[int], names: Sequence[str]) -> dict[str, Any]:
    short, colors = format.short_names(rows), model_colors(rows)
    largest = max(max(row.label, row.predicted or 0) for own in rows.values() for listed in own.values()
                  for row in listed)
    models = [{"name": format.literal(short[name]), "symbol": SYMBOLS.get(name, format.literal(short[name])),
               "color": colors[name], "results": {key: {"value": result.value, "low": result.low, "high": result.high}
                                                  for key, metric in (("clean", CLEAN), ("attacked", WORST))
                                                  if (result := run.find(name, metric)) is not None}}
              for name in rows]
    return {"count": len(index), "models": models, "threat": "" if run.threat is None else str(run.threat),
            "attacks": [format.literal(name) for name in _attack_names(rows)],
            "classes": [format.literal(names[label]) if label < len(names) else f"class {label}"
                        for label in range(max(largest + 1, len(names)))]}


def _columns(rows: Rows, index: Sequence[int], attacks: Sequence[str]) -> dict[str, Array]:
    codes = {name: code for code, name in enumerate(attacks, start=2)}
    first = next(iter(rows.values()))
    values = {"index": columns.whole(np.array(index)),
              "label": columns.whole(np.array([first[i][0].label for i in index]))}
    for number, own in enumerate(rows.values()):
        clean, worst = [own[i][0] for i in index], [_worst(own[i]) for i in index]
        broken = [STANDS if last.correct else codes.get(_breaker(last), WRONG_CLEAN) if start.correct else WRONG_CLEAN
                  for start, last in zip(clean, worst, strict=True)]
        smallest = [min((row.margin for row in own[i] if row.margin is not None), default=None) for i in index]
        values |= {f"clean{number}": columns.whole(np.array([row.predicted for row in clean])),
                   f"attacked{number}": columns.whole(np.array([row.predicted for row in worst])),
                   f"broken{number}": columns.whole(np.array(broken)),
                   f"marginClean{number}": _margins([row.margin for row in clean]),
                   f"margin{number}": _margins(smallest)}
    return values


def _margins(values: Sequence[float | None]) -> Array:
    known = columns.margins(np.array([0.0 if value is None else value for value in values]))
    return np.where([value is None for value in values], NO_MARGIN, known).astype(np.int16)


def _frontier(arrays: FrontierArrays, labels: Array) -> tuple[list[dict[str, Any]], dict[str, Array]]:
    """The positions of the slider with their figures, and what changes between them."""
    order = np.argsort(arrays.index, kind="stable")
    predicted = columns.whole(arrays.predicted[:, order])
    own = int(np.flatnonzero((arrays.alpha == arrays.evaluated) & np.isnan(arrays.lost))[0])
    steps = [{"alpha": alpha, "lost": None if math.isnan(lost) else lost,
              "evaluated": alpha == arrays.evaluated and bool((predicted[number] == predicted[own]).all()),
              "byAccurate": float(arrays.by_accurate[number].mean()), "clean": _share(predicted[number] == labels),
              "attacked": _share(arrays.standing[number])}
             for number, (alpha, lost) in enumerate(zip(arrays.alpha.tolist(), arrays.lost.tolist(), strict=True))]
    bits = (arrays.by_accurate[:, order].astype(np.uint8) + 2 * arrays.standing[:, order].astype(np.uint8))
    return steps, {"stepPredicted": columns.changes(predicted), "stepBits": columns.changes(bits),
                   **{f"{name}{kind}": columns.margins(values[row, order])
                      for name, values in (("gap", arrays.gaps), ("smallest", arrays.margins))
                      for row, kind in enumerate(("Before", "After"))}}


def _share(correct: Array) -> dict[str, float]:
    estimate = stats.clopper_pearson(int(correct.sum()), len(correct))
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high}


def _pictures(arrays: PictureArrays, index: Sequence[int]) -> tuple[Mapping[str, Any], dict[str, Array]]:
    """The sprites, and which position of the columns each picture belongs to."""
    place = {image: position for position, image in enumerate(index)}
    positions = [place.get(image, len(index)) for image in arrays.index.tolist()]
    return sprites(arrays), {
        "picture": columns.whole(np.array(positions)), "topClasses": columns.whole(arrays.top_classes.reshape(-1)),
        "topProbabilities": np.round(arrays.top_probabilities.reshape(-1) * 65535).astype(np.uint16)}
