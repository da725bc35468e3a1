"""The mixture as a module: images in, logits out, like any other classifier."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.core import checks
from equipoise.mixing import frontier as frontiers
from equipoise.mixing.frontier import Frontier
from equipoise.mixing.logit_maps import LogitMap, one_hot, wide
from equipoise.mixing.provenance import Provenance
from equipoise.mixing.rules import gate_of, mix
from equipoise.mixing.surrogate import BYPASS, Hinges, Surrogate

BAND = 1e-5  # margins so near to the threshold are not told apart in fp32


class MixedClassifier(nn.Module):
    """log((1 − α)·p_g(x) + α·softmax(M(h(x)))) [Bai2024, Eq. (3.4)] [Bai2024nuts, Eq. (5)].

    p_g is softmax(g(x)), or with `hard` the one-hot vector of g's class. Train or evaluation mode never
    changes the formula; it only reaches the bases, as in any module.

    Args:
        accurate: g, images (B, C, H, W) in [0, 1] → logits (B, K); with `hard` it may answer with classes (B,).
        robust: h, images → logits (B, K).
        alpha: weight of the robust side, in [0, 1].
        logit_map: M, on the robust side; None is the identity.
        hard: the accurate side at temperature 0.
        surrogate_alpha: α_d of :meth:`surrogate`.
        frontier: the mixtures that :meth:`with_target` chooses from.
        fitted: which images it was fitted on.
    """

    gate: Tensor

    def __init__(
        self, accurate: nn.Module, robust: nn.Module, alpha: float, *, logit_map: LogitMap | None = None,
        hard: bool = False, surrogate_alpha: float = 0.9, frontier: Frontier = (),
        fitted: Provenance | None = None,
    ) -> None:
        super().__init__()
        checks.within("alpha", alpha, 0, 1)
        self.accurate = accurate
        self.robust = robust
        self.logit_map = logit_map
        self.hard = hard
        self.surrogate_alpha = checks.within("surrogate_alpha", surrogate_alpha, 0, 1)
        self.frontier = frontier
        self.fitted = fitted
        self.register_buffer("gate", gate_of(float(alpha)))

    @property
    def alpha(self) -> float:
        """Weight of the robust side, to fifteen digits: the alpha that was given, not its rounding errors."""
        return float(f"{float(torch.sigmoid(self.gate)):.15g}")

    @property
    def q(self) -> float:
        """(1 − α)/α: a robust side that is ahead by more than this has the last word [Bai2024, Lemma 3.2]."""
        return math.exp(min(-float(self.gate), 700.0))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, K) log-probabilities, which serve as logits."""
        g, h = self.both(x)
        return mix(g, h, self.gate)

    def both(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, K) log-probabilities of the accurate side, and of the robust one."""
        h = self.mapped(self.robust(x))
        return self._accurate(x, h), h

    def alphas(self, x: Tensor) -> Tensor:
        """(B,) the weight of the robust side for every image: here the same for all."""
        return torch.sigmoid(self.gate).to(x.dtype).expand(len(x))

    def mapped(self, h: Tensor) -> Tensor:
        """(B, K) logits of h → log-probabilities of the robust side, in fp32 at least: half precision would tie
        margins that the threshold must tell apart."""
        return F.log_softmax(wide(h) if self.logit_map is None else self.logit_map(h), dim=1)

    def _accurate(self, x: Tensor, h: Tensor) -> Tensor:
        """(B, K) log-probabilities of the accurate side."""
        g = self.accurate(x)
        if self.hard:
            checks.require(g.dim() == 1 or g.shape == h.shape, "accurate and robust",
                           "have equal numbers of classes", (tuple(g.shape), tuple(h.shape)))
            return self._one_hot(g, h)
        checks.require(g.shape == h.shape, "accurate and robust", "have equal numbers of classes",
                       (tuple(g.shape), tuple(h.shape)))
        return F.log_softmax(wide(g), dim=1)

    @staticmethod
    def _one_hot(g: Tensor, h: Tensor) -> Tensor:
        return one_hot(g.long() if g.dim() == 1 else g.argmax(dim=1), h.shape[1], h.dtype)

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        """(B,) classes, the same as `forward(x).argmax(1)`, with g run only on the images it can decide.

        Wherever the robust side is ahead by more than :attr:`q`, the answer is its class, whatever g says.
        """
        h = self.mapped(self.robust(x))
        answer = h.argmax(dim=1)
        rows = self.undecided(h).nonzero().squeeze(1)
        if len(rows):
            few = h[rows]
            answer[rows] = mix(self._accurate(x[rows], few), few, self.gate).argmax(dim=1)
        return answer

    def undecided(self, h: Tensor) -> Tensor:
        """(B,) from log-probabilities of the robust side: where g may have a say.

        A margin that equals q is a tie, and one within the rounding of it may be: running g is always right.
        """
        top = h.exp().topk(2, dim=1).values
        return top[:, 0] - top[:, 1] <= self.q + BAND

    @property
    def differentiable(self) -> bool:
        """Whether the mixture's own gradients show the way: no map, no hard decision."""
        return self.logit_map is None and not self.hard

    def surrogate(self, *, stand_in: nn.Module | None = None, bypass: float = BYPASS) -> nn.Module:
        """The differentiable mixture that adaptive attacks follow [Bai2024nuts, Eq. (8)].

        Args:
            stand_in: for an accurate model that answers with classes: a similar one with gradients. Without
                one, only the robust side shows a way.
            bypass: r_d.
        """
        return Surrogate(stand_in or self.accurate, self.robust, self.logit_map, self.surrogate_alpha, bypass)

    def hinges(self, *, stand_in: nn.Module | None = None) -> nn.Module:
        """Scores for an attack on both sides at once; see :meth:`surrogate`."""
        return Hinges(stand_in or self.accurate, self.robust, self.logit_map, self.q)

    def with_target(self, lose_at_most: float) -> MixedClassifier:
        """The most accurate mixture of the fitted frontier that loses at most so many points; nothing is refitted.

        Args:
            lose_at_most: points (of 100) of robust accuracy.
        """
        point = frontiers.choose(self.frontier, lose_at_most)
        chosen = MixedClassifier(self.accurate, self.robust, point.alpha, logit_map=point.logit_map(), hard=True,
                                 surrogate_alpha=self.surrogate_alpha, frontier=self.frontier,
                                 fitted=self.fitted and self.fitted.slid(point.lose_at_most))
        return chosen.to(self.gate.device).train(self.training)

    def extra_repr(self) -> str:
        """The numbers of the formula."""
        aside = f"surrogate_alpha={self.surrogate_alpha!r}, map={self.logit_map}"
        return f"alpha={self.alpha:.15g}, hard={self.hard}, {aside}"


class HardLabels(nn.Module):
    """Anything that answers images with classes, as an accurate side: a function, a service, another framework."""

    def __init__(self, function: object) -> None:
        super().__init__()
        checks.require(callable(function), "accurate", "be callable", type(function).__name__)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B,) classes."""
        told = self.function(x.detach())  # type: ignore[operator]
        classes = torch.as_tensor(told, device=x.device)
        ok = classes.shape == (len(x),) and not classes.is_floating_point()
        checks.require(ok, "accurate", f"answer with {len(x)} classes", f"{classes.dtype} {tuple(classes.shape)}")
        return classes.long()

