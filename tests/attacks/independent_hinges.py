"""An attack on mixtures written apart from the package: plain PyTorch, from the definition of a
mixture alone.

A mixture predicts another class j than y if g predicts j and the robust side prefers y to j by at
most q = (1 − α)/α. For every target j this is two hinges, whose sum is lowered by signed gradient
steps with momentum (first start) and by Adam (later starts), with decaying steps. Only the argmax
of the mixture itself decides success.

In ℓ1 steps change few values, ever fewer, and none that [0, 1] ends; later starts average longer
instead of Adam.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Sides = Callable[
    [Tensor], tuple[Tensor, Tensor, Tensor, Tensor]
]  # x → g, h, log-probabilities of M(h), q (B,)


def sides_of(mixture: Any) -> Sides:
    """Logits of g, scaled logits of h, log-probabilities of the robust side, and q of every
    image."""

    def compute(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if not hasattr(mixture, "network"):
            g, h = mixture.accurate(x), mixture.robust(x)
            q = x.new_full((len(x),), (1 - mixture.alpha) / mixture.alpha)
        else:
            g, h, z = mixture.logits_and_gate(x)
            low, high = mixture.alpha_range
            alpha = low + (high - low) * torch.sigmoid(z)
            g, h, q = mixture.logit_scales[0] * g, mixture.logit_scales[1] * h, (1 - alpha) / alpha
        mapped = h if mixture.logit_map is None else mixture.logit_map(h)
        return g, h, torch.log_softmax(mapped, dim=1), q

    return compute


def two_hinges(
    sides: Sides, x: Tensor, y: Tensor, target: Tensor, units: Tensor, kappa: float
) -> Tensor:
    """(B,) the sum of both hinges; `units` (B, 3) are those in which g, h and the mapped side are
    measured."""
    g, h, log_p, q = sides(x)
    rows = torch.arange(len(x), device=x.device)
    others = g.scatter(1, target[:, None], -torch.inf).amax(dim=1)
    accurate = torch.relu(others - g[rows, target] + kappa) / units[:, 0]
    p = log_p.exp()
    excess = p[rows, y] - p[rows, target] - q
    decided_by_h = (excess.detach() > -0.02).to(x.dtype)
    mapped = (log_p[rows, y] - log_p[rows, target]) / units[:, 2]
    unmapped = (h[rows, y] - h[rows, target]) / units[:, 1]
    # The excess has the gradient of the gate; logits have one where probabilities are flat.
    return accurate + decided_by_h * (mapped + 0.2 * unmapped + torch.relu(excess + 0.02))


@contextmanager
def full_precision() -> Iterator[None]:
    """No TF32, which torch allows in the convolutions of a GPU: it may guide an attack but not
    judge it."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def misclassified(mixture: Any, x: Tensor, y: Tensor) -> Tensor:
    """(B,) whether the mixture itself predicts another class."""
    with full_precision():
        predicted: Tensor = mixture(x).argmax(dim=1)
    return predicted != y


def attack(
    mixture: Any,
    x: Tensor,
    y: Tensor,
    eps: float,
    *,
    norm: str = "linf",
    steps: int = 100,
    restarts: int = 2,
    targets: int = 9,
    kappa: float = 1.0,
    seed: int = 0,
    batch: int = 72,
) -> Tensor:
    """(B,) whether an image of the ball (ℓ∞, or ℓ1 with `norm` l1) and of [0, 1] is not classified
    as y.

    `batch` is the number of pairs of an image and a target in one pass.
    """
    sides, generator = sides_of(mixture), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        broken = misclassified(mixture, x, y)
        g, h, log_p, _ = sides(x)
        # Other classes by the smaller of their ranks for g and for h.
        hidden = [z.scatter(1, y[:, None], -torch.inf) for z in (g, h)]
        ranks = torch.minimum(*[z.argsort(dim=1, descending=True).argsort(dim=1) for z in hidden])
        order = (
            (ranks.float() - hidden[1].softmax(dim=1))
            .scatter(1, y[:, None], torch.inf)
            .argsort(dim=1)
        )
        units = torch.stack(
            [z.amax(dim=1) - z.mean(dim=1) for z in (g, h, log_p)], dim=1
        ).clamp_min(1e-3)
    order = order[:, : min(targets, h.shape[1] - 1)]
    for restart in range(restarts):
        pairs = torch.cartesian_prod(
            (~broken).nonzero().squeeze(1), torch.arange(order.shape[1], device=x.device)
        )
        for part in pairs.split(batch):
            rows, target = part[:, 0], order[part[:, 0], part[:, 1]]
            run = _run if norm == "linf" else _run_l1
            found = run(
                mixture,
                sides,
                x[rows],
                y[rows],
                target,
                units[rows],
                eps,
                steps,
                kappa,
                later=restart % 2 == 1,
                generator=generator,
            )
            broken[rows[found]] = True
    return broken


