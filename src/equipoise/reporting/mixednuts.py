"""The study of MixedNUTS: its fits, the accuracies of every part, margins of robust models, and the
map itself."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from equipoise.core import format
from equipoise.core.aggregation import CLEAN
from equipoise.core.arrays import FitArrays
from equipoise.core.results import Result
from equipoise.core.rows import AttackRow
from equipoise.reporting import mixture_fit
from equipoise.reporting.charts import Chart, Line, Panel, model_colors
from equipoise.reporting.section import MISSING, Cell, RunView, Section, Table, result_table

STUDY, FITS, MAIN = "mixednuts", "fits", "fits/mixednuts"
ADAPTIVE = "adaptive"  # beginning of the name of the attack
ROBUST_MODELS = "robust-models"
PARTS = {
    "curves": "Figure 8: MixedNUTS at several β, plain mixing and the robust models",
    ROBUST_MODELS: "Every robust model alone and in mixtures (adaptive smoothing, Figures 5 and 9)",
    "counts": "Table 9: numbers of fitting images",
    "seen": "Table 8: the images that Algorithm 1 has seen",
    "temperature": "Table 10: temperature of the accurate model, at equal clean accuracy on held-out images",
    "black-box": "D.5: without gradients of the robust model",
    "objective": "D.8.3: only errors that the accurate model corrects",
}
EXAMPLES = {
    "one class preferred": (3.0, 0.0, -0.5),
    "two classes compete": (-1.5, 2.0, 1.5),
}  # Figures 3 and 4
TEMPERATURES = (2.0, 1.0, 0.5)
PLAIN = "plain mixing"
MIXTURES = {
    "MixedNUTS": "mixed",
    PLAIN: "muted",
}  # names in rows, and their colours where there is one robust model


def fits(run: RunView) -> Section | None:
    """What Algorithm 1 returned in every fit [Tables 3, 7 and 11, D.9]."""
    folder = run.folder / FITS
    if run.identity.get("study") != STUDY or not folder.is_dir():
        return None
    body = []
    for path in sorted(folder.iterdir()):
        fit = run.subrun(f"{FITS}/{path.name}")
        if fit is None or fit.summary.fit is None:
            continue
        own, arrays = fit.summary.fit, FitArrays.load(path)
        numbers = (
            [MISSING] * 3
            if arrays is None or arrays.selected is None
            else [Cell(f"{value:.3g}") for value in arrays.selected[:3].tolist()]
        )
        objectives = [
            MISSING if value is None else Cell(format.percent(value))
            for value in (own.objective, own.recomputed_objective)
        ]
        body.append([Cell(path.name), *numbers, Cell(f"{own.alpha:.6g}"), *objectives])
    prose = [
        "The objective is the share of the robust model's clean errors that it decides itself: lower is better. "
        "It is recomputed at points of smallest margin of the mapped model (D.9).",
        "Each fit has a report of its own in its folder.",
    ]
    return Section(
        "Fits by Algorithm 1",
        prose,
        [
            Table(
                "Selected maps and weights.",
                ["fit", "s", "p", "c", "alpha", "objective", "recomputed"],
                body,
            )
        ],
    )


def parts(run: RunView) -> Section | None:
    """Accuracies of the mixtures of every part, and attacked against clean accuracy."""
    measured = {part: view for part in PARTS if (view := run.subrun(part, STUDY)) is not None}
    if not measured:
        return None
    tables = [
        result_table(PARTS[part], "model", view.summary.results) for part, view in measured.items()
    ]
    charts = [
        draw(measured[part].summary.results)
        for part, draw in (("curves", _trade_off), (ROBUST_MODELS, _robust_models))
        if part in measured
    ]
    return Section(
        "Ablations and trade-off",
        [
            "Every mixture was fitted on held-out images and attacked by its own adaptive list on the test images; the "
            f"images of Table 8 were seen by the fit. {_attack(next(iter(measured.values())))}"
        ],
        tables,
        charts,
    )


def _attack(part: RunView) -> str:
    """What the attacks of a part were made from, by its name in rows."""
    made_from = {
        f"{ADAPTIVE}-standard": "AutoAttack (standard)",
        f"{ADAPTIVE}-fast": "the attack `fast`",
    }
    return " ".join(
        f"Adaptive lists were made from {made_from[name]}, which is also the attack on single "
        f"models; in tables both are {name}."
        for name in part.attacks
        if name in made_from
    )


def _trade_off(results: Sequence[Result]) -> Chart:
    points = _points(results, "alpha", "beta", "weight")
    colors = model_colors(kind for kind in points if kind not in MIXTURES) | MIXTURES
    lines = [_line(own, colors[kind], kind, kind) for kind, own in points.items()]
    return _trade_off_chart(
        "mixednuts-trade-off", "MixedNUTS, plain mixing and robust models", lines
    )


def _robust_models(results: Sequence[Result]) -> Chart:
    """A colour for every robust model, alone or in a mixture."""
    points = _points(results, "alpha", "beta")
    parts = {kind: kind.partition(" with ") for kind in points}
    colors = model_colors(dict.fromkeys(model or kind for kind, (_, _, model) in parts.items()))
    lines = [
        _line(own, colors[parts[kind][2] or kind], kind, parts[kind][0])
        for kind, own in points.items()
    ]
    return _trade_off_chart(
        "mixednuts-robust-models", "several robust models, alone and in mixtures", lines
    )


def _points(results: Sequence[Result], *varied: str) -> dict[str, list[tuple[float, float]]]:
    """Clean and attacked accuracy in percent, by kind of model: its name without a setting that
    varies at the end."""
    values = {(result.model, result.metric): 100 * result.value for result in results}
    attacked = next(metric for _, metric in values if metric.startswith(ADAPTIVE))
    points: dict[str, list[tuple[float, float]]] = {}
    for model in dict.fromkeys(result.model for result in results):
        kind, _, setting = model.rpartition(", ")
        kind = kind if setting.partition(" ")[0] in varied else model
        points.setdefault(kind, []).append((values[model, CLEAN], values[model, attacked]))
    return {kind: sorted(own) for kind, own in points.items()}


def _line(points: Sequence[tuple[float, float]], color: str, label: str, kind: str) -> Line:
    """Squares for models alone, circles for MixedNUTS, diamonds and dashes for plain mixing; one
    point has no line."""
    linestyle = "None" if len(points) == 1 else "--" if kind == PLAIN else "-"
    return Line(
        x=[clean for clean, _ in points],
        y=[attacked for _, attacked in points],
        color=color,
        label=label,
        marker="D" if kind == PLAIN else "o" if kind in MIXTURES else "s",
        linestyle=linestyle,
    )


def _trade_off_chart(name: str, models: str, lines: list[Line]) -> Chart:
    return Chart(
        name,
        f"Attacked accuracy against clean accuracy of {models}",
        [Panel(lines)],
        x_label="clean accuracy, %",
        y_label="attacked accuracy, %",
    )


def margins(run: RunView) -> Section | None:
    """Median margins of robust models, by correctness [Figure 7]."""
    part = run.subrun("margins", STUDY)
    if part is None:
        return None
    rows = [row for row in part.rows if isinstance(row, AttackRow)]
    body = []
    for model in dict.fromkeys(row.model for row in rows):
        cells = []
        for attack in (CLEAN, *part.attacks):
            for correct in (True, False):
                values = [
                    abs(row.margin)
                    for row in rows
                    if (row.model, row.attack, row.correct) == (model, attack, correct)
                    and row.margin is not None
                ]
                cells.append(
                    Cell(f"{median(values):.3f}", f"n = {len(values)}") if values else MISSING
                )
        body.append([Cell(model), *cells])
    head = ["model", "clean, correct", "clean, wrong", "attacked, correct", "attacked, wrong"]
    prose = [
        "The size of the margin of the true class over the best other class, of layer-normed logits; the paper "
        "takes the margin of the first class over the second, which is the same where the prediction is correct. "
        + _attack(part)
    ]
    return Section("Margins of robust models", prose, [Table("Median margins.", head, body)])


def example_maps(run: RunView) -> Section | None:
    """Probabilities of two example logits with and without the fitted map, at several temperatures
    [Fig. 3 and 4]."""
    part = run.subrun(MAIN, STUDY)
    arrays = None if part is None else FitArrays.load(part.folder)
    if arrays is None or arrays.selected is None:
        return None
    s, p, c = arrays.selected[:3].tolist()
    import torch  # reports of other runs need neither

    from equipoise.mixing.logit_maps import LogitMap

    logit_map = LogitMap(s, p, c, "gelu")
    body = []
    for name, logits in EXAMPLES.items():
        z = torch.tensor([logits])
        for kind, scores in (("logits", z), ("mapped", logit_map(z))):
            cells = [torch.softmax(scores / temperature, dim=1)[0] for temperature in TEMPERATURES]
            body.append(
                [
                    Cell(name, kind),
                    *(
                        Cell(
                            " / ".join(f"{value:.3f}" for value in own.tolist()),
                            f"margin {_margin(own.tolist()):.3f}",
                        )
                        for own in cells
                    ),
                ]
            )
    prose = [
        "In Figures 3 and 4 of the paper the map raises the margin where one class is preferred and lowers it "
        "where two compete. The example logits here are our own."
    ]
    return Section(
        "What the map does to two example predictions",
        prose,
        [
            Table(
                f"Probabilities of three classes; s = {s:.3g}, p = {p:.3g}, c = {c:.3g}.",
                ["logits", *(f"temperature {temperature:g}" for temperature in TEMPERATURES)],
                body,
            )
        ],
    )


def _margin(p: Sequence[float]) -> float:
    first, second, *_ = sorted(p, reverse=True)
    return first - second


def map_margins(run: RunView) -> Section | None:
    """Margins before and after the map of the main fit [Figure 6, Table 6]."""
    part = run.subrun(MAIN, STUDY)
    return None if part is None else mixture_fit.map_margins(part)


def landscape(run: RunView) -> Section | None:
    """The objective over s, p and c of the main fit [Figure 9]."""
    part = run.subrun(MAIN, STUDY)
    return None if part is None else mixture_fit.landscape(part)
