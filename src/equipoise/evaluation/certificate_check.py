"""Attack every certified image inside its own radius: a certificate that breaks more often than promised is a bug."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from scipy.stats import binom
from torch import Tensor, nn

from equipoise.certification import ABSTAIN, Averaged, Engine, predict
from equipoise.core import device, geometry, progress, rng, stats
from equipoise.core.records import Row, Run, key_of
from equipoise.core.threat import Threat
from equipoise.data import Dataset, pixels
from equipoise.evaluation.certified import CertificationConditions, CertificationJob
from equipoise.evaluation.certified_summary import ATTACK
from equipoise.mixing import gate_of, mix

COPIES = 32  # noises that the attack averages over
_ALLOWED = 0.001  # chance with which an honest certificate would show more breaks than allowed


@dataclass(frozen=True)
class CrossCheck:
    """Attack, then confirm every apparent break with fresh samples.

    An image counts as broken when PREDICT, on `plan.samples` fresh samples, is sure of another class at
    the attacked image. Either the certificate or PREDICT was wrong then, which happens to each image that
    was to be certified with at most twice the failure probability. Abstentions belong to that number: of the
    images that *are* certified a larger share may be wrong, as where no class has a majority.
    """

    attack: Callable[..., Tensor]
    attack_name: str

    @property
    def name(self) -> str:
        """As in its rows."""
        return f"break-{self.attack_name}"

    def __call__(self, subject: CertificationJob, data: Dataset, rows: Sequence[Row], run: Run, terms: CertificationConditions) -> None:
        """One row per certified image; every process takes its share of them."""
        at = {int(index): place for place, index in enumerate(data.index.tolist())}
        held = [row for row in rows if row["attack"] == ATTACK and row["model"] == subject.name
                and row["predicted"] != ABSTAIN]
        target = _Target(subject, terms, data.image_shape).to(terms.device)
        broken = 0
        with progress.task(f"{subject.name}, {self.name}", total=len(held[run.world.rank :: run.world.size])) as task:
            for row in held[run.world.rank :: run.world.size]:
                if key_of({**row, "attack": self.name}) not in run.done:
                    found = self._attacked(subject, target, data.take(torch.tensor([at[row["index"]]])), row, terms)
                    run.append([found])
                    broken += not found["correct"]
                task.advance(1, broken=broken)

    def _attacked(self, subject: CertificationJob, target: nn.Module, image: Dataset, row: Row, terms: CertificationConditions) -> Row:
        x = pixels(image.images.to(terms.device))
        y = torch.tensor([row["predicted"]], device=terms.device)
        chance = rng.stream(terms.seed, self.name, image.index.to(terms.device))
        threat = Threat("l2", row["radius"])
        with device.precision(terms.precision, terms.device):
            x_adv = self.attack(target, x, y, threat=threat, stream=chance.at("attack"))
            if terms.plan.sound:
                # Whole levels, rounded towards the image, so that the ball is not left.
                x_adv = x + torch.trunc((x_adv - x) * 255) / 255
            said = int(y)
            apparent = int(self._vote(subject, x_adv, terms, chance, terms.plan.n0)) != said
            if apparent:
                said = int(self._vote(subject, x_adv, terms, chance.at("confirm"), terms.plan.samples))
        wrong = said not in (ABSTAIN, int(y))
        told: Row = {key: row[key] for key in ("index", "model", "label", "radius", "alpha") if key in row}
        return {**told, "attack": self.name, "predicted": said, "correct": not wrong, "apparent": apparent,
                "distance": round(float(geometry.size(x_adv - x, "l2")), 6)}

    def _vote(self, subject: CertificationJob, x: Tensor, terms: CertificationConditions, chance: rng.Stream, samples: int) -> Tensor:
        plan = replace(terms.plan, samples=samples, tolerance=None, decide_radius=None)
        return predict(subject.model, x, plan=plan, stream=chance, accurate=subject.accurate,
                       engine=Engine(terms.batch_size))

    def results(self, rows: Sequence[Row], terms: CertificationConditions) -> list[Row]:
        """The share of broken certificates, and how many would be a surprise."""
        found = []
        for model in dict.fromkeys(row["model"] for row in rows if row["attack"] == self.name):
            own = [row for row in rows if row["attack"] == self.name and row["model"] == model]
            count = sum(not row["correct"] for row in own)
            e = stats.clopper_pearson(count, len(own))
            tried = sum(row["attack"] == ATTACK and row["model"] == model for row in rows)
            allowed = int(binom.isf(_ALLOWED, tried, min(2 * terms.plan.failure, 1.0)))
            found.append({"model": model, "metric": f"broken-{self.attack_name}", "value": e.value, "low": e.low,
                          "high": e.high, "n": e.n, "broken": count, "allowed": allowed, "sound": count <= allowed})
        return found


class _Target(nn.Module):
    """What the attack sees: the average over fixed noises, mixed with the accurate classifier where there is one."""

    def __init__(self, subject: CertificationJob, terms: CertificationConditions, image_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.average = Averaged(subject.model, terms.plan.sigma, image_shape, copies=COPIES, seed=terms.seed)
        self.accurate = subject.accurate
        self.register_buffer("gate", gate_of(terms.plan.alpha))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, K) log-probabilities; the accurate side is soft here, so that it has gradients."""
        log_p: Tensor = self.average(x)
        if self.accurate is None:
            return log_p
        return mix(F.log_softmax(self.accurate(x), dim=1), log_p, self.get_buffer("gate").to(log_p.dtype))
