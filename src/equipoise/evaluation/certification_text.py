"""Tables that `equipoise certify` prints."""

from __future__ import annotations

from collections.abc import Sequence

from equipoise.certification.mixture import THEOREM_NAMES
from equipoise.core import format
from equipoise.core.results import Result, Summary


def results_table(results: Sequence[Result], failure: float) -> str:
    """A line per metric: ACR first, then certified accuracy as the radius grows, or at the decided
    radius alone.

    Where only results under attacks are left, these.
    """
    certified = [result for result in results if result.metric == "samples"]
    names = format.mixture_names((result.model, result.alpha) for result in results)
    title = (
        f"Certified on {_conditions(certified, failure)}, smoothed models"
        if certified
        else "Under attacks"
    )
    table = format.new_table(f"{title}, 95 % intervals", "model", "metric", "value")
    table.columns[1].justify = "left"
    previous = ""
    for result in results:
        text = f"{format.value(result)} {format.bounds(result)}".rstrip()
        if result.allowed is not None:
            verdict = "as allowed" if result.count <= result.allowed else "MORE THAN ALLOWED"
            text = f"{result.count} of {result.n} broken, {result.allowed} allowed: {verdict}"
        name = names[result.model, result.alpha]
        if name != previous:
            table.add_section()
        table.add_row(name if name != previous else "", result.metric, text)
        previous = name
    return format.render(table)


def _conditions(samples: Sequence[Result], failure: float) -> str:
    """How many images were certified and how, from the results on their numbers of samples."""
    sigmas = dict.fromkeys(f"{result.sigma:g}" for result in samples)
    return f"{min(result.n for result in samples)} images, σ = {', '.join(sigmas)}, failure {failure:g}"


def alphas_table(summary: Summary, failure: float) -> str:
    """A line per mixture: clean accuracy, and ACR by each theorem, all from the same votes."""
    by_name = {
        (item.model, item.alpha, item.theorem): item
        for item in summary.theorems
        if item.metric == "acr"
    }
    names = format.short_names(item.model for item in summary.theorems)
    samples = [result for result in summary.results if result.metric == "samples"]
    mean = format.number(sum(result.value for result in samples) / len(samples), 0)
    table = format.new_table(
        f"Average certified radius by theorem, {_conditions(samples, failure)} for all alphas of "
        f"an image together, {mean} samples per image, 95 % interval of ours",
        "model",
        "alpha",
        "clean,\nestimate",
        *(name.replace(" ", "\n") for name in THEOREM_NAMES.values()),
    )
    previous = ""
    for result in summary.results:
        if result.metric == "clean-estimate":
            cells = [by_name[result.model, result.alpha, theorem] for theorem in THEOREM_NAMES]
            values = [
                format.value(cell) + (f" {format.bounds(cell)}" if cell.theorem == "ours" else "")
                for cell in cells
            ]
            table.add_row(
                names[result.model] if result.model != previous else "",
                f"{result.alpha:.4g}",
                format.percent(result.value),
                *values,
            )
            previous = result.model
    return format.render(table)


def selection_text(summary: Summary) -> str:
    """The selected alphas, the excluded models, and the frontier."""
    names = format.short_names(
        [
            *(item.model for item in summary.selected_alphas),
            *(item.model for item in summary.excluded),
        ]
    )
    lines = [
        f"{names[item.model]}: alpha {item.alpha:.4g} for {format.percent(item.target)} clean; "
        f"{format.percent(item.clean_estimate)} {format.bounds(item)} on the {item.n} other images that selected "
        "it (estimate)"
        for item in summary.selected_alphas
    ]
    lines += [
        f"{names[item.model]}: excluded, no alpha gives {format.percent(item.target)} clean; at most "
        f"{format.percent(item.most)} on the {item.n} other images (estimate)"
        for item in summary.excluded
    ]
    table = format.new_table(
        "Frontier: the best of these mixtures at every radius",
        "radius",
        "certified",
        "model",
        "alpha",
    )
    for point in summary.frontier:
        table.add_row(
            format.two_decimals(point.radius),
            f"{format.percent(point.value)} {format.bounds(point)}",
            names[point.model],
            f"{point.alpha:.4g}",
        )
    return "\n".join([*lines, format.render(table)])
