"""The smoothed classifier as a differentiable module, for attacks and diagnostics: an estimate, never a certificate."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.core import checks
from equipoise.core.rng import stream


class Averaged(nn.Module):
    """log mean softmax(f(x + noise)) over a fixed set of noises [Salman2019].

    The noises are the same for every image and every call, so the module is a deterministic function and an
    attack on it meets no moving target.

    Args:
        model: base classifier.
        sigma: standard deviation of the noise.
        image_shape: (C, H, W).
        copies: noises.
        seed: of the noises.
    """

    noise: Tensor

    def __init__(
        self, model: nn.Module, sigma: float, image_shape: tuple[int, ...], *, copies: int = 32, seed: int = 0
    ) -> None:
        super().__init__()
        checks.positive("sigma", sigma)
        checks.whole("copies", copies, least=1)
        self.model = model
        drawn = stream(seed, "average", torch.arange(copies)).normal(*image_shape)
        self.register_buffer("noise", sigma * drawn)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, K) log-probabilities, which serve as logits."""
        copies = len(self.noise)
        noisy = x.unsqueeze(1) + self.noise.to(x.dtype)
        log_p = F.log_softmax(self.model(noisy.flatten(0, 1)), dim=1).view(len(x), copies, -1)
        return torch.logsumexp(log_p, dim=1) - torch.tensor(copies, dtype=log_p.dtype, device=x.device).log()
