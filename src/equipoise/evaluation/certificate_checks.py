"""Attacks on smoothed classifiers: on every certified image inside its radius, and diagnostics of the confidence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.attacks import make_attack
from equipoise.certification import ABSTAIN, AveragedClassifier, SamplerOptions, SmoothingPlan, diagnostics, predict
from equipoise.core import device, geometry, rng, stats
from equipoise.core.records import Run
from equipoise.core.results import Result
from equipoise.core.rows import MIXING_RATIO, CertificateAttackRow, CertificateRow, ConfidenceRow, MixingRatioRow, Row
from equipoise.core.threat import Threat
from equipoise.data import Dataset, pixels
from equipoise.evaluation.certificates import CertificationConditions, CertificationJob, certificates, clip
from equipoise.evaluation.measure import measure_batches
from equipoise.mixing import gate_of, mix

_COPIES = 32  # noises that the attack averages over
_FALSE_ALARM = 0.001  # probability that valid certificates show more breaks than allowed


@dataclass(frozen=True)
class CertificateAttack:
    """An attack on certified images, which confirms every apparent break with fresh samples.

    More broken certificates than allowed indicate a bug.
    An image counts as broken when PREDICT, on `plan.samples` fresh samples, certainly returns another class at the
    attacked image. Then either the certificate or PREDICT was wrong, which happens to each image that was to be
    certified with at most twice the failure probability. Abstentions belong to that number: of the images that *are*
    certified a larger share may be wrong, as where no class has a majority.
    """

    attack: Callable[..., Tensor]
    attack_name: str

    @property
    def name(self) -> str:
        """The name of its rows."""
        return f"break-{self.attack_name}"

    def measure(self, job: CertificationJob, data: Dataset, rows: Sequence[Row], run: Run,
                conditions: CertificationConditions) -> None:
        """Append a :class:`CertificateAttackRow` per certified image."""
        certified = {row.index: row for row in certificates(rows, job.name) if row.predicted != ABSTAIN}
        target = _AttackTarget(job, conditions.seed, data.image_shape).to(conditions.device)
        broken = 0

        def compute(image: Dataset) -> list[CertificateAttackRow]:
            nonlocal broken
            row = self._attack(job, target, image, certified[int(image.index)], conditions)
            broken += not row.correct
            return [row]

        images = data.take(torch.tensor([index in certified for index in data.index.tolist()], dtype=torch.bool))
        measure_batches(run, images, keys=lambda index: [job.key(index, self.name)], compute=compute, batch_size=1,
                        title=f"{job.name}, {self.name}", status=lambda: {"broken": broken})

    def _attack(self, job: CertificationJob, target: nn.Module, image: Dataset, row: CertificateRow,
                conditions: CertificationConditions) -> CertificateAttackRow:
        x = pixels(image.images.to(conditions.device))
        y = torch.tensor([row.predicted], device=conditions.device)
        stream = rng.stream(conditions.seed, self.name, image.index.to(conditions.device))
        with device.autocast(conditions.precision, conditions.device):
            x_adv = self.attack(target, x, y, threat=Threat("l2", row.radius), stream=stream.at("attack"))
            if job.plan.sound:
                # Integer levels, rounded towards the image, so that the ball is not left.
                x_adv = x + torch.trunc((x_adv - x) * 255) / 255
            predicted = row.predicted
            apparent = _predict(job, x_adv, conditions, stream, job.plan.n0) != predicted
            if apparent:
                predicted = _predict(job, x_adv, conditions, stream.at("confirm"), job.plan.samples)
        return CertificateAttackRow(
            index=row.index, model=row.model, alpha=row.alpha, attack=self.name, label=row.label, radius=row.radius,
            predicted=predicted, correct=predicted in (ABSTAIN, row.predicted), apparent=apparent,
            distance=round(float(geometry.size(x_adv - x, "l2")), 6))

    def results(self, rows: Sequence[Row], plan: SmoothingPlan) -> list[Result]:
        """The share of broken certificates of every model, and how many would be no surprise."""
        results = []
        attacked = [row for row in rows if isinstance(row, CertificateAttackRow) and row.attack == self.name]
        for model in dict.fromkeys(row.model for row in attacked):
            broken = stats.share(not row.correct for row in attacked if row.model == model)
            allowed = stats.binomial_upper_quantile(
                _FALSE_ALARM, len(certificates(rows, model)), min(2 * plan.failure, 1.0))
            results.append(Result.of(model, f"broken-{self.attack_name}", broken, allowed=allowed))
        return results


def _predict(job: CertificationJob, x: Tensor, conditions: CertificationConditions, stream: rng.Stream,
             samples: int) -> int:
    plan = replace(job.plan, samples=samples, tolerance=None, decide_radius=None)
    options = SamplerOptions(conditions.batch_size)
    return int(predict(job.model, x, plan=plan, stream=stream, accurate=job.accurate, options=options))


class _AttackTarget(nn.Module):
    """The differentiable classifier under attack: the averaged one, mixed with the accurate one where there is one."""

    def __init__(self, job: CertificationJob, seed: int, image_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.average = AveragedClassifier(job.model, job.plan.sigma, image_shape, copies=_COPIES, seed=seed)
        self.accurate = job.accurate
        self.register_buffer("gate", gate_of(job.plan.alpha))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, K) log-probabilities; the accurate side is soft here, so that it has gradients."""
        log_p: Tensor = self.average(x)
        if self.accurate is None:
            return log_p
        return mix(F.log_softmax(self.accurate(x), dim=1), log_p, self.get_buffer("gate").to(log_p.dtype))


