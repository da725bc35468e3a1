"""Projected gradient ascent [Madry2018]: the plain attack everything else is measured against."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from equipoise.attacks.gradients import Extra
from equipoise.core import checks, geometry, losses
from equipoise.core.ascent import ascend, last
from equipoise.core.modes import inference
from equipoise.core.rng import Stream
from equipoise.core.threat import Threat


def pgd(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    threat: Threat,
    stream: Stream,
    surrogate: nn.Module | None = None,
    extra: Extra | None = None,
    steps: int = 20,
    step_size: float | None = None,
    restarts: int = 1,
    loss: losses.Loss = losses.cross_entropy,
) -> Tensor:
    r"""Maximise a loss over the ball, and keep what fools the model, or else what comes nearest to it.

    .. math:: x \leftarrow \Pi\big(x + s \cdot \mathrm{steepest}(\nabla_x \ell(f(x), y))\big)

    Args:
        model: decides success: images (B, C, H, W) in [0, 1] → logits (B, K).
        x: (B, C, H, W) images in [0, 1].
        y: (B,) labels.
        threat: the ball.
        stream: the chance of these images.
        surrogate: gives the gradients instead of `model` (STD, ROB and MIX attacks on a mixture).
        extra: images → (B,), added to the loss that is raised.
        steps: gradient steps per start.
        step_size: of one step in the norm of the threat; 2.5·eps/steps if not given.
        restarts: starts per image; images already broken are left out of later ones.
        loss: raised per example.

    Returns:
        (B, C, H, W), detached, inside the ball and [0, 1].
    """
    checks.images(x)
    checks.require(len(stream) == len(x), "stream", f"be the chance of {len(x)} images", len(stream))
    checks.whole("steps", steps, least=1)
    checks.whole("restarts", restarts, least=1)
    stride = 2.5 * threat.eps / steps if step_size is None else checks.positive("step_size", step_size)
    source = model if surrogate is None else surrogate
    x = x.detach()
    with inference(model, surrogate):
        best, margin = x.clone(), _margin(model, x, y)
        for restart in range(restarts):
            rows = (margin >= 0).nonzero().squeeze(1)
            if len(rows) == 0:
                break
            x0, labels = x[rows], y[rows]
            x_adv = geometry.draw(x0, threat, stream[rows.to(stream.index.device)].at("start", restart))
            x_adv = last(ascend(_raised(source, labels, loss, extra), x_adv, norm=threat.norm, step_size=stride,
                                steps=steps, project=partial(geometry.project, x=x0, threat=threat)))
            reached = _margin(model, x_adv, labels)
            nearer = reached < margin[rows]
            best[rows[nearer]], margin[rows[nearer]] = x_adv[nearer], reached[nearer]
    return best


def transfer(model: nn.Module, x: Tensor, y: Tensor, *, threat: Threat, stream: Stream, source: nn.Module,
             steps: int = 20, loss: losses.Loss = losses.cross_entropy) -> Tensor:
    """PGD on `source` alone: every image is moved and the last step is kept, because `model` is never asked.

    So the same images serve against any model. Arguments are those of :func:`pgd`.
    """
    checks.images(x)
    checks.require(len(stream) == len(x), "stream", f"be the chance of {len(x)} images", len(stream))
    checks.whole("steps", steps, least=1)
    x = x.detach()
    with inference(source):
        start = geometry.draw(x, threat, stream.at("start", 0))
        return last(ascend(_raised(source, y, loss, None), start, norm=threat.norm, step_size=2.5 * threat.eps / steps,
                           steps=steps, project=partial(geometry.project, x=x, threat=threat)))



def _raised(source: nn.Module, y: Tensor, loss: losses.Loss, extra: Extra | None) -> Extra:
    def value(x: Tensor) -> Tensor:
        found = loss(source(x), y)
        return found if extra is None else found + extra(x)

    return value


@torch.no_grad()
def _margin(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    logits = checks.logits(model(x), len(x))
    return losses.signed_margin(logits, checks.labels(y, logits.shape[1], len(x)))
