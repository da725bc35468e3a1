"""What attacks on a gated mixture take gradients from, and a penalty on its alpha."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.core import checks
from equipoise.mixing.formula import gate_of, mix
from equipoise.mixing.surrogates import hinge_scores
from equipoise.models.inspection import Described, identity

if TYPE_CHECKING:
    from equipoise.mixing.gated import GatedClassifier


class OfGatedMixture(Described, ABC):
    """A network that is a function of what the bases and the gate of one mixture return."""

    def __init__(self, model: GatedClassifier) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, K)."""
        return self.from_base_outputs(*self.model.base_outputs(x))

    def reads_bases_of(self, model: nn.Module) -> bool:
        """Whether the mixture is this model."""
        return model is self.model

    @abstractmethod
    def from_base_outputs(self, g: Tensor, h: Tensor, z: Tensor) -> Tensor:
        """(B, K) from logits of both bases (B, K) and the gate's log-odds (B,)."""


class GatedSurrogate(OfGatedMixture):
    """A gated mixture with useful gradients.

    Args:
        model: the gated mixture.
        detach_gate: treat the gate as a constant.
        soft: use the soft sides and a gate no steeper than in training. Where even the middle of
            the alpha range would make g's gradient negligible, the gate is also lowered to the
            surrogate's alpha.
    """

    description = ("gated-surrogate", "detach_gate", "soft", "offset")

    def __init__(
        self, model: GatedClassifier, *, detach_gate: bool = False, soft: bool = False
    ) -> None:
        super().__init__(model)
        self.detach_gate, self.soft = detach_gate, soft
        middle = float(model.restrict_gate(torch.zeros((), dtype=torch.float64)))
        self.offset = max(middle - float(gate_of(model.surrogate_alpha)), 0.0) if soft else 0.0

    def from_base_outputs(self, g: Tensor, h: Tensor, z: Tensor) -> Tensor:
        """(B, K) log-probabilities from logits of both bases and the gate's log-odds."""
        z = self.model.limit_gate_slope(z) if self.soft else z
        return mix(
            *self.model.sides_of_logits(g, h, soft=self.soft),
            self.model.restrict_gate(z.detach() if self.detach_gate else z) - self.offset,
        )


class GatedHinges(OfGatedMixture):
    """:class:`Hinges` of a gated mixture: the threshold q is that of the image's own alpha.

    The threshold of α_min would count as reached where the gate still lets h decide, and the attack
    would stop there.
    """

    description = ("gated-hinges",)

    def from_base_outputs(self, g: Tensor, h: Tensor, z: Tensor) -> Tensor:
        """(B, K) scores from logits of both bases and the gate's log-odds."""
        q = torch.exp(-self.model.restrict_gate(z.detach())).unsqueeze(1)
        return hinge_scores(g, self.model.logit_scales[1] * h.float(), self.model.logit_map, q)


@dataclass(frozen=True)
class AlphaPenalty:
    """An extra term for attacks that lowers alpha, whatever its range [Bai2024, adversary D].

    `share` is −weight·sigmoid(gate), of the size of a margin, so that it changes the direction of
    an attack without replacing its objective. `published` is −weight·log sigmoid(gate), with weight
    1 in the official evaluation; it grows without bound where alpha is already low. A steep gate is
    used with its slope in training, because the sigmoid of a steep one is flat. On CUDA the forward
    pass runs in bfloat16, as the attack's own passes do.
    """

    model: GatedClassifier
    weight: float = 0.25
    form: str = "share"

    def __post_init__(self) -> None:
        checks.one_of("form", self.form, ("share", "published"))

    def describe(self) -> dict[str, Any]:
        """Form, weight and gate, for the identity of an attack."""
        return {
            "type": "alpha-penalty",
            "version": 1,
            "form": self.form,
            "weight": self.weight,
            "model": identity(self.model),
        }

    def __call__(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B,)."""
        with torch.autocast(
            x.device.type, dtype=torch.bfloat16, enabled=x.is_cuda, cache_enabled=False
        ):
            outputs = self.model.base_outputs(x)
        return self.from_base_outputs(*(output.to(x.dtype) for output in outputs))

    def reads_bases_of(self, model: nn.Module) -> bool:
        """Whether the mixture is this model."""
        return model is self.model

    def from_base_outputs(self, g: Tensor, h: Tensor, z: Tensor) -> Tensor:
        """(B,) from logits of both bases, which do not matter, and the gate's log-odds."""
        z = self.model.limit_gate_slope(z)
        return self.weight * (-torch.sigmoid(z) if self.form == "share" else F.softplus(-z))
