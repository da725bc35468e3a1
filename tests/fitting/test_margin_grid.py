"""Margins of many maps at once equal those of each map."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_logits import make_logits

from equipoise.fitting.cached_logits import CachedLogits
from equipoise.fitting.margin_grid import MapFamily, MarginGrid, _power
from equipoise.mixing import MixedClassifier
from equipoise.mixing.logit_maps import power

RIVALS_AND_UNITS = [(1.0, 0.0), (0.0, 0.0), (0.5, 0.0), (0.0, 1.3), (1.0, 0.7)]
ONE = (MapFamily(), torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([-0.4]))


@pytest.mark.parametrize(("rivals", "unit"), RIVALS_AND_UNITS)
@pytest.mark.parametrize("clamp", ["gelu", "gelu-monotone", "relu"])
def test_margins_and_gaps_equal_those_of_the_map(rivals: float, unit: float, clamp: str) -> None:
    family, logits = MapFamily(clamp, rivals, unit), make_logits(60)
    table = MarginGrid(logits).grid(
        family, torch.tensor([0.5, 3.0]), torch.tensor([1.0, 2.5]), torch.tensor([-0.6, 0.2])
    )
    assert table.candidates.shape == (8, 3)
    top, survived = logits.clean.argmax(1, keepdim=True), logits.survived
    differ = logits.accurate != top.squeeze(1)
    for row in (table.reordered == 0).nonzero().flatten().tolist():
        logit_map = family.map(table.candidates[row])
        clean = logit_map(logits.clean).softmax(1)
        gap = (clean.gather(1, top) - clean.gather(1, logits.accurate.unsqueeze(1))).squeeze(1)
        torch.testing.assert_close(table.gaps[row][differ], gap[differ], rtol=1e-4, atol=1e-6)
        attacked = (
            logit_map(logits.attacked.reshape(-1, 6))
            .softmax(1)
            .view(*logits.attacked.shape)[:, survived]
        )
        y = logits.labels[survived].expand(len(attacked), -1).unsqueeze(2)
        margin = (attacked.gather(2, y).squeeze(2) - attacked.scatter(2, y, -1).amax(2)).amin(0)
        torch.testing.assert_close(table.margins[row], margin, rtol=1e-4, atol=1e-6)


def test_gaps_of_some_images_are_those_of_all() -> None:
    """Bit by bit, and the margins and the number of reordered inputs do not change."""
    logits, some = make_logits(60), torch.arange(60) % 3 == 0
    part, whole = (
        grid.grid(
            MapFamily("gelu"), torch.tensor([0.5, 3.0]), torch.tensor([2.5]), torch.tensor([-2.0])
        )
        for grid in (MarginGrid(logits, gaps_of=some), MarginGrid(logits))
    )
    assert torch.equal(part.gaps, whole.gaps[:, some]) and int(whole.reordered[0]) > 0
    assert torch.equal(part.margins, whole.margins) and torch.equal(part.reordered, whole.reordered)


@pytest.mark.parametrize("p", [0.5, 1.0, 1.7, 8.0])
@pytest.mark.parametrize("smallest", [0.0, 1e-35, 1e-3])
def test_powers_equal_those_of_the_map(p: float, smallest: float) -> None:
    u = torch.linspace(-3, 3, 1000).view(100, 10)
    u[0, 0] = smallest
    assert torch.equal(_power(u, p), power(u, p))


def test_joined_tables_sort_the_margins_of_both() -> None:
    grid, (family, *axes) = MarginGrid(make_logits(60)), ONE
    first, second = grid.grid(family, *axes), grid.grid(family, 2 * axes[0], *axes[1:])
    assert torch.equal(first.sorted_margins, first.margins.sort(dim=1).values)
    joined = first.join(second)
    assert torch.equal(
        joined.sorted_margins, torch.cat([first.sorted_margins, second.sorted_margins])
    )


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.floats(0.01, 0.99), st.sampled_from(RIVALS_AND_UNITS))
def test_gaps_decide_as_the_mixture_does(
    seed: int, q: float, rivals_and_unit: tuple[float, float]
) -> None:
    family, logits = MapFamily("gelu-monotone", *rivals_and_unit), make_logits(40, seed=seed)
    candidate = torch.tensor([2.0, 2.0, -0.4])
    gaps = MarginGrid(logits).one(family, candidate).gaps[0]
    assert logits.accurate_logits is not None
    mixture = MixedClassifier(
        _Constant(logits.accurate_logits),
        torch.nn.Identity(),
        1 / (1 + q),
        hard=True,
        logit_map=family.map(candidate),
    )
    expected = torch.where(gaps <= q, logits.accurate, logits.clean.argmax(1))
    clear = (gaps - q).abs() >= 1e-5
    assert torch.equal(mixture(logits.clean).argmax(1)[clear], expected[clear])


class _Constant(torch.nn.Module):
    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits


def _margins(logits: CachedLogits, shift: int | None = None) -> torch.Tensor:
    """Margins where g predicts the label plus `shift` at every attacked point, or any class."""
    if shift is not None:
        classes = (logits.labels.expand(len(logits.attacked), -1) + shift) % 6
        logits = dataclasses.replace(logits, accurate_attacked=classes)
    return MarginGrid(logits).grid(*ONE).margins


def test_correct_accurate_model_cannot_be_overruled() -> None:
    assert bool(_margins(make_logits(60), 0).isinf().all())


def test_any_class_is_the_worst_case() -> None:
    logits = make_logits(60)
    other, worst = _margins(logits, 1), _margins(logits)
    assert bool((other >= worst).all()) and bool((other > worst).any())


def test_reordering_by_gelu_is_counted() -> None:
    clean = torch.tensor([[1.0, 0.8, 0.8, 0.8, 0.8, -4.0]])
    logits = CachedLogits(
        clean,
        clean.unsqueeze(0),
        torch.tensor([0]),
        torch.tensor([0]),
        torch.tensor([1]),
        torch.tensor([[-1]]),
    )
    candidate = torch.tensor([1.0, 1.0, -1.4])
    assert int(MarginGrid(logits).one(MapFamily("gelu"), candidate).reordered[0]) == 2
    assert int(MarginGrid(logits).one(MapFamily("gelu-monotone"), candidate).reordered[0]) == 0


@pytest.mark.parametrize(
    ("clamp", "shift"), [("relu", -0.9), ("relu", -3.0), ("gelu-monotone", -2.5)]
)
def test_classes_that_a_clamp_makes_equal(clamp: str, shift: float) -> None:
    """Also a monotone map changes the class where it makes classes equal: the first of them is then
    predicted."""
    logits = make_logits(40)
    family, candidate = MapFamily(clamp), torch.tensor([1.0, 1.0, shift], dtype=torch.float64)
    logit_map, labels = family.map(candidate), logits.labels
    expected = int((logit_map(logits.clean).argmax(1) != logits.clean.argmax(1)).sum())
    for points in logits.attacked[:, logits.survived]:
        expected += int((logit_map(points).argmax(1) != labels[logits.survived]).sum())
    assert int(MarginGrid(logits).one(family, candidate).reordered[0]) == expected > 0
