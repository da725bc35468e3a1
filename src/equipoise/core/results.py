"""Typed results: what `summary.json` of a run holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from equipoise.core import config, serialize
from equipoise.core.audits import Audit
from equipoise.core.checks import InputError
from equipoise.core.promises import PromiseCheck, Target
from equipoise.core.radius_curves import RadiusCurve
from equipoise.core.serialize import Count, NonNegative, Share
from equipoise.core.stats import Estimate
from equipoise.core.threat import Threat


@dataclass(frozen=True, kw_only=True)
class Result(Estimate):
    """One metric of one model with its 95 % interval over n images."""

    model: str
    metric: str
    alpha: float | None = None
    sigma: float | None = None
    threat: Threat | None = None
    allowed: Count | None = None  # for broken certificates: as many would be no surprise
    is_estimate: bool | None = None  # never a certificate
    # Of a randomised model per image: the value is a mean share of passes
    passes: Count | None = None

    @property
    def count(self) -> int:
        """How many of the n images the value counts."""
        return round(self.value * self.n)

    @classmethod
    def of(cls, model: str, metric: str, estimate: Estimate, **more: Any) -> Result:
        """A result from an estimate with an interval."""
        return cls(**vars(estimate), model=model, metric=metric, **more)


@dataclass(frozen=True, kw_only=True)
class Difference(Estimate):
    """Paired difference of a metric between two models on the same images."""

    model: str
    versus: str
    metric: str | None = None
    threat: Threat | None = None


@dataclass(frozen=True, kw_only=True)
class SanityCheck:
    """A measured sign that an attacked accuracy may be overstated, and whether it should worry the
    reader."""

    name: str
    value: float
    alarm: bool
    explanation: str
    model: str = ""
    attack: str = ""
    advice: str | None = None  # of an alarm: what to do next


@dataclass(frozen=True, kw_only=True)
class BrokenCount:
    """How many of the n images that an attack broke were broken by one of its stages."""

    model: str
    attack: str
    stage: str
    count: Count
    n: Count


@dataclass(frozen=True, kw_only=True)
class ClassAccuracy:
    """How many of the n images of one class are classified correctly, clean and in the worst case
    over all attacks.

    An image that a randomised model classifies correctly in a share of its passes counts with that
    share.
    """

    model: str
    label: Count
    n: Count
    clean: NonNegative
    attacked: NonNegative


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of one prediction; a multiplication with its addition counts as two operations.

    None is unknown: a model that computes outside of torch shows neither its parameters nor its
    operations.
    """

    model: str
    parameters: Count | None = None
    flops: NonNegative | None = None
    # Share of the images on which the accurate model had to run
    accurate_share: Share | None = None
    robust_passes: NonNegative | None = None  # per image, of a robust model with several views


@dataclass(frozen=True, kw_only=True)
class FitSummary:
    """Outcome of a fit; accuracies are those on the calibration half of the images, with rule
    `paper` on all."""

    helped: bool
    promise: str
    clean: Share
    robust_clean: Share
    robust_attacked: Share
    q: float
    alpha: Share
    rejected: dict[str, Count] = field(default_factory=dict)  # reason → candidates
    notes: tuple[str, ...] = ()
    rule: str = ""  # that chose the map; empty in older folders
    method: str = ""  # its name in tables and reports
    objective: Share | None = None  # of Algorithm 1, lower is better
    recomputed_objective: Share | None = None  # under an attack on the mapped model
    promised: Target | None = None  # what may be lost, if it helped
    passes: NonNegative | None = None  # of a cascade: views of the robust model per clean image
    # The same at the most expensive of the attacked points of each image
    attacked_passes: NonNegative | None = None
    images: Count | None = None  # how many the accuracies are of; unknown in older folders


@dataclass(frozen=True, kw_only=True)
class SelectionSummary:
    """A mixture selected among candidates, and what it reached on the images that selected it."""

    clean: Share
    attacked: Share
    met: bool  # whether it reaches its target
    candidates_attacked: Count
    mixture: str
    robust_attacked: Share | None = None  # the robust model on the same images
    promise: str | None = None


@dataclass(frozen=True, kw_only=True)
class SelectedAlpha:
    """The alpha of a certified mixture, selected for a clean accuracy on other images."""

    model: str
    alpha: float
    sigma: float
    target: float
    clean_estimate: Share
    low: Share
    high: Share
    n: Count


@dataclass(frozen=True, kw_only=True)
class FrontierPoint(Estimate):
    """The best of several certified mixtures at one radius."""

    radius: float
    model: str
    alpha: float
    sigma: float


@dataclass(frozen=True, kw_only=True)
class TheoremResult(Result):
    """A metric of a certified mixture with the radii of one theorem, from the same bounds as those
    of the others."""

    theorem: str


@dataclass(frozen=True, kw_only=True)
class ExcludedModel:
    """A certified mixture that cannot reach the wanted clean accuracy, and the most that it
    reaches."""

    model: str
    target: float
    most: float
    n: Count


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Everything `summary.json` holds; a command fills the fields that concern it."""

    command: str
    seconds: NonNegative
    results: tuple[Result, ...] = ()
    differences: tuple[Difference, ...] = ()
    promises: tuple[PromiseCheck, ...] = ()  # of fitted mixtures, on the images of this run
    sanity_checks: tuple[SanityCheck, ...] = ()
    audits: tuple[Audit, ...] = ()
    as_bytes: tuple[
        Result, ...
    ] = ()  # share of broken images that are still misclassified after rounding to bytes
    radius_curves: tuple[RadiusCurve, ...] = ()
    costs: tuple[Cost, ...] = ()
    # Model → images it was fitted on
    overlap: dict[str, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # on the images, such as class shares other than those of the split
    # Mixture → name of the rule that chose its map
    methods: dict[str, str] = field(default_factory=dict)
    fit: FitSummary | None = None
    gate: SelectionSummary | None = None
    best_epoch: int | None = None
    compile_seconds: NonNegative | None = None
    selected_alphas: tuple[SelectedAlpha, ...] = ()
    frontier: tuple[FrontierPoint, ...] = ()
    theorems: tuple[TheoremResult, ...] = ()
    excluded: tuple[ExcludedModel, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As it stands in `summary.json`."""
        return {
            "schema": config.SCHEMA,
            **serialize.to_plain(self),
            "results": serialize.to_plain(self.results),
        }

    def result(self, model: str, metric: str) -> Result:
        """The result of one model and metric."""
        return find(self.results, model, metric)


def find(results: Iterable[Result], model: str, metric: str) -> Result:
    """The result of one model and metric; KeyError if there is none."""
    results = list(results)
    for result in results:
        if (result.model, result.metric) == (model, metric):
            return result
    known = ", ".join(dict.fromkeys(f"{result.model} {result.metric}" for result in results))
    raise KeyError(f"there is no {metric!r} of {model!r}; there are: {known}")


def read_summary(folder: Path | str) -> Summary:
    """The summary of a finished run folder."""
    path = Path(folder) / "summary.json"
    if not path.exists():
        raise InputError(f"{folder} must be a finished run folder, got one without summary.json")
    values = config.read_json(path)
    config.check_schema(values, path)
    # `copied` is of version 0.2.0: which models of equal weights were attacked once.
    skipped = ("schema", "version", "copied")
    values = {key: value for key, value in values.items() if key not in skipped}
    return serialize.from_plain(Summary, values, str(path))
