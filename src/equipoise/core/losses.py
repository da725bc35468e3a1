"""Losses per example, (B, K) × (B,) → (B,): raised by attacks, lowered by training."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(logits: Tensor, y: Tensor, smoothing: float = 0.0) -> Tensor:
    """−log softmax(z)_y; with label smoothing s the target is (1 − s)·onehot + s/K."""
    return F.cross_entropy(logits, y, reduction="none", label_smoothing=smoothing)


def kl_divergence(log_p: Tensor, target: Tensor) -> Tensor:
    """KL(target ‖ p) over the last axis; the gradient also flows through the target."""
    return F.kl_div(log_p, target, reduction="none").sum(dim=-1)


def signed_margin(scores: Tensor, y: Tensor) -> Tensor:
    """s_y − max over the other classes; negative exactly where another class wins."""
    own = scores.gather(1, y.unsqueeze(1)).squeeze(1)
    others = scores.scatter(1, y.unsqueeze(1), -math.inf)
    return own - others.amax(dim=1)


def probability_margin(logits: Tensor, y: Tensor) -> Tensor:
    """The signed margin of softmax(z): in [−1, 1]."""
    return signed_margin(torch.softmax(logits, dim=1), y)


def top_log_odds(logits: Tensor) -> Tensor:
    """log p_top − log(1 − p_top) of the largest probability of softmax(z): how sure a prediction
    is."""
    first, rest = (
        logits.amax(dim=1),
        logits.scatter(1, logits.argmax(dim=1, keepdim=True), -math.inf),
    )
    return first - rest.logsumexp(dim=1)


def dlr(logits: Tensor, y: Tensor) -> Tensor:
    """Difference of logits ratio [Croce2020, Eq. (6)]: −(z_y − max_{j≠y} z_j) / (z_(1) − z_(3)).

    Neither shifting nor scaling the logits changes it, so confidence cannot mask its gradient. With
    two classes, where there is no third logit and the ratio would be ±1 everywhere, it is the plain
    margin.
    """
    margin = signed_margin(logits, y)
    if logits.shape[1] < 3:
        return -margin
    top = logits.topk(3, dim=1).values
    return -margin / (top[:, 0] - top[:, 2] + 1e-12)


def targeted_dlr(logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    """−(z_y − z_t) / (z_(1) − (z_(3) + z_(4)) / 2) [Croce2020, Eq. (7)].

    With three classes it would be constant wherever the target has the lowest logit; there, and
    with two, it is −gap.
    """
    gap = logits.gather(1, y.unsqueeze(1)).squeeze(1) - logits.gather(
        1, target.unsqueeze(1)
    ).squeeze(1)
    if logits.shape[1] < 4:
        return -gap
    top = logits.topk(4, dim=1).values
    return -gap / (top[:, 0] - top[:, 2:].mean(dim=1) + 1e-12)


def margin_loss(logits: Tensor, y: Tensor) -> Tensor:
    """max_{j≠y} p_j − p_y [PMA2024]: the negative probability margin, so that attacks raise it."""
    return -probability_margin(logits, y)


def relative(loss: Loss) -> Loss:
    """The loss of logits whose standard deviation over the classes is made 3, which is near that of
    most networks.

    Scaling the logits does not change it. On a network with logits a hundred times as large, where
    probabilities are 0 or 1 and cross-entropy and probability margin have no gradient, it is the
    loss of the network before scaling. With two classes, where it would be constant, it is the
    plain margin. Logits of −inf, as of classes that a network excludes, stay, and leave the
    gradients of the others finite.
    """

    def scaled(logits: Tensor, y: Tensor) -> Tensor:
        if logits.shape[1] < 3:
            return -signed_margin(logits, y)
        lowest = logits.masked_fill(logits.isinf(), math.inf).amin(dim=1, keepdim=True)
        finite = torch.maximum(logits, lowest)
        deviation = finite.std(dim=1, keepdim=True).clamp_min(torch.finfo(logits.dtype).tiny)
        return loss(torch.where(logits.isinf(), logits, 3 * finite / deviation), y)

    return scaled


LOSSES: dict[str, Loss] = {
    "ce": cross_entropy,
    "dlr": dlr,
    "margin": margin_loss,
    "relative-ce": relative(cross_entropy),
    "relative-margin": relative(margin_loss),
}
