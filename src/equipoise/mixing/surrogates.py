"""What attacks on a mixture take gradients from where the mixture itself has steps, and a penalty on its alpha."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.core import checks
from equipoise.mixing.formula import gate_of, mix
from equipoise.mixing.logit_maps import LogitMap, finite, layer_norm
from equipoise.models.inspection import Described, identity

if TYPE_CHECKING:
    from equipoise.mixing.classifier import MixedClassifier
    from equipoise.mixing.gated import GatedClassifier

BYPASS = 0.9  # share of the robust side whose gradient bypasses the map


class Surrogate(Described):
    r"""The auxiliary differentiable mixture.

    .. math:: \log\big((1-\alpha_d)\,\sigma(g) + \alpha_d r_d\,\sigma(h) + \alpha_d (1-r_d)\,\sigma(M(h))\big)

    [Bai2024nuts, Eq. (8)]. Its accurate side is not one-hot, and most of its robust side bypasses the map, so that
    neither hides the gradient.

    Args:
        accurate, robust: g and h; a g that returns classes has no gradient and is left out.
        logit_map: M; None is the identity.
        alpha: α_d; r_d is :data:`BYPASS`.
        scale: of normalized logits (:func:`working_scale`), which then replace h in σ(h); None is the paper's.
    """

    description = ("mixture-surrogate", "weights", "scale")

    def __init__(self, accurate: nn.Module, robust: nn.Module, logit_map: LogitMap | None, alpha: float,
                 scale: float | None = None) -> None:
        super().__init__()
        self.accurate, self.robust, self.logit_map, self.scale = accurate, robust, logit_map, scale
        self.weights = (1 - alpha, alpha * BYPASS, alpha * (1 - BYPASS))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, K) log-probabilities."""
        g, h = self.accurate(x), self.robust(x).float()
        mapped = h if self.logit_map is None else self.logit_map(h)
        if self.scale is not None and self.logit_map is not None:
            h = self.scale * self.logit_map.normalize(h)
        terms = [F.log_softmax(z.float(), dim=1) + math.log(weight)
                 for z, weight in zip((g, h, mapped), self.weights, strict=True) if weight > 0 and z.dim() == 2]
        return torch.logsumexp(torch.stack(terms), dim=0)


def working_scale(logit_map: LogitMap, q: float, classes: int = 10) -> float:
    """The factor at which a softmax of normalized logits is as confident as the map where g begins to decide.

    There the margin of the robust side is q: between two classes, or, if the map flattens the rivals, over all others.
    At the temperature of the logits themselves these probabilities may be flat, and surrogates without gradient.
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
    r"""How far the mixture is from predicting each class but h's first *because of the accurate side*.

    .. math:: -\frac{\max_k g_k - g_j}{\mathrm{spread}(g)} -
              [p_{top} - p_j > q]\,\big(\mathrm{LN}(h)_{top} - \mathrm{LN}(h)_j\big)

    with p = σ(M(h)). Zero exactly where g predicts j and the margin of h over j is at most q; as long as one of the two
    fails, its hinge has a gradient that no softmax has flattened. A map that flattens the rivals depends only on the
    confidence of h, so the second hinge then is the log-odds of h's first class.
    """

    description = ("mixture-hinges", "q")

    def __init__(self, accurate: nn.Module, robust: nn.Module, logit_map: LogitMap | None, q: float) -> None:
        super().__init__()
        self.accurate, self.robust, self.logit_map, self.q = accurate, robust, logit_map, q

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, K) scores ≤ 0."""
        return hinge_scores(self.accurate(x), self.robust(x), self.logit_map, self.q)


def hinge_scores(g: Tensor, h: Tensor, logit_map: LogitMap | None, q: float | Tensor) -> Tensor:
    """(B, K) scores of :class:`Hinges` from logits (B, K) of g and h, or classes (B,) of g; q may be (B, 1)."""
    h = h.float()
    g = g.float() if g.dim() == 2 else F.one_hot(g.long(), h.shape[1]).float()
    spread = g.detach().std(dim=1, keepdim=True).clamp_min(1e-6)
    accurate_hinge = (g.amax(dim=1, keepdim=True) - g) / spread
    p = torch.softmax(h if logit_map is None else logit_map(h), dim=1).detach()
    active = p.amax(dim=1, keepdim=True) - p > q
    normed = layer_norm(h)
    robust_hinge = normed.amax(dim=1, keepdim=True) - normed
    if logit_map is not None and logit_map.flattens_rivals:
        rivals = logit_map.numbers[3].to(h.dtype)
        first, rest = h.amax(dim=1, keepdim=True), h.scatter(1, h.argmax(dim=1, keepdim=True), -math.inf)
        confidence = F.softplus(first - rest.logsumexp(dim=1, keepdim=True))
        robust_hinge = rivals * robust_hinge + (1 - rivals) * confidence
    # The first class of h scores 0: an objective z_y − z_j then is the two hinges of j and nothing else.
    return (-accurate_hinge - active * robust_hinge).scatter(1, h.argmax(dim=1, keepdim=True), 0.0)


