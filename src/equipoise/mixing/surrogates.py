"""What attacks on a mixture take gradients from where the mixture itself has steps."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.core.losses import top_log_odds
from equipoise.mixing.logit_maps import LogitMap, finite, layer_norm
from equipoise.models.inspection import Described

if TYPE_CHECKING:
    from equipoise.mixing.classifier import MixedClassifier

BYPASS = 0.9  # share of the robust side whose gradient bypasses the map


class Surrogate(Described):
    r"""The auxiliary differentiable mixture.

    .. math:: \log\big((1-\alpha_d)\,\sigma(g) + \alpha_d r_d\,\sigma(h) + \alpha_d
    (1-r_d)\,\sigma(M(h))\big)

    [Bai2024nuts, Eq. (8)]. Its accurate side is not one-hot, and most of its robust side bypasses
    the map, so that neither hides the gradient.

    Args:
        accurate, robust: g and h; a g that returns classes has no gradient and is left out.
        logit_map: M; None is the identity.
        alpha: α_d; r_d is :data:`BYPASS`.
        working_q: the q at which normalized logits, at :func:`working_scale`, replace h in σ(h);
            None is the paper's.
    """

    description = ("mixture-surrogate", "weights", "working_q")

    def __init__(
        self,
        accurate: nn.Module,
        robust: nn.Module,
        logit_map: LogitMap | None,
        alpha: float,
        working_q: float | None = None,
    ) -> None:
        super().__init__()
        self.accurate, self.robust, self.logit_map, self.working_q = (
            accurate,
            robust,
            logit_map,
            working_q,
        )
        self._scales: dict[int, float] = {}  # by number of classes
        self.weights = (1 - alpha, alpha * BYPASS, alpha * (1 - BYPASS))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, K) log-probabilities."""
        return self.from_base_outputs(self.accurate(x), self.robust(x))

    def reads_bases_of(self, model: nn.Module) -> bool:
        """Whether g and h are the bases of this model."""
        return _has_bases(model, self.accurate, self.robust)

    def from_base_outputs(self, g: Tensor, h: Tensor, *_: Tensor) -> Tensor:
        """(B, K) log-probabilities from what the bases return; the log-odds of a gate do not
        matter."""
        h = h.float()
        mapped = h if self.logit_map is None else self.logit_map(h)
        if self.working_q is not None and self.logit_map is not None:
            h = self._scale(self.logit_map, h.shape[1]) * self.logit_map.normalize(h)
        terms = [
            F.log_softmax(z.float(), dim=1) + math.log(weight)
            for z, weight in zip((g, h, mapped), self.weights, strict=True)
            if weight > 0 and z.dim() == 2
        ]
        return torch.logsumexp(torch.stack(terms), dim=0)

    def _scale(self, logit_map: LogitMap, classes: int) -> float:
        """Computed once, because it waits for the device."""
        if classes not in self._scales:
            self._scales[classes] = working_scale(logit_map, self.working_q or 0.0, classes)
        return self._scales[classes]


def working_scale(logit_map: LogitMap, q: float, classes: int) -> float:
    """The factor at which a softmax of normalized logits is as confident as the map where g begins
    to decide.

    There the margin of the robust side is q: between two classes, or, if the map flattens the
    rivals, over all others. At the temperature of the logits themselves these probabilities may be
    flat, and surrogates without gradient.
    """
    q = min(max(q, 0.01), 0.99)
    rivals = classes - 1 if logit_map.flattens_rivals else 1
    gap = math.log((1 + rivals * q) / (1 - q))
    low, high = torch.tensor([[0.0], [50.0]], dtype=torch.float64, device=logit_map.numbers.device)
    bottom = logit_map.transform(low)
    for _ in range(50):  # a clamp may be flat, so that no formula can be inverted
        middle = (low + high) / 2
        reached = logit_map.transform(middle) - bottom >= gap
        low, high = torch.where(reached, low, middle), torch.where(reached, middle, high)
    return gap / max(float(high), 0.01)


