"""The mixing formula for every choice of alpha."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core.rng import stream
from equipoise.mixing import gate_of, mix

N, K = 400, 6


def _logits(seed: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    random_stream = stream(seed, "logits", torch.arange(4))
    return scale * random_stream.at("g").normal(6).double(), scale * random_stream.at("h").normal(
        6
    ).double()


@settings(deadline=None)
@given(st.integers(0, 99), st.floats(0.1, 30), st.floats(0, 1))
def test_mix_is_the_convex_combination_of_probabilities(
    seed: int, scale: float, alpha: float
) -> None:
    g, h = _logits(seed, scale)
    p = mix(F.log_softmax(g, 1), F.log_softmax(h, 1), gate_of(alpha).double()).exp()
    torch.testing.assert_close(
        p, (1 - alpha) * g.softmax(1) + alpha * h.softmax(1), rtol=1e-6, atol=1e-12
    )
    torch.testing.assert_close(p.sum(1), torch.ones(4, dtype=torch.float64))
    low, high = torch.minimum(g.softmax(1), h.softmax(1)), torch.maximum(g.softmax(1), h.softmax(1))
    assert bool(((low - 1e-9 <= p) & (p <= high + 1e-9)).all())


@pytest.mark.parametrize("gate", [-1e4, -300.0, -1.0, 0.0, 2.0, 300.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_finite_for_confident_bases(gate: float, dtype: torch.dtype) -> None:
    """The literal formula gives −inf and NaN here; both confident, and of different classes."""
    g = torch.tensor([[1000.0, 0, -1000], [0, 500.0, 0]], dtype=dtype, requires_grad=True)
    h = torch.tensor([[-1000.0, 0, 1000], [500.0, 0, 0]], dtype=dtype, requires_grad=True)
    odds = torch.tensor(gate, dtype=dtype, requires_grad=True)
    out = mix(F.log_softmax(g, 1), F.log_softmax(h, 1), odds)
    gradients = torch.autograd.grad(F.cross_entropy(out, torch.tensor([1, 2])), (g, h, odds))
    assert bool(out.isfinite().all()) and all(bool(grad.isfinite().all()) for grad in gradients)


def test_alpha_0_and_1_are_the_bases_exactly() -> None:
    g, h = (F.log_softmax(z.float(), 1) for z in _logits(0, 20))
    assert torch.equal(mix(g, h, gate_of(0.0)), g)
    assert torch.equal(mix(g, h, gate_of(1.0)), h)


def test_one_gate_per_image() -> None:
    g, h = (F.log_softmax(z, 1) for z in _logits(1, 3))
    gates = torch.tensor([-2.0, 0.0, 1.0, torch.inf], dtype=torch.float64)
    together = mix(g, h, gates)
    for i in range(4):
        torch.testing.assert_close(together[i], mix(g[i : i + 1], h[i : i + 1], gates[i])[0])


def test_gradient_against_differences() -> None:
    g, h = _logits(2, 2)
    gate = torch.tensor([-1.0, 0.0, 0.5, 3.0], dtype=torch.float64, requires_grad=True)

    def function(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return mix(F.log_softmax(a, 1), F.log_softmax(b, 1), c)

    assert torch.autograd.gradcheck(function, (g.requires_grad_(), h.requires_grad_(), gate))
