"""The mixing formula: log((1 − alpha) softmax(g) + alpha softmax(h))."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


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
