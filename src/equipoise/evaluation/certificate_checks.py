"""Attacks on every certified image inside its radius."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.certification import (
    ABSTAIN,
    AveragedClassifier,
    SamplerOptions,
    SmoothingPlan,
    predict,
)
from equipoise.core import device, geometry, rng, stats
from equipoise.core.records import Run
from equipoise.core.results import Result
from equipoise.core.rows import CertificateAttackRow, CertificateRow, Row, by_mixture, certificates
from equipoise.core.threat import Threat
from equipoise.data import Dataset, pixels
from equipoise.evaluation.certificates import CertificationConditions, CertificationJob
from equipoise.evaluation.measure import measure_batches
from equipoise.mixing import gate_of, mix

_COPIES = 32  # noises that the attack averages over
_FALSE_ALARM = 0.001  # probability that valid certificates show more breaks than allowed


@dataclass(frozen=True)
class CertificateAttack:
    """An attack on certified images, which confirms every apparent break with fresh samples.

    More broken certificates than allowed indicate a bug.
    An image counts as broken when PREDICT, on `plan.samples` fresh samples, certainly returns
    another class at the attacked image. Then either the certificate or PREDICT was wrong, which
    happens to each image that was to be certified with at most twice the failure probability.
    Abstentions belong to that number: of the images that *are* certified a larger share may be
    wrong, as where no class has a majority.
    """

    attack: Callable[..., Tensor]
    attack_name: str

    @property
    def name(self) -> str:
        """The name of its rows."""
        return f"break-{self.attack_name}"

    def measure(
        self,
        job: CertificationJob,
        data: Dataset,
        rows: Sequence[Row],
        run: Run,
        conditions: CertificationConditions,
    ) -> None:
        """Append a :class:`CertificateAttackRow` per certified image, at every alpha."""
        for own in job.per_alpha:
            self._measure(own, data, rows, run, conditions)

    def _measure(
        self,
        job: CertificationJob,
        data: Dataset,
        rows: Sequence[Row],
        run: Run,
        conditions: CertificationConditions,
    ) -> None:
        certified = {
            row.index: row
            for row in certificates(rows)
            if row.key == job.key(row.index) and row.predicted != ABSTAIN
        }
        target = _AttackTarget(job, conditions.seed, data.image_shape).to(conditions.device)
        broken = 0

        def compute(image: Dataset) -> list[CertificateAttackRow]:
            nonlocal broken
            row = self._attack(job, target, image, certified[int(image.index)], conditions)
            broken += not row.correct
            return [row]

        images = data.take(
            torch.tensor([index in certified for index in data.index.tolist()], dtype=torch.bool)
        )
        measure_batches(
            run,
            images,
            keys=lambda index: [job.key(index, self.name)],
            compute=compute,
            batch_size=1,
            title=f"{job.name}, {self.name}",
            status=lambda: {"broken": broken},
        )

    def _attack(
        self,
        job: CertificationJob,
        target: nn.Module,
        image: Dataset,
        row: CertificateRow,
        conditions: CertificationConditions,
    ) -> CertificateAttackRow:
        x = pixels(image.images.to(conditions.device))
        y = torch.tensor([row.predicted], device=conditions.device)
        stream = rng.stream(conditions.seed, self.name, image.index.to(conditions.device))
        with device.autocast(conditions.precision, conditions.device):
            x_adv = self.attack(
                target, x, y, threat=Threat("l2", row.radius), stream=stream.at("attack")
            )
            if job.plan.sound:
                # Integer levels, rounded towards the image, so that the ball is not left.
                x_adv = x + torch.trunc((x_adv - x) * 255) / 255
            predicted = row.predicted
            apparent = _predict(job, x_adv, conditions, stream, job.plan.n0) != predicted
            if apparent:
                predicted = _predict(job, x_adv, conditions, stream.at("confirm"), job.plan.samples)
        return CertificateAttackRow(
            index=row.index,
            model=row.model,
            alpha=row.alpha,
            attack=self.name,
            label=row.label,
            radius=row.radius,
            predicted=predicted,
            correct=predicted in (ABSTAIN, row.predicted),
            apparent=apparent,
            distance=round(float(geometry.size(x_adv - x, "l2")), 6),
        )

    def results(self, rows: Sequence[Row], plan: SmoothingPlan) -> list[Result]:
        """The share of broken certificates of every model and alpha, and how many would be no
        surprise."""
        results = []
        attacked = [
            row for row in rows if isinstance(row, CertificateAttackRow) and row.attack == self.name
        ]
        groups = by_mixture(rows)
        models = Counter(model for model, _ in groups)
        for (model, alpha), tried in groups.items():
            own = [not row.correct for row in attacked if (row.model, row.alpha) == (model, alpha)]
            if own:
                allowed = stats.binomial_upper_quantile(
                    _FALSE_ALARM, len(tried), min(2 * plan.failure, 1.0)
                )
                results.append(
                    Result.of(
                        model,
                        f"broken-{self.attack_name}",
                        stats.share(own),
                        allowed=allowed,
                        alpha=alpha if models[model] > 1 else None,
                    )
                )
        return results


def _predict(
    job: CertificationJob,
    x: Tensor,
    conditions: CertificationConditions,
    stream: rng.Stream,
    samples: int,
) -> int:
    plan = replace(job.plan, samples=samples, tolerance=None, decide_radius=None)
    options = SamplerOptions(conditions.batch_size)
    return int(
        predict(job.model, x, plan=plan, stream=stream, accurate=job.accurate, options=options)
    )


class _AttackTarget(nn.Module):
    """The differentiable classifier under attack: the averaged one, mixed with the accurate one
    where there is one."""

    def __init__(self, job: CertificationJob, seed: int, image_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.average = AveragedClassifier(
            job.model, job.plan.sigma, image_shape, copies=_COPIES, seed=seed
        )
        self.accurate = job.accurate
        self.register_buffer("gate", gate_of(job.plan.alpha))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, K) log-probabilities; the accurate side is soft here, so that it has
        gradients."""
        log_p: Tensor = self.average(x)
        if self.accurate is None:
            return log_p
        return mix(
            F.log_softmax(self.accurate(x), dim=1), log_p, self.get_buffer("gate").to(log_p.dtype)
        )
