"""Standard training, objectives that train on adversarial images (PGD training, TRADES, IAAT), and
their PGD."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.attacks import Pgd
from equipoise.core import ascent, checks, geometry, losses
from equipoise.core.geometry import per_example, project_to_ball
from equipoise.core.modes import inference
from equipoise.core.rng import Stream
from equipoise.core.settings import setting
from equipoise.core.threat import DEFAULT_EPS, NORMS, Threat, require_eps
from equipoise.training.objective import Memory, Objective, ObjectiveOutput, correct_predictions


def inner_pgd(
    evaluate: ascent.ValueAndGradient,
    x: Tensor,
    start: Tensor,
    *,
    norm: str,
    eps: float | Tensor | None,
    steps: int,
    step_size: float | Tensor | None = None,
) -> list[Tensor]:
    """All steps + 1 iterates of PGD from `start` on; see
    :func:`~equipoise.core.ascent.follow_gradient`.

    Unlike the PGD attack it treats all images alike, broken or not, and never waits for the GPU.
    `eps` is one radius around `x`, (B,) radii, or None for no ball but [0, 1]; a step has length
    2.5·eps/steps unless `step_size` is given.
    """
    if step_size is None:
        assert eps is not None
        step_size = 2.5 * eps / steps
    project = partial(project_to_ball, x=x, norm=norm, eps=eps)
    return list(
        ascent.follow_gradient(
            evaluate, start, norm=norm, step_size=step_size, steps=steps, project=project
        )
    )


def random_start(x: Tensor, norm: str, eps: Tensor, stream: Stream) -> Tensor:
    """(B, …) random points of balls of radii (B,)."""
    noise = stream.uniform(*x.shape[1:], low=-1, high=1).to(x.dtype)
    return project_to_ball(x + per_example(eps, x) * noise, x, norm, eps)


@dataclass(frozen=True, kw_only=True)
class Standard(Objective):
    r"""Standard training: the cross-entropy of clean images.

    .. math:: \ell(f(x), y)
    """

    name = "standard"

    label_smoothing: float = setting(0.0, "Label smoothing.", share=True)

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, stream: Stream, memory: Memory
    ) -> ObjectiveOutput:
        """See :class:`Objective`."""
        logits = model(x)
        return ObjectiveOutput(
            losses.cross_entropy(logits, y, self.label_smoothing), correct_predictions(logits, y)
        )


@dataclass(frozen=True, kw_only=True)
class AdversarialObjective(Objective):
    """Base of the objectives with a threat model; validated on clean and on attacked images."""

    norm: str = setting("linf", "Norm of the perturbation: linf, l2 or l1.", among=NORMS)
    eps: float = setting(
        DEFAULT_EPS, "Radius in units of [0, 1] pixels, e.g. 8/255.", fraction=True, positive=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_eps(self.norm, self.eps)

    def validation_metrics(
        self, model: nn.Module, x: Tensor, y: Tensor, stream: Stream
    ) -> dict[str, Tensor]:
        """Clean, and under PGD of ten steps at the full radius."""
        x_adv = Pgd(steps=10)(model, x, y, threat=Threat(self.norm, self.eps), stream=stream)
        return {
            "clean": correct_predictions(model(x), y),
            "attacked": correct_predictions(model(x_adv), y),
        }


@dataclass(frozen=True, kw_only=True)
class Adversarial(AdversarialObjective):
    r"""Adversarial training by projected gradient ascent [Madry2018].

    .. math:: \max_{\|x'-x\| \le \varepsilon} \ell(f(x'), y)

    [Madry2018, (2.1)]; the maximum is approximated by PGD. The attack sees the model in evaluation
    mode (running statistics of batch norm), the loss in training mode.

    With `for_mixing` a model that is to be the robust side of a mixture learns when to be sure:

    .. math:: \ell(f(x'), y) + w\,\big([f(x') = y]\,\log(1 + e^{t - c(x')}) + [f(x) \ne y]\,\log(1 +
    e^{c(x) - t})\big)

    c is the log-odds of the predicted class and t that of a confidence. A mixture follows h where
    it is sure: images that are kept under attack should be above the threshold even there, and
    clean images that h gets wrong, which g may correct, below it. Both indicators are constants to
    the gradient. With a confidence of 0.5 the first term is the cross-entropy again, which then
    counts twice for images that are kept. Clean and attacked images are one batch in training mode,
    so that batch norm treats both alike, as in evaluation mode.
    """

    name = "adversarial"

    steps: int = setting(7, "Gradient steps of the attack.", least=1)
    step_size: float | None = setting(
        None, "Length of a step; 2.5·eps/steps if not given.", fraction=True
    )
    random_start: bool = setting(True, "Start at a uniform point of the ball.")
    early_steps: int | None = setting(
        None, "Gradient steps in the early epochs, if fewer.", least=1
    )
    early_share: float = setting(0.5, "Share of the epochs that count as early.", share=True)
    label_smoothing: float = setting(0.0, "Label smoothing.", share=True)
    for_mixing: bool = setting(
        False,
        "Be surer of images that are kept under attack than of clean ones that are "
        "misclassified: for the robust side of a mixture.",
    )
    mixing_weight: float = setting(1.0, "Weight of that term, with for-mixing.", fraction=True)
    mixing_confidence: float = setting(
        0.5, "Confidence that separates both kinds of images, with for-mixing."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.strictly_within("mixing_confidence", self.mixing_confidence, 0, 1)
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            ignored = (
                item.name.startswith("mixing_") and not self.for_mixing and value != item.default
            )
            checks.require(not ignored, item.name, "be left out unless `for_mixing` is set", value)

    def describe(self) -> dict[str, Any]:
        """Of version 2 with `for_mixing`, which once saw clean images in evaluation mode."""
        return {**super().describe(), "version": 2 if self.for_mixing else self.version}

    def at_epoch(self, epoch: int, epochs: int) -> Self:
        """Early epochs have their own number of steps."""
        early_steps = self.early_steps if epoch < self.early_share * epochs else None
        return dataclasses.replace(self, steps=early_steps or self.steps, early_steps=None)

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, stream: Stream, memory: Memory
    ) -> ObjectiveOutput:
        """See :class:`Objective`."""
        start = (
            geometry.draw(x, Threat(self.norm, self.eps), stream.at("start"))
            if self.random_start
            else x
        )
        start = project_to_ball(start, x, self.norm, self.eps)
        with inference(model):
            evaluate = ascent.value_and_gradient(
                lambda point: losses.cross_entropy(model(point), y)
            )
            x_adv = inner_pgd(
                evaluate,
                x,
                start,
                norm=self.norm,
                eps=self.eps,
                steps=self.steps,
                step_size=self.step_size,
            )[-1]
        # One batch of both kinds, so that batch norm has the same statistics for both, as in
        # evaluation mode.
        logits = model(torch.cat([x, x_adv]) if self.for_mixing else x_adv)
        clean, attacked = logits[: len(x)], logits[-len(x) :]
        loss = losses.cross_entropy(attacked, y, self.label_smoothing)
        if self.for_mixing:
            loss = loss + self.mixing_weight * self.confidence_loss(clean, attacked, y)
        return ObjectiveOutput(loss, correct_predictions(attacked, y))

    def confidence_loss(self, clean: Tensor, attacked: Tensor, y: Tensor) -> Tensor:
        """(B,) the term of `for_mixing` from logits (B, K) of the clean and of the attacked
        images."""
        level = math.log(self.mixing_confidence / (1 - self.mixing_confidence))
        too_unsure = F.softplus(level - losses.top_log_odds(attacked))
        too_sure = F.softplus(losses.top_log_odds(clean) - level)
        return (
            correct_predictions(attacked, y) * too_unsure
            + ~correct_predictions(clean, y) * too_sure
        )


@dataclass(frozen=True, kw_only=True)
class TRADES(AdversarialObjective):
    r"""TRADES [Zhang2019]: accuracy on the clean image, and similar predictions in the whole ball.

    .. math:: \ell(f(x), y) + \beta \max_{x'} \mathrm{KL}(p(x) \,\|\, p(x'))

    [Zhang2019, (3)], as in the official code: the attack starts at x + 0.001·N(0, 1), maximises the
    divergence in evaluation mode, and the gradient flows through both arguments of the KL.
    """

    name = "trades"

    eps: float = setting(
        0.031, "Radius in units of [0, 1] pixels, e.g. 8/255.", fraction=True, positive=True
    )
    beta: float = setting(6.0, "Weight of the divergence.", fraction=True)
    steps: int = setting(10, "Gradient steps of the attack.", least=1)
    step_size: float | None = setting(
        None, "Length of a step; default: 0.007, in l2 2·eps/steps.", fraction=True
    )
    label_smoothing: float = setting(0.0, "Label smoothing.", share=True)

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, stream: Stream, memory: Memory
    ) -> ObjectiveOutput:
        """See :class:`Objective`."""
        x_adv = self.attack(model, x, stream)
        logits = model(x)
        p, log_q = torch.softmax(logits, dim=1), torch.log_softmax(model(x_adv), dim=1)
        loss = losses.cross_entropy(
            logits, y, self.label_smoothing
        ) + self.beta * losses.kl_divergence(log_q, p)
        return ObjectiveOutput(loss, correct_predictions(log_q, y))

    def attack(self, model: nn.Module, x: Tensor, stream: Stream) -> Tensor:
        """(B, C, H, W) where the prediction differs most from that at x."""
        default = 0.007 if self.norm == "linf" else 2 * self.eps / self.steps
        step_size = default if self.step_size is None else self.step_size
        start = x + 0.001 * stream.at("start").normal(*x.shape[1:]).to(x.dtype)
        with inference(model):
            with torch.no_grad():
                p = torch.softmax(model(x), dim=1)
            evaluate = ascent.value_and_gradient(
                lambda point: losses.kl_divergence(torch.log_softmax(model(point), dim=1), p)
            )
            return inner_pgd(
                evaluate,
                x,
                start,
                norm=self.norm,
                eps=self.eps,
                step_size=step_size,
                steps=self.steps,
            )[-1]


@dataclass(frozen=True, kw_only=True)
class IAAT(AdversarialObjective):
    r"""Instance-adaptive adversarial training [Balaji2019]: a radius for each image that grows
    while it resists.

    .. math:: \varepsilon_i \leftarrow (1 - w)\,\varepsilon_i + w\,(\varepsilon_i + \{\gamma, 0,
    -\gamma\})

    [Balaji2019, Algorithms 1 and 2]. The step is +γ if the attack at eps + γ fails, −γ if the
    attack at eps succeeds, and 0 otherwise; it is averaged over epochs with weight w. The first
    epochs train all images at the full radius. The attacks see the model in evaluation mode.
    """

    name = "iaat"

    steps: int = setting(10, "Gradient steps of the attack.", least=1)
    growth: float = setting(2 / 255, "Step of the radius, γ.", fraction=True)
    growth_weight: float = setting(
        0.1, "Weight of the new radius in the average over epochs, w.", share=True
    )
    warmup_epochs: int = setting(5, "First epochs, at the full radius.", least=0)
    label_smoothing: float = setting(0.0, "Label smoothing.", share=True)

    def at_epoch(self, epoch: int, epochs: int) -> Self:
        """`warmup_epochs` is 1 during the warm-up and 0 after it."""
        return dataclasses.replace(self, warmup_epochs=int(epoch < self.warmup_epochs))

    def initial_memory(self, count: int) -> Memory:
        """(count,) radii; all start at the full one."""
        return {"eps": torch.full((count,), self.eps)}

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, stream: Stream, memory: Memory
    ) -> ObjectiveOutput:
        """See :class:`Objective`."""
        eps = memory["eps"].to(x.dtype)
        with inference(model):
            if self.warmup_epochs == 0:
                eps = self.adapt(model, x, y, eps, stream)
            x_adv = self.attack(model, x, y, eps, stream.at("train"))
        logits = model(x_adv)
        loss = losses.cross_entropy(logits, y, self.label_smoothing)
        return ObjectiveOutput(
            loss, correct_predictions(logits, y), {"eps": eps.to(memory["eps"].dtype)}
        )

    def adapt(self, model: nn.Module, x: Tensor, y: Tensor, eps: Tensor, stream: Stream) -> Tensor:
        """(B,) radii after the step of one epoch."""
        with torch.no_grad():
            resists_more, resists = (
                correct_predictions(model(self.attack(model, x, y, radius, stream.at(purpose))), y)
                for radius, purpose in ((eps + self.growth, "more"), (eps, "same"))
            )
        step = (
            torch.where(resists_more, 1.0, torch.where(resists, 0.0, -1.0)).to(eps.dtype)
            * self.growth
        )
        return (eps + self.growth_weight * step).clamp_min(0)

    def attack(self, model: nn.Module, x: Tensor, y: Tensor, eps: Tensor, stream: Stream) -> Tensor:
        """(B, C, H, W) the last iterate of PGD in balls of radii (B,), from a random start."""
        start = random_start(x, self.norm, eps, stream)
        evaluate = ascent.value_and_gradient(lambda point: losses.cross_entropy(model(point), y))
        return inner_pgd(evaluate, x, start, norm=self.norm, eps=eps, steps=self.steps)[-1]
