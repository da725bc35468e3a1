"""How far certified mixtures are from their certificates: an attack whose successes are confirmed
by votes.

The classifier that is certified has no gradient: infinitely many noisy copies vote with their
classes. So a stand-in is attacked, which averages the probabilities of a few fixed copies, with a
soft accurate side. The perturbation that was found is then tried on the certified classifier
itself: what counts is the first point on the ray through it at which PREDICT, on fresh noise,
returns a wrong class with confidence. The norm of that point bounds the robust radius of this very
classifier from above, with probability 1 − failure per image; where PREDICT abstains, nothing is
claimed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.attacks import Attack, MinimumNorm
from equipoise.certification import ABSTAIN, SamplerOptions, SmoothingPlan, predict
from equipoise.core import device, geometry, rng
from equipoise.core.ascent import ascend, last
from equipoise.core.modes import inference
from equipoise.core.records import Run
from equipoise.core.rows import AttackRow
from equipoise.core.threat import Threat
from equipoise.data import Dataset, pixels
from equipoise.evaluation import Conditions
from equipoise.evaluation.measure import measure_batches
from equipoise.mixing import MixedClassifier
from equipoise.models import RandomlySmoothedClassifier
from equipoise.studies.mixing_classifiers_models import SmoothedModel

CONFIRMED = "confirmed"  # name of the attack in rows
# Points that are tried after the image itself: on the ray, so many sigmas beyond the perturbation
# of the stand-in.
OFFSETS = (0.0, 0.03, 0.06, 0.1, 0.15, 0.25, 0.4, 0.7)
FIRST_STEP = 0.01  # sigmas, where the stand-in misclassifies the image itself


@dataclass(frozen=True)
class ConfirmedAttack:
    """The attack on the stand-in and how its successes are confirmed; the defaults are those of the
    full size."""

    attack: Attack = field(default_factory=lambda: MinimumNorm(steps=20, targets=3, restarts=6))
    copies: int = 32  # noises of the stand-in
    samples: int = 1000  # votes at every point that is tried
    failure: float = 0.001  # per image, shared by all points
    max_sigmas: float = 4.5  # largest radius, in units of sigma

    def describe(self) -> dict[str, Any]:
        """Identity for `run.toml`."""
        return {
            "copies": self.copies,
            "samples": self.samples,
            "failure": self.failure,
            "max_sigmas": self.max_sigmas,
            "offsets": list(OFFSETS),
            **self.attack.describe(),
        }

    def max_radius(self, sigma: float) -> float:
        """The largest radius that is searched."""
        return self.max_sigmas * sigma

    def measure(
        self,
        base: SmoothedModel,
        accurate: nn.Module,
        alpha: float,
        data: Dataset,
        run: Run,
        conditions: Conditions,
    ) -> None:
        """Append an :class:`AttackRow` per image, with the norm of the smallest confirmed
        perturbation."""
        stand_in = self.stand_in(base, accurate, alpha).to(conditions.device).eval()
        broken = total = 0

        def compute(batch: Dataset) -> list[AttackRow]:
            nonlocal broken, total
            rows = self._rows(base, accurate, alpha, stand_in, batch, conditions)
            broken, total = broken + sum(not row.correct for row in rows), total + len(rows)
            return rows

        measure_batches(
            run,
            data,
            keys=lambda index: [(index, base.name, CONFIRMED, alpha)],
            compute=compute,
            batch_size=conditions.batch_size,
            title=f"{base.name} (alpha {alpha:g}), {CONFIRMED}",
            status=lambda: {"broken": f"{broken}/{total}"},
        )

    def stand_in(self, base: SmoothedModel, accurate: nn.Module, alpha: float) -> nn.Module:
        """The differentiable classifier that is attacked."""
        smoothed = RandomlySmoothedClassifier(base.model, base.sigma, self.copies)
        return smoothed if alpha == 1 else MixedClassifier(accurate, smoothed, alpha)

    def _rows(
        self,
        base: SmoothedModel,
        accurate: nn.Module,
        alpha: float,
        stand_in: nn.Module,
        batch: Dataset,
        conditions: Conditions,
    ) -> list[AttackRow]:
        x, y = pixels(batch.images.to(conditions.device)), batch.labels.to(conditions.device)
        stream = rng.stream(conditions.seed, CONFIRMED, batch.index.to(conditions.device))
        threat = Threat("l2", self.max_radius(base.sigma))
        plan = SmoothingPlan(
            base.sigma,
            alpha,
            samples=self.samples,
            n0=min(100, self.samples),
            failure=self.failure / (1 + len(OFFSETS)),
        )

        def search(rows: Tensor) -> Tensor:
            x_adv = self.attack(
                stand_in,
                x[rows],
                y[rows],
                threat=threat,
                stream=stream[rows].at("attack"),
                precision=conditions.precision,
            )
            return move_misclassified(stand_in, x[rows], x_adv, y[rows], FIRST_STEP * base.sigma)

        confirmed = confirm(
            base.model,
            None if alpha == 1 else accurate,
            x,
            search,
            y,
            plan=plan,
            stream=stream,
            largest=threat.eps,
            precision=conditions.precision,
        )
        return [
            AttackRow(
                index=index,
                model=base.name,
                attack=CONFIRMED,
                alpha=alpha,
                label=label,
                predicted=None if radius is None else predicted,
                correct=radius is None,
                radius=radius,
                max_radius=threat.eps,
            )
            for index, label, (radius, predicted) in zip(
                batch.index.tolist(), y.tolist(), confirmed, strict=True
            )
        ]


def move_misclassified(
    stand_in: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor, step: float
) -> Tensor:
    """`x_adv` with a first step of this length for images that did not move: the stand-in
    misclassifies them already.

    PREDICT does not, so that they are near the decision boundary, and the gradient gives the ray.
    """
    still = (x_adv == x).flatten(1).all(dim=1)
    if not still.any():
        return x_adv
    moved = x_adv.clone()
    with inference(stand_in):
        moved[still] = last(
            ascend(
                lambda at: F.cross_entropy(stand_in(at), y[still], reduction="none"),
                x[still],
                norm="l2",
                step_size=step,
                steps=1,
                project=lambda at: at.clamp(0, 1),
            )
        )
    return moved


def confirm(
    model: nn.Module,
    accurate: nn.Module | None,
    x: Tensor,
    search: Callable[[Tensor], Tensor],
    y: Tensor,
    *,
    plan: SmoothingPlan,
    stream: rng.Stream,
    largest: float,
    offsets: Sequence[float] = OFFSETS,
    precision: str = "auto",
) -> list[tuple[float | None, int]]:
    """For each of B images the norm of the first point on its ray that PREDICT misclassifies, and
    the class there.

    The first point of a ray is the image itself. `search` maps the positions of those that PREDICT
    does not misclassify there to the perturbed images of the stand-in, through which the rays go.
    None where no point of at most the `largest` norm is misclassified; PREDICT may err with
    probability `plan.failure` at each.
    """
    confirmed: list[tuple[float | None, int]] = [(None, ABSTAIN)] * len(x)

    def is_misclassified(rows: Tensor, points: Tensor, number: int) -> Tensor:
        """Ask about one point for each of these images, and note the misclassified ones."""
        sizes = geometry.size(points.double() - x[rows].double(), "l2")
        broken = sizes <= largest
        if broken.any():
            asked = broken.nonzero().squeeze(1)
            with device.autocast(precision, x.device):
                classes = predict(
                    model,
                    points[asked],
                    plan=plan,
                    stream=stream[rows[asked]].at("confirm", number),
                    options=SamplerOptions(),
                    accurate=accurate,
                ).to(x.device)
            broken[asked] = (classes != ABSTAIN) & (classes != y[rows[asked]])
            for row, predicted in zip(
                asked[broken[asked]].tolist(), classes[broken[asked]].tolist(), strict=True
            ):
                confirmed[int(rows[row])] = float(sizes[row]), predicted
        return broken

    left = torch.arange(len(x), device=x.device)
    left = left[~is_misclassified(left, x, 0)]
    if not len(left):
        return confirmed
    direction = search(left) - x[left]
    length = geometry.size(direction, "l2")
    for number, offset in enumerate(offsets, start=1):
        # Clamped towards the image, which is inside [0, 1], so that no coordinate moves further.
        step = geometry.per_example(1 + offset * plan.sigma / length.clamp_min(1e-12), direction)
        survived = ~is_misclassified(left, (x[left] + step * direction).clamp(0, 1), number)
        left, direction, length = (values[survived] for values in (left, direction, length))
    return confirmed
