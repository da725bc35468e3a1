"""Confidences of smoothed classifiers at adversarial images, as rows of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from equipoise.certification import AveragedClassifier, SamplerOptions, SmoothingPlan, diagnostics
from equipoise.core import device, rng, stats
from equipoise.core.records import Run
from equipoise.core.results import Result
from equipoise.core.rows import MIXING_RATIO, ConfidenceRow, MixingRatioRow, Row
from equipoise.data import Dataset, pixels
from equipoise.evaluation.certificates import CertificationConditions, CertificationJob, clip
from equipoise.evaluation.measure import measure_batches


@dataclass(frozen=True)
class Diagnosis:
    """Vote shares at adversarial images of growing radius, and equal-confidence mixing ratios
    [SmoothMix].

    The shares are estimates from a few hundred votes. Attacks move every image, misclassified ones
    too. The ratio is taken towards an adversarial image within a very wide ball; images that are
    misclassified from the start, or never, have no ratio.
    """

    name: ClassVar[str] = "diagnose"
    at: tuple[float, ...] = (0.0, 0.25, 0.5, 1.0, 2.0)  # ℓ2 radii of the attacks
    far: float = 8.0  # ℓ2 radius of the ball for the mixing ratio
    steps: int = 50  # of the attack in that ball
    samples: int = 200  # votes per image
    copies: int = 8  # noises that the attacks average over

    def measure(
        self,
        job: CertificationJob,
        data: Dataset,
        rows: Sequence[Row],
        run: Run,
        conditions: CertificationConditions,
    ) -> None:
        """Append a :class:`ConfidenceRow` per image and radius or ratio, and a
        :class:`MixingRatioRow` per image."""
        averaged = AveragedClassifier(
            job.model, job.plan.sigma, data.image_shape, copies=self.copies, seed=conditions.seed
        ).to(conditions.device)
        names = [*map(_at, self.at), MIXING_RATIO]
        measure_batches(
            run,
            data,
            keys=lambda index: [(index, job.name, name, None) for name in names],
            compute=lambda batch: self._rows(job, averaged, batch, conditions),
            batch_size=16,
            title=f"{job.name}, {self.name}",
        )

    def _rows(
        self,
        job: CertificationJob,
        averaged: AveragedClassifier,
        batch: Dataset,
        conditions: CertificationConditions,
    ) -> list[Row]:
        x, y = pixels(batch.images.to(conditions.device)), batch.labels.to(conditions.device)
        stream = rng.stream(conditions.seed, "diagnose", batch.index.to(conditions.device))
        samples = max(self.samples, job.plan.n0)
        plan = replace(job.plan, samples=samples, tolerance=None, decide_radius=None, sound=False)
        options = SamplerOptions(conditions.batch_size)
        shares: dict[str, Tensor] = {}
        with device.autocast(conditions.precision, conditions.device):
            for radius in self.at:
                x_adv = x if radius == 0 else diagnostics.attack_in_ball(averaged, x, y, radius)
                shares[_at(radius)] = diagnostics.vote_shares(
                    job.model, x_adv, plan, stream, options
                )
            x_adv = diagnostics.attack_in_ball(averaged, x, y, self.far, self.steps)
            ratios = diagnostics.mixing_ratios(
                job.model, x, x_adv, y, plan=plan, stream=stream, options=options
            )
        rows: list[Row] = []
        off_class = {
            name: share.scatter(1, batch.labels.unsqueeze(1), -1.0).amax(dim=1)
            for name, share in shares.items()
        }
        for i, (index, label) in enumerate(
            zip(batch.index.tolist(), batch.labels.tolist(), strict=True)
        ):
            for name, share in shares.items():
                true, off = float(share[i, label]), float(off_class[name][i])
                rows.append(
                    ConfidenceRow(
                        index=index,
                        model=job.name,
                        attack=name,
                        label=label,
                        true=round(true, 4),
                        off=round(off, 4),
                        correct=true > off,
                    )
                )
            ratio = float(ratios[i])
            rows.append(
                MixingRatioRow(
                    index=index,
                    model=job.name,
                    attack=MIXING_RATIO,
                    label=label,
                    correct=ratio != 0,
                    ratio=round(ratio, 4) if ratio > 0 else None,
                )
            )
        return rows

    def results(self, rows: Sequence[Row], plan: SmoothingPlan) -> list[Result]:
        """Mean confidences per radius [SmoothMix, Table 1], and mean ratio [Figure 3]."""
        results = []
        for model in dict.fromkeys(row.model for row in rows):
            own = [row for row in rows if row.model == model]
            values: dict[str, list[float]] = {}
            for radius in self.at:
                confidences = [
                    row
                    for row in own
                    if isinstance(row, ConfidenceRow) and row.attack == _at(radius)
                ]
                values[f"true@{radius:.2f}"] = [row.true for row in confidences]
                values[f"off@{radius:.2f}"] = [row.off for row in confidences]
            values["ratio"] = [
                row.ratio
                for row in own
                if isinstance(row, MixingRatioRow) and row.ratio is not None
            ]
            results += [
                Result.of(model, metric, clip(stats.mean(numbers), 1.0))
                for metric, numbers in values.items()
                if numbers
            ]
        return results


def _at(radius: float) -> str:
    # Not `confidence@`, as in older folders, whose attacks left misclassified images in place: rows
    # must not be mixed.
    return f"confidence-at@{radius:.2f}"
