"""Choosing a range: what is kept, what is chosen, and that it has met its own attack."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from equipoise.attacks import Apgd, Suite
from equipoise.core.checks import InputError
from equipoise.core.threat import Threat
from equipoise.data.dataset import Dataset, whole_split
from equipoise.fitting.candidates import CandidateEvaluator, CandidateLogits, Pool
from equipoise.fitting.selection import Selection, shift_for
from equipoise.mixing import GatedClassifier, MixedClassifier, mix

N, K, EPS = 60, 2, 0.1


class Ramp(nn.Module):
    """Two classes by one pixel; `steep` is how sure it is."""

    def __init__(self, pixel: int, steep: float) -> None:
        super().__init__()
        self.tap, self.deep = nn.Identity(), nn.Identity()
        self.pixel, self.weight = pixel, nn.Parameter(torch.tensor(steep))

    def forward(self, x: Tensor) -> Tensor:
        score = self.weight * (self.deep(self.tap(x)).flatten(1)[:, self.pixel] - 0.5)
        return torch.stack((score, -score), dim=1)


class Third(nn.Module):
    """A gate that says the third pixel."""

    taps = (("tap", "deep"), ("tap", "deep"))

    def forward(self, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
        return 4 * (seen[0][0].flatten(1)[:, 2] - 0.5)


def _gated() -> GatedClassifier:
    return GatedClassifier(Ramp(0, 30.0), Ramp(1, 6.0), Third(), scale=1.0, shift=0.0).eval()  # type: ignore[arg-type]


def _data() -> Dataset:
    """g is always right and easily fooled; h is right where it is far from the middle."""
    chance = torch.Generator().manual_seed(0)
    x = torch.rand(N, 1, 1, 3, generator=chance)
    y = torch.arange(N) % 2
    x[:, 0, 0, 0] = torch.where(y == 0, 0.56, 0.44)
    x[:, 0, 0, 1] = torch.where(y == 0, 0.4, 0.0) + 0.6 * x[:, 0, 0, 1]
    return whole_split("made", "train", (x * 255).to(torch.uint8), y, ("a", "b"))


def _arena() -> CandidateEvaluator:
    return CandidateEvaluator(_data(), Threat("linf", EPS), torch.device("cpu"), 0, 16)


def _strike(model: MixedClassifier) -> Suite:
    return Suite((Apgd("margin", 10),))


def test_what_was_seen_answers_for_every_candidate() -> None:
    model, arena = _gated(), _arena()
    seen = arena.look(model.with_range(0.2, 0.9, scale=3.0, shift=-1.0))
    x, y = arena.data.images.float() / 255, arena.data.labels
    for candidate in (model, model.with_range(0.5, 0.8, scale=0.5, shift=0.7)):
        assert torch.equal(seen.right(candidate), candidate(x).argmax(dim=1) == y)
    fixed = MixedClassifier(model.accurate, model.robust, 0.3)
    assert torch.equal(arena.look(fixed).right(fixed), fixed(x).argmax(dim=1) == y)


@pytest.mark.parametrize("target", [0.2, 0.4, 0.55])
def test_the_most_accurate_that_keeps_the_target(target: float) -> None:
    model, arena = _gated(), _arena()
    candidates = [MixedClassifier(model.accurate, model.robust, alpha).eval() for alpha in
                  torch.linspace(0.3, 1.0, 29).tolist()]
    found = Selection(candidates, Pool(arena, _strike)).choose(robust=target)
    # The same by brute force: every candidate under its own attack.
    own = [float(arena.struck(each, _strike(each)).right(each).float().mean()) for each in candidates]
    clean = [float(arena.look(each).right(each).float().mean()) for each in candidates]
    reached = next(value for each, value in zip(candidates, own, strict=True) if each is found.model)
    assert found.met and found.attacked >= target and found.attacked <= reached
    best = max(c for c, value in zip(clean, own, strict=True) if value >= target)
    assert found.clean >= best - 2 / N
    assert found.strikes < len(candidates)


def test_a_clean_target_and_one_that_nobody_reaches() -> None:
    model, arena = _gated(), _arena()
    candidates = [model.with_range(low, high) for low, high in ((0.0, 0.5), (0.2, 0.7), (0.5, 0.9), (0.8, 1.0))]
    contest = Selection(candidates, Pool(arena, _strike))
    kept = contest.choose(clean=0.9)
    assert kept.met and kept.clean >= 0.9
    none = contest.choose(robust=0.999)
    assert not none.met and none.attacked >= kept.attacked
    with pytest.raises(InputError, match="one of them"):
        contest.choose(robust=0.5, clean=0.5)


def test_a_choice_that_was_stopped_goes_on(tmp_path: Path) -> None:
    """Every attack is kept, by the weights and the numbers of its mixture; a choice repeated attacks nobody."""
    model, arena, struck = _gated(), _arena(), []

    def strike(model: MixedClassifier) -> Suite:
        struck.append(model.extra_repr())
        if len(struck) == 3:
            raise KeyboardInterrupt
        return _strike(model)

    candidates = [model.with_range(low, high) for low, high in ((0.0, 0.5), (0.2, 0.7), (0.5, 0.9), (0.8, 1.0))]
    with pytest.raises(KeyboardInterrupt):
        Selection(candidates, Pool(arena, strike, tmp_path / "pool")).choose(robust=0.4)
    found = Selection(candidates, Pool(arena, strike, tmp_path / "pool")).choose(robust=0.4)
    assert len(struck) == found.strikes + 1 and len(set(struck)) == found.strikes
    fresh = Selection(candidates, Pool(arena, _strike)).choose(robust=0.4)
    assert (fresh.model, fresh.facts()) == (found.model, found.facts())
    again = len(struck)
    assert Selection(candidates, Pool(arena, strike, tmp_path / "pool")).choose(robust=0.4).facts() == found.facts()
    assert len(struck) == again
    with torch.no_grad():
        next(model.parameters()).add_(0.1)
    Selection(candidates, Pool(arena, strike, tmp_path / "pool")).choose(robust=0.4)
    assert len(struck) > again, "another mixture is attacked itself"


def test_the_greatest_shift_that_stays_accurate() -> None:
    model, arena = _gated(), _arena()
    seen, shifts = arena.look(model), [0.5 * step for step in range(-12, 13)]
    accuracy = {shift: float(seen.right(model.with_range(0.0, 1.0, shift=shift)).float().mean()) for shift in shifts}
    wanted = max(shift for shift, value in accuracy.items() if value >= 0.95)
    assert min(accuracy.values()) < 0.95
    assert shift_for(model, seen, 0.95, shifts).shift == wanted
    assert accuracy[shift_for(model, seen, 1.01, shifts).shift] == max(accuracy.values())


def test_seen_is_the_formula() -> None:
    chance = torch.Generator().manual_seed(1)
    g, h = (torch.log_softmax(torch.randn(5, 3, generator=chance), dim=1) for _ in range(2))
    u, y = torch.randn(5, generator=chance), torch.tensor([0, 1, 2, 0, 1])
    model = _gated().with_range(0.1, 0.9, scale=2.0, shift=0.3)
    expected = mix(g, h, model.ranged(2 * u + 0.3)).argmax(dim=1) == y
    assert torch.equal(CandidateLogits(g, h, u, y).right(model), expected)
