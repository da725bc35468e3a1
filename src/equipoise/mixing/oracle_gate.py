"""What the best choice of alpha could do: an image by image bound on every gate."""

from __future__ import annotations

from torch import Tensor

SLACK = 1e-6  # in probabilities: a mixture that is rounded to a tie may still answer rightly


def right_alphas(log_p_accurate: Tensor, log_p_robust: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    r"""The interval of alpha in [0, 1] in which the mixture answers y; empty where low > high.

    .. math:: (1-\alpha)(g_y - g_j) + \alpha (h_y - h_j) \ge 0 \quad \text{for all } j

    Every class j allows a half-line. A gate that sees the label, as in [Bai2024, Theorem 4.1], is right wherever the
    interval is not empty; that can be where both bases are wrong, since each may prefer another wrong class.

    Args:
        log_p_accurate, log_p_robust: (B, K) log-probabilities of both sides.
        y: (B,) labels.

    Returns:
        (B,) low and (B,) high.
    """
    g, h = (side.double().exp() for side in (log_p_accurate, log_p_robust))
    label = y.unsqueeze(1)
    ahead = g.gather(1, label) - g + SLACK
    slope = h.gather(1, label) - h + SLACK - ahead
    # Where a class is behind for every alpha or for none, the half-line is everything or nothing.
    bound = -ahead / slope.where(slope != 0, 1.0)
    low = bound.where(slope > 0, (ahead < 0).double() * 2 * (slope == 0))
    high = bound.where(slope < 0, 1.0)
    return low.amax(dim=1).clamp_min(0), high.amin(dim=1).clamp_max(1)


def perfect(log_p_accurate: Tensor, log_p_robust: Tensor, y: Tensor) -> Tensor:
    """(B,) where some alpha in [0, 1] answers rightly: no gate does better [Bai2024, Theorem 4.1]."""
    low, high = right_alphas(log_p_accurate, log_p_robust, y)
    return low <= high
