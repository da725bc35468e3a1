"""Geometry of the perturbation sets: what differs between norms is here (and in the proposals of
the Square attack).

`size` measures, `dual_norm` measures gradients, `project` brings back inside, `steepest` is the
unit step that raises a linear function most, `draw` samples the ball uniformly, `surface` its
sphere, `move_to_hyperplane` finds the smallest move onto a hyperplane. Everything is per example
over (B, …).

The ℓ1 ball has corners, where [0, 1] cuts it off: its projections and moves are onto the
intersection with the box, and its steps change several pixels [Croce2021].
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from equipoise.core import checks
from equipoise.core.rng import Stream
from equipoise.core.threat import Threat

ORDERS = {"linf": math.inf, "l2": 2.0, "l1": 1.0}
SPREAD = 0.01  # share of the pixels that a step of plain gradient ascent changes in ℓ1


def per_example(scale: Tensor, x: Tensor) -> Tensor:
    """(B,) → (B, 1, …, 1), so that it meets x of shape (B, …)."""
    return scale.view(-1, *[1] * (x.dim() - 1))


def where_rows(mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """`new` (B, …) for the examples where the mask (B,) is true, `old` for the others."""
    return torch.where(per_example(mask, new), new, old)


def size(delta: Tensor, norm: str) -> Tensor:
    """(B,) ‖δ‖ of every example."""
    sizes: Tensor = torch.linalg.vector_norm(delta.flatten(1), ord=ORDERS[norm], dim=1)
    return sizes


def dual_order(norm: str | float) -> float:
    """The order p* with 1/p + 1/p* = 1 of linf, l2, l1 or any p ≥ 1.

    >>> dual_order("linf"), dual_order(2), dual_order(1.5)
    (1.0, 2.0, 3.0)
    """
    p = ORDERS.get(norm) if isinstance(norm, str) else norm
    valid = isinstance(p, int | float) and not isinstance(p, bool) and p >= 1
    checks.require(valid, "norm", "be linf, l2, l1 or a number of at least 1", norm)
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
    """What repeated projections around the same images can share: the bounds of an ℓ∞ ball; nothing
    for others."""
    return bounds(x, threat) if threat.norm == "linf" else (None, None)


def project(
    x_adv: Tensor, x: Tensor, threat: Threat, low: Tensor | None = None, high: Tensor | None = None
) -> Tensor:
    """The image nearest to `x_adv` (for ℓ2: on the way back to x) inside the ball and inside [0,
    1].

    `low` and `high` are the :func:`reusable_bounds` of x, where they are known already.
    """
    if threat.norm == "linf":
        if low is None or high is None:
            low, high = bounds(x, threat)
        return torch.clamp(x_adv, low, high)
    if threat.norm == "l1":
        return _project_l1(x_adv, x, threat.eps)
    delta = x_adv - x
    # Adding to x rounds every pixel by up to a quarter of the dtype's eps; together they must not
    # leave the ball.
    slack = torch.finfo(x.dtype).eps / 4 * math.sqrt(delta[0].numel()) if len(x) else 0.0
    radius = max(threat.eps - slack, threat.eps / 2)
    factor = radius / size(delta, "l2").clamp_min(radius)
    # Clamping a point of the ball to the box cannot leave the ball, because x itself is in the box.
    return (x + per_example(factor, delta) * delta).clamp_(0, 1)


def _project_l1(x_adv: Tensor, x: Tensor, eps: float | Tensor) -> Tensor:
    """The image nearest to `x_adv` inside the ℓ1 ball and [0, 1]; eps is a number or (B,).

    With aᵢ = |x_advᵢ − xᵢ| and rᵢ the room of pixel i in that direction, its perturbation is
    min(max(aᵢ − λ, 0), rᵢ), where λ ≥ 0 makes the sum eps. The sum falls with λ and is linear
    between neighbouring aᵢ and aᵢ − rᵢ: bisection finds the piece, and a division the solution on
    it.
    """
    delta, axes = x_adv - x, tuple(range(1, x.dim()))
    change, room = delta.abs(), torch.where(delta > 0, 1 - x, x)

    def perturbation(cut: Tensor) -> Tensor:
        return torch.minimum((change - per_example(cut, x)).clamp_(min=0), room)

    radius = eps.double() if isinstance(eps, Tensor) else x.new_full((), eps, dtype=torch.float64)
    radius = radius * (1 - 4 * torch.finfo(x.dtype).eps)  # what the last roundings may add
    low = x.new_zeros(len(x))
    inside = perturbation(low).sum(dim=axes, dtype=torch.float64) <= radius
    if x.device.type == "cpu" and bool(inside.all()):
        return x_adv.clamp(0, 1)
    high = change.amax(dim=axes)
    for _ in range(-int(math.log2(torch.finfo(x.dtype).eps)) + 3):
        middle = (low + high) / 2
        outside = perturbation(middle).sum(dim=axes) > radius
        low, high = torch.where(outside, middle, low), torch.where(outside, high, middle)
    left = change - per_example((low + high) / 2, x)
    free = (left > 0) & (left < room)
    fixed = torch.where(free, change, torch.where(left > 0, room, torch.zeros_like(room)))
    cut = (fixed.sum(dim=axes, dtype=torch.float64) - radius) / free.sum(dim=axes).clamp_min(1)
    moved = perturbation(cut.to(x.dtype).clamp(low, high))
    total = moved.sum(dim=axes, dtype=torch.float64)
    moved = moved * per_example((radius / total.clamp_min(1e-300)).clamp(max=1).to(x.dtype), moved)
    near = x + delta.sign() * moved
    near = torch.where((near - x).abs() > moved, torch.nextafter(near, x), near)
    return where_rows(inside, x_adv, near).clamp(0, 1)


def project_to_ball(x_adv: Tensor, x: Tensor, norm: str, eps: float | Tensor | None) -> Tensor:
    """Back into [0, 1] and into a ball whose radius may differ from image to image; None is no
    ball.

    x is in the box, so shrinking towards it stays there. Cheaper than :func:`project` and exact
    only up to rounding, which is enough for training.
    """
    if norm == "l1" and eps is not None:
        return _project_l1(x_adv, x, eps)
    x_adv = x_adv.clamp(0, 1)
    if eps is None:
        return x_adv
    delta, radius = x_adv - x, per_example(eps, x) if isinstance(eps, Tensor) else eps
    if norm == "linf":
        return (x + torch.clamp(delta, min=-radius, max=radius)).clamp(0, 1)  # type: ignore[arg-type]
    length = per_example(size(delta, "l2"), delta)
    return (x + delta * (radius / length.clamp_min(radius).clamp_min(1e-12))).clamp(0, 1)


def steepest(gradient: Tensor, norm: str, spread: float | Tensor = 0.0) -> Tensor:
    """The direction of size one that raises a linear function with this gradient most; zero stays
    zero.

    In ℓ1 that is a change of a single pixel, which [0, 1] soon ends. So `spread`, a number or (B,),
    divides the step equally among this share of the pixels, those with the largest gradients. Other
    norms do not need it.
    """
    if norm == "linf":
        return gradient.sign()
    if norm == "l1":
        return _sparse_signs(gradient, spread)
    # Scaled first, so that squares of tiny gradients do not vanish.
    largest = size(gradient, "linf").clamp_min(torch.finfo(gradient.dtype).tiny)
    scaled = gradient / per_example(largest, gradient)
    return scaled / per_example(size(scaled, "l2").clamp_min(1e-12), scaled)


def _sparse_signs(gradient: Tensor, share: float | Tensor) -> Tensor:
    """The signs of the given share of the largest gradients, at least one, with a sum of magnitudes
    of one."""
    magnitude = gradient.abs()
    ordered = magnitude.flatten(1).sort(dim=1, descending=True).values
    shares = share if isinstance(share, Tensor) else gradient.new_full((), share)
    number = (shares * ordered.shape[1]).long().clamp(1, ordered.shape[1]).expand(len(gradient))
    least = ordered.gather(1, number.unsqueeze(1) - 1).squeeze(1)
    signs = torch.where(
        magnitude >= per_example(least, gradient), gradient.sign(), torch.zeros_like(gradient)
    )
    return signs / per_example(size(signs, "l1").clamp_min(1), signs)


def draw(x: Tensor, threat: Threat, stream: Stream) -> Tensor:
    """A uniform point of the ball around every image, cut to [0, 1]."""
    shape = x.shape[1:]
    if threat.norm == "linf":
        delta = stream.uniform(*shape, low=-threat.eps, high=threat.eps)
    else:
        direction = _random_direction(shape, threat.norm, stream.at("direction"))
        radius = stream.at("radius").uniform() ** (1 / math.prod(shape))
        delta = direction * per_example(radius * threat.eps, direction)
    return project(x + delta.to(x.dtype), x, threat)


def _random_direction(shape: torch.Size, norm: str, stream: Stream) -> Tensor:
    """Uniform on the unit sphere of ℓ2 or ℓ1: normal or Laplace numbers over their size."""
    if norm == "l2":
        return steepest(stream.normal(*shape), "l2")
    uniform = stream.uniform(*shape, low=-1, high=1)
    laplace = -uniform.sign() * torch.log1p(-uniform.abs().clamp_max(1 - 2.0**-24))
    return laplace / per_example(size(laplace, "l1").clamp_min(1e-12), laplace)


def surface(x: Tensor, threat: Threat, stream: Stream) -> Tensor:
    """A random point whose perturbation has size eps, cut to [0, 1]: where APGD starts [Croce2020].

    In ℓ1 it is the projection of normal noise, which changes few pixels.
    """
    shape = x.shape[1:]
    if threat.norm == "l1":
        return project(x + stream.normal(*shape).to(x.dtype), x, threat)
    if threat.norm == "linf":
        direction = stream.uniform(*shape, low=-1, high=1)
        direction = direction / per_example(size(direction, "linf").clamp_min(1e-12), direction)
    else:
        direction = steepest(stream.normal(*shape), "l2")
    return project(x + threat.eps * direction.to(x.dtype), x, threat)


HYPERPLANE_ROUNDS = {
    "cpu": 12,
    "cuda": 8,
}  # on CUDA a test for convergence would cost more than the last rounds


def move_to_hyperplane(x: Tensor, w: Tensor, value: Tensor, norm: str) -> Tensor:
    r"""The smallest d (in the norm) with value + w·d = 0 and x + d in [0, 1]; as near to it as
    possible if none exists.

    Moving against the sign of `value`, coordinate i moves by min(λ v_i, limit_i), with speed v_i =
    1 for ℓ∞ and |w_i| for ℓ2. The total gain Σ|w_i|·min(λ v_i, limit_i) is concave and piecewise
    linear in λ, so Newton's method from λ = 0 approaches the solution from below and ends after
    finitely many rounds; a handful suffices, because few pixels reach their limit. In ℓ1 pixels go
    to their limit one after another, those with the largest |w_i| first. `w` are (B, …) normals,
    `value` (B,) values of the affine function at x.
    """
    direction = -w.sign() * per_example(value.sign(), w)
    limit = torch.where(direction > 0, 1 - x, torch.where(direction < 0, x, torch.zeros_like(x)))
    weight, gap = w.abs(), value.abs()
    if norm == "l1":
        return direction * _fill_largest(weight, limit, gap)
    speed = 1 if norm == "linf" else weight
    # What a pixel gains per unit of λ before its limit, and in all
    rate, most = weight * speed, weight * limit
    reached_at = limit / speed  # the λ from which on it is at its limit
    scale, axes = torch.zeros_like(gap), tuple(range(1, x.dim()))
    for _ in range(HYPERPLANE_ROUNDS.get(x.device.type, 12)):
        at_limit = reached_at <= per_example(scale, x)
        gain, slope = (
            torch.where(at_limit, most, 0).sum(dim=axes),
            torch.where(at_limit, 0, rate).sum(dim=axes),
        )
        larger = torch.where(slope > 0, (gap - gain).clamp_min(0) / slope.clamp_min(1e-30), scale)
        done = larger <= scale * (1 + 1e-7)
        scale = torch.maximum(scale, larger)
        if x.device.type == "cpu" and bool(done.all()):
            break
    return direction * torch.minimum(per_example(scale, x) * speed, limit)


def _fill_largest(weight: Tensor, limit: Tensor, gap: Tensor) -> Tensor:
    """Moves m ≤ limit (B, …) of smallest sum with Σ weight·m = gap (B,), or at their limits if that
    is not enough."""
    ordered, order = weight.flatten(1).double().sort(dim=1, descending=True, stable=True)
    gain = ordered * limit.flatten(1).gather(1, order)
    before = gain.cumsum(dim=1) - gain
    used = torch.minimum((gap.double().unsqueeze(1) - before).clamp_min(0), gain)
    moved = (
        torch.zeros_like(used).scatter(1, order, used / ordered.clamp_min(1e-300)).to(weight.dtype)
    )
    return torch.minimum(moved.view_as(weight), limit)