class Sides(Described):
    """What decides the class of a mixture, side by side, for attacks on both sides at once (:func:`hinge_sums`).

    Columns are the logits of g, the logits of h, the log-probabilities of the robust side, K each, and log q.
    """

    description = ("mixture-sides", "stand_in")

    def __init__(self, mixture: MixedClassifier, stand_in: nn.Module | None = None) -> None:
        super().__init__()
        self.mixture, self.stand_in = mixture, stand_in

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, 3K + 1)."""
        g, h, log_p, log_q = self.mixture.sides(x, self.stand_in)
        g = F.one_hot(g.long(), h.shape[1]).to(log_p.dtype) if g.dim() == 1 else g
        columns = (finite(g), finite(h), log_p, log_q.unsqueeze(1))
        return torch.cat([column.to(log_p.dtype) for column in columns], dim=1)


FORMS = ("mapped", "logits")  # what the hinge of the robust side measures
SLACK = 0.01  # the hinge of the robust side ends where its margin is this far below q


def hinge_sums(sides: Tensor, y: Tensor, form: str, *, reserve: float, rivals: float = 1.0) -> Tensor:
    r"""(B, K) how far a mixture is from predicting each class j instead of y *because of the accurate side*.

    .. math:: \frac{[\max_{k \ne j} g_k - g_j + r]_+}{\mathrm{spread}(g)} +
              [p_y - p_j > q]\,\Big(\frac{\ell_y - \ell_j}{\mathrm{spread}(\ell)} + \log\frac{p_y - p_j}{q}\Big)

    ℓ are the mapped log-probabilities, which have their gradient at the temperature of the map, or the logits of h,
    which have one where the map is flat. If a map flattens the rivals, the margin of logits is that over all others
    together. The last term has the gradient of a gate.

    Args:
        sides: (B, 3K + 1) of :class:`Sides`.
        y: (B,) labels.
        form: a name of :data:`FORMS`.
        reserve: r, in units of the spread of g.
        rivals: that of the map.
    """
    classes = (sides.shape[1] - 1) // 3
    g, h, log_p, log_q = sides.split([classes, classes, classes, 1], dim=1)
    label = y.unsqueeze(1)
    first, second = g.topk(2, dim=1).values.split(1, dim=1)
    spread = g.detach().std(dim=1, keepdim=True).clamp_min(1e-6)
    highest_other = torch.where(g == first, second, first)
    accurate = F.relu((highest_other - g) / spread + reserve)
    p = log_p.exp()
    difference = p.gather(1, label) - p
    decided_by_robust = difference.detach() > log_q.detach().exp() - SLACK
    scores = log_p if form == "mapped" else h
    own = scores.gather(1, label)
    margin = own - scores
    if form == "logits" and rivals < 1:
        others = h.scatter(1, label, -math.inf).logsumexp(dim=1, keepdim=True)
        margin = rivals * margin + (1 - rivals) * (own - others)
    margin = margin / scores.detach().std(dim=1, keepdim=True).clamp_min(1e-6)
    excess = F.relu(difference.clamp_min(1e-6).log() - log_q)
    total: Tensor = accurate + decided_by_robust * (margin + excess)
    return total


class GatedSurrogate(Described):
    """A gated mixture with useful gradients.

    Args:
        model: the gated mixture.
        detach_gate: treat the gate as a constant.
        soft: use the soft sides and a gate no steeper than in training. Where even the middle of the alpha range would
            make g's gradient negligible, the gate is also lowered to the surrogate's alpha.
    """

    description = ("gated-surrogate", "detach_gate", "soft", "offset")

    def __init__(self, model: GatedClassifier, *, detach_gate: bool = False, soft: bool = False) -> None:
        super().__init__()
        self.model, self.detach_gate, self.soft = model, detach_gate, soft
        middle = float(model.restrict_gate(torch.zeros((), dtype=torch.float64)))
        self.offset = max(middle - float(gate_of(model.surrogate_alpha)), 0.0) if soft else 0.0

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, K) log-probabilities."""
        g, h, z = self.model.log_probabilities_and_gate(x, soft=self.soft)
        z = self.model.limit_gate_slope(z) if self.soft else z
        return mix(g, h, self.model.restrict_gate(z.detach() if self.detach_gate else z) - self.offset)


class GatedHinges(Described):
    """:class:`Hinges` of a gated mixture: the threshold q is that of the image's own alpha.

    The threshold of α_min would count as reached where the gate still lets h decide, and the attack would stop there.
    """

    description = ("gated-hinges",)

    def __init__(self, model: GatedClassifier) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, K) scores ≤ 0."""
        g, h, z = self.model.logits_and_gate(x)
        q = torch.exp(-self.model.restrict_gate(z.detach())).unsqueeze(1)
        return hinge_scores(g, self.model.logit_scales[1] * h.float(), self.model.logit_map, q)


@dataclass(frozen=True)
class AlphaPenalty:
    """An extra term for attacks that lowers alpha, whatever its range [Bai2024, adversary D].

    `share` is −weight·sigmoid(gate), of the size of a margin, so that it changes the direction of an attack without
    replacing its objective. `published` is −weight·log sigmoid(gate), with weight 1 in the official evaluation; here it
    made attacks on margins and ratios weaker, because it grows without bound where alpha is already low. A steep gate
    is used with its slope in training, because the sigmoid of a steep one is flat. On CUDA the forward pass runs in
    bfloat16, as the attack's own passes do.
    """

    model: GatedClassifier
    weight: float = 0.25
    form: str = "share"

    def __post_init__(self) -> None:
        checks.one_of("form", self.form, ("share", "published"))

    def describe(self) -> dict[str, Any]:
        """Form, weight and gate, for the identity of an attack."""
        return {"type": "alpha-penalty", "version": 1, "form": self.form, "weight": self.weight,
                "model": identity(self.model)}

    def __call__(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B,)."""
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=x.is_cuda, cache_enabled=False):
            z = self.model.log_probabilities_and_gate(x)[2]
        z = self.model.limit_gate_slope(z.to(x.dtype))
        return self.weight * (-torch.sigmoid(z) if self.form == "share" else F.softplus(-z))
