"""The adaptive mixture: a gate selects an alpha for every image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.core import checks
from equipoise.mixing.classifier import MixedClassifier
from equipoise.mixing.formula import mix
from equipoise.mixing.gate import Gate
from equipoise.mixing.gated_surrogates import GatedHinges, GatedSurrogate
from equipoise.mixing.logit_maps import LogitMap, at_least_float32, one_hot
from equipoise.mixing.provenance import Provenance, gated_method
from equipoise.mixing.surrogates import BYPASS
from equipoise.models import feature_hooks
from equipoise.models.feature_hooks import FeatureMaps, forward_with_features

SCALE, SHIFT = 2.0, 0.4  # of the gate in training, as published


class GatedClassifier(MixedClassifier):
    r"""The mixture with an alpha for every image [Bai2024, Section 4].

    .. math:: \alpha(x) = \alpha_{min} + (\alpha_{max} - \alpha_{min})\,
              \mathrm{sigmoid}(scale \cdot u_\theta(x) + shift)

    u is the :class:`Gate`; each base runs once, in :meth:`predict` too. Range, scale and shift can
    be changed without training (:meth:`with_range`); a gate is trained over all of (0, 1) whatever
    the range is, because its objective mixes by :meth:`log_probabilities_and_gate`. :attr:`alpha`
    is α_min, the least weight of the robust side: all that holds for a fixed mixture with this
    alpha and any accurate side holds here too, :meth:`predict` and certificates included. Train or
    evaluation mode changes the gate alone: the bases stay frozen and in evaluation mode.

    Args:
        accurate, robust: images (B, C, H, W) in [0, 1] → logits (B, K).
        network: the gate, trained for these two.
        alpha_min, alpha_max: range of alpha, in [0, 1].
        scale, shift: of the gate's output before the sigmoid.
        logit_scales: factors of the logits of g and of h (inverse temperatures) [Bai2024, D.1].
        logit_map, hard, surrogate_alpha, provenance: see
            :class:`~equipoise.mixing.classifier.MixedClassifier`.
    """

    description = (
        "gated-mixture",
        "alpha_range",
        "scale",
        "shift",
        "logit_scales",
        "hard",
        "surrogate_alpha",
    )

    def __init__(
        self,
        accurate: nn.Module,
        robust: nn.Module,
        network: Gate,
        *,
        alpha_min: float = 0.0,
        alpha_max: float = 1.0,
        scale: float = SCALE,
        shift: float = SHIFT,
        logit_scales: tuple[float, float] = (1.0, 1.0),
        logit_map: LogitMap | None = None,
        hard: bool = False,
        surrogate_alpha: float = 0.9,
        provenance: Provenance | None = None,
    ) -> None:
        checks.within("alpha_min", alpha_min, 0, 1)
        checks.within("alpha_max", alpha_max, 0, 1)
        checks.require(
            alpha_min < alpha_max, "alpha_min", f"be below alpha_max, {alpha_max:g}", alpha_min
        )
        checks.positive("scale", scale)
        checks.require(math.isfinite(shift), "shift", "be finite", shift)
        for factor in logit_scales:
            checks.positive("logit_scales", factor)
        super().__init__(
            accurate,
            robust,
            alpha_min,
            logit_map=logit_map,
            hard=hard,
            surrogate_alpha=surrogate_alpha,
            provenance=provenance,
        )
        self.network, self.alpha_range = network, (alpha_min, alpha_max)
        self.scale, self.shift, self.logit_scales = scale, shift, logit_scales
        for base in (accurate, robust):
            base.requires_grad_(False).eval()
        self._keep_hooks()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy or a pickle."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._keep_hooks()

    def _keep_hooks(self) -> None:
        """Set the hooks of the feature layers for as long as the mixture lives: a pass then changes
        no module."""
        for base, layers in zip(
            (self.accurate, self.robust), self.network.feature_layers, strict=True
        ):
            feature_hooks.keep_hooks(self, feature_hooks.submodules(base, layers))

    def train(self, mode: bool = True) -> Self:
        """Change the mode of the gate only."""
        super().train(mode)
        self.accurate.eval()
        self.robust.eval()
        return self

    def base_outputs(self, x: Tensor) -> tuple[Tensor, ...]:
        """Logits of both bases (B, K), and the gate's log-odds (B,)."""
        return self.logits_and_gate(x)

    def from_base_outputs(self, *outputs: Tensor) -> Tensor:
        """(B, K) log-probabilities of the mixture from :meth:`base_outputs`."""
        g, h, z = outputs
        return mix(*self.sides_of_logits(g, h), self.restrict_gate(z))

    def log_probabilities_and_gate(
        self, x: Tensor, *, soft: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities of both sides (B, K), and the gate's log-odds over all of (0, 1), (B,).

        With `soft`, sides for attacks: the accurate one is never one-hot, and most of the robust
        one bypasses the map.
        """
        g, h, z = self.logits_and_gate(x)
        return (*self.sides_of_logits(g, h, soft=soft), z)

    def sides_of_logits(self, g: Tensor, h: Tensor, *, soft: bool = False) -> tuple[Tensor, Tensor]:
        """Logits of the bases (B, K) → log-probabilities of both sides."""
        log_p_h = self.map_robust(h)
        log_p_g = self._accurate_side(g, log_p_h.dtype, soft=soft)
        if soft and self.logit_map is not None:
            unmapped = F.log_softmax(self.logit_scales[1] * at_least_float32(h), dim=1)
            log_p_h = torch.logaddexp(unmapped + math.log(BYPASS), log_p_h + math.log(1 - BYPASS))
        return log_p_g, log_p_h

    def _accurate_side(self, g: Tensor, dtype: torch.dtype, *, soft: bool = False) -> Tensor:
        """Logits of g (B, K) → log-probabilities; of `dtype` where they are one-hot."""
        if self.hard and not soft:
            return one_hot(g.argmax(dim=1), g.shape[1], dtype)
        return F.log_softmax(self.logit_scales[0] * at_least_float32(g), dim=1)

    def logits_and_gate(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of both bases (B, K), and the gate's log-odds over all of (0, 1), (B,): one pass
        of each base."""
        g, features_g = self._accurate_with_features(x)
        h, features_h = self._robust_with_features(x)
        checks.require(
            g.shape == h.shape,
            "accurate and robust",
            "have equal numbers of classes",
            (tuple(g.shape), tuple(h.shape)),
        )
        return g, h, self._log_odds(features_g, features_h)

    def _accurate_with_features(self, x: Tensor) -> tuple[Tensor, FeatureMaps]:
        return forward_with_features(self.accurate, self.network.feature_layers[0], x, keeper=self)

    def _robust_with_features(self, x: Tensor) -> tuple[Tensor, FeatureMaps]:
        return forward_with_features(self.robust, self.network.feature_layers[1], x, keeper=self)

    def _log_odds(self, features_g: FeatureMaps, features_h: FeatureMaps) -> Tensor:
        output: Tensor = self.network((features_g, features_h))
        return self.scale * output + self.shift

    def log_probabilities(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, K) log-probabilities of the accurate side, and of the robust one."""
        return self.log_probabilities_and_gate(x)[:2]

    def map_robust(self, h: Tensor) -> Tensor:
        """(B, K) logits of h → log-probabilities of the robust side."""
        return super().map_robust(self.logit_scales[1] * at_least_float32(h))

    def restrict_gate(self, z: Tensor) -> Tensor:
        """Log-odds over (0, 1) → log-odds over (α_min, α_max), without computing an alpha that
        could round to 1."""
        low, high = self.alpha_range
        if (low, high) == (0.0, 1.0):
            return z
        width = math.log(high - low)
        log_alpha, log_rest = width + F.logsigmoid(z), width + F.logsigmoid(-z)
        if low > 0:
            log_alpha = torch.logaddexp(log_alpha, torch.full_like(log_alpha, math.log(low)))
        if high < 1:
            log_rest = torch.logaddexp(log_rest, torch.full_like(log_rest, math.log1p(-high)))
        return log_alpha - log_rest

    @property
    def method(self) -> str:
        """The name of the gate, and of the rule of the map that it is over, in tables and
        reports."""
        return gated_method(None if self.logit_map is None else self.rule)

    @property
    def steeper_than_trained(self) -> bool:
        """Whether the gate has a larger scale than in training: its gradient then vanishes away
        from its middle."""
        return self.scale > SCALE

    def limit_gate_slope(self, z: Tensor) -> Tensor:
        """Log-odds of the gate with at most the scale of training, which keeps a gradient for
        attacks."""
        return z * (SCALE / self.scale) if self.steeper_than_trained else z

    def alphas(self, x: Tensor) -> Tensor:
        """(B,) the weight of the robust side for every image."""
        return torch.sigmoid(self.restrict_gate(self.log_probabilities_and_gate(x)[2]))

    def _predict_with_accurate(self, x: Tensor, h: Tensor, features: Sequence[Tensor]) -> Tensor:
        g, features_g = self._accurate_with_features(x)
        checks.logits(g, len(x), f"logits of {self._name_of('accurate')}")
        checks.require(
            g.shape == h.shape,
            "accurate and robust",
            "have equal numbers of classes",
            (tuple(g.shape), tuple(h.shape)),
        )
        z = self._log_odds(features_g, (features[0], features[1]))
        logits = mix(self._accurate_side(g, h.dtype), h, self.restrict_gate(z))
        return checks.logits(logits, len(x), "logits of the mixture").argmax(dim=1)

    def with_range(
        self,
        alpha_min: float,
        alpha_max: float,
        *,
        scale: float | None = None,
        shift: float | None = None,
    ) -> GatedClassifier:
        """The same gate with another range, scale or shift [Bai2024, Table 7]; nothing is
        trained."""
        return self._copy(
            alpha_min=alpha_min,
            alpha_max=alpha_max,
            scale=self.scale if scale is None else scale,
            shift=self.shift if shift is None else shift,
        )

    def with_settings_of(self, mixture: MixedClassifier) -> GatedClassifier:
        """The same gate with the map, hard labels, temperature and α_d of another mixture of the
        same bases."""
        same = mixture.accurate is self.accurate and mixture.robust is self.robust
        checks.require(same, "mixture", "be a mixture of the gate's own bases", "another pair")
        first, second = self.logit_scales
        tempered = mixture.accurate_temperature != 1
        return self._copy(
            logit_map=mixture.logit_map,
            hard=mixture.hard,
            surrogate_alpha=mixture.surrogate_alpha,
            logit_scales=(1 / mixture.accurate_temperature if tempered else first, second),
        )

    def _copy(self, **changes: Any) -> GatedClassifier:
        same = {
            name: getattr(self, name)
            for name in (
                "scale",
                "shift",
                "logit_scales",
                "logit_map",
                "hard",
                "surrogate_alpha",
                "provenance",
            )
        }
        ends = {"alpha_min": self.alpha_range[0], "alpha_max": self.alpha_range[1]}
        copy = GatedClassifier(
            self.accurate, self.robust, self.network, **{**same, **ends, **changes}
        )
        return copy.to(self.gate.device).train(self.training)

    def surrogate(self, *, stand_in: nn.Module | None = None) -> nn.Module:
        """The differentiable mixture that adaptive attacks take gradients from, through the gate
        too."""
        _refuse_stand_in(stand_in)
        return GatedSurrogate(self, soft=True)

    def hinges(self, *, stand_in: nn.Module | None = None) -> nn.Module:
        """Scores for an attack on both sides at once, with every image's own alpha."""
        _refuse_stand_in(stand_in)
        return GatedHinges(self)

    def sides(self, *outputs: Tensor) -> tuple[Tensor, ...]:
        """Logits of g and of h (B, K), log-probabilities of the robust side, and log q (B,) of
        every image's alpha."""
        g, h, z = outputs
        scaled = [
            scale * at_least_float32(logits)
            for scale, logits in zip(self.logit_scales, (g, h), strict=True)
        ]
        return scaled[0], scaled[1], self.map_robust(h), -self.restrict_gate(z)

    def without_gate_gradient(self) -> nn.Module:
        """The mixture for a grey-box adversary: no gradient through the gate [Bai2024, adversary
        A]."""
        return GatedSurrogate(self, detach_gate=True, soft=not self.differentiable)


def _refuse_stand_in(stand_in: nn.Module | None) -> None:
    checks.require(
        stand_in is None,
        "stand_in",
        "be left out for a gate, which uses features of g itself",
        "a model",
    )
