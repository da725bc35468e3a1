"""What a fit promises, over thousands of fits whose true loss is known.

The population is a large set of synthetic images with the margins of real maps. Every fit draws its
images from it with replacement, selects a map on one half, sets the threshold on the other, and
loses an exactly known share of the population.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from synthetic_logits import make_logits
from torch import Tensor

from equipoise.core.promises import Target
from equipoise.fitting.conformal import threshold
from equipoise.fitting.margin_grid import MapFamily, MarginGrid
from equipoise.fitting.selection import _best

FITS, BATCH, N = 2500, 500, 250  # N images in each half


@dataclass(frozen=True)
class Population:
    margins: (
        Tensor  # (G, N) of every map; infinite for images that the robust model does not survive
    )
    gaps: Tensor  # (G, N)
    correct: Tensor  # (N,) robust model
    accurate_correct: Tensor
    robust: Tensor  # (N,) survived


@pytest.fixture(scope="module")
def population() -> Population:
    logits = make_logits(8000)
    grid, scales = MarginGrid(logits), torch.tensor([0.5, 2.0])
    tables = [
        grid.grid(family, scales, torch.tensor([1.0, 2.0]), torch.tensor([-0.3]))
        for family in (MapFamily(), MapFamily("gelu-monotone", 0.0, 1.0))
    ]
    margins = torch.full((8, 8000), torch.inf)
    margins[:, grid.rows] = torch.cat([table.margins for table in tables])
    return Population(
        margins,
        torch.cat([table.gaps for table in tables]),
        logits.correct,
        logits.accurate == logits.labels,
        logits.survived,
    )


def true_losses(population: Population, target: Target) -> Tensor:
    """(FITS,) the share of the population (of its robust images) that each fit loses."""
    generator, losses = torch.Generator().manual_seed(0), []
    ordered = population.margins[:, population.robust].sort(dim=1).values
    whole = ordered.shape[1] if target.of_robust else population.margins.shape[1]
    for _ in range(FITS // BATCH):
        halves = torch.randint(len(population.correct), (2, BATCH, N), generator=generator)
        # The map: of all candidates that with the highest clean accuracy at its own threshold on
        # the first half.
        scores = []
        for margins, gaps in zip(population.margins, population.gaps, strict=True):
            q = thresholds(margins, halves[0], population, target)
            by_accurate = gaps[halves[0]] <= q.unsqueeze(1)
            correct = torch.where(
                by_accurate, population.accurate_correct[halves[0]], population.correct[halves[0]]
            )
            scores.append(correct.float().mean(dim=1))
        selected = torch.stack(scores).argmax(dim=0)
        for candidate in selected.unique().tolist():
            fits = selected == candidate
            q = thresholds(population.margins[candidate], halves[1][fits], population, target)
            losses.append(
                torch.searchsorted(ordered[candidate].contiguous(), q, right=True) / whole
            )
    return torch.cat(losses).double()


def thresholds(margins: Tensor, rows: Tensor, population: Population, target: Target) -> Tensor:
    """(B,) the threshold of every fit; the number of allowed losses depends on its own robust
    images."""
    robust = population.robust[rows].sum(dim=1)
    drawn = margins[rows]
    q = torch.zeros(len(rows))
    allowed = torch.tensor([target.allowed(N, int(count)) for count in robust])
    for losses in allowed.unique().tolist():
        q[allowed == losses] = threshold(drawn[allowed == losses], losses)
    return q


@pytest.mark.parametrize(
    "target", [Target(0.02), Target(0.05), Target(0.1, of_robust=True)], ids=str
)
def test_expectation(population: Population, target: Target) -> None:
    """The mean loss is at most the target; single fits exceed it in about a third of the cases or
    more."""
    losses = true_losses(population, target)
    exceeded = float((losses > target.share).double().mean())
    print(
        f"{target}, {target.kind}: mean loss {100 * losses.mean():.3f} %, exceeded by {100 * exceeded:.1f} % of fits"
    )
    assert float(losses.mean()) <= target.share + 3 * float(losses.std()) / FITS**0.5
    assert float(losses.mean()) >= 0.85 * target.share, "not absurdly careful"
    assert 0.25 < exceeded < 0.5


@pytest.mark.parametrize(
    "target",
    [
        Target(0.02, confidence=0.95),
        Target(0.05, confidence=0.9),
        Target(0.1, of_robust=True, confidence=0.95),
    ],
    ids=str,
)
def test_probability(population: Population, target: Target) -> None:
    """At most a share 1 − confidence of all fits exceeds the target, and not far fewer."""
    losses = true_losses(population, target)
    exceeded, tail = (
        float((losses > target.share).double().mean()),
        1 - float(target.confidence or 0),
    )
    print(
        f"{target}, {target.kind}: mean loss {100 * losses.mean():.3f} %, exceeded by {100 * exceeded:.1f} % of fits"
    )
    assert exceeded <= tail + 3 * (tail * (1 - tail) / FITS) ** 0.5
    assert exceeded >= tail / 10, "not absurdly careful"


def test_a_selected_range_promises_nothing() -> None:
    """The range of a gate is the best of many on the images that attacked them all: its loss is
    above the target."""
    generator, losses, share = torch.Generator().manual_seed(2), torch.linspace(0, 0.1, 41), 0.04
    true = []
    for _ in range(2000):
        # Candidates that lose more are more accurate; each is judged by its own errors, with little
        # in common.
        robust = 0.5 - torch.binomial(torch.full((41,), 500.0), losses, generator=generator) / 500
        true.append(float(losses[_best(0.8 + losses, robust, 0.5 - share, None)]))
    exceeded = sum(loss > share for loss in true) / len(true)
    mean = sum(true) / len(true)
    print(
        f"a selected range: mean loss {100 * mean:.2f} %, exceeded by {100 * exceeded:.1f} % of fits"
    )
    assert mean > share and exceeded > 0.5
