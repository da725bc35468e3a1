"""APGD-T [Croce2020]: APGD on the targeted ratio of logits, one target class after another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equipoise.attacks.apgd import Ascent
from equipoise.attacks.engine import Search
from equipoise.attacks.gradients import Extra, GradientSource
from equipoise.attacks.worst_case import strike
from equipoise.core import checks, geometry, losses
from equipoise.core.rng import Stream
from equipoise.core.threat import Threat

ORDERS = ("logits", "distance")
CANDIDATES = 18  # classes whose distance is measured; the others follow in the order of their logits


def targeted(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    threat: Threat,
    stream: Stream,
    surrogate: nn.Module | None = None,
    extra: Extra | None = None,
    steps: int = 100,
    targets: int = 9,
    order: str = "logits",
    follow: str = "model",
    precision: str = "auto",
) -> Tensor:
    """APGD towards each of the `targets` likeliest other classes.

    Args and result are those of :func:`~equipoise.attacks.apgd.apgd`, with
        targets: classes tried per image, at most K − 1; images already broken are left out of later ones.
        order: likeliest by the logits of the clean image, or by the distance to the linearised boundary
            [MALT2024], which is better where some classes are far more sensitive than others.
    """
    return strike(targeted_stages(steps=steps, targets=targets, order=order), model, x, y, threat=threat, stream=stream,
                  surrogate=surrogate, extra=extra, follow=follow, precision=precision)


def targeted_stages(*, steps: int = 100, targets: int = 9, order: str = "logits") -> list[Targeted]:
    """One stage per target."""
    return [Targeted(rank=rank, steps=steps, order=order)
            for rank in range(1, checks.whole("targets", targets, least=1) + 1)]


@dataclass(frozen=True)
class Targeted:
    """A stage: APGD towards the class of one rank, 1 being the likeliest; only where the margin is below `within`."""

    rank: int = 1
    steps: int = 100
    order: str = "logits"
    within: float | None = None

    def __post_init__(self) -> None:
        checks.whole("rank", self.rank, least=1)
        checks.whole("steps", self.steps, least=1)
        checks.one_of("order", self.order, ORDERS)

    @property
    def name(self) -> str:
        """As it stands in rows and reports."""
        return self.start + ("" if self.order == "logits" else f"-{self.order}")

    @property
    def start(self) -> str:
        """The purpose of the random start, which the order of the targets leaves as it is."""
        return f"targeted-{self.rank}" + ("" if self.steps == 100 else f"@{self.steps}")

    @property
    def cost(self) -> float:
        """In passes with a gradient."""
        return float(self.steps)

    def search(self, adversary: GradientSource, threat: Threat) -> Search | None:
        """The stage against this adversary's model; none if it has fewer classes."""
        return _Aimed(adversary, threat, self) if self.rank < adversary.classes else None


class _Aimed(Ascent):
    def __init__(self, adversary: GradientSource, threat: Threat, stage: Targeted) -> None:
        super().__init__(adversary, threat, stage.steps, stage.start, _objective, ("targeted",))
        self.stage = stage

    def aims(self, x: Tensor, y: Tensor, chance: Stream) -> Tensor:
        if self.stage.order == "logits" or self.stage.rank > CANDIDATES:
            return ranked(self.adversary.logits(x), y)[:, self.stage.rank - 1]
        return nearest_first(self.adversary, x, y, chance, self.threat.norm)[:, self.stage.rank - 1]


def _objective(z: Tensor, y: Tensor, aim: Tensor | None) -> Tensor:
    assert aim is not None
    return losses.targeted_dlr(z, y, aim)


def ranked(logits: Tensor, y: Tensor) -> Tensor:
    """(B, K − 1) the other classes, from the highest logit to the lowest."""
    # A hard decision has logits of −inf; they still rank above the true class, which comes last.
    others = logits.nan_to_num(neginf=torch.finfo(logits.dtype).min).scatter(1, y.unsqueeze(1), -torch.inf)
    return others.argsort(dim=1, descending=True, stable=True)[:, :-1]


def nearest_first(adversary: GradientSource, x: Tensor, y: Tensor, chance: Stream, norm: str) -> Tensor:
    """(B, R) likeliest other classes by (z_y − z_j) / ‖∇(z_y − z_j)‖ in the dual norm [MALT2024], smallest first.

    R is K − 1, but at most :data:`CANDIDATES`. Every stage asks again, so the answers are kept with the
    adversary: four bytes a class, whatever the number of classes.
    """
    known = adversary.memory
    index = chance.index.tolist()
    if any((norm, number) not in known for number in index):
        order = ranked(adversary.logits(x), y)[:, :CANDIDATES]
        look = adversary.ascend("difference", difference, plain=True)
        distances = []
        for rank in range(order.shape[1]):
            gap, gradient, _ = look(x, y, order[:, rank])
            dual = gradient.abs().sum(dim=(1, 2, 3)) if norm == "linf" else geometry.size(gradient, "l2")
            distances.append(-gap / dual.clamp_min(1e-12))
        by_distance = order.gather(1, torch.stack(distances, dim=1).argsort(dim=1, stable=True))
        for number, row in zip(index, by_distance.to("cpu", torch.int32).numpy(), strict=True):
            known[norm, number] = row.tobytes()
    kept = torch.frombuffer(bytearray(b"".join(known[norm, number] for number in index)), dtype=torch.int32)
    return kept.view(len(index), -1).to(x.device, torch.int64)


def difference(z: Tensor, y: Tensor, aim: Tensor | None) -> Tensor:
    """z_t − z_y: positive where the target wins."""
    assert aim is not None
    return (z.gather(1, aim.unsqueeze(1)) - z.gather(1, y.unsqueeze(1))).squeeze(1)
