from __future__ import annotations

import dataclasses

import pytest
import synthetic_logits
import torch

from equipoise.core.checks import InputError
from equipoise.fitting import lose_at_most
from equipoise.fitting.cache import checked
from equipoise.fitting.margin_grid import Family, MarginGrid
from equipoise.fitting.search import MapSearch, families
from equipoise.fitting.search_space import LIMITS, SearchSpace

TARGET = lose_at_most(5.0)


def test_the_grid_is_all_combinations() -> None:
    search = MapSearch(synthetic_logits.make())
    assert len(search.landscape) == 512 and len({tuple(row) for row in search.landscape.candidates.tolist()}) == 512
    assert search.landscape.candidates[:8, 1:].unique(dim=0).shape[0] == 1, "s runs fastest"


def test_the_choice_keeps_its_promise_on_the_images_that_made_it() -> None:
    cache = synthetic_logits.make()
    search = MapSearch(cache, families("auto", cache, "gelu-monotone"))
    search.refine(TARGET)
    choice = search.choose(TARGET)
    assert choice is not None
    scored = search.scored(TARGET, search.tables[choice.family])
    best = scored.best
    assert torch.equal(scored.table.candidates[best], choice.candidate)
    lost = int((scored.table.margins[best] <= scored.q[best]).sum())
    assert 0 < lost <= TARGET.allowed(len(cache), int(cache.standing.sum()))
    own = float((cache.clean.argmax(1) == cache.labels).float().mean())
    assert choice.worth > own and choice.map()(cache.clean).shape == cache.clean.shape


def test_refinement_never_does_worse_and_follows_the_seed() -> None:
    cache = synthetic_logits.make()
    found = []
    for _ in range(2):
        search = MapSearch(cache, families("switch", cache, "gelu-monotone"))
        before = {family: search.scored(TARGET, table).worth.amax() for family, table in search.tables.items()}
        search.widen(TARGET)
        search.refine(TARGET)
        after = {family: search.scored(TARGET, table).worth.amax() for family, table in search.tables.items()}
        assert all(after[family] >= before[family] for family in before)
        found.append(after)
    assert found[0] == found[1]


def test_families_by_rule() -> None:
    cache = synthetic_logits.make()
    nuts, switch, auto = (families(rule, cache, "relu") for rule in ("nuts", "switch", "auto"))
    assert nuts == [Family("relu")] and auto == nuts + switch
    assert all(family.rivals == 0 and family.unit > 0 for family in switch) and not switch[-1].free
    single = MapSearch(cache, switch[-1:])
    assert bool((single.landscape.candidates[:, 1:] == torch.tensor([1.0, 0.0])).all())
    with pytest.raises(InputError, match="did you mean 'nuts'"):
        families("nutz", cache, "relu")


def test_edges_are_said_and_widened() -> None:
    narrow = SearchSpace(s=(0.05, 0.06), p=(1.0, 1.1), c=(-0.1, 0.0), steps=3)
    search = MapSearch(synthetic_logits.make(), start=narrow)
    search.widen(TARGET)
    assert search.notes and all("edge of the box" in note for note in search.notes)
    box = search.boxes[Family()]
    assert box != narrow and len(search.landscape) == 27 < len(search.tables[Family()])
    for ends, (least, most) in zip((box.s, box.p, box.c), LIMITS, strict=True):
        assert least <= ends[0] < ends[1] <= most


def test_reordering_candidates_are_rejected() -> None:
    cache = synthetic_logits.make()
    low = SearchSpace(s=(0.5, 2.0), p=(1.0, 2.0), c=(-2.5, -1.5), steps=4)
    search = MapSearch(cache, [Family("gelu")], start=low)
    scored = search.scored(TARGET, search.landscape)
    reason = "reorders the robust model's classes"
    assert scored.rejected[reason] == search.rejected(TARGET)[reason] > 0
    assert bool((scored.table.reordered[scored.worth.isfinite()] == 0).all())
    assert MapSearch(cache).rejected(TARGET)[reason] == 0


def test_fragile_thresholds_are_rejected() -> None:
    tiny = SearchSpace(s=(0.01, 0.011), p=(1.0, 1.1), c=(0.0, 0.1), steps=2)
    cache = synthetic_logits.make()
    cache = dataclasses.replace(cache, attacked=torch.cat([cache.clean.unsqueeze(0), cache.attacked]))
    cache.attacked[0] = cache.clean.mean(1, keepdim=True) + 1e-3 * torch.nn.functional.one_hot(cache.labels, 6)
    search = MapSearch(cache, [Family(unit=1.0)], start=tiny)
    assert search.rejected(lose_at_most(1.0))["threshold too near to 0 or 1"] == len(search.landscape)
    assert search.choose(lose_at_most(1.0)) is None


def test_the_papers_objective_needs_no_accurate_model() -> None:
    cache = synthetic_logits.make()
    search = MapSearch(cache, objective="surrogate")
    scored = search.scored(TARGET, search.landscape)
    wrong = cache.clean.argmax(1) != cache.labels
    blind = MarginGrid(dataclasses.replace(cache, accurate=None)).one(Family(), scored.table.candidates[3])
    expected = float((blind.gaps[0][wrong] <= scored.q[3]).float().mean())
    assert float(scored.plain[3]) == pytest.approx(expected)
    with pytest.raises(InputError, match="`objective` must be surrogate without an accurate model"):
        MapSearch(dataclasses.replace(cache, accurate=None))


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
