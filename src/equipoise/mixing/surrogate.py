"""What an adversary of the mixture takes gradients from: the mixture itself has steps that hide them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.mixing.logit_maps import LogitMap, layer_norm

BYPASS = 0.9  # share of the robust side whose gradient passes by the map


class Surrogate(nn.Module):
    r"""The auxiliary differentiable mixture.

    .. math:: \log\big((1-\alpha_d)\,\sigma(g) + \alpha_d r_d\,\sigma(h) + \alpha_d (1-r_d)\,\sigma(M(h))\big)

    [Bai2024nuts, Eq. (8)]. Its accurate side is not one-hot, and most of its robust side passes by the map,
    so that neither hides the way.

    Args:
        accurate: g; one that answers with classes has no gradient to give, and is left out.
        robust: h.
        logit_map: M; None is the identity.
        alpha: α_d.
        bypass: r_d.
    """

    def __init__(self, accurate: nn.Module, robust: nn.Module, logit_map: LogitMap | None, alpha: float,
                 bypass: float = BYPASS) -> None:
        super().__init__()
        self.accurate, self.robust, self.logit_map = accurate, robust, logit_map
        self.shares = (1 - alpha, alpha * bypass, alpha * (1 - bypass))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, K) log-probabilities."""
        g, h = self.accurate(x), self.robust(x).float()
        mapped = h if self.logit_map is None else self.logit_map(h)
        parts = [F.log_softmax(z.float(), dim=1) + math.log(share)
                 for z, share in zip((g, h, mapped), self.shares, strict=True) if share > 0 and z.dim() == 2]
        return torch.logsumexp(torch.stack(parts), dim=0)


class Hinges(nn.Module):
    r"""How far the mixture is from answering each class but h's first *because the accurate side says so*.

    .. math:: -\frac{\max_k g_k - g_j}{\mathrm{spread}(g)} -
              [p_{top} - p_j > q]\,\big(\mathrm{LN}(h)_{top} - \mathrm{LN}(h)_j\big)

    with p = σ(M(h)). Zero exactly where g says j and h finds j plausible enough to let it pass; as long as
    one of the two fails, its hinge gives a gradient that no softmax has flattened. A map that evens out the
    rivals asks only how sure h is, so the second hinge then is the log-odds of h's first class.
    """

    def __init__(self, accurate: nn.Module, robust: nn.Module, logit_map: LogitMap | None, q: float) -> None:
        super().__init__()
        self.accurate, self.robust, self.logit_map, self.q = accurate, robust, logit_map, q

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, K) scores ≤ 0."""
        return hinged(self.accurate(x), self.robust(x), self.logit_map, self.q)


def hinged(g: Tensor, h: Tensor, logit_map: LogitMap | None, q: float | Tensor) -> Tensor:
    """(B, K) scores of :class:`Hinges`, from the answers of both bases.

    Args:
        g: (B, K) logits of the accurate base, or its classes (B,).
        h: (B, K) logits of the robust base.
        logit_map: M; None is the identity.
        q: (1 − α)/α, or (B, 1) one for every image.
    """
    h = h.float()
    g = g.float() if g.dim() == 2 else F.one_hot(g.long(), h.shape[1]).float()
    spread = g.detach().std(dim=1, keepdim=True).clamp_min(1e-6)
    behind = (g.amax(dim=1, keepdim=True) - g) / spread
    p = torch.softmax(h if logit_map is None else logit_map(h), dim=1).detach()
    closed = p.amax(dim=1, keepdim=True) - p > q
    normed = layer_norm(h)
    ahead = normed.amax(dim=1, keepdim=True) - normed
    if logit_map is not None and logit_map.flat:
        rivals = logit_map.numbers[3].to(h.dtype)
        first, rest = h.amax(dim=1, keepdim=True), h.scatter(1, h.argmax(dim=1, keepdim=True), -math.inf)
        sure = F.softplus(first - rest.logsumexp(dim=1, keepdim=True))
        ahead = rivals * ahead + (1 - rivals) * sure
    # The first class of h scores 0: an objective z_y − z_j then is the two hinges of j and nothing else.
    return (-behind - closed * ahead).scatter(1, h.argmax(dim=1, keepdim=True), 0.0)
