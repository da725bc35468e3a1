"""How confident a smoothed classifier is where it should not be [SmoothMix, NoiseTable 1 and Figure 3].

Both look at adversarial images of the smoothed classifier; the attack is handed in, because attacks are
strangers to this room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equipoise.certification.plan import SmoothingPlan
from equipoise.certification.sampler import Engine, Sampler
from equipoise.core.modes import inference
from equipoise.core.rng import Stream

Attack = Callable[[Tensor, Tensor, float], Tensor]  # images, labels, ℓ2 radius → attacked images


@dataclass(frozen=True, eq=False)
class Confidence:
    """Vote shares of the smoothed classifier at adversarial images of one attack radius."""

    radius: float
    true: Tensor  # (B,) share of the true class
    off: Tensor  # (B,) largest share of another class


@torch.no_grad()
def shares(model: nn.Module, x: Tensor, plan: SmoothingPlan, stream: Stream, engine: Engine) -> Tensor:
    """(B, K) votes / samples."""
    with inference(model):
        zero = torch.zeros(len(x), dtype=torch.int64)
        return Sampler(model, x, stream, plan, engine).votes("shares", zero, zero + plan.samples) / plan.samples


def confidences(
    model: nn.Module, x: Tensor, y: Tensor, *, attack: Attack, at: Sequence[float], plan: SmoothingPlan, stream: Stream,
    engine: Engine | None = None,
) -> list[Confidence]:
    """True-class and best wrong-class confidence as the attack radius grows; radius 0 is the clean image."""
    found = []
    for radius in at:
        attacked = x if radius == 0 else attack(x, y, radius)
        p = shares(model, attacked, plan, stream, engine or Engine())
        own = y.cpu().unsqueeze(1)
        found.append(Confidence(radius, p.gather(1, own).squeeze(1), p.scatter(1, own, -1.0).amax(dim=1)))
    return found


def mixing_ratios(
    model: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor, *, plan: SmoothingPlan, stream: Stream,
    engine: Engine | None = None, halvings: int = 7,
) -> Tensor:
    """(B,) least λ in [0, 1] at which (1 − λ)·x + λ·x_adv is no longer voted y: the equal-confidence ratio.

    SearchResult by bisection with the same noise at every λ; 0 where the clean image is voted otherwise already,
    NaN where the adversarial one is not.
    """
    def kept(ratio: Tensor) -> Tensor:
        scale = ratio.to(x).view(-1, *[1] * (x.dim() - 1))
        mixed = ((1 - scale) * x + scale * x_adv).clamp(0, 1)
        return shares(model, mixed, plan, stream, engine or Engine()).argmax(dim=1) == y.cpu()

    low, high = torch.zeros(len(x)), torch.ones(len(x))
    at_start, at_end = kept(low), kept(high)
    for _ in range(halvings):
        middle = (low + high) / 2
        stands = kept(middle)
        low, high = torch.where(stands, middle, low), torch.where(stands, high, middle)
    return torch.where(at_start, torch.where(at_end, torch.nan, high), 0.0)