@dataclass(frozen=True)
class Diagnosis:
    """Vote shares at adversarial images of growing radius, and equal-confidence mixing ratios [SmoothMix].

    The shares are estimates from a few hundred votes. The ratio is taken towards an adversarial image within a very
    wide ball; images that are misclassified from the start, or never, have none.
    """

    at: tuple[float, ...] = (0.0, 0.25, 0.5, 1.0, 2.0)  # ℓ2 radii of the attacks
    far: float = 8.0  # ℓ2 radius of the ball for the mixing ratio
    steps: int = 50  # of the attack in that ball
    samples: int = 200  # votes per image
    copies: int = 8  # noises that the attacks average over

    def measure(self, job: CertificationJob, data: Dataset, rows: Sequence[Row], run: Run,
                conditions: CertificationConditions) -> None:
        """Append a :class:`ConfidenceRow` per image and radius, and a :class:`MixingRatioRow` per image."""
        averaged = AveragedClassifier(job.model, job.plan.sigma, data.image_shape, copies=self.copies,
                                      seed=conditions.seed).to(conditions.device)
        names = [*map(_name, self.at), MIXING_RATIO]
        measure_batches(run, data, keys=lambda index: [(index, job.name, name, None) for name in names],
                        compute=lambda batch: self._rows(job, averaged, batch, conditions), batch_size=16,
                        title=f"{job.name}, diagnose")

    def _rows(self, job: CertificationJob, averaged: AveragedClassifier, batch: Dataset,
              conditions: CertificationConditions) -> list[Row]:
        x, y = pixels(batch.images.to(conditions.device)), batch.labels.to(conditions.device)
        stream = rng.stream(conditions.seed, "diagnose", batch.index.to(conditions.device))
        samples = max(self.samples, job.plan.n0)
        plan = replace(job.plan, samples=samples, tolerance=None, decide_radius=None, sound=False)
        options = SamplerOptions(conditions.batch_size)
        own, shares = batch.labels.unsqueeze(1), {}
        with device.autocast(conditions.precision, conditions.device):
            for radius in self.at:
                x_adv = x if radius == 0 else make_attack("pgd")(averaged, x, y, threat=Threat("l2", radius),
                                                                 stream=stream.at("attack", str(radius)))
                shares[radius] = diagnostics.vote_shares(job.model, x_adv, plan, stream, options)
            x_adv = make_attack("pgd", steps=self.steps)(averaged, x, y, threat=Threat("l2", self.far),
                                                         stream=stream.at("far"))
            ratios = diagnostics.mixing_ratios(job.model, x, x_adv, y, plan=plan, stream=stream, options=options)
        rows: list[Row] = []
        for i, (index, label) in enumerate(zip(batch.index.tolist(), batch.labels.tolist(), strict=True)):
            for radius, share in shares.items():
                true, off = float(share[i, label]), float(share.scatter(1, own, -1.0)[i].max())
                rows.append(ConfidenceRow(index=index, model=job.name, attack=_name(radius), label=label,
                                          true=round(true, 4), off=round(off, 4), correct=true > off))
            ratio = float(ratios[i])
            rows.append(MixingRatioRow(index=index, model=job.name, attack=MIXING_RATIO, label=label,
                                       correct=ratio != 0, ratio=round(ratio, 4) if ratio > 0 else None))
        return rows

    def results(self, rows: Sequence[Row], plan: SmoothingPlan) -> list[Result]:
        """Mean confidences per radius [SmoothMix, Table 1] and the mean mixing ratio [Figure 3]."""
        results = []
        for model in dict.fromkeys(row.model for row in rows):
            own = [row for row in rows if row.model == model]
            values: dict[str, list[float]] = {}
            for radius in self.at:
                confidences = [row for row in own if isinstance(row, ConfidenceRow) and row.attack == _name(radius)]
                values[f"true@{radius:.2f}"] = [row.true for row in confidences]
                values[f"off@{radius:.2f}"] = [row.off for row in confidences]
            values["ratio"] = [row.ratio for row in own if isinstance(row, MixingRatioRow) and row.ratio is not None]
            results += [Result.of(model, metric, clip(stats.mean(numbers), 1.0))
                        for metric, numbers in values.items() if numbers]
        return results


def _name(radius: float) -> str:
    return f"confidence@{radius:.2f}"
