"""A strength for every image: the policy β_θ(x), computed from features of both sides."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.local_smoothing.jacobian import Norm
from equipoise.local_smoothing.smoothing import SmoothedClassifier
from equipoise.models import feature_hooks
from equipoise.models.feature_hooks import FeatureLayers, find_feature_layers
from equipoise.models.inspection import Described

MAX_BETA = 14.0  # β is clamped to [−14, 14]: exp(14) is a million, and beyond that nothing changes
# γ_t of [Bai2022, Section 6.3]
TARGETS = 0.0, 0.316, 1.46, 6.81, 31.6, 147.0, 681.0, 3162.0, math.inf


class Policy(nn.Module):
    """β_θ from feature maps of two depths of both bases [Bai2022, Figure 1].

    3×3 convolutions with batch norm and ReLU: the shallow maps → pooled to the size of the deep
    ones and joined with them → two more with a 2×2 max-pool between → global average → one number,
    clamped. `shallow` and `deep` are the channels of the joined maps of both bases; the first
    convolution has `width` channels, the later ones twice as many (the paper does not state the
    widths).
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
        out = self.second(
            torch.cat((F.adaptive_max_pool2d(self.first(shallow), deep.shape[2:]), deep), dim=1)
        )
        if min(out.shape[2:]) > 1:
            out = F.max_pool2d(out, 2)
        beta: Tensor = self.fc(self.third(out).mean(dim=(2, 3))).squeeze(1)
        return beta.clamp(-MAX_BETA, MAX_BETA)


def _layer(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )


class AdaptiveSmoothing(Described):
    r"""The adaptive classifier [Bai2022, Eq. (7), (10)]: rule (3.3) with γ(x) = exp(β_θ(x)).

    The bases always stay frozen and in evaluation mode.

    Args:
        accurate, robust: images (B, C, H, W) in [0, 1] → logits (B, K).
        example: a few images, to find the channels of the feature maps.
        feature_layers: two submodule names per base, (accurate, robust);
            :func:`find_feature_layers` if not given.
        width, seed: of the policy, and random seed of its initial weights.
        trust, space, norm, attached: of the rule, see
            :class:`~equipoise.local_smoothing.smoothing.SmoothedClassifier`.
    """

    description = ("adaptive-smoothing", "feature_layers")

    def __init__(
        self,
        accurate: nn.Module,
        robust: nn.Module,
        *,
        example: Tensor,
        feature_layers: tuple[FeatureLayers, FeatureLayers] | None = None,
        width: int = 64,
        seed: int = 0,
        trust: str = "top-ratio",
        space: str = "logits",
        norm: Norm = "linf",
        attached: bool = True,
    ) -> None:
        super().__init__()
        self.rule = SmoothedClassifier(
            accurate, robust, 1.0, trust=trust, space=space, norm=norm, attached=attached
        )
        self.rule.requires_grad_(False).eval()
        self.feature_layers = feature_layers or (
            find_feature_layers(accurate, example),
            find_feature_layers(robust, example),
        )
        shallow, deep = feature_hooks.joined_channels(
            (accurate, robust), self.feature_layers, example
        )
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.policy = Policy(shallow, deep, width)

    def train(self, mode: bool = True) -> AdaptiveSmoothing:
        """Change the mode of the policy only."""
        super().train(mode)
        self.rule.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, K) logits."""
        return self.logits_and_beta(x)[0]

    def logits_and_beta(
        self, x: Tensor, gate: Tensor | None = None, own: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logits (B, K) and β (B,).

        With a gate (B,), the images that are not `own` (B,) use it as log γ, as an attack with
        another target strength does; the β returned is the policy's for all images.
        """
        layers = dict(
            zip((id(self.rule.accurate), id(self.rule.oracle)), self.feature_layers, strict=True)
        )
        g, h, trust, features = self.rule.sides_and_trust(
            x,
            lambda base, at: feature_hooks.forward_with_features(
                base, layers[id(base)], at, keeper=self
            ),
        )
        beta = self.policy(*feature_hooks.join_features(features))
        used = beta if gate is None or own is None else torch.where(own, beta, gate.to(beta.dtype))
        return self.rule.combine(g, h, trust, used), beta
