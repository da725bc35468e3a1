"""The headline of certificates: noise, radius, and how many images are certified there."""

from __future__ import annotations

from equipoise.core import format
from equipoise.core.aggregation import CLEAN
from equipoise.core.rows import by_mixture
from equipoise.reporting.certificates import CERTIFIED_AT, radius_of
from equipoise.reporting.section import MISSING, Cell, RunView, Section, Table, result_cell

MOST_SENTENCES = 3  # of models in the headline


def headline(run: RunView) -> Section | None:
    """How many images are certified at which radius, under which noise, in words and as a short
    table."""
    models = by_mixture(run.rows)
    if not models:
        return None
    names, results = (
        format.mixture_names(models),
        {(item.model, item.alpha, item.metric): item for item in run.summary.results},
    )
    radii = sorted(
        {item.metric for item in run.summary.results if item.metric.startswith(CERTIFIED_AT)},
        key=radius_of,
    )
    shown = next(
        (
            metric
            for metric in radii
            if radius_of(metric) > 0
            and any(item.value > 0 for (*_, own), item in results.items() if own == metric)
        ),
        radii[0] if radii else "",
    )
    sigmas = sorted({rows[0].sigma for rows in models.values()})
    sentences, body = [], []
    for (model, alpha), rows in models.items():
        measured = {
            metric: results.get((model, alpha, metric)) for metric in (CLEAN, "acr", *radii)
        }
        if (share := measured.get(shown)) is not None:
            noise = "" if len(sigmas) == 1 else f" (σ = {rows[0].sigma:g})"
            sentences.append(f"{names[model, alpha]}{noise} on {format.percent(share.value)}")
        body.append(
            [
                Cell(names[model, alpha]),
                Cell(f"{rows[0].sigma:g}"),
                *(MISSING if item is None else result_cell(item) for item in measured.values()),
            ]
        )
    head = [
        "smoothed model",
        "σ",
        CLEAN,
        "average radius",
        *(f"certified at {radius_of(metric):g}" for metric in radii),
    ]
    columns = [
        i
        for i, name in enumerate(head)
        if any(row[i] != MISSING for row in body) and (name != "σ" or len(sigmas) > 1)
    ]
    noise = f" of σ = {sigmas[0]:g}" if len(sigmas) == 1 else ""
    prose = (
        [
            f"Smoothed with Gaussian noise{noise}, predictions are correct and certified at ℓ2 radius "
            f"{radius_of(shown):g} for n = {format.counts(map(len, models.values()))} images as follows: "
            f"{'; '.join(sentences[:MOST_SENTENCES])}{'; others below' * (len(sentences) > MOST_SENTENCES)}."
        ]
        if sentences
        else []
    )
    prose.append(
        "Smoothed: the class that is most frequent under Gaussian noise is the prediction. Certified at a "
        "radius: correct, and no perturbation of that Euclidean length can change it. The average radius "
        "counts images that are misclassified or abstained as 0."
    )
    notes = [f"{note[:1].upper()}{note[1:]}." for note in format.data_notes(run.summary)]
    return Section(
        "Results",
        [*prose, *notes],
        [
            Table(
                f"Accuracy of the smoothed prediction, average certified ℓ2 radius, and certified accuracy by radius; n = "
                f"{format.counts(map(len, models.values()))} images, 95 % intervals.",
                [head[i] for i in columns],
                [[row[i] for i in columns] for row in body],
            )
        ],
    )
