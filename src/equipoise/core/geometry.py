"""Geometry of the perturbation sets: what differs between norms is here (and in the proposals of the Square attack).

`size` measures, `dual_norm` measures gradients, `project` brings back inside, `steepest` is the unit step that raises a
linear function most, `draw` samples the ball uniformly, `surface` its sphere, `move_to_hyperplane` finds the smallest
move onto a hyperplane. Everything is per example over (B, …).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from equipoise.core import checks
from equipoise.core.rng import Stream
from equipoise.core.threat import Threat


def per_example(scale: Tensor, x: Tensor) -> Tensor:
    """(B,) → (B, 1, …, 1), so that it meets x of shape (B, …)."""
    return scale.view(-1, *[1] * (x.dim() - 1))


def where_rows(mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """`new` (B, …) for the examples where the mask (B,) is true, `old` for the others."""
    return torch.where(per_example(mask, new), new, old)


def size(delta: Tensor, norm: str) -> Tensor:
    """(B,) ‖δ‖ of every example."""
    order = {"linf": math.inf, "l2": 2.0}[norm]
    sizes: Tensor = torch.linalg.vector_norm(delta.flatten(1), ord=order, dim=1)
    return sizes


def dual_order(norm: str | float) -> float:
    """The order p* with 1/p + 1/p* = 1 of linf, l2 or any p ≥ 1.

    >>> dual_order("linf"), dual_order(2), dual_order(1.5)
    (1.0, 2.0, 3.0)
    """
    p = {"linf": math.inf, "l2": 2.0}.get(norm) if isinstance(norm, str) else norm
    valid = isinstance(p, int | float) and not isinstance(p, bool) and p >= 1
    checks.require(valid, "norm", "be linf, l2 or a number of at least 1", norm)
    assert p is not None
    if p == 1:
        return math.inf
    return 1.0 if p == math.inf else round(p / (p - 1), 12)


def dual_norm(gradient: Tensor, norm: str | float) -> Tensor:
    """(B,) size of every gradient in the dual norm, so that |δᵀ∇f| ≤ ‖δ‖ · dual_norm(∇f)."""
    sizes: Tensor = torch.linalg.vector_norm(gradient.flatten(1), ord=dual_order(norm), dim=1)
    return sizes


def bounds(x: Tensor, threat: Threat) -> tuple[Tensor, Tensor]:
    """Lowest and highest image of the ℓ∞ ball inside [0, 1], exact in the dtype of `x`.

    x ± eps may round outwards by one unit in the last place; such ends move inwards by one.
    """
    eps = threat.eps_in(x.dtype)
    low, high = x - eps, x + eps
    low = torch.where(x - low > eps, torch.nextafter(low, x), low)
    high = torch.where(high - x > eps, torch.nextafter(high, x), high)
    return low.clamp_(min=0), high.clamp_(max=1)


def reusable_bounds(x: Tensor, threat: Threat) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """What repeated projections around the same images can share: the bounds of an ℓ∞ ball; nothing for ℓ2."""
    return bounds(x, threat) if threat.norm == "linf" else (None, None)


def project(x_adv: Tensor, x: Tensor, threat: Threat, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    """The image nearest to `x_adv` (for ℓ2: on the way back to x) inside the ball and inside [0, 1].

    `low` and `high` are the :func:`reusable_bounds` of x, where they are known already.
    """
    if threat.norm == "linf":
        if low is None or high is None:
            low, high = bounds(x, threat)
        return torch.clamp(x_adv, low, high)
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


def draw(x: Tensor, threat: Threat, stream: Stream) -> Tensor:
    """A uniform point of the ball around every image, cut to [0, 1]."""
    shape = x.shape[1:]
    if threat.norm == "linf":
        delta = stream.uniform(*shape, low=-threat.eps, high=threat.eps)
    else:
        direction = steepest(stream.at("direction").normal(*shape), "l2")
        radius = stream.at("radius").uniform() ** (1 / math.prod(shape))
        delta = direction * per_example(radius * threat.eps, direction)
    return project(x + delta.to(x.dtype), x, threat)


def surface(x: Tensor, threat: Threat, stream: Stream) -> Tensor:
    """A random point whose perturbation has size eps, cut to [0, 1]: where APGD starts [Croce2020]."""
    shape = x.shape[1:]
    if threat.norm == "linf":
        direction = stream.uniform(*shape, low=-1, high=1)
        direction = direction / per_example(size(direction, "linf").clamp_min(1e-12), direction)
    else:
        direction = steepest(stream.normal(*shape), "l2")
    return project(x + threat.eps * direction.to(x.dtype), x, threat)


HYPERPLANE_ROUNDS = {"cpu": 12, "cuda": 8}  # on CUDA a test for convergence would cost more than the last rounds


def move_to_hyperplane(x: Tensor, w: Tensor, value: Tensor, norm: str) -> Tensor:
    r"""The smallest d (in the norm) with value + w·d = 0 and x + d in [0, 1]; as near to it as possible if none exists.

    Moving against the sign of `value`, coordinate i gains |w_i|·m_i, where m_i = min(λ, limit_i) for ℓ∞ and
    min(λ|w_i|, limit_i) for ℓ2. The total gain is concave and piecewise linear in λ, so Newton's method from λ = 0
    approaches the solution from below and ends after finitely many rounds; a handful suffices, because few pixels reach
    their limit. `w` are (B, …) normals, `value` (B,) values of the affine function at x.
    """
    direction = -w.sign() * per_example(value.sign(), w)
    limit = torch.where(direction > 0, 1 - x, torch.where(direction < 0, x, torch.zeros_like(x)))
    weight = w.abs()
    speed = torch.ones_like(weight) if norm == "linf" else weight
    gain_per_unit = weight * speed
    gap = value.abs()
    scale = torch.zeros_like(value)
    axes = tuple(range(1, x.dim()))
    for _ in range(HYPERPLANE_ROUNDS.get(x.device.type, 12)):
        unlimited = per_example(scale, x) * speed
        free = unlimited < limit
        gain = (weight * torch.minimum(unlimited, limit)).sum(dim=axes)
        slope = (gain_per_unit * free).sum(dim=axes)
        more = torch.where(slope > 0, (gap - gain).clamp_min(0) / slope.clamp_min(1e-30), torch.zeros_like(gap))
        scale = scale + more
        if x.device.type == "cpu" and bool((more <= 1e-7 * scale).all()):
            break
    return direction * torch.minimum(per_example(scale, x) * speed, limit)
