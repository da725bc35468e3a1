"""The study of SmoothMix: certified accuracy by training method, ablations, and confidences under
attack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from statistics import fmean, stdev

import numpy as np

from equipoise.core import format, records
from equipoise.core.results import find
from equipoise.core.rows import MixingRatioRow, certificates
from equipoise.reporting.certificates import CERTIFIED, certified_accuracy, radius_axis
from equipoise.reporting.charts import OTHERS, Chart, Histogram, Line, Panel
from equipoise.reporting.section import (
    MISSING,
    Cell,
    RunView,
    Section,
    Table,
    result_cell,
    result_table,
)

STUDY = "smoothmix"
COLORS = ("muted", "accurate", "robust", "mixed", *OTHERS[:2], "wrong", "ink")
ONE_STEP = ", one-step adversary"  # dashed, in the colour of the same method without it
TABLES = {
    "table-2": "Training methods on images of one channel (Table 2, Figure 4)",
    "table-3": "Training methods on CIFAR-10, ResNet-18 (Table 3, Figure 5)",
    "resnet110": "Training methods on CIFAR-10, ResNet-110 (Table 3, Figure 5)",
}
PUBLISHED_NETWORK = {"table-3": ", ResNet-110"}  # where it is another one than ours
ONE_LOG = "The released logs are of one training run each, on the whole test set."
LOGS = {
    "table-2": "The released logs are means of five training runs on the whole test set. They hold radii with "
    "three digits, which adds up to 0.0024 to their averages on MNIST at sigma 0.5.",
    "table-3": ONE_LOG,
    "resnet110": ONE_LOG,
}
CHECKPOINTS = (
    "SmoothAdv",
    "MACER",
)  # on CIFAR-10 the paper certified those that the authors of the methods released
ABLATIONS = {
    "figure-6": "weight of the mixed images",
    "figure-7a": "steps and their length",
    "figure-7b": "largest norm of the attack",
    "figure-7c": "noises per image",
}


def _runs(run: RunView, folder: str, part: str) -> list[RunView]:
    """The finished runs of a part in a folder of the study, in the order of the study."""
    if run.identity.get("study") != STUDY or not (run.folder / folder).is_dir():
        return []
    named = [
        path
        for path in sorted((run.folder / folder).iterdir())
        if (path / "run.toml").is_file()
        and part in records.read_description(path / "run.toml").settings.get("parts", ())
    ]
    runs = [
        own for path in named if (own := run.subrun(f"{folder}/{path.name}", STUDY)) is not None
    ]
    return sorted(runs, key=lambda own: (int(own.settings["position"]), int(own.identity["seed"])))


def _by_classifier(runs: Sequence[RunView]) -> list[list[RunView]]:
    """The runs of every classifier: one for each random seed that it was trained and certified
    with."""
    groups: dict[str, list[RunView]] = {}
    for run in runs:
        groups.setdefault(str(run.settings["recipe"]), []).append(run)
    return list(groups.values())


def _label(run: RunView) -> str:
    return str(run.settings["label"])


def _sigma(run: RunView) -> float:
    return next(result.sigma for result in run.summary.results if result.sigma is not None)


def _curves(runs: Sequence[RunView]) -> list[Line]:
    """Certified accuracy of every classifier against the radius, the mean over its seeds."""
    radii = {
        _label(own[0]): np.array(
            [row.radius if row.correct else 0.0 for run in own for row in certificates(run.rows)]
        )
        for own in _by_classifier(runs)
    }
    at = radius_axis(max(float(own.max(initial=0.0)) for own in radii.values()))
    colors = dict(
        zip(
            dict.fromkeys(label.removesuffix(ONE_STEP) for label in radii),
            cycle(COLORS),
            strict=False,
        )
    )
    return [
        Line.of(
            at.tolist(),
            certified_accuracy(own, at),
            colors[label.removesuffix(ONE_STEP)],
            label,
            marker="",
            steps=True,
            interval=False,
            linestyle="--" if label.endswith(ONE_STEP) else "-",
        )
        for label, own in radii.items()
    ]


def _acr(runs: Sequence[RunView]) -> float:
    """The mean over the seeds of a classifier."""
    return fmean(find(run.summary.results, _label(run), "acr").value for run in runs)


def _mean_cell(runs: Sequence[RunView], metric: str) -> Cell:
    """A result of a classifier with its interval over images; of several seeds their mean and
    standard deviation."""
    results = [find(run.summary.results, _label(run), metric) for run in runs]
    if len(results) == 1:
        return result_cell(results[0])
    values = [result.value for result in results]
    mean, spread = (
        format.value(replace(results[0], value=value)) for value in (fmean(values), stdev(values))
    )
    spread = (
        f"{stdev(values):.4f}" if metric == "acr" else spread
    )  # training runs differ in the fourth digit
    return Cell(mean, f"± {spread}, {len(values)} seeds")


def _acr_table(caption: str, runs: Sequence[RunView], network: str = "") -> Table:
    """ACR of every classifier beside those that were published (of another network, if named), and
    clean accuracy."""
    body = []
    for own in _by_classifier(runs):
        run = own[0]
        published = [
            Cell(f"{float(run.settings[name]):.4g}") if name in run.settings else MISSING
            for name in ("paper_acr", "logs_acr")
        ]
        body.append(
            [
                Cell(_label(run)),
                Cell(f"{_sigma(run):g}"),
                *published,
                *(_mean_cell(own, metric) for metric in ("acr", "clean")),
                Cell(str(find(run.summary.results, _label(run), "acr").n)),
            ]
        )
    seeds = (
        ""
        if len(body) == len(runs)
        else "; of several seeds their mean ± the standard deviation of training runs"
    )
    return Table(
        f"{caption} (ACR; 0 for misclassified or abstained images), with 95 % intervals over images{seeds}.",
        ["method", "sigma", f"paper{network}", f"official logs{network}", "ours", "clean", "n"],
        body,
    )


def _named(runs: Sequence[RunView]) -> dict[str, RunView]:
    """Runs by the label of their classifier, and by the seed where there are several."""
    return {
        _label(run) + (f", seed {run.identity['seed']}" if len(own) > 1 else ""): run
        for own in _by_classifier(runs)
        for run in own
    }


def _table_section(run: RunView, part: str) -> Section | None:
    runs = _runs(run, "certificates", part)
    if not runs:
        return None
    by_sigma = {
        sigma: [own for own in runs if _sigma(own) == sigma]
        for sigma in sorted(set(map(_sigma, runs)))
    }
    best = {sigma: max(_by_classifier(own), key=_acr) for sigma, own in by_sigma.items()}
    largest = "; ".join(
        f"{_acr(own):.3f} at sigma {sigma:g} ({_label(own[0])})" for sigma, own in best.items()
    )
    classifiers = _by_classifier(runs)
    several = [_label(own[0]) for own in classifiers if len(own) > 1]
    prose = [
        f"The largest average certified radius: {largest}. Intervals are over images, of one training run each."
    ]
    if several:
        prose.append(f"Of several random seeds: {'; '.join(dict.fromkeys(several))}.")
    if any("logs_acr" in own.settings for own in runs):
        prose.append(LOGS[part])
    if part != "table-2" and any(
        "paper_acr" in own.settings and _label(own) in CHECKPOINTS for own in runs
    ):
        prose.append(
            f"The paper's figures of {' and '.join(CHECKPOINTS)} are of checkpoints that the authors of these "
            "methods released."
        )
    tables = [_acr_table("Average certified radius", runs, PUBLISHED_NETWORK.get(part, ""))]
    for sigma, own in by_sigma.items():
        results = [
            replace(result, model=name)
            for name, one in _named(own).items()
            for result in one.summary.results
            if result.metric.startswith("certified@")
        ]
        tables.append(
            result_table(
                f"Certified accuracy by ℓ2 radius at sigma {sigma:g}",
                "method",
                results,
                row=lambda result: result.model,
                collapsed=True,
            )
        )
    panels = [
        Panel(_curves(own), title=f"sigma {sigma:g}", y_range=(0, 103))
        for sigma, own in by_sigma.items()
    ]
    chart = Chart(
        f"smoothmix-{part}",
        f"Certified accuracy of {len(classifiers)} classifiers against radius",
        panels,
        x_label="ℓ2 radius",
        y_label=CERTIFIED,
        height=0.4 + 2.5 * len(panels),
    )
    return Section(TABLES[part], prose, tables, [chart])


def methods(run: RunView) -> Section | None:
    """All methods, small network [Table 2, Figure 4]."""
    return _table_section(run, "table-2")


def methods_on_cifar10(run: RunView) -> Section | None:
    """All methods, ResNet-18 [Table 3, Figure 5]."""
    return _table_section(run, "table-3")


def methods_with_resnet110(run: RunView) -> Section | None:
    """All methods, ResNet-110 [Table 3, Figure 5]."""
    return _table_section(run, "resnet110")


def ablations(run: RunView) -> Section | None:
    """Settings of SmoothMix varied one at a time [Figures 6, 7]."""
    runs = {part: _runs(run, "certificates", part) for part in ABLATIONS}
    # The baseline and SmoothMix are in all of them.
    runs = {part: own for part, own in runs.items() if len(_by_classifier(own)) > 2}
    if not runs:
        return None
    panels = [
        Panel(_curves(own), title=ABLATIONS[part], y_range=(0, 103)) for part, own in runs.items()
    ]
    chart = Chart(
        "smoothmix-ablations",
        "Certified accuracy of variants of SmoothMix against radius",
        panels,
        x_label="ℓ2 radius",
        y_label=CERTIFIED,
        height=0.4 + 2.3 * len(panels),
    )
    tables = [
        _acr_table(f"Average certified radius by {ABLATIONS[part]}", own)
        for part, own in runs.items()
    ]
    return Section(
        "Settings of SmoothMix (Figures 6 and 7)",
        [
            "Each variant differs from SmoothMix (η = 1) in one setting; the panels also show the Gaussian baseline."
        ],
        tables,
        [chart],
    )


def off_class_confidence(run: RunView) -> Section | None:
    """Confidence in the true and in the best other class under attacks of growing radius [Table
    1]."""
    runs = _runs(run, "table-1", "table-1")
    if not runs:
        return None
    results = [
        result
        for own in runs
        for result in own.summary.results
        if result.metric.startswith(("true@", "off@"))
    ]
    table = result_table(
        "Mean estimated vote shares of the true class and of the best other class, with 95 % "
        "intervals",
        "ℓ2 radius and class",
        results,
        row=lambda result: result.metric,
        column=lambda result: result.model,
    )
    return Section(
        "Confidence at adversarial images (Table 1)",
        [
            "Where the confidence in another class under attack exceeds the clean confidence in the true one, the "
            "classifier is over-confident near the images. Every image is attacked, misclassified ones too."
        ],
        [table],
    )


def interpolation(run: RunView) -> Section | None:
    """Confidences on the line to the adversarial image [Figure 2] and equal-confidence mixing
    ratios [Figure 3]."""
    runs = _runs(run, "figures-2-3", "figures-2-3")
    if not runs:
        return None
    lines, histograms = [], []
    for own, color in zip(runs, cycle(COLORS[1:]), strict=False):
        for prefix, text, linestyle in (
            ("true-along@", "true class", "-"),
            ("off-along@", "best other class", "--"),
        ):
            points = [result for result in own.summary.results if result.metric.startswith(prefix)]
            lines.append(
                Line.of(
                    [float(result.metric.partition("@")[2]) for result in points],
                    points,
                    color,
                    f"{_label(own)}, {text}",
                    linestyle=linestyle,
                )
            )
        ratios = [
            row.ratio
            for row in own.rows
            if isinstance(row, MixingRatioRow) and row.ratio is not None
        ]
        histograms.append(
            Histogram(
                values=ratios,
                bins=np.linspace(0, 1, 21).tolist(),
                color=color,
                filled=False,
                label=f"{_label(own)} (n = {len(ratios)})",
                density=True,
            )
        )
    results = [result for own in runs for result in own.summary.results if result.metric == "ratio"]
    table = result_table(
        "Mean equal-confidence mixing ratio of the images that change their class on the way, with "
        "95 % intervals",
        "method",
        results,
        row=lambda result: result.model,
    )
    count = format.counts(len({row.index for row in own.rows}) for own in runs)
    return Section(
        "On the way to the adversarial image (Figures 2 and 3)",
        [
            f"Mean confidences on the line from the clean image (0) to an adversarial one (1), n = {count} images. The "
            "equal-confidence mixing ratio is where the true class loses; after training with SmoothMix it should be "
            "larger."
        ],
        [table],
        [
            Chart(
                "smoothmix-line",
                "Confidence in the true and in the best other class along the line",
                [Panel(lines, x_range=(0, 1), y_range=(0, 103))],
                x_label="mixing ratio",
                y_label="vote share, % (estimate)",
            ),
            Chart(
                "smoothmix-ratios",
                "Histograms of equal-confidence mixing ratios",
                [Panel(histograms, x_range=(0, 1))],
                x_label="equal-confidence mixing ratio (estimate)",
                y_label="density",
                height=2.6,
            ),
        ],
    )
