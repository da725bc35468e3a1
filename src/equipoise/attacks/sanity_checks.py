"""Signs that an attacked accuracy is overstated.

Each check measures a value and raises an alarm beyond a threshold. None changes a verdict.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from equipoise.attacks.apgd import Apgd
from equipoise.attacks.randomized import judge_repeatedly
from equipoise.core import device, losses, rng
from equipoise.core.ascent import value_and_gradient
from equipoise.core.modes import inference
from equipoise.core.results import SanityCheck
from equipoise.core.rng import Stream
from equipoise.core.threat import Threat

BUDGETS = (1, 2, 4)
STEPS = 10
STRONGER = "run --attack standard if it was not, or attack in Python with a differentiable surrogate of the model"
ADVICE = {  # check → what to do after its alarm
    "train mode": "Call model.eval() before the model is saved or evaluated, and check that its accuracy is unchanged",
    "randomness": "Run --attack rand, which averages gradients and verdicts over passes, or fix the random numbers of "
    "the model",
    "batch-size dependence": "Remove what mixes the images of a batch, such as batch normalisation in training mode",
    "probabilities for logits": "Return logits instead of probabilities: leave the softmax out of the model",
    "infinite logits": f"Gradients are hidden by a hard decision: {STRONGER}",
    "vanishing gradients": f"Gradient attacks see nothing here: {STRONGER}; --attack square needs no gradients",
    "accuracy rises with budget": f"The attack is too weak or misled: {STRONGER}",
    "black box beats white box": f"Do not report this accuracy yet: {STRONGER}",
}


def run_sanity_checks(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    threat: Threat,
    stream: Stream,
    surrogate: nn.Module | None = None,
    eot: int | None = None,
    repeats: int | None = None,
) -> list[SanityCheck]:
    """Check a model with a few forward passes, one gradient, and short attacks at :data:`BUDGETS`
    times the threat.

    Some tens of images suffice. The model comes in whatever mode it is used; an attack would get
    its gradients from the surrogate, averaged over `eot` passes, and success is judged by `repeats`
    passes, where these are given.
    """
    with rng.seed_global(stream.at("passes")), device.full_precision(x.device):
        return _run_sanity_checks(
            model,
            x,
            y,
            threat,
            stream,
            Apgd(steps=STEPS, surrogate=surrogate, eot=eot, repeats=repeats),
        )


def _run_sanity_checks(
    model: nn.Module, x: Tensor, y: Tensor, threat: Threat, stream: Stream, attack: Apgd
) -> list[SanityCheck]:
    surrogate = attack.surrogate
    training = sum(sub.training for sub in model.modules())
    source = model if surrogate is None else surrogate
    with inference(model, surrogate):
        with torch.no_grad():
            z, again = model(x), model(x)
            alone = torch.cat([model(x[row : row + 1]) for row in range(min(len(x), 8))])
        gradient = value_and_gradient(lambda point: losses.cross_entropy(source(point), y))(x)[1]
    random, size_dependence = _change(z, again), _change(z[: len(alone)], alone)
    # A model that tells nothing but the class cannot return logits.
    classes_alone = bool(((z == 0) | (z == 1)).all())
    probabilities = (
        0.0 if classes_alone else _share(((z.sum(dim=1) - 1).abs() < 1e-3) & (z >= 0).all(dim=1))
    )
    infinite = _share(z.isinf().any(dim=1))
    vanishing = _share(gradient.flatten(1).abs().amax(dim=1) <= 1e-10)
    return [
        _check(
            "train mode",
            float(training),
            training > 0,
            "modules that came in training mode; they are evaluated in evaluation mode",
        ),
        _check(
            "randomness",
            random,
            random > 1e-4 and attack.repeats is None,
            "largest change of a logit between two equal passes, relative to the spread of finite logits"
            + (
                "; one pass decides on an image here"
                if attack.repeats is None
                else f"; {attack.repeats} passes decide on an image"
            ),
        ),
        # Random changes between two passes say nothing about the batch size.
        _check(
            "batch-size dependence",
            size_dependence,
            size_dependence > 1e-3 and random <= 1e-4,
            "largest change of a logit when an image is classified alone, relative to the spread of finite logits",
        ),
        _check(
            "probabilities for logits",
            probabilities,
            probabilities > 0.5,
            "share of outputs that are already probabilities; their losses have tiny gradients",
        ),
        _check(
            "infinite logits",
            infinite,
            infinite > 0 and surrogate is None,
            "share of outputs with a logit of −inf, as a hard decision gives it; losses on them have no gradient"
            + ("" if surrogate is None else ", and it comes from a surrogate"),
        ),
        _check(
            "vanishing gradients",
            vanishing,
            vanishing > 0.1,
            "share of images on which the gradient of the cross-entropy is zero",
        ),
        _accuracy_by_budget(model, x, y, threat, stream, attack),
    ]


def black_box_check(broken: Mapping[str, int], survived: int) -> SanityCheck:
    """Images that only the attack without gradients broke, as a share of those that survived all
    others.

    `broken` counts images by the stage that broke them, `survived` those that nothing broke.
    """
    by_square = sum(
        count for stage, count in broken.items() if stage.rpartition("/")[2].startswith("square")
    )
    share = by_square / max(by_square + survived, 1)
    return _check(
        "black box beats white box",
        share,
        by_square > 0,
        "share of the images that survived gradient attacks and that Square broke: gradients are masked",
    )


def _check(name: str, value: float, alarm: bool, explanation: str) -> SanityCheck:
    return SanityCheck(
        name=name,
        value=value,
        alarm=alarm,
        explanation=explanation,
        advice=f"{ADVICE[name]}." if alarm else None,
    )


def _share(mask: Tensor) -> float:
    return float(mask.float().mean())


def _change(z: Tensor, other: Tensor) -> float:
    """Largest |z − other| in units of the spread of finite logits; one that becomes infinite counts
    as a whole unit."""
    finite = z[z.isfinite()]
    spread = float(finite.amax() - finite.amin()) if finite.numel() else 0.0
    both = z.isfinite() & other.isfinite()
    moved = torch.where(both, z - other, torch.zeros_like(z)).abs() / (spread or 1.0)
    return float(torch.where(both, moved, (z != other).to(z.dtype)).amax())


def _accuracy_by_budget(
    model: nn.Module, x: Tensor, y: Tensor, threat: Threat, stream: Stream, attack: Apgd
) -> SanityCheck:
    accuracies = []
    # No ℓ∞ ball is larger than the box of all images.
    radii = [
        min(threat.eps * factor, 1.0) if threat.norm == "linf" else threat.eps * factor
        for factor in BUDGETS
    ]
    # Preparing networks for another precision would take longer than these few passes.
    for x_adv in attack.at_threats(
        model,
        x,
        y,
        threats=[Threat(threat.norm, eps) for eps in radii],
        precision="fp32",
        streams=[stream.at("symptoms", factor) for factor in BUDGETS],
    ):
        with inference(model):
            verdict = judge_repeatedly(partial(model, x_adv), y, attack.repeats or 1)
        accuracies.append(float(verdict.share_correct.mean()))
    rise = max(later - earlier for earlier, later in pairwise(accuracies))
    listed = ", ".join(
        f"{accuracy:.0%} at {factor}·eps"
        for factor, accuracy in zip(BUDGETS, accuracies, strict=True)
    )
    return _check(
        "accuracy rises with budget",
        max(rise, 0.0),
        rise > max(0.02, 1.5 / len(x)),
        f"largest rise of accuracy under a short attack as the budget grows ({listed})",
    )
