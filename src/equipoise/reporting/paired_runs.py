"""Runs beside one another: which images they have in common, which models correspond, and paired
differences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from equipoise.core import aggregation, format, stats
from equipoise.core.results import Difference
from equipoise.core.rows import AttackRow, CertificateRow, ImageRow, Mixture, Row, by_mixture
from equipoise.reporting.accuracy import NAMES
from equipoise.reporting.certificates import CERTIFIED_AT, LINE_STYLES, radius_of
from equipoise.reporting.charts import OTHERS
from equipoise.reporting.section import RunView

COLORS = ("accurate", "robust", "mixed", *OTHERS)
ACR = "acr"


@dataclass(frozen=True)
class NamedRun:
    """A run of a comparison, with a short name that no other of them has, and its place among
    them."""

    name: str
    run: RunView
    number: int

    @property
    def color(self) -> str:
        """Its colour in tables and figures."""
        return COLORS[self.number % len(COLORS)]

    @property
    def linestyle(self) -> str:
        """Another one for runs whose colour repeats that of an earlier one."""
        return LINE_STYLES[self.number // len(COLORS) % len(LINE_STYLES)]

    @property
    def models(self) -> list[Mixture]:
        """All models that have results, a mixture at each of its alphas."""
        return list(
            dict.fromkeys((result.model, result.alpha) for result in self.run.summary.results)
        )

    @property
    def data(self) -> Mapping[str, object]:
        """What `run.toml` says about the images; empty if it says nothing."""
        data = self.run.identity.get("data")
        return data if isinstance(data, Mapping) else {}


def distinct_names(names: Iterable[str]) -> dict[str, str]:
    """Short names of folders or models, as long as they stay different; otherwise the names as they
    are."""
    short = format.short_names(names)
    return (
        short
        if len(set(short.values())) == len(short)
        else {name: format.literal(name) for name in short}
    )


def shared_models(runs: Sequence[NamedRun]) -> list[dict[str, str]]:
    """For each run: its models by their names in `run.toml`, and the names that models of all runs
    are listed under.

    A model that no earlier run has by name is listed under the name of an earlier one with the same
    weights.
    """
    names: dict[str, str] = {}  # of weights: the name of the first model that has them
    shared: list[dict[str, str]] = []
    for item in runs:
        models = item.run.identity.get("models")
        models = models if isinstance(models, Mapping) else {}
        weights = {
            name: str(model["weights"])
            for name, model in models.items()
            if isinstance(model, Mapping) and model.get("weights")
        }
        own = {name: name for name in models}
        for name, hashed in weights.items():
            earlier = names.get(hashed, name)
            if earlier not in own.values() and not any(name in other.values() for other in shared):
                own[name] = earlier
        for name, hashed in weights.items():
            names.setdefault(hashed, own[name])
        shared.append(own)
    return shared


@dataclass(frozen=True)
class CommonImages:
    """The images that two runs have in common, by their positions in the split, and how that is
    known."""

    positions: frozenset[int]
    reason: str  # why there are these or none; ends a sentence


def common_images(first: NamedRun, other: NamedRun) -> CommonImages:
    """The images that two runs both measured; never by row number alone.

    Equal digests of the data are equal images. Otherwise an image is the one at its position in the
    split of a data set by name or path, as long as all labels agree. Images that were given in
    memory have no such position.
    """
    ours, theirs = (_labels(item.run.rows) for item in (first, other))
    if not ours or not theirs:
        return CommonImages(frozenset(), "rows of images are not there")
    if not first.data or not other.data:
        return CommonImages(frozenset(), "a run does not record which images it measured")
    both = ours.keys() & theirs.keys()
    if first.data.get("digest") is not None and first.data.get("digest") == other.data.get(
        "digest"
    ):
        return CommonImages(frozenset(both), "both runs have the same data, by their digest")
    place = [tuple(item.data.get(key) for key in ("name", "split")) for item in (first, other)]
    if place[0] != place[1]:
        return CommonImages(frozenset(), "the runs have other data sets or splits")
    name = str(first.data.get("name"))
    if not _has_positions(name):
        return CommonImages(
            frozenset(),
            f"{name} is no data set by name, so that only equal digests show equal images",
        )
    if any(ours[index] != theirs[index] for index in both):
        return CommonImages(
            frozenset(),
            f"labels at the same positions of {name} differ, so its images have changed",
        )
    if not both:
        return CommonImages(frozenset(), "the runs have other parts of the data set")
    own = f", if {name} has not changed between the runs" if ":" in name else ""
    return CommonImages(
        frozenset(both), f"matched by their positions in {name}, with equal labels{own}"
    )


def _labels(rows: Sequence[Row]) -> dict[int, int]:
    return {row.index: row.label for row in rows if isinstance(row, ImageRow)}


def _has_positions(name: str) -> bool:
    """Whether a position in the data of this name is always the same image: a known data set, or a
    path."""
    from equipoise.data.sources import DATASETS, is_own_data  # imports torch

    return name in DATASETS or is_own_data(name)


def corresponding(first: NamedRun, other: NamedRun) -> list[tuple[Mixture, Mixture]]:
    """Models of one name and alpha in both runs; without any, the main model of each."""
    same = [model for model in other.models if model in first.models]
    if same or not first.models or not other.models:
        return [(model, model) for model in same]
    return [(main_model(first.models), main_model(other.models))]


def main_model(models: Sequence[Mixture]) -> Mixture:
    """The mixture, or else the first."""
    return next((model for model in models if model[0] == "mixed"), models[0])


def differences(
    first: NamedRun, other: NamedRun, common: CommonImages
) -> dict[Mixture, list[Difference]]:
    """By model of `other`: its results minus those of the corresponding model of `first`, on the
    common images.

    Clean and, under the same threat, worst-case accuracy; or certified accuracy at every radius
    that both runs report and the average certified radius (`acr`, with Student's interval). `model`
    and `versus` are names as in a sentence.
    """
    paired: dict[Mixture, list[Difference]] = {}
    for versus, model in corresponding(first, other) if common.positions else []:
        names = described(other, model), described(first, versus)
        rows = [
            *_own_rows(other.run.rows, model, names[0], common),
            *_own_rows(first.run.rows, versus, names[1], common),
        ]
        attacked = [
            item
            for item in _attacked(rows, names, first.run)
            if item.metric == aggregation.CLEAN or first.run.threat == other.run.threat
        ]
        if own := [*attacked, *_certified(first, other, rows, names)]:
            paired[model] = own
    return paired


def described(item: NamedRun, mixture: Mixture) -> str:
    """A model of a run, as in "the mixture of runs/a"."""
    name = NAMES.get(mixture[0]) if mixture[1] is None else None
    return f"{name or format.mixture_names(item.models)[mixture]} of {item.name}"


def _own_rows(rows: Sequence[Row], mixture: Mixture, name: str, common: CommonImages) -> list[Row]:
    """The rows of one model on common images, under another name."""
    return [
        replace(row, model=name, alpha=None)
        for row in rows
        if (row.model, row.alpha) == mixture and row.index in common.positions
    ]


def _attacked(rows: Sequence[Row], names: tuple[str, str], run: RunView) -> list[Difference]:
    attacked = [row for row in rows if isinstance(row, AttackRow)]
    measured = [{row.index for row in attacked if row.model == name} for name in names]
    return (
        aggregation.differences(attacked, [names], run.threat) if measured[0] & measured[1] else []
    )


def _certified(
    first: NamedRun, other: NamedRun, rows: Sequence[Row], names: tuple[str, str]
) -> list[Difference]:
    groups = by_mixture(rows)
    ours, theirs = (
        {row.index: _radius(row) for row in groups.get((name, None), [])} for name in names
    )
    both = sorted(ours.keys() & theirs.keys())
    if not both:
        return []
    known = {result.metric for result in first.run.summary.results} & {
        result.metric for result in other.run.summary.results
    }
    estimates = []
    if ACR in known:
        estimates.append((ACR, stats.mean([ours[index] - theirs[index] for index in both])))
    for metric in sorted(
        (metric for metric in known if metric.startswith(CERTIFIED_AT)), key=radius_of
    ):
        reached = [
            [own[index] >= max(radius_of(metric), 1e-12) for index in both]
            for own in (ours, theirs)
        ]
        gained = sum(own and not versus for own, versus in zip(*reached, strict=True))
        lost = sum(versus and not own for own, versus in zip(*reached, strict=True))
        estimates.append((metric, stats.paired_difference(gained, lost, len(both))))
    return [
        Difference(**vars(estimate), model=names[0], versus=names[1], metric=metric)
        for metric, estimate in estimates
    ]


def _radius(row: CertificateRow) -> float:
    return row.radius if row.correct else 0.0
