"""The study of certified mixtures: certificates beside attacks, and mixtures as accurate as less
noisy models."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from equipoise.certification.mixture import THEOREM_NAMES
from equipoise.core import format, stats
from equipoise.core.results import SelectedAlpha
from equipoise.core.rows import AttackRow, CertificateRow, Mixture, Row, by_mixture
from equipoise.reporting.certificates import (
    CERTIFIED,
    FRONTIER_THEOREMS,
    THEOREM_TITLES,
    Radii,
    certified_accuracy,
    radius_axis,
    theorem_radii,
)
from equipoise.reporting.charts import Chart, Line, LineStyle, Panel, model_colors, percent_range
from equipoise.reporting.section import Cell, RunView, Section, Table

STUDY = "mixing-classifiers"
STEP = 0.25
STYLES: dict[str, LineStyle] = {
    "3.5": ":",
    "lipschitz": "-.",
    "A.2": "--",
    "ours": "-",
}  # of the curve of a theorem
ATTACKED = "under attack (upper bound)"
Mixtures = Mapping[Mixture, list[CertificateRow]]
Attacked = Mapping[Mixture, Mapping[int, float]]  # norm of the perturbation of every image


def certified_and_attacked(run: RunView) -> Section | None:
    """Certified accuracy by every theorem, beside the accuracy under an attack, of every sigma and
    alpha."""
    part, attack = run.subrun("certify", STUDY), run.subrun("attack", STUDY)
    if part is None:
        return None
    mixtures = mixtures_by_sigma(part.rows)
    shown, models = shown_mixtures(run, mixtures), model_names(mixtures)
    attacked = {} if attack is None else attacked_radii(attack)
    names = mixture_names(shown, models)
    charts = [
        _model_chart(
            number,
            models[model],
            [mixture for mixture in shown if mixture[0] == model],
            shown,
            attacked,
        )
        for number, model in enumerate(dict.fromkeys(model for model, _ in shown))
    ]
    prose = [
        "A certificate is a lower bound on the accuracy at a radius, with a failure probability for each image; "
        "an attack gives an upper bound. What is true lies between the two.",
        "All theorems and all alphas use the same votes and the same confidence bounds.",
    ]
    if attack is not None:
        prose.append(_attack_prose(shown, attacked))
    tables = [
        _gap_table(names[mixture], rows, attacked.get(mixture)) for mixture, rows in shown.items()
    ]
    return Section("Certified mixtures beside an attack", prose, tables, charts)


def mixtures_by_sigma(rows: Iterable[Row]) -> Mixtures:
    """The certificates of every smoothed model at every alpha, in order of sigma and alpha."""
    return dict(sorted(by_mixture(rows).items(), key=lambda item: (item[1][0].sigma, item[0])))


def model_names(mixtures: Mixtures) -> dict[str, str]:
    """Names of all smoothed models of a run: by sigma, and by network where several have the same
    sigma."""
    sigmas = {model: rows[0].sigma for (model, _), rows in mixtures.items()}
    models_of, networks = Counter(sigmas.values()), format.short_names(sigmas)
    return {
        model: f"σ = {sigma:g}" if models_of[sigma] == 1 else networks[model]
        for model, sigma in sigmas.items()
    }


def mixture_names(mixtures: Iterable[Mixture], models: Mapping[str, str]) -> dict[Mixture, str]:
    """Names of mixtures, given those of the smoothed models."""
    renamed = {mixture: (models[mixture[0]], mixture[1]) for mixture in mixtures}
    names = format.mixture_names(renamed.values())
    return {mixture: names[own] for mixture, own in renamed.items()}


def shown_mixtures(run: RunView, mixtures: Mixtures) -> Mixtures:
    """Those that were attacked; where none was yet, all but those selected for another smoothed
    model."""
    part, select = run.subrun("attack", STUDY), run.subrun("select", STUDY)
    if part is not None:
        attacked = attacked_radii(part)
        return {mixture: rows for mixture, rows in mixtures.items() if mixture in attacked}
    selected = () if select is None else select.summary.selected_alphas
    own = {(item.model, item.alpha) for item in selected}
    alphas = {item.alpha for item in selected}
    return {
        mixture: rows
        for mixture, rows in mixtures.items()
        if mixture in own or mixture[1] not in alphas
    }


def attacked_radii(attack: RunView) -> Attacked:
    """Norm of the smallest perturbation that is known to be misclassified, of every image, by
    mixture."""
    radii: dict[Mixture, dict[int, float]] = {}
    for row in attack.rows:
        if isinstance(row, AttackRow):
            own = radii.setdefault((row.model, row.alpha), {})
            own[row.index] = math.inf if row.radius is None else row.radius
    return radii


def _radii_up_to(longest: float) -> Radii:
    """The radii of a table, up to one that nothing reaches."""
    return np.arange(int(longest / STEP) + 2, dtype=np.float64) * STEP


def _accuracy(radii: Radii, at: Radii) -> list[stats.Estimate]:
    """Accuracy under attack: the share of images whose perturbation is larger than the radius."""
    return [stats.clopper_pearson(int((radii > radius).sum()), len(radii)) for radius in at]


def _model_chart(
    number: int, model: str, mixtures: Sequence[Mixture], shown: Mixtures, attacked: Attacked
) -> Chart:
    """A panel per alpha: certified accuracy by every theorem, and the accuracy under attack."""
    longest = max(
        (
            float(theorem_radii(shown[mixture], 1.0, "ours").max(initial=0.0))
            for mixture in mixtures
        ),
        default=0.0,
    )
    at = radius_axis(longest)
    panels = []
    for mixture in mixtures:
        rows = shown[mixture]
        lines = [
            Line.of(
                at.tolist(),
                certified_accuracy(theorem_radii(rows, rows[0].alpha, theorem), at),
                "mixed",
                THEOREM_NAMES[theorem],
                marker="",
                steps=True,
                linestyle=style,
                width=1.4,
                interval=theorem == "ours",
            )
            for theorem, style in STYLES.items()
        ]
        if mixture in attacked:
            lines.append(
                Line.of(
                    at.tolist(),
                    _accuracy(np.array(list(attacked[mixture].values())), at),
                    "wrong",
                    ATTACKED,
                    marker="",
                    steps=True,
                    width=1.4,
                )
            )
        panels.append(
            Panel(
                lines,
                title=f"alpha {rows[0].alpha:.4g}",
                x_range=(0, at[-1]),
                y_range=percent_range(lines),
            )
        )
    return Chart(
        f"certified-attacked-{number}",
        f"Certified and attacked accuracy against radius of {model}",
        panels,
        x_label=f"ℓ2 radius, {model}",
        y_label="accuracy, %",
        height=0.6 + 1.7 * len(panels),
    )


def _gap_table(
    name: str, rows: Sequence[CertificateRow], attacked: Mapping[int, float] | None
) -> Table:
    """Certified accuracy at every radius by theorem, the accuracy under attack, and the gap on the
    same images."""
    alpha = rows[0].alpha
    radii = {theorem: theorem_radii(rows, alpha, theorem) for theorem in STYLES}
    at = _radii_up_to(float(radii["ours"].max(initial=0.0)))
    certified = {theorem: certified_accuracy(own, at) for theorem, own in radii.items()}
    both = [i for i, row in enumerate(rows) if attacked is not None and row.index in attacked]
    broken = np.array([] if attacked is None else [attacked[rows[i].index] for i in both])
    upper = _accuracy(broken, at) if both else []
    lower = certified_accuracy(radii["ours"][both], at) if both else []
    body = []
    for i, radius in enumerate(at):
        cells = [
            Cell(format.percent(own[i].value), format.bounds(own[i])) for own in certified.values()
        ]
        if both:
            cells += [
                Cell(format.percent(upper[i].value), format.bounds(upper[i])),
                Cell(format.points(upper[i].value - lower[i].value)),
            ]
        body.append([Cell(f"{radius:.2f}"), *cells])
    caption = f"{name}: certified accuracy of n = {len(rows)} images"
    head = [THEOREM_NAMES[theorem] for theorem in STYLES]
    if both:
        caption += (
            f"; {ATTACKED} of n = {len(both)} of them, and how far it lies above ours on the same images, in "
            "points"
        )
        head += [ATTACKED, "gap"]
    return Table(f"{caption}. Exact 95 % intervals.", ["radius", *head], body, collapsed=alpha != 1)


def _attack_prose(shown: Mixtures, attacked: Attacked) -> str:
    """What the attack is, and whether any of its perturbations lies inside a certified radius."""
    pairs = [
        (radius, attacked[mixture][row.index])
        for mixture, rows in shown.items()
        for row, radius in zip(rows, theorem_radii(rows, rows[0].alpha, "ours"), strict=True)
        if row.index in attacked[mixture]
    ]
    inside = sum(broken <= certified for certified, broken in pairs if certified > 0)
    return (
        "The attack searches the smallest perturbation of a stand-in, which averages the probabilities of a few "
        "fixed noisy copies. A perturbation counts where the certified classifier itself returns a wrong class, "
        "with confidence and on fresh noise. A stronger attack can only lower the curve. "
        f"Of {sum(certified > 0 for certified, _ in pairs)} certificates of a correct class, {inside} "
        f"{'has' if inside == 1 else 'have'} a confirmed perturbation inside the certified radius."
    )


def equal_clean(run: RunView) -> Section | None:
    """Mixtures of noisier models with the clean accuracy of a less noisy model alone [Bai2024,
    Figures 6 and 7]."""
    part, select = run.subrun("certify", STUDY), run.subrun("select", STUDY)
    if part is None or select is None or not select.summary.selected_alphas:
        return None
    mixtures = mixtures_by_sigma(part.rows)
    groups: dict[str, list[SelectedAlpha]] = {}
    for item in select.summary.selected_alphas:
        groups.setdefault(item.baseline or "", []).append(item)
    prose = [
        "Each mixture has the largest alpha with which it is estimated to be as accurate on clean held-out images "
        "as the less noisy model is alone. The paper finds that with the Lipschitz bound of Theorem 3.5 the "
        "mixture certifies larger radii than that model, and that with Theorem A.2 the model certifies more. It "
        "inserts mean probabilities; here all bounds hold with confidence."
    ]
    charts, tables = [], []
    for number, (baseline, items) in enumerate(groups.items()):
        chart, table = _equal_clean_group(number, baseline, items, mixtures)
        charts.append(chart)
        tables.append(table)
    return Section("Noisier models at equal clean accuracy", prose, tables, charts)


def _equal_clean_group(
    number: int, baseline: str, items: Sequence[SelectedAlpha], mixtures: Mixtures
) -> tuple[Chart, Table]:
    models = model_names(mixtures)
    names = mixture_names([(baseline, 1.0), *((item.model, item.alpha) for item in items)], models)
    longest = max(
        float(theorem_radii(mixtures[mixture], mixture[1], "ours").max(initial=0.0))
        for mixture in names
    )
    at, steps = radius_axis(longest), _radii_up_to(longest)
    panels, body, colors = [], [], model_colors(names.values())
    for theorem in FRONTIER_THEOREMS:
        lines = []
        for mixture, name in names.items():
            radii = theorem_radii(mixtures[mixture], mixture[1], theorem)
            lines.append(
                Line.of(
                    at.tolist(),
                    certified_accuracy(radii, at),
                    colors[name],
                    name,
                    marker="",
                    steps=True,
                    linestyle="--" if mixture[0] == baseline else "-",
                )
            )
            body.append(
                [
                    Cell(f"{name}, {THEOREM_NAMES[theorem]}"),
                    *(
                        Cell(format.percent(share.value), format.bounds(share))
                        for share in certified_accuracy(radii, steps)
                    ),
                ]
            )
        panels.append(
            Panel(lines, title=THEOREM_TITLES[theorem], x_range=(0, at[-1]), y_range=(0, 103))
        )
    clean = "; ".join(
        f"{names[item.model, item.alpha]} {format.percent(item.clean_estimate)}" for item in items
    )
    table = Table(
        f"Certified accuracy by radius. Estimated clean accuracy on n = {items[0].n} held-out images: "
        f"{models[baseline]} alone {format.percent(items[0].target)}; {clean}.",
        ["mixture and theorem", *(f"{radius:.2f}" for radius in steps)],
        body,
    )
    chart = Chart(
        f"equal-clean-{number}",
        f"Certified accuracy against radius of {' and '.join(names.values())}",
        panels,
        x_label="ℓ2 radius",
        y_label=CERTIFIED,
        height=6.2,
    )
    return chart, table