class Hinges(Described):
    r"""How far the mixture is from predicting each class but h's first *because of the accurate
    side*.

    .. math:: -\frac{\max_k g_k - g_j}{\mathrm{spread}(g)} -
              [p_{top} - p_j > q]\,\big(\mathrm{LN}(h)_{top} - \mathrm{LN}(h)_j\big)

    with p = σ(M(h)). Zero exactly where g predicts j and the margin of h over j is at most q; as
    long as one of the two fails, its hinge has a gradient that no softmax has flattened. A map that
    flattens the rivals depends only on the confidence of h, so the second hinge then is the
    log-odds of h's first class.
    """

    description = ("mixture-hinges", "q")

    def __init__(
        self, accurate: nn.Module, robust: nn.Module, logit_map: LogitMap | None, q: float
    ) -> None:
        super().__init__()
        self.accurate, self.robust, self.logit_map, self.q = accurate, robust, logit_map, q

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, K) scores ≤ 0."""
        return self.from_base_outputs(self.accurate(x), self.robust(x))

    def reads_bases_of(self, model: nn.Module) -> bool:
        """Whether g and h are the bases of this model."""
        return _has_bases(model, self.accurate, self.robust)

    def from_base_outputs(self, g: Tensor, h: Tensor, *_: Tensor) -> Tensor:
        """(B, K) scores from what the bases return; the log-odds of a gate do not matter."""
        return hinge_scores(g, h, self.logit_map, self.q)


def _has_bases(model: nn.Module, accurate: nn.Module, robust: nn.Module) -> bool:
    return getattr(model, "accurate", None) is accurate and getattr(model, "robust", None) is robust


def hinge_scores(g: Tensor, h: Tensor, logit_map: LogitMap | None, q: float | Tensor) -> Tensor:
    """(B, K) scores of :class:`Hinges` from logits (B, K) of g and h, or classes (B,) of g; q may
    be (B, 1)."""
    h = h.float()
    g = g.float() if g.dim() == 2 else F.one_hot(g.long(), h.shape[1]).float()
    spread = g.detach().std(dim=1, keepdim=True).clamp_min(1e-6)
    accurate_hinge = (g.amax(dim=1, keepdim=True) - g) / spread
    # The first class of h scores 0: an objective z_y − z_j then is the two hinges of j and nothing
    # else.
    return (-accurate_hinge - robust_hinge(h, logit_map, q)).scatter(
        1, h.argmax(dim=1, keepdim=True), 0.0
    )


def robust_hinge(h: Tensor, logit_map: LogitMap | None, q: float | Tensor) -> Tensor:
    """(B, K) how far h is from leaving the decision to another class: 0 where its margin over it is
    at most q."""
    h = h.float()
    p = torch.softmax(h if logit_map is None else logit_map(h), dim=1).detach()
    active = p.amax(dim=1, keepdim=True) - p > q
    normed = layer_norm(h)
    hinge = normed.amax(dim=1, keepdim=True) - normed
    if logit_map is not None and logit_map.flattens_rivals:
        rivals = logit_map.numbers[3].to(h.dtype)
        confidence = F.softplus(top_log_odds(h)).unsqueeze(1)
        hinge = rivals * hinge + (1 - rivals) * confidence
    return active * hinge


class OfMixture(Described, ABC):
    """A network that is a function of what the bases of one mixture return; a stand-in replaces
    g."""

    def __init__(self, mixture: MixedClassifier, stand_in: nn.Module | None = None) -> None:
        super().__init__()
        self.mixture, self.stand_in = mixture, stand_in

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, columns)."""
        if self.stand_in is None:
            return self.from_base_outputs(*self.mixture.base_outputs(x))
        return self.from_base_outputs(self.stand_in(x), *self.mixture.robust_outputs(x))

    def reads_bases_of(self, model: nn.Module) -> bool:
        """Whether the mixture is this model, and no base has a stand-in."""
        return model is self.mixture and self.stand_in is None

    @abstractmethod
    def from_base_outputs(self, *outputs: Tensor) -> Tensor:
        """(B, columns) from what the bases return."""


