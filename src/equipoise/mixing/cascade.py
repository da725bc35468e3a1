"""The cascade of views: one view of the robust model decides where it is sure, its other views and
g elsewhere."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core import checks
from equipoise.mixing.classifier import MixedClassifier
from equipoise.mixing.formula import mix
from equipoise.mixing.logit_maps import LogitMap
from equipoise.mixing.provenance import Frontier, FrontierMixture, Provenance
from equipoise.mixing.surrogates import OfMixture, Surrogate, hinge_scores, robust_hinge
from equipoise.models.inspection import Described
from equipoise.models.layers.tta import TTAClassifier

SURE = 1e-6  # probability that a sure first view leaves to the other classes in the robust side of a cascade


class CascadedClassifier(MixedClassifier):
    r"""A confidence switch in two stages over the N views of a robust model with test-time
    augmentation.

    .. math:: \text{prediction} = \begin{cases}
              \arg\max M_1(h_1) & \text{if the margin of } \sigma(M_1(h_1)) \text{ exceeds } q_1,\\
              \arg\max M(\bar h) & \text{otherwise, if the margin of } \sigma(M(\bar h)) \text{
              exceeds } q,\\ \text{the class of } g & \text{otherwise,}\end{cases}

    h_1 are the logits of the first view and h̄ their mean over all N, M is the logit map, M_1 the
    same map with a scale of its own, and q = (1 − α)/α. It is a mixture whose alpha depends on the
    image: 1 where the first view is sure. :meth:`predict` runs the other views, and g after them,
    only where they are needed.

    Args:
        accurate, alpha, logit_map, surrogate_alpha, frontier, provenance: see
            :class:`MixedClassifier`; the labels of g are hard.
        robust: h with its views.
        first_q: q_1, in [0, 1]: at 1 the first view is never sure, and this is the mixture with all
            views.
        first_scale: the scale of M_1; None is that of M.
    """

    description = ("cascaded-mixture", "alpha", "first_q", "first_scale", "surrogate_alpha")
    stages = 2
    robust: TTAClassifier

    def __init__(
        self,
        accurate: nn.Module,
        robust: nn.Module,
        alpha: float,
        *,
        first_q: float,
        first_scale: float | None = None,
        logit_map: LogitMap | None = None,
        surrogate_alpha: float = 0.9,
        frontier: Frontier = (),
        provenance: Provenance | None = None,
    ) -> None:
        checks.instance("robust", robust, TTAClassifier, "have views (tta:N:REFERENCE)")
        super().__init__(
            accurate,
            robust,
            alpha,
            logit_map=logit_map,
            hard=True,
            surrogate_alpha=surrogate_alpha,
            frontier=frontier,
            provenance=provenance,
        )
        self.first_q, self.first_scale = float(checks.within("first_q", first_q, 0, 1)), first_scale
        checks.require(
            first_scale is None or logit_map is not None,
            "first_scale",
            "come with a map",
            first_scale,
        )
        self.first_map = (
            logit_map
            if logit_map is None or first_scale is None
            else logit_map.with_scale(first_scale)
        )

    @property
    def rule(self) -> str:
        """The key in :data:`~equipoise.mixing.provenance.RULES`."""
        return "cascade" if self.alpha < 1 else "robust"

    def robust_outputs(self, x: Tensor) -> tuple[Tensor, ...]:
        """(B, K) mean logits over all views, and those of the first view."""
        first = self.robust.first_view(x)
        return self.robust.complete(x, first), first

    def from_base_outputs(self, *outputs: Tensor) -> Tensor:
        """(B, K) log-probabilities of the mixture from :meth:`base_outputs`."""
        g, h, first = outputs
        sure, log_p = self._stages(h, first)
        gate = torch.where(sure, math.inf, self.gate)
        return mix(self._accurate_log_probabilities(g, log_p), log_p, gate)

    def log_probabilities(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, K) log-probabilities of the accurate side, and of the stage that is the robust
        one."""
        g, h, first = self.base_outputs(x)
        log_p = self._stages(h, first)[1]
        return self._accurate_log_probabilities(g, log_p), log_p

    def map_first(self, first: Tensor) -> Tensor:
        """(B, K) logits of the first view → log-probabilities."""
        return self._mapped(first, self.first_map)

    def _stages(self, h: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        """(B,) where the first view is sure, and (B, K) log-probabilities of the stage that
        decides."""
        log_p_first = self.map_first(first)
        sure = self.is_sure(log_p_first)
        return sure, torch.where(sure.unsqueeze(1), log_p_first, self.map_robust(h))

    def robust_side(self, h: Tensor, *outputs: Tensor) -> Tensor:
        """(B, K) log-probabilities of the robust side from :meth:`robust_outputs`, by which g may
        change the class.

        Where the first view is sure, its class has nearly all probability: no g changes it.
        """
        first = self.map_first(outputs[0])
        rest = torch.full_like(first, math.log(SURE / (first.shape[1] - 1)))
        decided = rest.scatter(1, first.argmax(dim=1, keepdim=True), math.log1p(-SURE))
        return torch.where(self.is_sure(first).unsqueeze(1), decided, self.map_robust(h))

    def is_sure(self, log_p_first: Tensor) -> Tensor:
        """(B,) where the first view decides, given its log-probabilities (B, K)."""
        top = log_p_first.exp().topk(2, dim=1).values
        return top[:, 0] - top[:, 1] > self.first_q

    def alphas(self, x: Tensor) -> Tensor:
        """(B,) the weight of the robust side for every image: 1 where the first view is sure."""
        sure = self.is_sure(self.map_first(self.robust.first_view(x)))
        return torch.where(sure, 1.0, self.alpha).to(x.dtype)

    def _predict(self, x: Tensor) -> Tensor:
        name = f"logits of {self._name_of('robust')}"
        first = checks.logits(self.robust.first_view(x), len(x), name)
        log_p_first = self.map_first(first)
        classes = log_p_first.argmax(dim=1)
        rows = (~self.is_sure(log_p_first)).nonzero().squeeze(1)
        if len(rows):
            h = self.map_robust(
                checks.logits(self.robust.complete(x[rows], first[rows]), len(rows), name)
            )
            classes[rows] = self._predict_by_margin(x[rows], h)
        return classes

    def passes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B,) views that :meth:`predict` runs, and (B,) bool where it runs g."""
        h, first = self.robust_outputs(x)
        unsure = ~self.is_sure(self.map_first(first))
        views = torch.where(unsure, float(self.views), 1.0)
        return views, unsure & self.needs_accurate(self.map_robust(h))

    def surrogate(self, *, stand_in: nn.Module | None = None) -> nn.Module:
        """:meth:`MixedClassifier.surrogate` of the mixtures with all views and with the first view,
        together."""
        stages = [
            Surrogate(stand_in or self.accurate, self.robust, own, self.surrogate_alpha)
            for own in (self.logit_map, self.first_map)
        ]
        return CascadeSurrogate(self, *stages, stand_in=stand_in)

    def tempered_surrogate(self, *, stand_in: nn.Module | None = None) -> nn.Module:
        """:meth:`surrogate` with the cascade's own alpha, each stage at the temperature at which
        its map works."""
        stages = [
            Surrogate(
                stand_in or self.accurate, self.robust, own, self.alpha, None if own is None else q
            )
            for own, q in ((self.logit_map, self.q), (self.first_map, self.first_q))
        ]
        return CascadeSurrogate(self, *stages, stand_in=stand_in)

    def hinges(self, *, stand_in: nn.Module | None = None) -> nn.Module:
        """Scores for an attack on both stages and on g at once."""
        return CascadeHinges(self, stand_in)

    def sides(self, *outputs: Tensor) -> tuple[Tensor, ...]:
        """As for any mixture, with the logits, log-probabilities and log q of the first view as a
        second stage."""
        g, h, first = outputs
        log_q = torch.full_like(
            first[:, 0], max(math.log(max(self.first_q, 1e-30)), -60.0), dtype=torch.float32
        )
        return *super().sides(g, h), first, self.map_first(first), log_q


def mixture_at(
    point: FrontierMixture, accurate: nn.Module, robust: nn.Module, **settings: Any
) -> MixedClassifier:
    """The mixture of a point on a frontier; `settings` are those that the point does not hold."""
    settings["logit_map"] = point.logit_map()
    if point.first_q is not None:
        return CascadedClassifier(
            accurate,
            robust,
            point.alpha,
            first_q=point.first_q,
            first_scale=point.first_scale,
            **settings,
        )
    return MixedClassifier(accurate, robust, point.alpha, hard=True, **settings)


class FirstView(Described):
    """The first view of a robust model as a network of its own, for attacks on the first stage of a
    cascade."""

    description = ("first-view",)

    def __init__(self, robust: TTAClassifier) -> None:
        super().__init__()
        self.robust = robust

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, K) logits."""
        return self.robust.first_view(x)


