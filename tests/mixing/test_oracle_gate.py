"""The bound of Theorem 4.1: nothing that only chooses alpha does better."""

from __future__ import annotations

import torch
from torch import Tensor

from equipoise.mixing import gate_of, mix
from equipoise.mixing.logit_maps import one_hot
from equipoise.mixing.oracle_gate import perfect, right_alphas

N, K = 400, 6


def _sides() -> tuple[Tensor, Tensor, Tensor]:
    chance = torch.Generator().manual_seed(5)
    g, h = (torch.log_softmax(2 * torch.randn(N, K, generator=chance), dim=1) for _ in range(2))
    return g, h, torch.randint(0, K, (N,), generator=chance)


def test_it_is_what_trying_every_alpha_finds() -> None:
    g, h, y = _sides()
    tried = torch.stack([mix(g, h, gate_of(a)).argmax(dim=1) == y for a in torch.linspace(0, 1, 2001).tolist()])
    bound = perfect(g, h, y)
    assert bool((bound >= tried.any(dim=0)).all())
    assert int((bound & ~tried.any(dim=0)).sum()) <= 2  # intervals narrower than the grid
    assert float(bound.float().mean()) >= float(tried.float().mean(dim=1).max())
    # More than a choice between the two: both wrong, a mixture right.
    either = (g.argmax(dim=1) == y) | (h.argmax(dim=1) == y)
    assert bool((bound >= either).all()) and int((bound & ~either).sum()) > 0


def test_the_interval_is_where_the_answer_is_right() -> None:
    g, h, y = _sides()
    low, high = right_alphas(g, h, y)
    some = perfect(g, h, y) & (high - low > 1e-3)
    for share in (0.01, 0.5, 0.99):
        alpha = low + share * (high - low)
        p = (1 - alpha)[:, None] * g.exp() + alpha[:, None] * h.exp()
        assert bool((p.argmax(dim=1) == y)[some].all())
    outside = some & (high < 0.98)
    p = (0.99 - high)[:, None] * g.exp() + (high + 0.01)[:, None] * h.exp()
    assert bool((p.argmax(dim=1) != y)[outside].all()) and bool(outside.any())


def test_a_hard_side_and_equal_sides() -> None:
    g, h, y = _sides()
    hard = one_hot(g.argmax(dim=1), K)
    assert bool((perfect(hard, h, y) >= (g.argmax(dim=1) == y)).all())
    assert torch.equal(perfect(g, g, y), g.argmax(dim=1) == y)
