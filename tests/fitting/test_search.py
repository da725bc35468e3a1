"""The search of a map on cached logits."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from synthetic_logits import make_logits

from equipoise.core import rng
from equipoise.core.rng import Stream
from equipoise.fitting.conformal import (
    Target,
    ascending,
    lose_at_most,
    threshold,
    threshold_of_sorted,
)
from equipoise.fitting.margin_grid import MapFamily, MarginGrid, MarginTable
from equipoise.fitting.search import (
    LIMITS,
    MIN_Q,
    SATURATED,
    SPLITS,
    MapSearch,
    SearchSpace,
    families,
    is_fragile,
)

TARGET = lose_at_most(5.0)
FAMILY = MapFamily()
EDGES = [f"{name} {end}" for name in "spc" for end in ("low", "high")]


def test_grid_holds_all_combinations() -> None:
    candidates = MapSearch(make_logits()).tables[FAMILY].candidates
    assert len({tuple(row) for row in candidates.tolist()}) == len(candidates) == 512
    assert candidates[:8, 1:].unique(dim=0).shape[0] == 1, "s varies fastest"


def test_selection_equals_brute_force() -> None:
    """Every candidate of the grid as a map of its own, with its threshold and accuracy computed one
    by one."""
    logits = make_logits(120)
    search = MapSearch(logits, space=SearchSpace(steps=4))
    selected = search.select(TARGET)
    assert selected is not None
    scores = []
    for candidate in search.tables[FAMILY].candidates:
        logit_map = FAMILY.map(candidate)
        p = torch.stack(
            [logit_map(points[logits.survived]).softmax(1) for points in logits.attacked]
        )
        y = logits.labels[logits.survived].expand(len(p), -1).unsqueeze(2)
        margins = (p.gather(2, y).squeeze(2) - p.scatter(2, y, -1).amax(2)).amin(0)
        q = threshold(margins, TARGET.allowed(len(logits), len(margins)))
        clean = logit_map(logits.clean).softmax(1)
        gap = clean.amax(1) - clean.gather(1, logits.accurate.unsqueeze(1)).squeeze(1)
        predicted = torch.where(gap <= q, logits.accurate, clean.argmax(1))
        usable = 1e-3 <= float(q) <= 1 - 1e-3
        scores.append(float((predicted == logits.labels).float().mean()) if usable else -1.0)
    assert selected.score == pytest.approx(max(scores))


def test_the_halves_of_cross_validation_are_drawn_once_for_all_targets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = make_logits(120)
    drawn, real = list[str](), rng.stream

    def stream(seed: int, purpose: str, index: torch.Tensor) -> Stream:
        drawn.append(purpose)
        return real(seed, purpose, index)

    search = MapSearch(
        logits, families("auto", logits, "gelu-monotone"), space=SearchSpace(steps=4)
    )
    monkeypatch.setattr(rng, "stream", stream)
    for lost in (2.0, 5.0, 8.0):
        search.select(lose_at_most(lost))
    assert drawn == ["across"] * SPLITS


def cross_validated(search: MapSearch, family: MapFamily, target: Target) -> float:
    """The same score, computed for one candidate and one half at a time."""
    table, usable = (
        search.tables[family],
        search.score(target, search.tables[family]).score.isfinite(),
    )
    all_gaps = (
        MarginGrid(search.logits).at(family, table.candidates[:, 1:], table.candidates[:, :1]).gaps
    )
    scores = []
    for first, second in search._splits:
        assert bool((first ^ second).all()) and int(first.sum()) == len(first) // 2
        q, score = [], []
        for half in (first, second):
            robust = [column for column, row in enumerate(search.grid.rows.tolist()) if half[row]]
            allowed = Target(target.share).allowed(int(half.sum()), len(robust))
            q.append([float(threshold(margins[robust], allowed)) for margins in table.margins])
            score.append(
                [
                    float(
                        torch.where(gaps <= own, search.accurate_correct, search.correct)[half]
                        .double()
                        .mean()
                    )
                    for gaps, own in zip(all_gaps, q[-1], strict=True)
                ]
            )
        for one, other in ((0, 1), (1, 0)):
            candidates = [number for number, is_usable in enumerate(usable.tolist()) if is_usable]
            best = max(
                candidates,
                key=lambda number: (
                    round(score[one][number], 6),
                    -abs(math.log(q[one][number] / (1 - q[one][number]))),
                ),
            )
            scores.append(score[other][best])
    return sum(scores) / len(scores)


def test_cross_validation_equals_a_direct_computation() -> None:
    """For several targets, which share sorted margins, and again after new candidates were
    added."""
    logits = make_logits(121)
    search = MapSearch(
        logits, families("auto", logits, "gelu-monotone"), space=SearchSpace(steps=4)
    )
    for _ in range(2):
        for target in (lose_at_most(4.0), lose_at_most(10.0), lose_at_most(10.0, 0.9)):
            for family in search.families:
                scored = search.score(target, search.tables[family])
                assert search._cross_validate(scored, target) == pytest.approx(
                    cross_validated(search, family, target), abs=1e-6
                )
        search.refine(TARGET)


def test_the_search_uses_one_thread_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of several commands on one machine would wait for each other at every one of these
    small tensors."""
    used, before, real = set[int](), torch.get_num_threads(), MarginGrid.at

    def at(
        grid: MarginGrid, family: MapFamily, pairs: torch.Tensor, scales: torch.Tensor
    ) -> MarginTable:
        used.add(torch.get_num_threads())
        return real(grid, family, pairs, scales)

    def selected() -> tuple[list[float], float]:
        found = MapSearch(make_logits(120), space=SearchSpace(steps=4)).run(TARGET)
        assert found is not None
        return found.candidate.tolist(), found.score

    expected = selected()
    monkeypatch.setattr(MarginGrid, "at", at)
    torch.set_num_threads(2)
    try:
        assert selected() == expected
        assert used == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_selected_map_keeps_the_target_on_its_images() -> None:
    logits = make_logits()
    search = MapSearch(logits, families("auto", logits, "gelu-monotone"))
    search.refine(TARGET)
    selected = search.select(TARGET)
    assert selected is not None
    scored = search.score(TARGET, search.tables[selected.family])
    assert torch.equal(scored.table.candidates[scored.best], selected.candidate)
    lost = int((scored.table.margins[scored.best] <= scored.q[scored.best]).sum())
    assert 0 < lost <= TARGET.allowed(len(logits), int(logits.survived.sum()))
    assert selected.score > float(logits.correct.float().mean())


