"""Runs beside one another: which images they have in common, which models correspond, and paired
differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from equipoise.core import aggregation, format, stats
from equipoise.core.aggregation import CLEAN
from equipoise.core.results import Difference
from equipoise.core.rows import AttackRow, CertificateRow, ImageRow, Mixture, Row, by_mixture
from equipoise.reporting.certificates import ACR, certified_metrics, radii_of, radius_of
from equipoise.reporting.run_view import OTHER_COLOURS, RunView

COLOURS = ("accurate", "robust", "mixed", *OTHER_COLOURS)
KINDS = {"demo": "evaluate"}  # commands that measure the same things


@dataclass(frozen=True)
class NamedRun:
    """A run of a comparison, with a short name that no other of them has, and its colour."""

    name: str
    run: RunView
    colour: str

    @property
    def kind(self) -> str:
        """The command that measures the same."""
        return KINDS.get(self.run.summary.command, self.run.summary.command)

    @property
    def models(self) -> list[Mixture]:
        """All models that have results, a mixture at each of its alphas."""
        return self.run.measured

    @property
    def data(self) -> Mapping[str, object]:
        """What `run.toml` says about the images; empty if it says nothing."""
        return self.run.table("data")

    def label(self, model: str, alpha: float | None = None) -> str:
        """A model of the run in a figure."""
        return f"{self.name}: {self.run.name(model, alpha)}"

    def spoken(self, mixture: Mixture) -> str:
        """A model of the run in a sentence, as in "the mixture of runs/a"."""
        return f"{self.run.spoken(*mixture)} of {self.name}"


@dataclass(frozen=True)
class CommonImages:
    """The images that two runs have in common, by their positions in the split."""

    positions: frozenset[int]
    reason: str  # why there are these or none; ends a sentence


def common_images(first: NamedRun, other: NamedRun) -> CommonImages:
    """The images that two runs both measured; never by row number alone.

    Equal digests of the data are equal images. Otherwise an image is the one at its position in the
    split of a data set by name or path, as long as all labels agree. Images that were given in
    memory have no such position.
    """
    ours, theirs = _labels(first.run.rows), _labels(other.run.rows)
    if not ours or not theirs:
        return CommonImages(frozenset(), "rows of images are not there")
    if not first.data or not other.data:
        return CommonImages(frozenset(), "a run does not record which images it measured")
    both = frozenset(ours.keys() & theirs.keys())
    digest = first.data.get("digest")
    if digest is not None and digest == other.data.get("digest"):
        return CommonImages(both, "both runs have the same data, by their digest")
    name = str(first.data.get("name"))
    reason = f"matched by their positions in {name}, with equal labels"
    if first.run.data_name != other.run.data_name:
        both, reason = frozenset(), "the runs have other data sets or splits"
    elif not _has_positions(name):
        both, reason = (
            frozenset(),
            f"{name} is no data set by name, so that only equal digests show equal images",
        )
    elif not both:
        reason = "the runs have other parts of the data set"
    elif any(ours[index] != theirs[index] for index in both):
        both, reason = (
            frozenset(),
            f"labels at the same positions of {name} differ, so its images have changed",
        )
    elif ":" in name:
        reason += f", if {name} has not changed between the runs"
    return CommonImages(both, reason)


def _labels(rows: Sequence[Row]) -> dict[int, int]:
    return {row.index: row.label for row in rows if isinstance(row, ImageRow)}


def _has_positions(name: str) -> bool:
    """Whether a position in the data of this name is always the same image."""
    from equipoise.data.sources import DATASETS, is_own_data  # imports torch

    return name in DATASETS or is_own_data(name)


def main_model(models: Sequence[Mixture]) -> Mixture:
    """The mixture, or else the first."""
    for model in models:
        if model[0] == "mixed":
            return model
    return models[0]


def corresponding(first: NamedRun, other: NamedRun) -> list[tuple[Mixture, Mixture]]:
    """Models of one name and alpha in both runs; without any, the main model of each."""
    same = [(model, model) for model in other.models if model in first.models]
    if same or not first.models or not other.models:
        return same
    return [(main_model(first.models), main_model(other.models))]


def differences(
    first: NamedRun, other: NamedRun, common: CommonImages
) -> dict[Mixture, list[Difference]]:
    """By model of `other`: its results minus those of the corresponding model of `first`, on the
    common images.

    Clean and, under the same threat, robust accuracy; or certified accuracy at every radius that
    both runs report and the average certified radius (`acr`, with Student's interval).
    """
    paired: dict[Mixture, list[Difference]] = {}
    if not common.positions:
        return paired
    for versus, model in corresponding(first, other):
        names = other.spoken(model), first.spoken(versus)
        rows = _rows(other, model, names[0], common) + _rows(first, versus, names[1], common)
        found = []
        for item in _attacked(rows, names, first.run):
            if item.metric == CLEAN or first.run.threat == other.run.threat:
                found.append(item)
        found += _certified(first, other, rows, names)
        if found:
            paired[model] = found
    return paired


def _rows(item: NamedRun, mixture: Mixture, name: str, common: CommonImages) -> list[Row]:
    """The rows of one model on common images, under another name."""
    rows: list[Row] = []
    for row in item.run.rows:
        if (row.model, row.alpha) == mixture and row.index in common.positions:
            rows.append(replace(row, model=name, alpha=None))
    return rows


def _attacked(rows: Sequence[Row], names: tuple[str, str], run: RunView) -> list[Difference]:
    attacked = [row for row in rows if isinstance(row, AttackRow)]
    measured = {(row.model, row.index) for row in attacked}
    if not any((names[0], row.index) in measured and row.model == names[1] for row in attacked):
        return []
    return aggregation.differences(attacked, [names], run.threat)


def _certified(
    first: NamedRun, other: NamedRun, rows: Sequence[Row], names: tuple[str, str]
) -> list[Difference]:
    groups = by_mixture(rows)
    ours = _radii(groups.get((names[0], None), []))
    theirs = _radii(groups.get((names[1], None), []))
    both = sorted(ours.keys() & theirs.keys())
    if not both:
        return []
    own = np.array([ours[index] for index in both])
    versus = np.array([theirs[index] for index in both])
    known = set(first.run.metrics) & set(other.run.metrics)
    changes = {}
    if ACR in known:
        changes[ACR] = stats.mean((own - versus).tolist())
    for metric in certified_metrics(first.run.summary.results):
        if metric in known:
            radius = max(radius_of(metric), 1e-12)
            gained = int(((own >= radius) & (versus < radius)).sum())
            lost = int(((own < radius) & (versus >= radius)).sum())
            changes[metric] = stats.paired_difference(gained, lost, len(both))
    found = []
    for metric, change in changes.items():
        found.append(Difference(**vars(change), model=names[0], versus=names[1], metric=metric))
    return found


def _radii(rows: Sequence[CertificateRow]) -> dict[int, float]:
    radii = {}
    for row, radius in zip(rows, radii_of(rows), strict=True):
        radii[row.index] = float(radius)
    return radii


def short(names: Sequence[str]) -> list[str]:
    """Short names of folders, as long as they stay different."""
    shortened = list(format.short_names(names).values())
    if len(set(shortened)) == len(shortened):
        return shortened
    return [format.literal(name) for name in names]
