"""The adaptive mixture: a gate network uses features of both bases to select an alpha for every image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.core import checks
from equipoise.core.modes import inference
from equipoise.mixing.classifier import MixedClassifier
from equipoise.mixing.formula import mix
from equipoise.mixing.logit_maps import LogitMap, at_least_float32, one_hot
from equipoise.mixing.provenance import Provenance
from equipoise.mixing.surrogates import BYPASS, GatedHinges, GatedSurrogate
from equipoise.models import feature_hooks
from equipoise.models.feature_hooks import FeatureLayers, FeatureMaps, forward_with_features
from equipoise.models.inspection import Described
from equipoise.models.resnet import PreActBlock, he_init

WIDTH = 96  # 6.3 million parameters for a pair of ResNet-18; the official network has width 256 and 44 million
SCALE, SHIFT = 2.0, 0.4  # of the gate in training, as published
PairOfLayers = tuple[FeatureLayers, FeatureLayers]  # feature layers of the accurate and of the robust base


class Gate(Described):
    """The mixing network: one number per image from feature maps of two depths of both bases [Bai2024, Figure 10].

    Three stages of two pre-activation blocks, each halving the map: the first on the joined shallow maps; its output is
    added to the joined deep maps (through a 1×1 convolution where the channels differ, average-pooled where the sizes
    do); global average; a linear layer without bias; batch norm without a scale, so that the output cannot shrink or
    grow during training. The statistics are the batch's in training mode and running ones otherwise; nothing else
    depends on the mode.

    Args:
        feature_layers: the submodules of both bases whose outputs it gets.
        shallow, deep: channels of the joined maps of both bases.
        width: channels of the first stage; the next have twice and four times as many.
        momentum: of the running statistics of the output.
    """

    description = ("gate", "feature_layers", "shape")

    def __init__(self, feature_layers: PairOfLayers, shallow: int, deep: int, width: int = WIDTH,
                 momentum: float = 0.05) -> None:
        super().__init__()
        self.feature_layers = feature_layers
        self.shape = (shallow, deep, checks.whole("width", width, least=1, most=4096))
        self.first = _stage(shallow, width)
        self.join: nn.Module = nn.Identity() if deep == width else nn.Conv2d(deep, width, 1, bias=False)
        self.second = _stage(width, 2 * width)
        self.third = _stage(2 * width, 4 * width)
        self.fc = nn.Linear(4 * width, 1, bias=False)
        self.output = nn.BatchNorm1d(1, affine=False, momentum=momentum)
        he_init(self)

    def forward(self, features: Sequence[FeatureMaps]) -> Tensor:
        """(B,) from the maps of the accurate and of the robust base; about standard normal on training images."""
        shallow, deep = feature_hooks.join_features(features)
        checks.require((shallow.shape[1], deep.shape[1]) == self.shape[:2], "bases", "be those of the gate, with "
                       f"{self.shape[0]} and {self.shape[1]} channels at its feature layers",
                       (shallow.shape[1], deep.shape[1]))
        matched = feature_hooks.match_sizes([self.first(shallow), self.join(deep)])
        last = self.third(self.second(matched[0] + matched[1])).mean(dim=(2, 3))
        # In bfloat16 this one number would hide from an attack what it gains by changing it.
        with torch.autocast(last.device.type, enabled=False):
            output: Tensor = self.output(self.fc(last.to(self.fc.weight.dtype)))
        return output.squeeze(1)


def _stage(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(PreActBlock(inputs, outputs, 2), PreActBlock(outputs, outputs, 1))


def new_gate(accurate: nn.Module, robust: nn.Module, example: Tensor, *, feature_layers: PairOfLayers | None = None,
             width: int = WIDTH, momentum: float = 0.05, seed: int = 0) -> Gate:
    """A gate with random weights for two bases.

    Args:
        accurate, robust: images (B, C, H, W) in [0, 1] → logits (B, K).
        example: a few images, to find the channels of the feature maps.
        feature_layers: two submodule names per base, found if not given.
        width, momentum: of the :class:`Gate`.
        seed: the same seed gives the same weights.
    """
    layers = feature_layers
    valid = layers is None or [len(names) if isinstance(names, tuple | list) else 0 for names in layers] == [2, 2]
    checks.require(valid, "feature_layers", "hold two names for the accurate and two for the robust base", layers)
    with torch.no_grad(), inference(accurate, robust):
        layers = layers or (feature_hooks.find_feature_layers(accurate, example),
                            feature_hooks.find_feature_layers(robust, example))
        shallow, deep = feature_hooks.joined_channels((accurate, robust), layers, example)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return Gate(layers, shallow, deep, width, momentum)


class GatedClassifier(MixedClassifier):
    r"""The mixture with an alpha for every image [Bai2024, Section 4].

    .. math:: \alpha(x) = \alpha_{min} + (\alpha_{max} - \alpha_{min})\,
              \mathrm{sigmoid}(scale \cdot u_\theta(x) + shift)

    u is the :class:`Gate`; each base runs once. Range, scale and shift can be changed without training
    (:meth:`with_range`); a gate is trained over all of (0, 1) whatever the range is, because its objective mixes by
    :meth:`log_probabilities_and_gate`. :attr:`alpha` is α_min, the least weight of the robust side: all that holds for
    a fixed mixture with this alpha and any accurate side holds here too, :meth:`predict` and certificates included.
    Train or evaluation mode changes the gate alone: the bases stay frozen and in evaluation mode.

    Args:
        accurate, robust: images (B, C, H, W) in [0, 1] → logits (B, K).
        network: the gate, trained for these two.
        alpha_min, alpha_max: range of alpha, in [0, 1].
        scale, shift: of the gate's output before the sigmoid.
        logit_scales: factors of the logits of g and of h (inverse temperatures) [Bai2024, D.1].
        logit_map, hard, surrogate_alpha, provenance: see :class:`~equipoise.mixing.classifier.MixedClassifier`.
    """

    description = ("gated-mixture", "alpha_range", "scale", "shift", "logit_scales", "hard", "surrogate_alpha")

    def __init__(
        self, accurate: nn.Module, robust: nn.Module, network: Gate, *, alpha_min: float = 0.0, alpha_max: float = 1.0,
        scale: float = SCALE, shift: float = SHIFT, logit_scales: tuple[float, float] = (1.0, 1.0),
        logit_map: LogitMap | None = None, hard: bool = False, surrogate_alpha: float = 0.9,
        provenance: Provenance | None = None,
    ) -> None:
        checks.within("alpha_min", alpha_min, 0, 1)
        checks.within("alpha_max", alpha_max, 0, 1)
        checks.require(alpha_min < alpha_max, "alpha_min", f"be below alpha_max, {alpha_max:g}", alpha_min)
        checks.positive("scale", scale)
        checks.require(math.isfinite(shift), "shift", "be finite", shift)
        for factor in logit_scales:
            checks.positive("logit_scales", factor)
        super().__init__(accurate, robust, alpha_min, logit_map=logit_map, hard=hard, surrogate_alpha=surrogate_alpha,
                         provenance=provenance)
        self.network, self.alpha_range = network, (alpha_min, alpha_max)
        self.scale, self.shift, self.logit_scales = scale, shift, logit_scales
        for base in (accurate, robust):
            base.requires_grad_(False).eval()
        self._keep_hooks()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy or a pickle."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._keep_hooks()

    def _keep_hooks(self) -> None:
        """Set the hooks of the feature layers for as long as the mixture lives: a pass then changes no module."""
        for base, layers in zip((self.accurate, self.robust), self.network.feature_layers, strict=True):
            feature_hooks.keep_hooks(self, feature_hooks.submodules(base, layers))

    def train(self, mode: bool = True) -> Self:
        """Change the mode of the gate only."""
        super().train(mode)
        self.accurate.eval()
        self.robust.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, K) log-probabilities, which serve as logits."""
        g, h, z = self.log_probabilities_and_gate(x)
        return mix(g, h, self.restrict_gate(z))

    def log_probabilities_and_gate(self, x: Tensor, *, soft: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities of both sides (B, K), and the gate's log-odds over all of (0, 1), (B,).

        With `soft`, sides for attacks: the accurate one is never one-hot, and most of the robust one bypasses the map.
        """
        g, h, z = self.logits_and_gate(x)
        return (*self._sides(g, h, soft=soft), z)

    def _sides(self, g: Tensor, h: Tensor, *, soft: bool = False) -> tuple[Tensor, Tensor]:
        """Logits of the bases (B, K) → log-probabilities of both sides."""
        log_p_g, log_p_h = F.log_softmax(self.logit_scales[0] * at_least_float32(g), dim=1), self.map_robust(h)
        if soft and self.logit_map is not None:
            unmapped = F.log_softmax(self.logit_scales[1] * at_least_float32(h), dim=1)
            log_p_h = torch.logaddexp(unmapped + math.log(BYPASS), log_p_h + math.log(1 - BYPASS))
        if self.hard and not soft:
            log_p_g = one_hot(g.argmax(dim=1), g.shape[1], log_p_h.dtype)
        return log_p_g, log_p_h

    def logits_and_gate(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of both bases (B, K), and the gate's log-odds over all of (0, 1), (B,): one pass of each base."""
        layers = self.network.feature_layers
        g, features_g = forward_with_features(self.accurate, layers[0], x, keeper=self)
        h, features_h = forward_with_features(self.robust, layers[1], x, keeper=self)
        checks.require(g.shape == h.shape, "accurate and robust", "have equal numbers of classes",
                       (tuple(g.shape), tuple(h.shape)))
        return g, h, self.scale * self.network((features_g, features_h)) + self.shift

    def log_probabilities(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, K) log-probabilities of the accurate side, and of the robust one."""
        return self.log_probabilities_and_gate(x)[:2]

    def map_robust(self, h: Tensor) -> Tensor:
        """(B, K) logits of h → log-probabilities of the robust side."""
        return super().map_robust(self.logit_scales[1] * at_least_float32(h))

    def restrict_gate(self, z: Tensor) -> Tensor:
        """Log-odds over (0, 1) → log-odds over (α_min, α_max), without computing an alpha that could round to 1."""
        low, high = self.alpha_range
        if (low, high) == (0.0, 1.0):
            return z
        width = math.log(high - low)
        log_alpha, log_rest = width + F.logsigmoid(z), width + F.logsigmoid(-z)
        if low > 0:
            log_alpha = torch.logaddexp(log_alpha, torch.full_like(log_alpha, math.log(low)))
        if high < 1:
            log_rest = torch.logaddexp(log_rest, torch.full_like(log_rest, math.log1p(-high)))
        return log_alpha - log_rest

    @property
    def steeper_than_trained(self) -> bool:
        """Whether the gate has a larger scale than in training: its gradient then vanishes away from its middle."""
        return self.scale > SCALE

    def limit_gate_slope(self, z: Tensor) -> Tensor:
        """Log-odds of the gate with at most the scale of training, which keeps a gradient for attacks."""
        return z * (SCALE / self.scale) if self.steeper_than_trained else z

    def alphas(self, x: Tensor) -> Tensor:
        """(B,) the weight of the robust side for every image."""
        return torch.sigmoid(self.restrict_gate(self.log_probabilities_and_gate(x)[2]))

    def _predict_with_accurate(self, x: Tensor, h: Tensor) -> Tensor:
        g, h, z = self.logits_and_gate(x)
        checks.logits(g, len(x), f"logits of {self._name_of('accurate')}")
        logits = mix(*self._sides(g, h), self.restrict_gate(z))
        return checks.logits(logits, len(x), "logits of the mixture").argmax(dim=1)

    def with_range(self, alpha_min: float, alpha_max: float, *, scale: float | None = None,
                   shift: float | None = None) -> GatedClassifier:
        """The same gate with another range, scale or shift [Bai2024, Table 7]; nothing is trained."""
        return self._copy(alpha_min=alpha_min, alpha_max=alpha_max, scale=self.scale if scale is None else scale,
                          shift=self.shift if shift is None else shift)

    def with_settings_of(self, mixture: MixedClassifier) -> GatedClassifier:
        """The same gate with the logit map, hard labels and surrogate alpha of another mixture of the same bases."""
        same = mixture.accurate is self.accurate and mixture.robust is self.robust
        checks.require(same, "mixture", "be a mixture of the gate's own bases", "another pair")
        return self._copy(logit_map=mixture.logit_map, hard=mixture.hard, surrogate_alpha=mixture.surrogate_alpha)

    def _copy(self, **changes: Any) -> GatedClassifier:
        same = {name: getattr(self, name) for name in ("scale", "shift", "logit_scales", "logit_map", "hard",
                                                       "surrogate_alpha", "provenance")}
        ends = {"alpha_min": self.alpha_range[0], "alpha_max": self.alpha_range[1]}
        copy = GatedClassifier(self.accurate, self.robust, self.network, **{**same, **ends, **changes})
        return copy.to(self.gate.device).train(self.training)

    def surrogate(self, *, stand_in: nn.Module | None = None) -> nn.Module:
        """The differentiable mixture that adaptive attacks take gradients from, through the gate too."""
        _refuse_stand_in(stand_in)
        return GatedSurrogate(self, soft=True)

    def hinges(self, *, stand_in: nn.Module | None = None) -> nn.Module:
        """Scores for an attack on both sides at once, with every image's own alpha."""
        _refuse_stand_in(stand_in)
        return GatedHinges(self)

    def sides(self, x: Tensor, stand_in: nn.Module | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Logits of g and of h (B, K), log-probabilities of the robust side, and log q (B,) of every image's alpha."""
        _refuse_stand_in(stand_in)
        g, h, z = self.logits_and_gate(x)
        scaled = [scale * at_least_float32(logits) for scale, logits in zip(self.logit_scales, (g, h), strict=True)]
        return scaled[0], scaled[1], self.map_robust(h), -self.restrict_gate(z)

    def without_gate_gradient(self) -> nn.Module:
        """The mixture for a grey-box adversary: no gradient through the gate [Bai2024, adversary A]."""
        return GatedSurrogate(self, detach_gate=True, soft=not self.differentiable)


def _refuse_stand_in(stand_in: nn.Module | None) -> None:
    checks.require(stand_in is None, "stand_in", "be left out for a gate, which uses features of g itself", "a model")
