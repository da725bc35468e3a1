"""Auto-PGD [Croce2020]: projected gradient ascent with momentum that halves its own steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equipoise.attacks.engine import Search, State, step_towards
from equipoise.attacks.gradients import Extra, GradientSource, Objective
from equipoise.attacks.worst_case import strike
from equipoise.core import checks, geometry, losses
from equipoise.core.rng import Stream
from equipoise.core.threat import Threat

MOMENTUM = 0.75  # share of the gradient step; the rest repeats the last move
RHO = 0.75  # steps shrink unless so large a share of the last ones raised the loss


def apgd(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    threat: Threat,
    stream: Stream,
    surrogate: nn.Module | None = None,
    extra: Extra | None = None,
    steps: int = 100,
    restarts: int = 1,
    loss: str = "ce",
    follow: str = "model",
    precision: str = "auto",
) -> Tensor:
    r"""Raise a loss by steps that start at 2·eps and halve where progress stalls.

    .. math::
        z &= \Pi\big(x_t + s \cdot \mathrm{steepest}(\nabla \ell(x_t))\big), \\
        x_{t+1} &= \Pi\big(x_t + \tfrac34 (z - x_t) + \tfrac14 (x_t - x_{t-1})\big)

    At checkpoints (first after 22 % of the steps, then at intervals that shrink by 3 % to 6 %) a row halves
    its step and goes back to its best point if fewer than ¾ of the steps since the last one raised the
    loss, or if neither the step nor the best loss has changed since.

    Args:
        model: decides success: images (B, C, H, W) in [0, 1] → logits (B, K).
        x: (B, C, H, W) images in [0, 1].
        y: (B,) labels.
        threat: the ball.
        stream: the chance of these images.
        surrogate: gives the gradients instead of `model`.
        extra: images → (B,), added to the loss that is raised.
        steps: gradient steps per start.
        restarts: starts per image; images already broken are left out of later ones.
        loss: ce, dlr or margin (of probabilities).
        follow: whose loss tells which iterate is best: model or surrogate.
        precision: of the gradients: auto, fp32 or bf16; success is always judged in full precision.

    Returns:
        (B, C, H, W), detached, inside the ball and [0, 1]: what fools the model, or else comes nearest.
    """
    return strike(apgd_stages(steps=steps, restarts=restarts, loss=loss), model, x, y, threat=threat, stream=stream,
                  surrogate=surrogate, extra=extra, follow=follow, precision=precision)


def apgd_stages(*, steps: int = 100, restarts: int = 1, loss: str = "ce") -> list[Apgd]:
    """One stage per start."""
    return [Apgd(loss=loss, steps=steps, restart=restart)
            for restart in range(checks.whole("restarts", restarts, least=1))]


@dataclass(frozen=True)
class Apgd:
    """A stage: APGD from one random start; only where the margin is below `within`."""

    loss: str = "ce"
    steps: int = 100
    restart: int = 0
    within: float | None = None

    def __post_init__(self) -> None:
        checks.one_of("loss", self.loss, losses.LOSSES)
        checks.whole("steps", self.steps, least=1)

    @property
    def name(self) -> str:
        """As it stands in rows and reports."""
        return (f"apgd-{self.loss}" + (f"-{self.restart + 1}" if self.restart else "")
                + ("" if self.steps == 100 else f"@{self.steps}"))

    @property
    def cost(self) -> float:
        """In passes with a gradient."""
        return float(self.steps)

    def search(self, adversary: GradientSource, threat: Threat) -> Search:
        """The stage against this adversary's model."""
        raised = losses.LOSSES[self.loss]
        return Ascent(adversary, threat, self.steps, self.name, lambda z, y, aim: raised(z, y), (self.loss,))


def checkpoints(steps: int) -> dict[int, int]:
    """Pass → steps since the checkpoint before it.

    >>> list(checkpoints(100).items())[:4]
    [(22, 22), (41, 19), (57, 16), (70, 13)]
    """
    width, least, shrink = (max(int(share * steps), 1) for share in (0.22, 0.06, 0.03))
    found, at = {}, width
    while at <= steps:
        found[at] = width
        width = max(width - shrink, least)
        at += width
    return found


