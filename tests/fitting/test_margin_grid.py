from __future__ import annotations

import dataclasses

import pytest
import synthetic_logits
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.fitting.cache import ANY, Cache
from equipoise.fitting.margin_grid import Family, MarginGrid
from equipoise.mixing import MixedClassifier

RIVALS_AND_UNITS = [(1.0, 0.0), (0.0, 0.0), (0.5, 0.0), (0.0, 1.3), (1.0, 0.7)]




@pytest.mark.parametrize(("rivals", "unit"), RIVALS_AND_UNITS)
@pytest.mark.parametrize("clamp", ["gelu", "gelu-monotone", "relu"])
def test_margins_and_gaps_of_the_map_itself(rivals: float, unit: float, clamp: str) -> None:
    family = Family(clamp, rivals, unit)
    cache = synthetic_logits.make(60)
    assert cache.accurate is not None
    table = MarginGrid(cache).grid(family, torch.tensor([0.5, 3.0]), torch.tensor([1.0, 2.5]), torch.tensor([-0.6, 0.2]))
    assert len(table) == 8 and table.candidates.shape == (8, 3)
    kept = cache.standing
    for row, candidate in enumerate(table.candidates):
        chosen = family.map(candidate)
        clean = chosen(cache.clean).softmax(1)
        own = cache.clean.argmax(1, keepdim=True)
        if int(table.reordered[row]):
            continue
        gap = (clean.gather(1, own) - clean.gather(1, cache.accurate.unsqueeze(1))).squeeze(1)
        differ = cache.accurate != own.squeeze(1)
        torch.testing.assert_close(table.gaps[row][differ], gap[differ], rtol=1e-4, atol=1e-6)
        attacked = chosen(cache.attacked.reshape(-1, 6)).softmax(1).view(*cache.attacked.shape)[:, kept]
        y = cache.labels[kept].expand(len(attacked), -1).unsqueeze(2)
        worst = attacked.scatter(2, y, -1).amax(2)
        margin = (attacked.gather(2, y).squeeze(2) - worst).amin(0)
        torch.testing.assert_close(table.margins[row], margin, rtol=1e-4, atol=1e-6)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.floats(0.01, 0.99), st.sampled_from(RIVALS_AND_UNITS))
def test_gaps_decide_as_the_mixture_does(seed: int, q: float, numbers: tuple[float, float]) -> None:
    family = Family("gelu-monotone", *numbers)
    cache = synthetic_logits.make(40, seed=seed)
    assert cache.accurate is not None and cache.soft is not None
    candidate = torch.tensor([2.0, 2.0, -0.4])
    table = MarginGrid(cache).one(family, candidate)
    mixture = MixedClassifier(torch.nn.Identity(), torch.nn.Identity(), 1 / (1 + q), hard=True,
                              logit_map=family.map(candidate))
    mixture.accurate = _Given(cache.soft)
    told = mixture(cache.clean).argmax(1)
    near = (table.gaps[0] - q).abs() < 1e-5
    expected = torch.where(table.gaps[0] <= q, cache.accurate, cache.clean.argmax(1))
    assert torch.equal(told[~near], expected[~near])


class _Given(torch.nn.Module):
    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits


def test_what_the_accurate_model_says_at_attacked_points() -> None:
    cache = synthetic_logits.make(60)
    look = MarginGrid(cache)
    whatever = dataclasses.replace(cache, said=torch.full(cache.attacked.shape[:2], ANY))
    right = dataclasses.replace(cache, said=cache.labels.expand(len(cache.attacked), -1))
    other = dataclasses.replace(cache, said=(cache.labels.expand(len(cache.attacked), -1) + 1) % 6)
    grid = (Family(), torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([-0.4]))
    worst = look.grid(*grid).margins
    assert torch.equal(MarginGrid(whatever).grid(*grid).margins, worst)
    assert bool(MarginGrid(right).grid(*grid).margins.isinf().all())
    named = MarginGrid(other).grid(*grid).margins
    assert bool((named >= worst).all()) and bool((named > worst).any())


def test_gelu_that_reorders_is_counted() -> None:
    clean = torch.tensor([[1.0, 0.8, 0.8, 0.8, 0.8, -4.0]])
    cache = Cache(clean, clean.unsqueeze(0), torch.tensor([0]), torch.tensor([0]), torch.tensor([1]))
    candidate = torch.tensor([1.0, 1.0, -1.4])
    assert int(MarginGrid(cache).one(Family("gelu"), candidate).reordered[0]) == 2
    assert int(MarginGrid(cache).one(Family("gelu-monotone"), candidate).reordered[0]) == 0
