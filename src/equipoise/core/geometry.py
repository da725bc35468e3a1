"""The shape of a perturbation set: four functions per norm, and nothing else knows about norms.

`size` measures, `project` brings back inside, `steepest` is the unit step that raises a linear function
most, `draw` samples the ball uniformly. Everything is per example over (B, …).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from equipoise.core.rng import Stream
from equipoise.core.threat import Threat


def per_example(scale: Tensor, x: Tensor) -> Tensor:
    """(B,) → (B, 1, …, 1), so that it meets x of shape (B, …)."""
    return scale.view(-1, *[1] * (x.dim() - 1))


def size(delta: Tensor, norm: str) -> Tensor:
    """(B,) ‖δ‖ of every example."""
    order = {"linf": math.inf, "l2": 2.0}[norm]
    sizes: Tensor = torch.linalg.vector_norm(delta.flatten(1), ord=order, dim=1)
    return sizes


def bounds(x: Tensor, threat: Threat) -> tuple[Tensor, Tensor]:
    """Lowest and highest image of the ℓ∞ ball inside [0, 1], exact in the dtype of `x`.

    x ± eps may round outwards, so that the difference to x exceeds eps by one unit in the last place;
    such ends move inwards by one.
    """
    eps = threat.eps_in(x.dtype)
    low, high = x - eps, x + eps
    low = torch.where(x - low > eps, torch.nextafter(low, x), low)
    high = torch.where(high - x > eps, torch.nextafter(high, x), high)
    return low.clamp_(min=0), high.clamp_(max=1)


def project(x_adv: Tensor, x: Tensor, threat: Threat) -> Tensor:
    """The image nearest to `x_adv` (for ℓ2: on the way back to x) inside the ball and inside [0, 1]."""
    if threat.norm == "linf":
        low, high = bounds(x, threat)
        return torch.minimum(torch.maximum(x_adv, low), high)
    delta = x_adv - x
    # Adding to x rounds every pixel by up to a quarter of the dtype's eps; together they must not leave the ball.
    slack = torch.finfo(x.dtype).eps / 4 * math.sqrt(delta[0].numel()) if len(x) else 0.0
    radius = max(threat.eps - slack, threat.eps / 2)
    factor = radius / size(delta, "l2").clamp_min(radius)
    # Clamping a point of the ball to the box cannot leave the ball, because x itself is in the box.
    return (x + per_example(factor, delta) * delta).clamp_(0, 1)


def project_to_ball(x_adv: Tensor, x: Tensor, norm: str, eps: float | Tensor | None) -> Tensor:
    """Back into [0, 1] and into a ball whose radius may differ from image to image; None is no ball.

    x is in the box, so shrinking towards it stays there. Cheaper than :func:`project` and exact only up to rounding,
    which is enough for training.
    """
    x_adv = x_adv.clamp(0, 1)
    if eps is None:
        return x_adv
    delta, radius = x_adv - x, per_example(eps, x) if isinstance(eps, Tensor) else eps
    if norm == "linf":
        return (x + torch.clamp(delta, min=-radius, max=radius)).clamp(0, 1)  # type: ignore[arg-type]
    length = per_example(size(delta, "l2"), delta)
    return (x + delta * (radius / length.clamp_min(radius).clamp_min(1e-12))).clamp(0, 1)


def steepest(gradient: Tensor, norm: str) -> Tensor:
    """The direction of size one that raises a linear function with this gradient most; zero stays zero."""
    if norm == "linf":
        return gradient.sign()
    # Scaled first, so that squares of tiny gradients do not vanish.
    largest = size(gradient, "linf").clamp_min(torch.finfo(gradient.dtype).tiny)
    scaled = gradient / per_example(largest, gradient)
    return scaled / per_example(size(scaled, "l2").clamp_min(1e-12), scaled)


def draw(x: Tensor, threat: Threat, chance: Stream) -> Tensor:
    """A uniform point of the ball around every image, cut to [0, 1]."""
    shape = x.shape[1:]
    if threat.norm == "linf":
        delta = chance.uniform(*shape, low=-threat.eps, high=threat.eps)
    else:
        direction = steepest(chance.at("direction").normal(*shape), "l2")
        radius = chance.at("radius").uniform() ** (1 / math.prod(shape))
        delta = direction * per_example(radius * threat.eps, direction)
    return project(x + delta.to(x.dtype), x, threat)


def surface(x: Tensor, threat: Threat, chance: Stream) -> Tensor:
    """A random point whose perturbation has size eps, cut to [0, 1]: where APGD starts [Croce2020]."""
    shape = x.shape[1:]
    if threat.norm == "linf":
        direction = chance.uniform(*shape, low=-1, high=1)
        direction = direction / per_example(size(direction, "linf").clamp_min(1e-12), direction)
    else:
        direction = steepest(chance.normal(*shape), "l2")
    return project(x + threat.eps * direction.to(x.dtype), x, threat)