class Ascent:
    """APGD on any objective; pass 0 looks at the start, pass t at the point after t steps."""

    def __init__(self, adversary: GradientSource, threat: Threat, steps: int, purpose: str, objective: Objective,
                 key: tuple[object, ...]) -> None:
        self.adversary, self.threat, self.purpose = adversary, threat, purpose
        self.passes = steps + 1
        self.checks = checkpoints(steps)
        self.look = adversary.ascend(key, objective)

    def aims(self, x: Tensor, y: Tensor, chance: Stream) -> Tensor | None:
        """(B,) classes to aim at; an untargeted search has none."""
        return None

    def start(self, x: Tensor, y: Tensor, chance: Stream) -> State:
        """Every row at a random point of the sphere."""
        at = self.origin(x, y, chance)
        never = x.new_full((len(x),), -torch.inf)
        state = {"x": x, "y": y, "point": at, "previous": at, "nearest": x, "margin": -never,
                 "best": at, "best_gradient": torch.zeros_like(x), "best_value": never, "last_value": never,
                 "mark": never, "rises": torch.zeros_like(never), "step": torch.full_like(never, 2 * self.threat.eps),
                 "halved": torch.ones_like(y, dtype=torch.bool), "age": torch.zeros_like(y)}
        if self.threat.norm == "linf":
            state["low"], state["high"] = geometry.bounds(x, self.threat)
        aim = self.aims(x, y, chance)
        return state if aim is None else {**state, "aim": aim}

    def origin(self, x: Tensor, y: Tensor, chance: Stream) -> Tensor:
        """Where the ascent begins."""
        return geometry.surface(x, self.threat, chance.at(self.purpose))

    def leg(self, state: State, chance: Stream, ages: Sequence[int], passes: int) -> None:
        """`passes` passes; chance plays no part after the start."""
        for done in range(passes):
            checking = any(age + done in self.checks for age in ages)
            self._pass(state, checking)

    def _pass(self, s: State, checking: bool) -> None:
        value, gradient, margin = self.look(s["point"], s["y"], s.get("aim"))
        alive = s["age"] < self.passes  # filling and rows past their end stay as they are
        nearer = (margin < s["margin"]) & alive
        s["nearest"] = step_towards(nearer, s["point"], s["nearest"])
        s["margin"] = torch.where(nearer, margin, s["margin"])
        first = s["age"] == 0
        s["rises"] = s["rises"] + ((value > s["last_value"]) & ~first)
        s["last_value"] = value
        better = (value > s["best_value"]) | first
        s["best"] = step_towards(better, s["point"], s["best"])
        s["best_gradient"] = step_towards(better, gradient, s["best_gradient"])
        s["best_value"] = torch.where(better, value, s["best_value"])
        s["mark"] = torch.where(first, value, s["mark"])
        point = s["point"]
        if checking:
            halve = self._check(s)
            point = step_towards(halve, s["best"], point)
            gradient = step_towards(halve, s["best_gradient"], gradient)
        self._move(s, point, gradient, first)
        s["age"] = s["age"] + 1

    def _check(self, s: State) -> Tensor:
        """At a checkpoint: which rows halve their step and go back to their best point."""
        widths = torch.tensor([self.checks.get(at, 0) for at in range(self.passes + 1)], device=s["age"].device)
        width = widths[s["age"].clamp(max=self.passes)]
        due = width > 0
        halve = due & ((s["rises"] <= RHO * width) | (~s["halved"] & (s["mark"] >= s["best_value"])))
        s["step"] = torch.where(halve, s["step"] / 2, s["step"])
        s["halved"] = torch.where(due, halve, s["halved"])
        s["mark"] = torch.where(due, s["best_value"], s["mark"])
        s["rises"] = torch.where(due, torch.zeros_like(s["rises"]), s["rises"])
        return halve

    def _move(self, s: State, point: Tensor, gradient: Tensor, first: Tensor) -> None:
        stride = geometry.per_example(s["step"], point) * geometry.steepest(gradient, self.threat.norm)
        share = geometry.per_example(torch.where(first, 1.0, MOMENTUM).to(point.dtype), point)
        aimed = self._inside(s, point + stride)
        mixed = point + share * (aimed - point) + (1 - share) * (point - s["previous"])
        s["previous"], s["point"] = point, self._inside(s, mixed)

    def _inside(self, s: State, point: Tensor) -> Tensor:
        if self.threat.norm == "linf":
            return torch.clamp(point, s["low"], s["high"])
        return geometry.project(point, s["x"], self.threat)
