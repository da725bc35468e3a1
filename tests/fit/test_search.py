from __future__ import annotations

import dataclasses

import pytest
import synthetic_logits
import torch

from equipoise.checks import InputError
from equipoise.fit import lose_at_most
from equipoise.fit.cache import checked
from equipoise.fit.search import LIMITS, Box, Search
from equipoise.fit.tables import Tabulate

TARGET = lose_at_most(5.0)


def test_the_grid_is_all_combinations() -> None:
    search = Search(synthetic_logits.make(), "gelu-monotone", rule="nuts")
    assert len(search.landscape) == 512 and len({tuple(row) for row in search.landscape.candidates.tolist()}) == 512
    assert search.landscape.candidates[:8, 1:].unique(dim=0).shape[0] == 1, "s runs fastest"


def test_the_best_keeps_its_promise_on_the_images_that_chose_it() -> None:
    cache = synthetic_logits.make()
    search = Search(cache, "gelu-monotone")
    search.refine(TARGET)
    scored = search.scored(TARGET)
    best = scored.best
    lost = int((scored.table.margins[best] <= scored.q[best]).sum())
    assert lost <= TARGET.allowed(len(cache), int(cache.standing.sum())) and lost > 0
    own = float((cache.clean.argmax(1) == cache.labels).float().mean())
    assert float(scored.worth[best]) > own


def test_refinement_and_more_rules_never_do_worse() -> None:
    cache = synthetic_logits.make()
    found = {}
    for rule in ("nuts", "switch", "auto"):
        search = Search(cache, "gelu-monotone", rule=rule)
        before = float(search.scored(TARGET).worth.amax())
        search.widen(TARGET)
        search.refine(TARGET)
        found[rule] = float(search.scored(TARGET).worth.amax())
        assert found[rule] >= before
    again = Search(cache, "gelu-monotone", rule="switch")
    again.widen(TARGET)
    again.refine(TARGET)
    assert float(again.scored(TARGET).worth.amax()) == found["switch"], "a function of the seed"


def test_edges_are_said_and_widened() -> None:
    narrow = Box(s=(0.05, 0.06), p=(1.0, 1.1), c=(-0.1, 0.0), steps=3)
    search = Search(synthetic_logits.make(), "gelu-monotone", rule="nuts", start=narrow)
    search.widen(TARGET)
    assert search.notes and all("edge of the box" in note for note in search.notes)
    assert search.box != narrow and len(search.landscape) == 27 < len(search.table)
    for ends, (least, most) in zip((search.box.s, search.box.p, search.box.c), LIMITS, strict=True):
        assert least <= ends[0] < ends[1] <= most


def test_reordering_candidates_are_rejected() -> None:
    cache = synthetic_logits.make()
    low = Box(s=(0.5, 2.0), p=(1.0, 2.0), c=(-2.5, -1.5), steps=4)
    scored = Search(cache, "gelu", rule="nuts", start=low).scored(TARGET)
    assert scored.rejected["reorders the robust model's classes"] > 0
    assert bool((scored.table.reordered[scored.worth.isfinite()] == 0).all())
    kept = Search(cache, "gelu-monotone", rule="nuts", start=Box()).scored(TARGET)
    assert kept.rejected["reorders the robust model's classes"] == 0


def test_fragile_thresholds_are_rejected() -> None:
    tiny = Box(s=(0.01, 0.011), p=(1.0, 1.1), c=(0.0, 0.1), steps=2)
    cache = synthetic_logits.make()
    cache = dataclasses.replace(cache, attacked=torch.cat([cache.clean.unsqueeze(0), cache.attacked]))
    cache.attacked[0] = cache.clean.mean(1, keepdim=True) + 1e-3 * torch.nn.functional.one_hot(cache.labels, 6)
    scored = Search(cache, "gelu-monotone", rule="nuts", start=tiny).scored(lose_at_most(1.0))
    assert scored.rejected["threshold too near to 0 or 1"] == len(scored.table)


def test_the_papers_objective_needs_no_accurate_model() -> None:
    cache = synthetic_logits.make()
    search = Search(cache, "gelu-monotone", "surrogate", rule="nuts")
    scored = search.scored(TARGET)
    wrong = cache.clean.argmax(1) != cache.labels
    top = torch.softmax(cache.clean, 1).topk(2, dim=1).values
    assert top.shape == (300, 2)
    blind = Tabulate(dataclasses.replace(cache, accurate=None), "gelu-monotone").one(scored.table.candidates[3])
    expected = float((blind.gaps[0][wrong] <= scored.q[3]).float().mean())
    assert float(scored.plain[3]) == pytest.approx(expected)
    with pytest.raises(InputError, match="`objective` must be surrogate without an accurate model"):
        Search(dataclasses.replace(cache, accurate=None), "gelu-monotone", "mixture")


def test_halves_part_the_images() -> None:
    cache = synthetic_logits.make(101)
    first, second = cache.halves(3)
    assert (len(first), len(second)) == (50, 51)
    assert sorted([*first.index.tolist(), *second.index.tolist()]) == list(range(101))
    shuffled = cache.take(torch.randperm(101, generator=torch.Generator().manual_seed(0)))
    assert set(shuffled.halves(3)[0].index.tolist()) == set(first.index.tolist()), "follows the image"
    assert set(cache.halves(4)[0].index.tolist()) != set(first.index.tolist())


def test_what_cannot_be_fitted() -> None:
    cache = synthetic_logits.make()
    with pytest.raises(InputError, match="at least 50 images to fit on, got 49"):
        checked(cache.take(torch.arange(49)))
    spoiled = cache.clean.clone()
    spoiled[3, 2] = torch.inf
    with pytest.raises(InputError, match="finite logits, got NaN or inf on clean images"):
        checked(dataclasses.replace(cache, clean=spoiled))
    hopeless = -10 * torch.nn.functional.one_hot(cache.labels, 6).float().unsqueeze(0)
    with pytest.raises(InputError, match="right on at least one attacked image"):
        checked(dataclasses.replace(cache, attacked=hopeless))
    with pytest.raises(InputError, match="must differ, got the same answer on all 300 images"):
        checked(dataclasses.replace(cache, accurate=cache.clean.argmax(1)))


def test_joining_points_with_and_without_answers() -> None:
    cache = synthetic_logits.make(60)
    more = cache.join(cache.attacked[:1], torch.zeros(1, 60, dtype=torch.int64))
    assert more.said is not None and more.said.tolist() == [[-1] * 60, [-1] * 60, [0] * 60]
    assert more.join(cache.attacked[:1]).said is not None and cache.join(cache.attacked[:1]).said is None
