"""What the explorer of an evaluation shows, as columns over its images."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from equipoise.core import format, stats
from equipoise.core.aggregation import (
    CLEAN,
    WORST,
    accuracies,
    base_models_first,
    share_correct,
    worst_row,
)
from equipoise.core.arrays import Array, FrontierArrays, PictureArrays
from equipoise.core.results import Result
from equipoise.core.rows import AttackRow
from equipoise.reporting.charts import model_colors
from equipoise.reporting.explorer import columns
from equipoise.reporting.explorer.pictures import sprites
from equipoise.reporting.section import Explorer, RunView, Section

COMMANDS = ("evaluate", "demo")
IN_TABLE = 3  # models with a column in the table of images
MOST_MODELS = 12
STANDS, WRONG_CLEAN = 0, 1  # codes of what broke an image; those of attacks follow
NO_MARGIN = -32768
FULL = 65535  # a share of 1
ROLES = {
    "accurate": "g",
    "robust": "h",
    "mixed": "mixture",
}  # by their color, which is the last word of a name in rows
Rows = dict[str, dict[int, list[AttackRow]]]  # model → image → rows, the clean one first


def explorer(run: RunView) -> Section | None:
    """The images of an evaluation with everything that was measured on them, to search and to
    filter."""
    if run.summary.command not in COMMANDS:
        return None
    rows = _complete_rows(run)
    if not rows:
        return None
    index = sorted(set.intersection(*(set(own) for own in rows.values())))
    if not index:
        return None
    pictures, frontier = PictureArrays.load(run.folder), FrontierArrays.load(run.folder)
    if frontier is not None and (
        sorted(frontier.index.tolist()) != index or not set(frontier.names) <= rows.keys()
    ):
        frontier = None
    names, roles = pictures.class_names if pictures is not None else (), _roles(rows, frontier)
    header, values = (
        _header(run, rows, index, names, roles),
        _columns(rows, index, _attack_names(rows)),
    )
    if frontier is not None:
        steps, more = _frontier(frontier, values["label"])
        header, values = {**header, "steps": steps}, {**values, **more}
    picture = None
    if pictures is not None:
        picture, more = _pictures(pictures, index)
        place = {name: number for number, name in enumerate(rows)}
        header, values = (
            {
                **header,
                "pictures": {
                    "count": len(pictures.index),
                    "model": pictures.model,
                    "of": place.get(pictures.model, -1),
                    "models": [place.get(name, -1) for name in pictures.models],
                },
            },
            {**values, **more},
        )
    return Section(
        "Explore",
        _prose(run, rows, index, header["inTable"], roles),
        explorer=Explorer(columns.pack(header, values), picture or {}),
    )


def _roles(rows: Rows, frontier: FrontierArrays | None) -> dict[str, str]:
    """Which model is g, which h and which the mixture; none where names leave it open."""
    if frontier is not None:
        return dict(zip(frontier.names, ROLES.values(), strict=True))
    named = {name: ROLES[word] for name in rows if (word := name.rpartition(" ")[2]) in ROLES}
    return named if len(set(named.values())) == len(named) else {}


def _in_table(rows: Rows, roles: Mapping[str, str]) -> list[int]:
    """The models with a column in the table of images: those with a role, then the others."""
    listed = sorted(enumerate(rows), key=lambda item: item[1] not in roles)
    return sorted(number for number, _ in listed[:IN_TABLE])


def _prose(
    run: RunView,
    rows: Rows,
    index: Sequence[int],
    in_table: Sequence[int],
    roles: Mapping[str, str],
) -> list[str]:
    """Which images are shown, and how."""
    total = max(len({row.index for row in run.rows}), int(run.data.get("count", 0)))
    which = f"All n = {total} images of the run."
    if len(index) < total:
        which = f"{len(index)} of {total} images{'' if run.finished else ' so far'}: those measured under every attack."
    if not run.finished:
        which += (
            " A suite of attacks first decides the images that it breaks, so failures are too frequent among "
            "them until the run ends. All accuracies of the explorer are of these images."
        )
    prose = [
        f"{which} Choose a row to see an image; every filter is part of the address, so a link leads to what you "
        "see."
    ]
    if roles:
        described = {
            "g": "accurate base model",
            "h": "robust base model",
            "mixture": "mixture of both",
        }
        named = [f"{role}: the {described[role]}, {run.name(name)}" for name, role in roles.items()]
        prose.append(f"{'; '.join(named)}.")
    if len(in_table) < len(rows):
        shown = format.short_names(rows)
        listed = ", ".join(format.literal(shown[list(rows)[m]]) for m in in_table)
        prose.append(
            f"The tables have columns for {listed}; the "
            f"trade-off and every choice of a model have all {len(rows)} models."
        )
    if passes := max(map(_passes, rows.values())):
        prose.append(
            f"Answers of randomised models are those of most of {passes} passes; their results are mean "
            "shares of passes, and may differ from the number of images that are right."
        )
    return prose


def _passes(rows: Mapping[int, Sequence[AttackRow]]) -> int:
    """Of a randomised model: how many passes are behind a share; else 0."""
    return max(
        (
            row.passes or 1
            for listed in rows.values()
            for row in listed
            if row.share_correct is not None
        ),
        default=0,
    )


def _complete_rows(run: RunView) -> Rows:
    """Rows of the models that were measured clean and under attacks, with the images that have all
    of theirs."""
    table: Rows = {}
    for row in run.rows:
        if isinstance(row, AttackRow) and row.alpha is None and row.predicted is not None:
            own = table.setdefault(row.model, {}).setdefault(row.index, [])
            own.insert(0, row) if row.attack == CLEAN else own.append(row)
    listed = sorted(table, key=base_models_first)
    attacks = {model: max(map(len, table[model].values())) for model in listed}
    complete = {
        model: {
            index: rows
            for index, rows in table[model].items()
            if len(rows) == attacks[model] and rows[0].attack == CLEAN
        }
        for model in listed
    }
    return {
        model: own
        for model, own in list(complete.items())[:MOST_MODELS]
        if own and attacks[model] > 1
    }


def _breaker(row: AttackRow) -> str:
    """The attack, and for a suite its stage, of a row that is not correct."""
    stage = row.broken_by
    return row.attack if not stage else f"{row.attack}: {stage}"


def _breakers(rows: Sequence[AttackRow]) -> Iterator[str]:
    """All attacks that broke an image: that it is misclassified under, and not without them."""
    if rows[0].correct:
        yield from (_breaker(row) for row in rows[1:] if not row.correct and row.broken_by != CLEAN)


def _attack_names(rows: Rows) -> list[str]:
    """What broke images, in the order of how often."""
    counts = Counter(
        name for own in rows.values() for listed in own.values() for name in _breakers(listed)
    )
    return sorted(counts, key=lambda name: (-counts[name], name))


def _results(run: RunView, rows: Rows, index: Sequence[int]) -> dict[tuple[str, str], Result]:
    """Results by model and metric; of an unfinished run those of the images that are shown, else
    those of the run."""
    shown = set(index)
    listed = (
        run.summary.results
        if run.finished
        else accuracies(
            (
                row
                for own in rows.values()
                for i, listed in own.items()
                if i in shown
                for row in listed
            ),
            None,
        )
    )
    return {(result.model, result.metric): result for result in listed if result.alpha is None}


def _header(
    run: RunView, rows: Rows, index: Sequence[int], names: Sequence[str], roles: Mapping[str, str]
) -> dict[str, Any]:
    short, results = format.short_names(rows), _results(run, rows, index)
    colors = model_colors(rows) | {
        name: color for name, role in roles.items() for color, own in ROLES.items() if own == role
    }
    largest = max(
        max(row.label, row.predicted or 0)
        for own in rows.values()
        for listed in own.values()
        for row in listed
    )
    models = [
        {
            "name": format.literal(short[name]),
            "symbol": roles.get(name, format.literal(short[name])),
            "color": colors[name],
            "passes": _passes(rows[name]),
            "results": {
                key: {"value": result.value, "low": result.low, "high": result.high}
                for key, metric in (("clean", CLEAN), ("attacked", WORST))
                if (result := results.get((name, metric))) is not None
            },
        }
        for name in rows
    ]
    place = {name: number for number, name in enumerate(rows)}
    return {
        "count": len(index),
        "models": models,
        "inTable": _in_table(rows, roles),
        "roles": {role: place[name] for name, role in roles.items()},
        "threat": "" if run.threat is None else str(run.threat),
        "attacks": [format.literal(name) for name in _attack_names(rows)],
        "classes": [
            format.class_name(names, label) for label in range(max(largest + 1, len(names)))
        ],
    }


def _columns(rows: Rows, index: Sequence[int], attacks: Sequence[str]) -> dict[str, Array]:
    codes = {name: code for code, name in enumerate(attacks, start=2)}
    first = next(iter(rows.values()))
    values = {
        "index": columns.whole(np.array(index)),
        "label": columns.whole(np.array([first[i][0].label for i in index])),
    }
    for number, own in enumerate(rows.values()):
        clean, worst = [own[i][0] for i in index], [worst_row(own[i]) for i in index]
        broken = [
            STANDS
            if last.correct
            else codes.get(_breaker(last), WRONG_CLEAN)
            if start.correct
            else WRONG_CLEAN
            for start, last in zip(clean, worst, strict=True)
        ]
        smallest = [
            min((row.margin for row in own[i] if row.margin is not None), default=None)
            for i in index
        ]
        values |= {
            f"clean{number}": columns.whole(np.array([row.predicted for row in clean])),
            f"attacked{number}": columns.whole(np.array([row.predicted for row in worst])),
            f"broken{number}": columns.whole(np.array(broken)),
            f"brokenBy{number}": _bits([set(_breakers(own[i])) for i in index], attacks),
            f"marginClean{number}": _margins([row.margin for row in clean]),
            f"margin{number}": _margins(smallest),
        }
        if _passes(own):
            values |= {
                f"shareClean{number}": _shares(clean),
                f"shareAttacked{number}": _shares(worst),
            }
    return values


def _bits(broken_by: Sequence[set[str]], attacks: Sequence[str]) -> Array:
    """(⌈A / 8⌉ N) bytes: attack a broke image i if bit a % 8 of byte (a // 8) N + i is set."""
    members = np.array(
        [[name in own for own in broken_by] for name in attacks], dtype=bool
    ).reshape(len(attacks), len(broken_by))
    return np.packbits(members, axis=0, bitorder="little").reshape(-1)


def _shares(rows: Sequence[AttackRow]) -> Array:
    """The shares of passes in which a randomised model is right."""
    return np.round(np.array([share_correct(row) for row in rows]) * FULL).astype(np.uint16)


def _margins(values: Sequence[float | None]) -> Array:
    known = columns.margins(np.array([0.0 if value is None else value for value in values]))
    return np.where([value is None for value in values], NO_MARGIN, known).astype(np.int16)


def _frontier(
    arrays: FrontierArrays, labels: Array
) -> tuple[list[dict[str, Any]], dict[str, Array]]:
    """The positions of the slider with their figures, and what changes between them."""
    order = np.argsort(arrays.index, kind="stable")
    predicted = columns.whole(arrays.predicted[:, order])
    own = int(np.flatnonzero((arrays.alpha == arrays.evaluated) & np.isnan(arrays.lost))[0])
    steps = [
        {
            "alpha": alpha,
            "lost": None if math.isnan(lost) else lost,
            "evaluated": alpha == arrays.evaluated
            and bool((predicted[number] == predicted[own]).all()),
            "byAccurate": float(arrays.by_accurate[number].mean()),
            "clean": _share(predicted[number] == labels),
            "attacked": _share(arrays.standing[number]),
        }
        for number, (alpha, lost) in enumerate(
            zip(arrays.alpha.tolist(), arrays.lost.tolist(), strict=True)
        )
    ]
    bits = arrays.by_accurate[:, order].astype(np.uint8) + 2 * arrays.standing[:, order].astype(
        np.uint8
    )
    return steps, {
        "stepPredicted": columns.changes(predicted),
        "stepBits": columns.changes(bits),
        **_mapped_margins(arrays, order),
    }


def _mapped_margins(arrays: FrontierArrays, order: Array) -> dict[str, Array]:
    """Margins of the robust model with its map, clean and smallest; none where the mixture has no
    map."""
    if arrays.clean_margins is None or np.array_equal(*arrays.gaps):
        return {}
    return {
        "mappedClean": columns.margins(arrays.clean_margins[1, order]),
        "mappedSmallest": columns.margins(arrays.margins[1, order]),
    }


def _share(correct: Array) -> dict[str, float]:
    estimate = stats.clopper_pearson(int(correct.sum()), len(correct))
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high}


def _pictures(
    arrays: PictureArrays, index: Sequence[int]
) -> tuple[Mapping[str, Any], dict[str, Array]]:
    """The sprites, and which position of the columns each picture belongs to."""
    place = {image: position for position, image in enumerate(index)}
    positions = [place.get(image, len(index)) for image in arrays.index.tolist()]
    return sprites(arrays), {
        "picture": columns.whole(np.array(positions)),
        "topClasses": columns.whole(arrays.top_classes.reshape(-1)),
        "topProbabilities": np.round(arrays.top_probabilities.reshape(-1) * FULL).astype(np.uint16),
    }
