"""Tables of the SmoothMix study as text: average certified radii beside published ones, and
confidences."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from equipoise.core import format, records
from equipoise.core.results import Summary, read_summary
from equipoise.studies.smoothmix_models import INTERPOLATION, TABLE_1, TABLE_3
from equipoise.studies.smoothmix_seeds import CERTIFICATES


class FinishedRun(NamedTuple):
    """The summary of one classifier in a part of the study, with the settings and the seed of
    `run.toml`."""

    summary: Summary
    settings: dict[str, Any]
    seed: int

    def metric(self, name: str) -> str:
        """A result with its 95 % interval; empty if there is none of this name."""
        return next(
            (
                f"{format.value(result)} {format.bounds(result)}"
                for result in self.summary.results
                if result.metric == name
            ),
            "",
        )


def study_tables(folder: Path) -> str:
    """The average certified radii of all classifiers, and confidences under attack; only what has
    been run."""
    certified = _finished_runs(folder / CERTIFICATES)
    confidences = {part: _finished_runs(folder / part) for part in (TABLE_1, INTERPOLATION)}
    tables = [_acr_table(certified)] if certified else []
    return "\n".join(
        [*tables, *(_confidence_table(part, runs) for part, runs in confidences.items() if runs)]
    )


def _finished_runs(folder: Path) -> list[FinishedRun]:
    """In the order of the study, those of several seeds together."""
    runs = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if (path / "summary.json").is_file():
            described = records.read_description(path / "run.toml")
            runs.append(
                FinishedRun(read_summary(path), described.settings, int(described.identity["seed"]))
            )
    return sorted(runs, key=lambda run: (run.settings["position"], run.seed))


def _acr_table(runs: Sequence[FinishedRun]) -> str:
    several_seeds = len({run.seed for run in runs}) > 1
    starred = "; * of a ResNet-110" if any(map(_is_of_another_network, runs)) else ""
    table = format.new_table(
        "Average certified radius (0 if misclassified or abstained), 95 % intervals over images"
        f"{starred}",
        "method",
        "σ",
        "n",
        "paper",
        "logs",
        "ours",
    )
    for run in runs:
        acr = next(result for result in run.summary.results if result.metric == "acr")
        settings, star = run.settings, "*" if _is_of_another_network(run) else ""
        published = [
            f"{settings[name]:.3f}{star}" if name in settings else ""
            for name in ("paper_acr", "logs_acr")
        ]
        seed = f", seed {run.seed}" if several_seeds else ""
        table.add_row(
            f"{settings['label']}{seed}",
            f"{acr.sigma:g}",
            str(acr.n),
            *published,
            run.metric("acr"),
        )
    return format.render(table)


def _is_of_another_network(run: FinishedRun) -> bool:
    """Whether the published radii are of a ResNet-110 and ours of a ResNet-18."""
    return TABLE_3 in run.settings["parts"]


def _confidence_table(part: str, runs: Sequence[FinishedRun]) -> str:
    """Confidence in the true and in the best other class at the attacked images, or the mean mixing
    ratios."""
    if part == INTERPOLATION:
        table = format.new_table(
            "Mean equal-confidence mixing ratio (Figure 3), 95 % intervals", "method", "ratio"
        )
        for run in runs:
            table.add_row(run.settings["label"], run.metric("ratio"))
        return format.render(table)
    table = format.new_table(
        "Confidence under attack (Table 1), 95 % intervals",
        "method",
        "radius",
        "true class",
        "best other class",
    )
    for run in runs:
        radii = [
            result.metric.removeprefix("true@")
            for result in run.summary.results
            if result.metric.startswith("true@")
        ]
        for radius in radii:
            table.add_row(
                run.settings["label"] if radius == radii[0] else "",
                radius,
                *(run.metric(f"{name}@{radius}") for name in ("true", "off")),
            )
    return format.render(table)
