"""The adaptive mixture: a gate looks at both bases and gives every image its own alpha."""

from __future__ import annotations

import math
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.core import checks
from equipoise.mixing.classifier import MixedClassifier
from equipoise.mixing.gate import Gate
from equipoise.mixing.gated_surrogate import GatedHinges, GatedSurrogate
from equipoise.mixing.logit_maps import LogitMap, wide
from equipoise.mixing.provenance import Provenance
from equipoise.mixing.rules import mix
from equipoise.mixing.surrogate import BYPASS
from equipoise.models.feature_hooks import tapped

SCALE, SHIFT = 2.0, 0.4  # of the gate in training, as published


class GatedClassifier(MixedClassifier):
    r"""The mixture with an alpha for every image [Bai2024, Section 4].

    .. math:: \alpha(x) = \alpha_{min} + (\alpha_{max} - \alpha_{min})\,
              \mathrm{sigmoid}(scale \cdot u_\theta(x) + shift)

    u is the :class:`~equipoise.mixing.gate.Gate`, fed by one forward pass of each base. Range, scale and shift can be
    changed without retraining (:meth:`with_range`); a gate learns over all of (0, 1) whatever the range is, because
    its objective mixes by :meth:`parts`. :attr:`alpha` is α_min, the least say that the robust side ever has: all that
    holds for a fixed mixture with this alpha and any accurate side holds here too, :meth:`predict` and certificates
    included. Train or evaluation mode reaches the gate alone: the bases stay frozen and in evaluation mode.

    Args:
        accurate, robust: images (B, C, H, W) in [0, 1] → logits (B, K).
        network: the gate, trained for these two.
        alpha_min, alpha_max: ends of the range, in [0, 1].
        scale, shift: of the gate's answer before the sigmoid.
        sharpness: factors of the logits of g and of h [Bai2024, D.1].
        logit_map, hard, surrogate_alpha, fitted: see :class:`~equipoise.mixing.classifier.MixedClassifier`.
    """

    def __init__(
        self, accurate: nn.Module, robust: nn.Module, network: Gate, *, alpha_min: float = 0.0, alpha_max: float = 1.0,
        scale: float = SCALE, shift: float = SHIFT, sharpness: tuple[float, float] = (1.0, 1.0),
        logit_map: LogitMap | None = None, hard: bool = False, surrogate_alpha: float = 0.9,
        fitted: Provenance | None = None,
    ) -> None:
        checks.within("alpha_min", alpha_min, 0, 1)
        checks.within("alpha_max", alpha_max, 0, 1)
        checks.require(alpha_min < alpha_max, "alpha_min", f"be below alpha_max, {alpha_max:g}", alpha_min)
        checks.positive("scale", scale)
        checks.require(math.isfinite(shift), "shift", "be finite", shift)
        for factor in sharpness:
            checks.positive("sharpness", factor)
        super().__init__(accurate, robust, alpha_min, logit_map=logit_map, hard=hard, surrogate_alpha=surrogate_alpha,
                         fitted=fitted)
        self.network = network
        self.range, self.scale, self.shift, self.sharpness = (alpha_min, alpha_max), scale, shift, sharpness
        for base in (accurate, robust):
            base.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> Self:
        """Only the gate changes its mode."""
        super().train(mode)
        self.accurate.eval()
        self.robust.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, K) log-probabilities, which serve as logits."""
        g, h, z = self.parts(x)
        return mix(g, h, self.ranged(z))

    def parts(self, x: Tensor, *, soft: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities of both sides (B, K), and the gate over all of (0, 1), (B,): one pass of each base.

        With `soft`, the sides that adversaries follow, in which neither a hard decision nor a map hides the way.
        """
        g, h, z = self.answers(x)
        mapped, sure = self.mapped(h), F.log_softmax(self.sharpness[0] * wide(g), dim=1)
        if soft and self.logit_map is not None:
            direct = F.log_softmax(self.sharpness[1] * wide(h), dim=1)
            mapped = torch.logaddexp(direct + math.log(BYPASS), mapped + math.log(1 - BYPASS))
        return self._one_hot(g, mapped) if self.hard and not soft else sure, mapped, z

    def answers(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of both bases (B, K), and the gate over all of (0, 1), (B,): one pass of each base."""
        taps = self.network.taps
        (g, left), (h, right) = tapped(self.accurate, taps[0], x), tapped(self.robust, taps[1], x)
        checks.require(g.shape == h.shape, "accurate and robust", "have equal numbers of classes",
                       (tuple(g.shape), tuple(h.shape)))
        return g, h, self.scale * self.network((left, right)) + self.shift

    def both(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, K) log-probabilities of the accurate side, and of the robust one."""
        return self.parts(x)[:2]

    def mapped(self, h: Tensor) -> Tensor:
        """(B, K) logits of h → log-probabilities of the robust side."""
        return super().mapped(self.sharpness[1] * wide(h))

    def ranged(self, z: Tensor) -> Tensor:
        """Log-odds over (0, 1) → log-odds over (α_min, α_max), without ever forming an alpha that rounds to 1."""
        low, high = self.range
        if (low, high) == (0.0, 1.0):
            return z
        wide = math.log(high - low)
        take, keep = wide + F.logsigmoid(z), wide + F.logsigmoid(-z)
        if low > 0:
            take = torch.logaddexp(take, torch.full_like(take, math.log(low)))
        if high < 1:
            keep = torch.logaddexp(keep, torch.full_like(keep, math.log1p(-high)))
        return take - keep

    @property
    def steep(self) -> bool:
        """Whether the gate is steeper than it was trained: its own gradient then vanishes a little off its middle."""
        return self.scale > SCALE

    def gentle(self, z: Tensor) -> Tensor:
        """Log-odds of the gate, no steeper than in training, for those who look for a way down."""
        return z * (SCALE / self.scale) if self.steep else z

    def alphas(self, x: Tensor) -> Tensor:
        """(B,) the weight of the robust side for every image."""
        return torch.sigmoid(self.ranged(self.parts(x)[2]))

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        """(B,) classes, the same as `forward(x).argmax(1)`; g and the gate run only where they can decide."""
        h = self.mapped(self.robust(x))
        answer = h.argmax(dim=1)
        rows = self.undecided(h).nonzero().squeeze(1)
        if len(rows):
            answer[rows] = self(x[rows]).argmax(dim=1)
        return answer

    def with_range(self, alpha_min: float, alpha_max: float, *, scale: float | None = None,
                   shift: float | None = None) -> GatedClassifier:
        """The same gate with another range, scale or shift [Bai2024, Table 7]; nothing is trained."""
        return self._with(self.logit_map, self.hard, self.surrogate_alpha, (alpha_min, alpha_max), scale, shift)

    def on(self, mixture: MixedClassifier) -> GatedClassifier:
        """The same gate over the sides of another mixture of these bases, such as one with a map of MixedNUTS."""
        same = mixture.accurate is self.accurate and mixture.robust is self.robust
        checks.require(same, "mixture", "be one of the gate's own bases", "another pair")
        return self._with(mixture.logit_map, mixture.hard, mixture.surrogate_alpha, self.range, None, None)

    def _with(self, logit_map: LogitMap | None, hard: bool, surrogate_alpha: float, ends: tuple[float, float],
              scale: float | None, shift: float | None) -> GatedClassifier:
        made = GatedClassifier(
            self.accurate, self.robust, self.network, alpha_min=ends[0], alpha_max=ends[1],
            scale=self.scale if scale is None else scale, shift=self.shift if shift is None else shift,
            sharpness=self.sharpness, logit_map=logit_map, hard=hard, surrogate_alpha=surrogate_alpha,
            fitted=self.fitted)
        return made.to(self.gate.device).train(self.training)

    def surrogate(self, *, stand_in: nn.Module | None = None, bypass: float = BYPASS) -> nn.Module:
        """What adversaries follow where the mixture itself hides the way; the gate shows its own."""
        _alone(stand_in)
        return GatedSurrogate(self, relaxed=True)

    def hinges(self, *, stand_in: nn.Module | None = None) -> nn.Module:
        """Scores for an attack on both sides at once, with every image's own alpha."""
        _alone(stand_in)
        return GatedHinges(self)

    def stopped(self) -> nn.Module:
        """The mixture for a grey-box adversary: no gradient comes through the gate [Bai2024, adversary A]."""
        return GatedSurrogate(self, stopped=True, relaxed=not self.differentiable)

    def extra_repr(self) -> str:
        """The numbers of the formula."""
        low, high = self.range
        aside = f"scale={self.scale:g}, shift={self.shift:g}, sharpness={self.sharpness}"
        return f"alpha_min={low:.15g}, alpha_max={high:.15g}, {aside}, hard={self.hard}, map={self.logit_map}"


def _alone(stand_in: nn.Module | None) -> None:
    checks.require(stand_in is None, "stand_in", "be left out for a gate, which looks into g itself", "a model")
