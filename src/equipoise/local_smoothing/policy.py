"""A strength for every image: the policy β_θ(x) looks at features of both sides and says whom to trust."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.local_smoothing.jacobian import Norm
from equipoise.local_smoothing.smoothing import SmoothedClassifier
from equipoise.models.feature_hooks import Taps, find_taps, matched, tapped

MOST = 14.0  # β is cropped to [−14, 14]: exp(14) is a million, and beyond that nothing changes
TARGETS = (0.0, 0.316, 1.46, 6.81, 31.6, 147.0, 681.0, 3162.0, math.inf)  # γ_t of [Bai2022, Section 6.3]


class Policy(nn.Module):
    """β_θ from feature maps of two depths of both bases [Bai2022, Figure 1].

    3×3 convolutions with batch norm and ReLU: the shallow maps → pooled to the size of the deep ones and joined with
    them → two more with a 2×2 max-pool between → global average → one number, cropped. Which widths the figure has
    cannot be read in the text; they are settings here.

    Args:
        shallow, deep: channels of the joined maps of both bases.
        width: channels of the first convolution; the later ones have twice as many.
    """

    def __init__(self, shallow: int, deep: int, width: int = 64) -> None:
        super().__init__()
        self.first = _layer(shallow, width)
        self.second = _layer(width + deep, 2 * width)
        self.third = _layer(2 * width, 2 * width)
        self.fc = nn.Linear(2 * width, 1)
        nn.init.zeros_(self.fc.weight)
        nn.init.zeros_(self.fc.bias)

    def forward(self, shallow: Tensor, deep: Tensor) -> Tensor:
        """(B, shallow, H, W), (B, deep, H', W') → (B,) β in [−14, 14]."""
        out = self.second(torch.cat((F.adaptive_max_pool2d(self.first(shallow), deep.shape[2:]), deep), dim=1))
        if min(out.shape[2:]) > 1:
            out = F.max_pool2d(out, 2)
        beta: Tensor = self.fc(self.third(out).mean(dim=(2, 3))).squeeze(1)
        return beta.clamp(-MOST, MOST)


def _layer(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


class AdaptiveSmoothing(nn.Module):
    r"""The adaptive classifier [Bai2022, Eq. (7), (10)]: rule (3.3) with γ(x) = exp(β_θ(x)).

    The bases stay in evaluation mode and frozen whatever happens to the policy: they are what it learns about.

    Args:
        accurate, robust: images (B, C, H, W) in [0, 1] → logits (B, K).
        example: a few images, to find the channels of the feature maps.
        taps: two submodule names per base, (accurate, robust); :func:`find_taps` if not given.
        width: of the policy.
        seed: of its first weights.
        trust, space, norm, attached: of the rule, see :class:`~equipoise.local_smoothing.smoothing.SmoothedClassifier`.
    """

    def __init__(
        self, accurate: nn.Module, robust: nn.Module, *, example: Tensor, taps: tuple[Taps, Taps] | None = None,
        width: int = 64, seed: int = 0, trust: str = "top-ratio", space: str = "logits", norm: Norm = "linf",
        attached: bool = True,
    ) -> None:
        super().__init__()
        self.rule = SmoothedClassifier(accurate, robust, 1.0, trust=trust, space=space, norm=norm, attached=attached)
        self.rule.requires_grad_(False).eval()
        self.taps = taps or (find_taps(accurate, example), find_taps(robust, example))
        with torch.no_grad():
            caught = [tapped(base, names, example)[1]
                      for base, names in zip((accurate, robust), self.taps, strict=True)]
        shallow, deep = (sum(maps[depth].shape[1] for maps in caught) for depth in (0, 1))
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.policy = Policy(shallow, deep, width)

    def train(self, mode: bool = True) -> AdaptiveSmoothing:
        """Only the policy changes its mode."""
        super().train(mode)
        self.rule.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, K) logits."""
        return self.both(x)[0]

    def both(self, x: Tensor, gate: Tensor | None = None, own: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits (B, K) and β (B,).

        With a gate (B,), the images that are not their `own` (B,) take that for log γ, as an attack does that aims
        at another strength; the β that is told is the policy's for all.
        """
        names = dict(zip((id(self.rule.accurate), id(self.rule.oracle)), self.taps, strict=True))
        g, h, trust, seen = self.rule.parts(x, lambda base, at: tapped(base, names[id(base)], at))
        maps = [torch.cat(matched([side[depth] for side in seen]), dim=1) for depth in (0, 1)]
        beta = self.policy(*maps)
        used = beta if gate is None or own is None else torch.where(own, beta, gate.to(beta.dtype))
        return self.rule.combine(g, h, trust, used), beta

    def at(self, x: Tensor, gate: Tensor) -> Tensor:
        """(B, K) at the strength exp(gate) whatever the policy says."""
        return self.rule.mixed(x, gate)
