"""Selections that share their attacked images."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_pair import conditions, untrained_pair

from equipoise.attacks import Apgd
from equipoise.core.checks import InputError
from equipoise.mixing import MixedClassifier
from equipoise.models import checkpoint
from equipoise.studies.shared_pool import SharedPool

ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9)


class CountedPool(SharedPool):
    """Counts the attacks."""

    def __init__(self, folder: Path) -> None:
        super().__init__(untrained_pair().held_out, conditions(), folder)
        self.attacks = 0

    def _attack(self, model: MixedClassifier) -> torch.Tensor:
        self.attacks += 1
        return super()._attack(model)


@pytest.fixture(autouse=True)
def one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "equipoise.studies.shared_pool.candidate_attack", lambda model: Apgd(loss="margin", steps=1)
    )


def candidates() -> list[MixedClassifier]:
    pair = untrained_pair()
    return [MixedClassifier(pair.accurate, pair.robust, alpha).eval() for alpha in ALPHAS]


def test_later_selections_of_a_family_begin_with_its_images(tmp_path: Path) -> None:
    """A seed of a gate attacks the first few candidates; the next one only those it may select."""
    pool = CountedPool(tmp_path / "pool")
    first = pool.select("first", "plain", candidates(), 0.0, rounds=1)
    assert pool.attacks == len(list((tmp_path / "pool" / "images").iterdir())) >= 3
    before, other = pool.attacks, candidates()
    for model in other:
        model.surrogate_alpha = 0.8  # another mixture to the pool
    second = pool.select("second", "plain", other, 0.0, rounds=1)
    assert pool.attacks == before + 1 and second.candidates_attacked == 1
    assert second.attacked <= first.clean


def test_an_interrupted_selection_gives_the_same(tmp_path: Path) -> None:
    whole = CountedPool(tmp_path / "whole").select("first", "plain", candidates(), 0.3, rounds=2)
    pool = CountedPool(tmp_path / "part")
    pool.selection, pool.family = "first", "plain"
    pool.attacked(candidates()[2])  # then it was killed
    resumed = CountedPool(tmp_path / "part").select("first", "plain", candidates(), 0.3, rounds=2)
    assert resumed.model.alpha == whole.model.alpha and torch.equal(
        resumed.survived, whole.survived
    )


def test_other_images_are_refused(tmp_path: Path) -> None:
    pool = CountedPool(tmp_path / "pool")
    (tmp_path / "pool" / "images").mkdir(parents=True)
    checkpoint.write_safetensors(
        tmp_path / "pool" / "images" / "0000.safetensors",
        {"images": torch.zeros(2, 1, 8, 8)},
        {"selection": "a", "family": "b"},
    )
    with pytest.raises(InputError, match="must hold attacked images of these selections"):
        pool.select("first", "plain", candidates(), 0.0, rounds=1)