def test_refinement_never_lowers_the_score() -> None:
    logits = make_logits()
    search = MapSearch(logits, families("switch", logits, "gelu-monotone"))
    before = {
        family: search.score(TARGET, table).score.amax() for family, table in search.tables.items()
    }
    search.run(TARGET)
    assert all(
        search.score(TARGET, table).score.amax() >= before[family]
        for family, table in search.tables.items()
    )


def test_search_is_reproducible() -> None:
    logits = make_logits()
    first, second = (
        MapSearch(logits, families("auto", logits, "gelu-monotone")).run(TARGET) for _ in range(2)
    )
    assert first is not None and second is not None
    assert first.family == second.family and torch.equal(first.candidate, second.candidate)


def test_families_by_rule() -> None:
    logits = make_logits()
    nuts, switch, auto = (families(rule, logits, "relu") for rule in ("nuts", "switch", "auto"))
    assert nuts == [MapFamily("relu")] and auto == nuts + switch
    assert (
        all(family.rivals == 0 and family.unit > 0 for family in switch) and switch[-1].scale_only
    )


def test_scale_only_family_varies_s_alone() -> None:
    logits = make_logits()
    family = families("switch", logits, "relu")[-1]
    candidates = MapSearch(logits, [family]).tables[family].candidates
    assert bool((candidates[:, 1:] == torch.tensor([1.0, 0.0])).all()) and len(candidates) == 32


def test_space_is_widened_at_its_edges() -> None:
    narrow = SearchSpace(s=(0.05, 0.06), p=(1.0, 1.1), c=(-0.1, 0.0), steps=3)
    search = MapSearch(make_logits(), space=narrow)
    search.widen(TARGET)
    assert search.notes and all("edge of the search space" in note for note in search.notes)
    assert search.spaces[FAMILY] != narrow and len(search.tables[FAMILY].candidates) > 27


def test_reordering_candidates_are_rejected() -> None:
    logits, family = make_logits(), MapFamily("gelu")
    low = SearchSpace(s=(0.5, 2.0), p=(1.0, 2.0), c=(-2.5, -1.5), steps=4)
    search = MapSearch(logits, [family], space=low)
    scored = search.score(TARGET, search.tables[family])
    reason = "reorders the robust model's classes"
    assert search.rejected(TARGET)[reason] > 0
    assert bool((scored.table.reordered[scored.score.isfinite()] == 0).all())
    assert MapSearch(logits).rejected(TARGET)[reason] == 0


def test_thresholds_near_zero_are_rejected() -> None:
    logits, family = make_logits(), MapFamily(unit=1.0)
    tie = logits.clean.mean(1, keepdim=True) + 1e-3 * torch.nn.functional.one_hot(logits.labels, 6)
    search = MapSearch(
        logits.with_points(tie.unsqueeze(0)),
        [family],
        space=SearchSpace(s=(0.01, 0.011), p=(1.0, 1.1), c=(0.0, 0.1), steps=2),
    )
    target = lose_at_most(1.0)
    assert search.rejected(target)["threshold too near to 0 or 1"] == 8
    assert search.select(target) is None


def test_surrogate_objective_ignores_the_accurate_model() -> None:
    logits = make_logits()
    search = MapSearch(logits, objective="surrogate")
    scored = search.score(TARGET, search.tables[FAMILY])
    gaps = MarginGrid(logits, use_accurate=False).one(FAMILY, scored.table.candidates[3]).gaps[0]
    expected = float((gaps[~logits.correct] <= scored.q[3]).float().mean())
    assert float(scored.unfiltered_score[3]) == pytest.approx(expected)
    other = dataclasses.replace(logits, accurate=(logits.accurate + 1) % 6)
    again = MapSearch(other, objective="surrogate").score(TARGET, search.tables[FAMILY])
    assert torch.equal(again.score, scored.score)


