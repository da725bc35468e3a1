"""Signs that an attacked accuracy means less than it says: measured, reported, never swallowed.

Each is a value with the line above which it alarms. Nothing here changes a verdict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.attacks.apgd import apgd
from equipoise.core import losses
from equipoise.core.modes import inference
from equipoise.core.rng import Stream
from equipoise.core.threat import Threat

BUDGETS = (1, 2, 4)


@dataclass(frozen=True)
class SanityCheck:
    """One sign: what was measured, and whether it should worry the reader."""

    name: str
    value: float
    alarm: bool
    says: str

    def facts(self) -> dict[str, Any]:
        """As it stands in `summary.json`."""
        return asdict(self)


def run_sanity_checks(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    threat: Threat,
    stream: Stream,
    surrogate: nn.Module | None = None,
    steps: int = 10,
) -> list[SanityCheck]:
    """Look at a model from outside: a few forward passes, one gradient, and short attacks at growing budgets.

    Args:
        model: as the caller has it, in whatever mode.
        x, y: some tens of images with labels.
        threat: the budget of the evaluation; :data:`BUDGETS` times it is tried.
        stream: the chance of these images.
        surrogate: where an attack would take its gradients.
        steps: of the short attacks.
    """
    training = sum(sub.training for sub in model.modules())
    found = [SanityCheck("train mode", float(training), training > 0,
                     "modules in training mode when handed over; they are evaluated in evaluation mode")]
    with inference(model, surrogate):
        with torch.no_grad():
            z, again = model(x), model(x)
            alone = torch.cat([model(x[row : row + 1]) for row in range(min(len(x), 8))])
        found += [_randomness(z, again), _company(z[: len(alone)], alone), _probabilities(z),
                  _infinite(z, surrogate), _vanishing(model if surrogate is None else surrogate, x, y)]
    return [*found, _budget(model, x, y, threat, stream, surrogate, steps)]


def black_box(broken: Mapping[str, int], standing: int) -> SanityCheck:
    """Images that only the attack without gradients broke, as a share of those the others had left standing.

    Args:
        broken: images by the stage that broke them.
        standing: images that nothing broke.
    """
    last = sum(count for stage, count in broken.items() if stage.startswith("square"))
    share = last / max(last + standing, 1)
    return SanityCheck("black box beats white box", share, last > 0,
                   "share of the images left by gradient attacks that Square broke: gradients are masked")


def _randomness(z: Tensor, again: Tensor) -> SanityCheck:
    value = _change(z, again)
    return SanityCheck("randomness", value, value > 1e-4,
                   "largest change of a logit between two equal passes, as a part of the spread of finite logits")


def _company(z: Tensor, alone: Tensor) -> SanityCheck:
    value = _change(z, alone)
    return SanityCheck("batch-size dependence", value, value > 1e-3,
                   "largest change of a logit when an image is seen alone, as a part of the spread of finite logits")


def _change(z: Tensor, other: Tensor) -> float:
    """Largest |z − other| in units of the spread of finite logits; one that becomes infinite counts as a whole unit."""
    finite = z[z.isfinite()]
    spread = float(finite.amax() - finite.amin()) if finite.numel() else 0.0
    both = z.isfinite() & other.isfinite()
    moved = torch.where(both, z - other, torch.zeros_like(z)).abs() / (spread or 1.0)
    return float(torch.where(both, moved, (z != other).to(z.dtype)).amax())


def _infinite(z: Tensor, surrogate: nn.Module | None) -> SanityCheck:
    share = float(z.isinf().any(dim=1).to(torch.float32).mean())
    return SanityCheck("infinite logits", share, share > 0 and surrogate is None,
                   "share of outputs with a logit of −inf, as a hard decision gives it; losses on them have no "
                   "gradient" + ("" if surrogate is None else ", and it comes from a surrogate"))


def _probabilities(z: Tensor) -> SanityCheck:
    sums = (z.sum(dim=1) - 1).abs() < 1e-3
    value = float((sums & (z >= 0).all(dim=1)).float().mean())
    return SanityCheck("probabilities for logits", value, value > 0.5,
                   "share of outputs that are already probabilities; their losses have tiny gradients")


def _vanishing(source: nn.Module, x: Tensor, y: Tensor) -> SanityCheck:
    point = x.detach().requires_grad_()
    with torch.enable_grad():
        value = losses.cross_entropy(source(point), y)
        gradient = torch.autograd.grad(value.sum(), point)[0] if value.requires_grad else torch.zeros_like(x)
    dead = gradient.flatten(1).nan_to_num().abs().amax(dim=1) <= 1e-10
    share = float(dead.float().mean())
    return SanityCheck("vanishing gradients", share, share > 0.1,
                   "share of images on which the gradient of the cross-entropy is zero")


def _budget(model: nn.Module, x: Tensor, y: Tensor, threat: Threat, stream: Stream, surrogate: nn.Module | None,
            steps: int) -> SanityCheck:
    reached = []
    for factor in BUDGETS:
        # No ℓ∞ ball is larger than the box of all images.
        wider = Threat(threat.norm, min(threat.eps * factor, 1.0) if threat.norm == "linf" else threat.eps * factor)
        x_adv = apgd(model, x, y, threat=wider, stream=stream.at("symptoms", factor), surrogate=surrogate, steps=steps)
        with inference(model), torch.no_grad():
            reached.append(float((model(x_adv).argmax(dim=1) == y).float().mean()))
    rise = max(later - earlier for earlier, later in pairwise(reached))
    shown = ", ".join(f"{accuracy:.0%} at {factor}·eps" for factor, accuracy in zip(BUDGETS, reached, strict=True))
    return SanityCheck("accuracy rises with budget", max(rise, 0.0), rise > max(0.02, 1.5 / len(x)),
                   f"largest rise of accuracy under a short attack as the budget grows ({shown})")
