"""Any attack that keeps the contract, as one stage of a list."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.attacks.engine import Search, State
from equipoise.attacks.gradients import GradientSource
from equipoise.core import checks, geometry
from equipoise.core.rng import Stream
from equipoise.core.threat import Threat


@dataclass(frozen=True)
class FunctionAttack:
    """A stage: a function `attack(model, x, y, *, threat, stream, surrogate, extra) → x_adv`."""

    name: str
    attack: Callable[..., Tensor]
    cost: float = 20
    within: float | None = None

    def search(self, adversary: GradientSource, threat: Threat) -> Search:
        """The stage against this adversary's model."""
        return _Once(adversary, threat, self)


class _Once:
    """One pass, which is the whole attack."""

    passes = 1

    def __init__(self, adversary: GradientSource, threat: Threat, stage: FunctionAttack) -> None:
        self.adversary, self.threat, self.stage = adversary, threat, stage

    def start(self, x: Tensor, y: Tensor, chance: Stream) -> State:
        return {"x": x, "y": y, "nearest": x, "margin": x.new_full((len(x),), torch.inf)}

    def leg(self, state: State, chance: Stream, ages: Sequence[int], passes: int) -> None:
        own = chance.at(self.stage.name)
        size = self.adversary.block or len(ages)
        state["nearest"] = torch.cat([
            self.stage.attack(
                self.adversary.model, state["x"][start : start + size], state["y"][start : start + size],
                threat=self.threat, stream=own[start : start + size], surrogate=self.adversary.surrogate,
                extra=self.adversary.extra)
            for start in range(0, len(ages), size)]).detach()
        inside(self.stage.name, state["nearest"], state["x"], self.threat)


def inside(name: str, x_adv: Tensor, x: Tensor, threat: Threat) -> None:
    """Refuse an attack that leaves the ball or [0, 1]: one that cheats proves nothing."""
    checks.require(x_adv.shape == x.shape, name, f"return images of shape {tuple(x.shape)}", tuple(x_adv.shape))
    checks.images(x_adv, f"images of {name}")
    reach = float(geometry.size(x_adv - x, threat.norm).max())
    checks.require(reach <= threat.eps * (1 + 1e-5), name, f"stay within {threat}", reach)