def test_axes_span_the_box() -> None:
    s, p, c = SearchSpace(steps=3).axes()
    torch.testing.assert_close(s, torch.tensor([0.05, 0.5, 5.0], dtype=torch.float64))
    assert p.tolist() == [1.0, 2.5, 4.0] and c.tolist() == [-1.1, -0.55, 0.0]


def test_widening_adds_half_of_the_width() -> None:
    wider = SearchSpace(p=(1.0, 3.0), c=(-1.0, 0.0)).widened(["p high", "c low"])
    assert wider.p == (1.0, 4.0) and wider.c == (-1.5, 0.0)
    assert wider.s == pytest.approx((0.05, 5.0))


def test_widening_stops_at_the_limits() -> None:
    space = SearchSpace()
    for _ in range(20):
        space = space.widened(EDGES)
    for ends, limits in zip((space.s, space.p, space.c), LIMITS, strict=True):
        assert ends == pytest.approx(limits)
    assert space.edges(torch.tensor([limits[0] for limits in LIMITS])) == []


def test_edges_of_a_candidate() -> None:
    assert SearchSpace().edges(torch.tensor([0.05, 2.0, 0.0], dtype=torch.float64)) == [
        "s low",
        "c high",
    ]
    assert SearchSpace().edges(torch.tensor([1.0, 2.0, -0.5], dtype=torch.float64)) == []


@pytest.mark.parametrize("target", [lose_at_most(5.0), lose_at_most(1.0)])
def test_saturated_maps_are_rejected(target: Target) -> None:
    """At s = 50 and p = 7.75 margins are 0 or 1, and a threshold of 1/2 between them means
    nothing."""
    logits, family = make_logits(), MapFamily()
    saturated = MapSearch(
        logits, [family], space=SearchSpace(s=(49.0, 50.0), p=(7.5, 8.0), c=(-0.2, 0.0), steps=2)
    )
    scored = saturated.score(target, saturated.tables[family])
    assert bool((scored.table.reordered == 0).any()), "the maps are not rejected for another reason"
    assert saturated.select(target) is None
    assert saturated.rejected(target)["saturated near the threshold"] > 0
    usable = MapSearch(logits, [family]).select(target)
    assert usable is not None and float(usable.candidate[0]) < 10


def test_a_threshold_half_way_to_a_saturated_margin_is_fragile() -> None:
    margins = torch.tensor(
        [
            [1e-9, 1e-9, 0.9999, 1.0],
            [0.1, 0.2, 0.4, 0.9],
            [0.1, 1.0, 1.0, 1.0],
            [0.2, 0.4, torch.inf, torch.inf],
        ]
    )
    q = torch.tensor([0.5, 0.3, 0.05, 0.3])
    assert is_fragile(margins, q).tolist() == [True, False, True, False]


def test_fragile_thresholds_equal_their_definition() -> None:
    """Of margins of which many tie, are saturated or infinite, one row at a time."""
    random = torch.rand(400, 12, generator=torch.Generator().manual_seed(0))
    margins = torch.where(
        random < 0.7, random, (2000 * (random - 0.8)).clamp(0, 1).round(decimals=2)
    )
    margins = ascending(torch.where(random > 0.95, torch.inf, margins))
    for losses in range(-1, 13):
        q = threshold_of_sorted(margins, losses)
        for fragile, row, own in zip(is_fragile(margins, q).tolist(), margins, q, strict=True):
            finite, above = row[row.isfinite()], row[row > own]
            next_saturated = bool(len(above)) and 1 - MIN_Q < float(above.min()) < math.inf
            most_saturated = 2 * int((finite > 1 - SATURATED).sum()) > len(finite)
            assert fragile == (
                not MIN_Q <= float(own) <= 1 - MIN_Q or next_saturated or most_saturated
            )


@pytest.mark.parametrize("objective", ["mixture", "surrogate", "conditional"])
def test_scores_equal_those_from_all_gaps(objective: str) -> None:
    """The tables of a search hold the gaps of the images alone on which its score depends on which
    model decides."""
    logits = make_logits(90, accuracy=0.8)
    search = MapSearch(logits, objective=objective, space=SearchSpace(steps=3))
    scored = search.score(TARGET, search.tables[FAMILY])
    gaps = (
        MarginGrid(logits, use_accurate=objective == "mixture")
        .grid(FAMILY, *search.space.axes())
        .gaps
    )
    by_accurate, errors = gaps <= scored.q.unsqueeze(1), ~logits.correct
    if objective == "mixture":
        expected = (
            torch.where(by_accurate, search.accurate_correct, logits.correct).double().mean(dim=1)
        )
    else:
        errors &= search.accurate_correct | (objective == "surrogate")
        expected = by_accurate[:, errors].double().mean(dim=1)
    torch.testing.assert_close(scored.unfiltered_score.double(), expected, rtol=0, atol=1e-6)