class Sides(OfMixture):
    """What decides the class of a mixture, side by side, for attacks on both sides at once
    (:func:`hinge_sums`).

    Columns are the logits of g, and for every stage of the robust side (all but cascades have one)
    the logits of h, their log-probabilities, K each, and log q.
    """

    description = ("mixture-sides", "stand_in")

    def from_base_outputs(self, *outputs: Tensor) -> Tensor:
        """(B, K + stages·(2K + 1)) from what the bases return."""
        g, *stages = self.mixture.sides(*outputs)
        log_p = stages[1]
        g = F.one_hot(g.long(), log_p.shape[1]).to(log_p.dtype) if g.dim() == 1 else g
        columns = [finite(g)]
        for h, own, log_q in zip(*[iter(stages)] * 3, strict=True):
            columns += [finite(h), own, log_q.unsqueeze(1)]
        return torch.cat([column.to(log_p.dtype) for column in columns], dim=1)


FORMS = ("mapped", "logits")  # what the hinge of the robust side measures
RESERVES = {
    True: 0.05,
    False: 1.0,
}  # by whether labels of g are hard: soft ones must also be confident
SLACK = 0.01  # the hinge of the robust side ends where its margin is this far below q
TOWARDS_TARGET = 0.2  # weight of the logits of h towards the target where a map flattens the rivals


def hinge_sums(
    sides: Tensor, y: Tensor, form: str, *, reserve: float, rivals: float = 1.0, stages: int = 1
) -> Tensor:
    r"""(B, K) how far a mixture is from predicting each class j instead of y *because of the
    accurate side*.

    .. math:: \frac{[\max_{k \ne j} g_k - g_j + r]_+}{\mathrm{spread}(g)} +
              [p_y - p_j > q]\,\Big(\frac{\ell_y - \ell_j}{\mathrm{spread}(\ell)} + \log\frac{p_y -
              p_j}{q}\Big)

    ℓ are the mapped log-probabilities, which have their gradient at the temperature of the map, or
    the logits of h, which have one where the map is flat. If a map flattens the rivals, the margin
    of logits is that over all others together. At `rivals` = 0 neither margin depends on j, so the
    logits of h towards j are added with a small weight; they also put classes near h first among
    those equally near for g. The last term has the gradient of a gate. The second hinge is summed
    over the stages of the robust side: each of them must leave the decision to g.

    Args:
        sides: of :class:`Sides`.
        y: (B,) labels.
        form: a name of :data:`FORMS`.
        reserve: r, in units of the spread of g.
        rivals: that of the map.
        stages: of the robust side.
    """
    classes = (sides.shape[1] - stages) // (2 * stages + 1)
    g, *columns = sides.split([classes, *[classes, classes, 1] * stages], dim=1)
    first, second = g.topk(2, dim=1).values.split(1, dim=1)
    highest_other = torch.where(g == first, second, first)
    total: Tensor = F.relu((highest_other - g) / _spread(g) + reserve)
    for h, log_p, log_q in zip(*[iter(columns)] * 3, strict=True):
        total = total + _stage_hinge(h, log_p, log_q, y.unsqueeze(1), form, rivals)
    return total


def _spread(scores: Tensor) -> Tensor:
    """(B, 1) the unit in which differences of scores (B, K) are measured; a constant for
    gradients."""
    return scores.detach().std(dim=1, keepdim=True).clamp_min(1e-6)


def _stage_hinge(
    h: Tensor, log_p: Tensor, log_q: Tensor, label: Tensor, form: str, rivals: float
) -> Tensor:
    """(B, K) the second hinge of :func:`hinge_sums` for one stage."""
    p = log_p.exp()
    difference = p.gather(1, label) - p
    decided_by_robust = difference.detach() > log_q.detach().exp() - SLACK
    scores = log_p if form == "mapped" else h
    own = scores.gather(1, label)
    margin = own - scores
    if form == "logits" and rivals < 1:
        others = h.scatter(1, label, -math.inf).logsumexp(dim=1, keepdim=True)
        margin = rivals * margin + (1 - rivals) * (own - others)
    margin = margin / _spread(scores)
    if rivals < 1:
        margin = margin + (1 - rivals) * TOWARDS_TARGET * (h.gather(1, label) - h) / _spread(h)
    excess = F.relu(difference.clamp_min(1e-6).log() - log_q)
    return decided_by_robust * (margin + excess)