def _run(
    mixture: Any,
    sides: Sides,
    x: Tensor,
    y: Tensor,
    target: Tensor,
    units: Tensor,
    eps: float,
    steps: int,
    kappa: float,
    *,
    later: bool,
    generator: torch.Generator,
) -> Tensor:
    low, high = (x - eps).clamp(0, 1), (x + eps).clamp(0, 1)
    noise = torch.rand(x.shape, generator=generator, dtype=x.dtype).to(x.device)
    point = (x + eps * (2 * noise - 1)).clamp(low, high)
    velocity, square = torch.zeros_like(x), torch.zeros_like(x)
    broken = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    for step in range(steps):
        point.requires_grad_()
        loss = two_hinges(sides, point, y, target, units, kappa)
        gradient = torch.autograd.grad(loss.sum(), point)[0].nan_to_num()
        size = 0.5 * eps * (1 - step / steps) ** 1.5 + eps / 200
        with torch.no_grad():
            if later:
                gradient = gradient / gradient.flatten(1).norm(dim=1).clamp_min(1e-12).view(
                    -1, 1, 1, 1
                )
                velocity, square = (
                    0.9 * velocity + 0.1 * gradient,
                    0.99 * square + 0.01 * gradient**2,
                )
                corrected = velocity / (1 - 0.9 ** (step + 1))
                move = corrected / ((square / (1 - 0.99 ** (step + 1))).sqrt() + 1e-8)
                point = (point - size * move).clamp(low, high)
            else:
                gradient = gradient / gradient.flatten(1).abs().mean(dim=1).clamp_min(1e-12).view(
                    -1, 1, 1, 1
                )
                velocity = 0.75 * velocity + gradient
                point = (point - size * velocity.sign()).clamp(low, high)
            if step % 3 == 2 or step == steps - 1:
                broken |= misclassified(mixture, point, y)
    return broken


def _run_l1(
    mixture: Any,
    sides: Sides,
    x: Tensor,
    y: Tensor,
    target: Tensor,
    units: Tensor,
    eps: float,
    steps: int,
    kappa: float,
    *,
    later: bool,
    generator: torch.Generator,
) -> Tensor:
    noise = torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device)
    point, velocity = into_l1_ball(x + 0.01 * noise, x, eps), torch.zeros_like(x)
    broken = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    for step in range(steps):
        point.requires_grad_()
        loss = two_hinges(sides, point, y, target, units, kappa)
        gradient = torch.autograd.grad(loss.sum(), point)[0].nan_to_num()
        size = eps * (0.6 * (1 - step / steps) + 0.03)
        count = max(1, int((0.02, 0.01, 0.0065, 0.0033)[4 * step // steps] * x[0].numel()))
        with torch.no_grad():
            gradient = gradient / gradient.flatten(1).norm(dim=1).clamp_min(1e-12).view(-1, 1, 1, 1)
            velocity = (0.9 if later else 0.7) * velocity + gradient
            can_move = torch.where(velocity > 0, point > 1e-3, point < 1 - 1e-3)
            strength = (velocity.abs() * can_move).flatten(1)
            chosen = strength >= strength.topk(count, dim=1).values[:, -1:]
            point = into_l1_ball(point - size / count * velocity.sign() * chosen.view_as(x), x, eps)
            if step % 3 == 2 or step == steps - 1:
                broken |= misclassified(mixture, point, y)
    return broken


def into_l1_ball(point: Tensor, x: Tensor, eps: float) -> Tensor:
    """A point of the ball and of [0, 1] near to the one given: all changes shrink by the same
    amount, or to zero."""
    change = (point.clamp(0, 1) - x).flatten(1)
    ordered = change.abs().sort(dim=1, descending=True).values
    cuts = (ordered.cumsum(dim=1) - eps) / torch.arange(1, ordered.shape[1] + 1, device=x.device)
    last = (ordered > cuts).sum(dim=1, keepdim=True).clamp_min(1) - 1
    cut = cuts.gather(1, last).clamp_min(0)
    return x + (change.sign() * (change.abs() - cut).clamp_min(0)).view_as(x)
