"""Certificates of the images of a data set as rows of a run, metrics of the rows, and the selection
of alpha."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.special import ndtri
from torch import Tensor, nn

from equipoise import __version__, certification
from equipoise.attacks.fused import channels_last_copy
from equipoise.attacks.prepared import EXAMPLES
from equipoise.certification import (
    ABSTAIN,
    Certificate,
    SamplerOptions,
    SamplingSettings,
    SmoothingPlan,
)
from equipoise.certification.mixture import THEOREMS, SmoothedBase, at_alpha, frontier
from equipoise.certification.radii import SMALLEST_UNIFORM, Floats
from equipoise.core import checks, device, format, rng, stats
from equipoise.core.modes import inference
from equipoise.core.records import Run
from equipoise.core.results import (
    ExcludedModel,
    FrontierPoint,
    Result,
    SelectedAlpha,
    TheoremResult,
)
from equipoise.core.rows import (
    CERTIFY,
    SELECT_ALPHA,
    CertificateRow,
    Row,
    RowKey,
    by_mixture,
    certificates,
)
from equipoise.data import Dataset, pixels
from equipoise.evaluation.measure import measure_batches

RADIUS_STEP = 0.25  # between the radii of the summary
SMALLEST_RADIUS = 1e-300  # at radius zero every certificate counts, but no abstention
_SAMPLES_PER_WRITE = {"cpu": 100_000, "cuda": 10_000_000}


@dataclass(frozen=True)
class CertificationJob:
    """A base classifier to be smoothed under a plan, and the accurate classifier it is mixed with,
    if any."""

    name: str
    model: nn.Module
    plan: SmoothingPlan
    accurate: nn.Module | None = None

    @property
    def per_alpha(self) -> tuple[CertificationJob, ...]:
        """A job for each of the alphas that share the votes, or this job alone."""
        return tuple(replace(self, plan=plan) for plan in self.plan.per_alpha)

    def key(self, index: int, measurement: str = CERTIFY) -> RowKey:
        """The key of the row of one image, at the alpha of the plan; only mixtures have one."""
        return index, self.name, measurement, None if self.accurate is None else self.plan.alpha

    def keys(self, index: int, measurement: str = CERTIFY) -> list[RowKey]:
        """The keys of all rows of one image."""
        return [job.key(index, measurement) for job in self.per_alpha]


@dataclass(frozen=True)
class CertificationConditions:
    """What all jobs of a certification share."""

    device: torch.device
    seed: int = 0
    batch_size: int | None = None  # noisy images per forward pass; see :class:`SamplerOptions`
    precision: str = "auto"
    compiled: bool = False  # noise and model
    # Images certified between two writes; if None, enough to fill the device
    images_per_write: int | None = None

    def __post_init__(self) -> None:
        device.check_precision(self.precision, self.device)

    def environment(self) -> dict[str, Any]:
        """What may differ between two starts of the same run, for the settings of `run.toml`."""
        return {
            "batch_size": SamplerOptions(self.batch_size).batch_size_on(self.device),
            "compiled": self.compiled,
            "device": str(self.device),
            "equipoise": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }


def certify_images(
    job: CertificationJob,
    data: Dataset,
    run: Run,
    conditions: CertificationConditions,
    measurement: str = CERTIFY,
) -> None:
    """Append a :class:`CertificateRow` per image and alpha to the run; the rows are named
    `measurement`."""
    start, drawn = time.monotonic(), 0
    job = _with_faster_model(job, data, conditions)

    def on_samples(count: int) -> None:
        nonlocal drawn
        drawn += count

    def speed() -> dict[str, object]:
        rate = drawn / (time.monotonic() - start)
        return {"speed": f"{rate / 1e3:.1f}k samples/s" if rate >= 1e3 else f"{rate:.0f} samples/s"}

    per_write = _SAMPLES_PER_WRITE[conditions.device.type] // job.plan.samples
    measure_batches(
        run,
        data,
        keys=lambda index: job.keys(index, measurement),
        compute=lambda batch: _certificate_rows(job, batch, conditions, on_samples, measurement),
        batch_size=conditions.images_per_write or min(max(per_write, 1), 256),
        title=f"{job.name}, {measurement}",
        status=speed,
    )


def _with_faster_model(
    job: CertificationJob, data: Dataset, conditions: CertificationConditions
) -> CertificationJob:
    """The job with a faster copy of its model, which agrees with it on the first images."""
    if conditions.compiled:  # the compiler chooses the layout itself
        return job
    x = pixels(data.images[:EXAMPLES].to(conditions.device))
    with inference(job.model), device.full_precision(conditions.device):
        return replace(job, model=channels_last_copy(job.model, x))


def _certificate_rows(
    job: CertificationJob,
    batch: Dataset,
    conditions: CertificationConditions,
    on_samples: Callable[[int], None],
    measurement: str,
) -> list[CertificateRow]:
    x, y = pixels(batch.images.to(conditions.device)), batch.labels
    stream = rng.stream(conditions.seed, CERTIFY, batch.index.to(conditions.device))
    options = SamplerOptions(conditions.batch_size, conditions.compiled, on_samples)
    accurate = None
    with device.autocast(conditions.precision, conditions.device):
        certificate = certification.certify(
            job.model, x, plan=job.plan, stream=stream, options=options
        )
        if job.accurate is not None:
            with inference(job.accurate), torch.no_grad():
                accurate = torch.cat(
                    [job.accurate(part).argmax(dim=1) for part in x.split(128)]
                ).cpu()
    checks.labels(y, certificate.votes.shape[1])
    if job.plan.alphas:
        parts = [
            _rows_of(own, batch, at_alpha(certificate, own.plan), accurate, measurement)
            for own in job.per_alpha
        ]
        return [row for rows in zip(*parts, strict=True) for row in rows]
    return _rows_of(job, batch, certificate, accurate, measurement)


def _rows_of(
    job: CertificationJob,
    batch: Dataset,
    certificate: Certificate,
    accurate: Tensor | None,
    measurement: str,
) -> list[CertificateRow]:
    """One row per image, at the alpha of the plan."""
    answers = certification.predict_from_certificate(certificate, job.plan, accurate).tolist()
    gaps = None if accurate is None else certificate.gap(accurate).tolist()
    rows = []
    for i, (index, label) in enumerate(
        zip(batch.index.tolist(), batch.labels.tolist(), strict=True)
    ):
        predicted, radius = int(certificate.predicted[i]), float(certificate.radius[i])
        decided = job.plan.decide_radius
        # The bounds are stored in full, because a radius near certainty depends on their last
        # digits.
        rows.append(
            CertificateRow(
                index=index,
                model=job.name,
                attack=measurement,
                alpha=job.key(index)[-1],
                label=label,
                predicted=predicted,
                correct=predicted == label,
                radius=decided
                if decided is not None and round_down(radius) < decided <= radius
                else round_down(radius),
                lower=float(certificate.lower[i]),
                upper=float(certificate.upper[i]) if job.plan.two_sided else None,
                samples=int(certificate.samples[i]),
                top=int(certificate.top[i]),
                answer=answers[i],
                sigma=float(job.plan.sigma),
                accurate=None if accurate is None else int(accurate[i]),
                gap=None if gaps is None else round(gaps[i], 6),
            )
        )
    return rows


def round_down(value: float) -> float:
    """Six decimals, never rounded up."""
    steps = math.floor(value * 1e6)
    return steps / 1e6 if steps / 1e6 <= value else (steps - 1) / 1e6


def results(rows: Iterable[Row], settings: SamplingSettings) -> list[Result]:
    """ACR, certified accuracy at steps of 0.25, abstentions, clean accuracy and samples of every
    model and alpha.

    Where a radius was to be decided, only the certified accuracy there and the samples.
    """
    return [
        Result.of(model, metric, estimate, alpha=alpha, sigma=own[0].sigma)
        for (model, alpha), own in by_mixture(rows).items()
        for metric, estimate in _metrics(own, settings).items()
    ]


def theorem_results(rows: Iterable[Row], settings: SamplingSettings) -> tuple[TheoremResult, ...]:
    """ACR and certified accuracy of every mixture by each of THEOREMS, from the bounds of the same
    votes.

    None where a radius was to be decided, which holds for our radius only.
    """
    if settings.decide_radius is not None:
        return ()
    return tuple(
        TheoremResult(
            **vars(estimate),
            model=model,
            metric=metric,
            alpha=alpha,
            sigma=own[0].sigma,
            theorem=theorem,
        )
        for (model, alpha), own in by_mixture(rows).items()
        if alpha is not None
        for theorem in THEOREMS
        for metric, estimate in _radius_metrics(
            own, SmoothedBase.of_rows(own).radius(alpha, theorem), settings
        ).items()
    )


def _metrics(
    rows: Sequence[CertificateRow], settings: SamplingSettings
) -> dict[str, stats.Estimate]:
    radius, decided = (
        np.array([row.radius if row.correct else 0.0 for row in rows]),
        settings.decide_radius,
    )
    if decided is not None:
        metrics = {f"certified@{format.two_decimals(decided)}": stats.share(radius >= decided)}
    else:
        metrics = _radius_metrics(rows, radius, settings)
        metrics["abstained"] = stats.share(row.predicted == ABSTAIN for row in rows)
        metrics["clean"] = stats.share(row.answer == row.label for row in rows)
        if rows[0].alpha is not None:
            # By estimated probabilities, without abstaining: the accuracy that alpha is selected
            # for.
            metrics["clean-estimate"] = stats.share(
                SmoothedBase.of_rows(rows).correct(rows[0].alpha)
            )
    metrics["samples"] = clip(
        stats.mean([float(row.samples) for row in rows]), 2.0 * settings.samples
    )
    return metrics


def _radius_metrics(
    rows: Sequence[CertificateRow], radius: Floats, settings: SamplingSettings
) -> dict[str, stats.Estimate]:
    """ACR and certified accuracy from the radii, which are 0 where the certified class is wrong."""
    # The largest radius that so many samples can certify; few certify nothing.
    spent = (
        min(settings.failure / SMALLEST_UNIFORM, 0.5) if settings.randomized else settings.failure
    )
    largest = max(rows[0].sigma * float(ndtri(spent ** (1 / settings.samples))), 0.0)
    metrics = {"acr": clip(stats.mean(radius.tolist()), largest)}
    for step in range(max(int(largest / RADIUS_STEP), 1) + 1):
        count = int((radius >= max(step * RADIUS_STEP, SMALLEST_RADIUS)).sum())
        metrics[f"certified@{format.two_decimals(step * RADIUS_STEP)}"] = stats.clopper_pearson(
            count, len(rows)
        )
    return metrics


def frontier_points(
    jobs: Sequence[CertificationJob], rows: Sequence[Row]
) -> tuple[FrontierPoint, ...]:
    """The best mixture at every radius [Bai2024, Figures 6, 7], or at the radius that was to be
    decided."""
    mixtures = [
        (SmoothedBase.of_rows(certificates(rows, job.name)), job.plan.alpha) for job in jobs
    ]
    longest = max(float(base.radius(alpha).max(initial=0.0)) for base, alpha in mixtures)
    decided = jobs[0].plan.decide_radius
    radii = (
        np.arange(int(longest / RADIUS_STEP) + 1) * RADIUS_STEP
        if decided is None
        else np.array([decided])
    )
    points = []
    for radius, best in zip(radii.tolist(), frontier(mixtures, radii)[1], strict=True):
        base, alpha = mixtures[best]
        certified = stats.share(base.radius(alpha) >= max(radius, SMALLEST_RADIUS))
        points.append(
            FrontierPoint(
                radius=radius,
                **asdict(certified),
                model=jobs[best].name,
                alpha=alpha,
                sigma=base.sigma,
            )
        )
    return tuple(points)


def clip(estimate: stats.Estimate, highest: float) -> stats.Estimate:
    """The estimate with its interval cut to [0, highest]."""
    return stats.Estimate(
        estimate.value, max(estimate.low, 0.0), min(estimate.high, highest), estimate.n
    )


@dataclass(frozen=True)
class CleanTarget:
    """A clean accuracy for all mixtures: each gets the largest alpha that reaches it on `images`
    (an estimate).

    The radii are valid whatever alpha is selected, because the bound of a base holds for every
    alpha at once; only the clean accuracy would be overstated on the images that selected alpha.
    """

    clean: float
    images: Dataset
    samples: int = 1000  # votes per image; an estimate is enough

    def __post_init__(self) -> None:
        checks.within("clean", self.clean, 0, 1)

    def describe(self) -> dict[str, Any]:
        """Identity for `run.toml`."""
        return {
            "clean": self.clean,
            "samples": self.samples,
            "count": len(self.images),
            "digest": self.images.digest(),
        }

    def select(
        self, jobs: Sequence[CertificationJob], run: Run, conditions: CertificationConditions
    ) -> list[CertificationJob]:
        """The jobs with their alphas; a base that cannot reach the accuracy is excluded."""
        for job in jobs:
            # Only the class, its votes and the accurate model's class are needed, no radius.
            plan = replace(
                job.plan,
                samples=min(job.plan.samples, max(self.samples, job.plan.n0)),
                alpha=1.0,
                tolerance=None,
                decide_radius=None,
                two_sided=False,
            )
            certify_images(replace(job, plan=plan), self.images, run, conditions, SELECT_ALPHA)
        rows = run.finish()
        bases = [SmoothedBase.of_rows(certificates(rows, job.name, SELECT_ALPHA)) for job in jobs]
        best = [base.best_clean_accuracy() for base in bases]
        checks.require(
            max(best) >= self.clean,
            "clean",
            f"be reachable with alpha in [0.5, 1], at most {max(best):g}",
            self.clean,
        )
        return [
            replace(job, plan=replace(job.plan, alpha=base.largest_alpha(self.clean)))
            for job, base, reached in zip(jobs, bases, best, strict=True)
            if reached >= self.clean
        ]

    def selected(
        self, jobs: Sequence[CertificationJob], rows: Sequence[Row]
    ) -> tuple[SelectedAlpha, ...]:
        """The alpha of each mixture, and its clean accuracy on the images that selected it."""
        bases = [SmoothedBase.of_rows(certificates(rows, job.name, SELECT_ALPHA)) for job in jobs]
        estimates = [
            stats.share(base.correct(job.plan.alpha)) for job, base in zip(jobs, bases, strict=True)
        ]
        return tuple(
            SelectedAlpha(
                model=job.name,
                alpha=job.plan.alpha,
                sigma=job.plan.sigma,
                target=self.clean,
                clean_estimate=e.value,
                low=e.low,
                high=e.high,
                n=e.n,
            )
            for job, e in zip(jobs, estimates, strict=True)
        )

    def excluded(
        self, jobs: Sequence[CertificationJob], rows: Sequence[Row]
    ) -> tuple[ExcludedModel, ...]:
        """Models that cannot reach the accuracy, and the best that they reach."""
        names = dict.fromkeys(row.model for row in certificates(rows, measurement=SELECT_ALPHA))
        bases = {
            name: SmoothedBase.of_rows(certificates(rows, name, SELECT_ALPHA))
            for name in names
            if name not in {job.name for job in jobs}
        }
        return tuple(
            ExcludedModel(
                model=name, target=self.clean, most=base.best_clean_accuracy(), n=len(base.labels)
            )
            for name, base in bases.items()
        )


def other_images(split: Dataset, images: Dataset, at_least: int = 100) -> Dataset:
    """As many images of a split as are certified, or `at_least`, evenly spread over those that are
    not certified."""
    rest = split.take(~torch.isin(split.index, images.index))
    checks.require(
        len(rest) > 0, "count", "leave images of the split to select alpha on", len(images)
    )
    count = min(len(rest), max(len(images), at_least))
    return rest.take(torch.arange(count) * len(rest) // count)
