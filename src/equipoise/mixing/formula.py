"""The mixing formula, and the best that any choice of alpha per image could achieve: a bound for
every gate."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

SLACK = 1e-6  # in probabilities: a mixture that is rounded to a tie may still classify correctly


def mix(log_p_accurate: Tensor, log_p_robust: Tensor, gate: Tensor) -> Tensor:
    r"""Mix two predictions in probability space.

    .. math:: \log\big((1-\alpha)\,p_{acc} + \alpha\,p_{rob}\big), \qquad \alpha =
    \mathrm{sigmoid}(gate)

    [Bai2024, Eq. (3.4)]. The literal formula gives −inf logits and NaN gradients for confident
    bases; with log-sigmoids of the gate it is finite for |gate| ≤ 1e4 and exact at ±inf. A class
    that neither side gives any probability is −inf, with gradient 0.

    Args:
        log_p_accurate, log_p_robust: (B, K) log-probabilities of both classifiers.
        gate: () or (B,) log-odds of alpha; −inf keeps the accurate one, +inf the robust one.

    Returns:
        (B, K) log-probabilities; they sum to one over K, so they also serve as logits.

    >>> p, q = torch.tensor([[0.9, 0.1]]), torch.tensor([[0.2, 0.8]])
    >>> mix(p.log(), q.log(), gate_of(0.5)).exp()
    tensor([[0.5500, 0.4500]])
    """
    gate = gate.to(log_p_robust.dtype).unsqueeze(-1)
    accurate, robust = F.logsigmoid(-gate) + log_p_accurate, F.logsigmoid(gate) + log_p_robust
    neither = torch.maximum(accurate, robust).detach() == -math.inf
    return torch.logaddexp(accurate.masked_fill(neither, 0.0), robust).masked_fill(
        neither, -math.inf
    )


def gate_of(alpha: float) -> Tensor:
    """() float64: the log-odds of alpha in [0, 1], −inf and +inf at the ends."""
    if alpha in (0.0, 1.0):
        return torch.tensor(-math.inf if alpha == 0 else math.inf, dtype=torch.float64)
    return torch.tensor(math.log(alpha) - math.log1p(-alpha), dtype=torch.float64)


def correct_alphas(
    log_p_accurate: Tensor, log_p_robust: Tensor, y: Tensor
) -> tuple[Tensor, Tensor]:
    r"""The interval of alpha in [0, 1] in which the mixture predicts y; empty where low > high.

    .. math:: (1-\alpha)(g_y - g_j) + \alpha (h_y - h_j) \ge 0 \quad \text{for all } j

    Every class j allows a half-line. A gate that knows the label, as in [Bai2024, Theorem 4.1], is
    correct wherever the interval is not empty; that can be where both bases are wrong, because each
    may prefer another wrong class.

    Args:
        log_p_accurate, log_p_robust: as for :func:`mix`.
        y: (B,) labels. :data:`SLACK` is added to their probability, for gates that are bounded from
            above.

    Returns:
        (B,) low and (B,) high.
    """
    g, h = (side.double().exp() for side in (log_p_accurate, log_p_robust))
    label = y.unsqueeze(1)
    ahead = g.gather(1, label) - g + SLACK
    slope = h.gather(1, label) - h + SLACK - ahead
    # With slope 0 the condition does not depend on alpha: every alpha is allowed, or none.
    bound = -ahead / slope.where(slope != 0, 1.0)
    low = bound.where(slope > 0, (ahead < 0).double() * 2 * (slope == 0))
    high = bound.where(slope < 0, 1.0)
    return low.amax(dim=1).clamp_min(0), high.amin(dim=1).clamp_max(1)


def oracle_is_correct(log_p_accurate: Tensor, log_p_robust: Tensor, y: Tensor) -> Tensor:
    """(B,) where some alpha in [0, 1] gives the correct class: no gate does better [Bai2024,
    Theorem 4.1]."""
    low, high = correct_alphas(log_p_accurate, log_p_robust, y)
    return low <= high