class BothStages(OfMixture):
    r"""Both stages of a cascade together: an attack that lowers it lowers the confidence of both.

    .. math:: \log\tfrac{1}{2}\big(\sigma(M_1(h_1)) + \sigma(M(\bar h))\big)
    """

    description = ("both-stages",)
    mixture: CascadedClassifier

    def from_base_outputs(self, *outputs: Tensor) -> Tensor:
        """(B, K) log-probabilities; those of g do not matter, and may be left out."""
        h, first = outputs[-2:]
        return _mean_probability(self.mixture.map_robust(h), self.mixture.map_first(first))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, K)."""
        return self.from_base_outputs(*self.mixture.robust_outputs(x))

    def reads_bases_of(self, model: nn.Module) -> bool:
        """Whether the model is the cascade, or the margins of it."""
        return super().reads_bases_of(model.mixture if isinstance(model, CascadeMargins) else model)


class CascadeSurrogate(OfMixture):
    r"""The auxiliary mixtures S of both stages together: an attack that lowers it lowers either.

    .. math:: \log\tfrac{1}{2}\big(\exp S(g, h_1) + \exp S(g, \bar h)\big)
    """

    description = ("cascade-surrogate",)

    def __init__(
        self,
        mixture: CascadedClassifier,
        all_views: Surrogate,
        first_view: Surrogate,
        *,
        stand_in: nn.Module | None,
    ) -> None:
        super().__init__(mixture, stand_in)
        self.all_views, self.first_view = all_views, first_view

    def from_base_outputs(self, *outputs: Tensor) -> Tensor:
        """(B, K) log-probabilities."""
        g, h, first = outputs
        return _mean_probability(
            self.all_views.from_base_outputs(g, h), self.first_view.from_base_outputs(g, first)
        )


class CascadeMargins(OfMixture):
    """:meth:`CascadedClassifier.robust_side` as a network: its margins are those that a fit judges
    a cascade by."""

    description = ("cascade-margins",)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, K)."""
        return self.from_base_outputs(*self.base_outputs(x))

    def base_outputs(self, x: Tensor) -> tuple[Tensor, ...]:
        """What its own and :class:`BothStages`' outputs are a function of: one pass of the views
        serves both."""
        return self.mixture.robust_outputs(x)

    def reads_bases_of(self, model: nn.Module) -> bool:
        """Whether the model is this one."""
        return model is self

    def from_base_outputs(self, *outputs: Tensor) -> Tensor:
        """(B, K) log-probabilities; the output of g does not matter, and may be left out."""
        return self.mixture.robust_side(*outputs[-2:])


class CascadeHinges(OfMixture):
    """:class:`~equipoise.mixing.surrogates.Hinges` with a third one: the first view must not be
    sure either."""

    description = ("cascade-hinges", "stand_in")

    def from_base_outputs(self, *outputs: Tensor) -> Tensor:
        """(B, K) scores ≤ 0."""
        g, h, first = outputs
        assert isinstance(self.mixture, CascadedClassifier)
        scores = hinge_scores(g, h, self.mixture.logit_map, self.mixture.q)
        scores = scores - robust_hinge(first, self.mixture.first_map, self.mixture.first_q)
        return scores.scatter(1, h.argmax(dim=1, keepdim=True), 0.0)


def _mean_probability(*log_p: Tensor) -> Tensor:
    """(B, K) logarithm of the mean of some probabilities, given as logarithms."""
    return torch.logsumexp(torch.stack(log_p), dim=0) - math.log(len(log_p))
