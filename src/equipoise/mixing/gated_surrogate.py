"""A gated mixture as its adversaries follow it, and the term that pushes its alpha down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.core import checks
from equipoise.mixing.rules import gate_of, mix
from equipoise.mixing.surrogate import hinged

if TYPE_CHECKING:
    from equipoise.mixing.gated import GatedClassifier

FORMS = ("share", "published")


class GatedSurrogate(nn.Module):
    """A gated mixture as its adversaries follow it.

    With `relaxed` its sides are soft and its gate is gentle, and where even its middle alpha would silence g, the gate
    is moved down to the surrogate's alpha, so that g's gradient counts; with `stopped` the gate is a constant.
    """

    def __init__(self, model: GatedClassifier, *, stopped: bool = False, relaxed: bool = False) -> None:
        super().__init__()
        self.model, self.stopped, self.relaxed = model, stopped, relaxed
        middle = float(model.ranged(torch.zeros((), dtype=torch.float64)))
        self.less = max(middle - float(gate_of(model.surrogate_alpha)), 0.0) if relaxed else 0.0

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, K) log-probabilities."""
        g, h, z = self.model.parts(x, soft=self.relaxed)
        z = self.model.gentle(z) if self.relaxed else z
        return mix(g, h, self.model.ranged(z.detach() if self.stopped else z) - self.less)

    def extra_repr(self) -> str:
        """How it is followed."""
        return f"stopped={self.stopped}, relaxed={self.relaxed}, less={self.less:g}, {self.model.extra_repr()}"


class GatedHinges(nn.Module):
    """:class:`~equipoise.mixing.surrogate.Hinges` of a gated mixture: h lets g pass by the image's own threshold.

    The threshold of α_min would call doors open that the gate keeps shut, and the attack would stop pushing there.
    """

    def __init__(self, model: GatedClassifier) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, K) scores ≤ 0."""
        g, h, z = self.model.answers(x)
        q = torch.exp(-self.model.ranged(z.detach())).unsqueeze(1)
        return hinged(g, self.model.sharpness[1] * h.float(), self.model.logit_map, q)


@dataclass(frozen=True)
class AlphaPenalty:
    """An extra term for attacks that pushes alpha down, whatever the range [Bai2024, adversary D].

    `share` is −weight·sigmoid(gate), of the size of a margin, so that it bends the way of an attack and does not
    replace its goal. `published` is −weight·log sigmoid(gate), of which the official evaluation has weight 1; measured
    here it makes attacks on margins and ratios weaker, because it grows without bound where the gate has long given in.
    A steep gate is pushed as a gentle one, because the sigmoid of a steep one is flat. On CUDA the pass runs in
    bfloat16, as the attack's own do.
    """

    model: GatedClassifier
    weight: float = 0.25
    form: str = "share"

    def __post_init__(self) -> None:
        checks.one_of("form", self.form, FORMS)

    def __call__(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B,)."""
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=x.is_cuda, cache_enabled=False):
            z = self.model.parts(x)[2]
        z = self.model.gentle(z.to(x.dtype))
        return self.weight * (-torch.sigmoid(z) if self.form == "share" else F.softplus(-z))
