"""FAB-T [Croce2020b]: walk along the decision boundary towards the image, one target class after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equipoise.attacks.engine import Search, State, step_towards
from equipoise.attacks.gradients import Extra, GradientSource
from equipoise.attacks.hyperplane import onto
from equipoise.attacks.targeted import difference, ranked
from equipoise.attacks.worst_case import strike
from equipoise.core import checks, geometry
from equipoise.core.rng import Stream
from equipoise.core.threat import Threat

BIAS = 0.1  # largest pull of a step towards the clean image
OVERSHOOT = 1.05
BACK = 0.9  # an adversarial point goes back by a tenth of its perturbation


def fab(
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
    precision: str = "auto",
) -> Tensor:
    r"""Find adversarial points of small norm by projecting onto linearised boundaries.

    With d₁, d₂ the smallest moves inside [0, 1] that take the current point and the clean image onto the
    hyperplane where the linearised logits of y and the target are equal, and a = min(‖d₁‖/(‖d₁‖ + ‖d₂‖), 0.1):

    .. math:: x_{t+1} = (1 - a)(x_t + 1.05\,d_1) + a\,(x_0 + 1.05\,d_2)

    A point that fools the model goes back towards the image by a tenth. Only points of size eps or less
    count; the result is the smallest perturbation found, brought into the ball.

    Args and result are those of :func:`~equipoise.attacks.targeted.targeted`. There is no random start, and `extra`
    does not count: FAB has no objective but the distance to a decision.
    """
    return strike(fab_stages(steps=steps, targets=targets), model, x, y, threat=threat, stream=stream,
                  surrogate=surrogate, extra=extra, follow="model", precision=precision)


def fab_stages(*, steps: int = 100, targets: int = 9) -> list[Fab]:
    """One stage per target."""
    return [Fab(rank=rank, steps=steps) for rank in range(1, checks.whole("targets", targets, least=1) + 1)]


@dataclass(frozen=True)
class Fab:
    """A stage: FAB towards the class of one rank, 1 being the likeliest; only where the margin is below `within`."""

    rank: int = 1
    steps: int = 100
    within: float | None = None

    def __post_init__(self) -> None:
        checks.whole("rank", self.rank, least=1)
        checks.whole("steps", self.steps, least=1)

    @property
    def name(self) -> str:
        """As it stands in rows and reports."""
        return f"fab-{self.rank}" + ("" if self.steps == 100 else f"@{self.steps}")

    @property
    def cost(self) -> float:
        """In passes with a gradient."""
        return self.steps * 1.5

    def search(self, adversary: GradientSource, threat: Threat) -> Search | None:
        """The stage against this adversary's model; none if it has fewer classes."""
        return _Walk(adversary, threat, self) if self.rank < adversary.classes else None


class _Walk:
    def __init__(self, adversary: GradientSource, threat: Threat, stage: Fab) -> None:
        self.adversary, self.threat, self.rank = adversary, threat, stage.rank
        self.passes = stage.steps
        self.look = adversary.ascend("difference", difference, plain=True)
        self.query = adversary.query()

    def start(self, x: Tensor, y: Tensor, chance: Stream) -> State:
        aim = ranked(self.adversary.logits(x), y)[:, self.rank - 1]
        never = x.new_full((len(x),), torch.inf)
        return {"x": x, "y": y, "aim": aim, "point": x, "nearest": x, "margin": never, "size": never.clone(),
                "age": torch.zeros_like(y)}

    def leg(self, state: State, chance: Stream, ages: Sequence[int], passes: int) -> None:
        for _ in range(passes):
            self._pass(state)

    def _pass(self, s: State) -> None:
        x, point, norm = s["x"], s["point"], self.threat.norm
        value, w, _ = self.look(point, s["y"], s["aim"])
        # The plane {p : value + w·(p − point) = 0}, seen from the point and from the image.
        ahead = value + (w * (x - point)).sum(dim=(1, 2, 3))
        d1, d2 = onto(torch.cat([point, x]), torch.cat([w, w]), torch.cat([value, ahead]), norm).chunk(2)
        a1, a2 = (geometry.size(d, norm).clamp_min(1e-8) for d in (d1, d2))
        a = geometry.per_example((a1 / (a1 + a2)).clamp(max=BIAS), point)
        moved = ((1 - a) * (point + OVERSHOOT * d1) + a * (x + OVERSHOOT * d2)).clamp(0, 1)
        _, margin = self.query(moved, s["y"])
        fooled = (margin <= 0) & (s["age"] < self.passes)
        size = geometry.size(moved - x, norm)
        smaller = fooled & (size < s["size"])
        s["nearest"] = step_towards(smaller, geometry.project(moved, x, self.threat), s["nearest"])
        s["size"] = torch.where(smaller, size, s["size"])
        # Outside the ball a point proves nothing: its projection is judged once, at the end.
        s["margin"] = torch.where(smaller & (size <= self.threat.eps * (1 + 1e-6)), margin, s["margin"])
        s["point"] = step_towards(fooled, x + BACK * (moved - x), moved)
        s["age"] = s["age"] + 1
