"""Batches of the training set: split, order, augmentation."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from small_training import PLAN, dataset

from equipoise.core import rng
from equipoise.core.checks import InputError
from equipoise.training import TrainingPlan
from equipoise.training.loader import TrainingLoader, _fits, cutout, split

CPU = torch.device("cpu")


def test_split_uses_every_image_once() -> None:
    training, held_out = split(dataset(), PLAN)
    assert len(held_out) == 20 and not set(training.index.tolist()) & set(held_out.index.tolist())
    assert set(training.index.tolist()) | set(held_out.index.tolist()) == set(range(7, 97))


def test_every_image_once_an_epoch_in_a_new_order() -> None:
    loader = TrainingLoader(dataset(70), TrainingPlan(batch_size=16), CPU)
    batches = [[batch.index for batch in loader.batches(epoch, 0)] for epoch in (0, 1)]
    assert [len(index) for index in batches[0]] == [16, 16, 16, 16, 6]
    first, second = (torch.cat(epoch) for epoch in batches)
    assert torch.equal(first.sort().values, second.sort().values) and torch.equal(
        first.sort().values, loader.index
    )
    assert not torch.equal(first, second)


@pytest.mark.parametrize(("free", "fits"), [(4100, True), (3900, False)])
def test_images_on_a_gpu_take_a_quarter_of_its_free_memory_at_most(
    free: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2 * free))
    images = torch.zeros(10, 1, 5, 5)  # 1000 bytes
    assert _fits(images, torch.device("cuda")) == fits and _fits(images, CPU)


def test_batches_from_the_middle_of_an_epoch() -> None:
    loader = TrainingLoader(dataset(70), PLAN, CPU)
    whole, rest = list(loader.batches(1, 0)), list(loader.batches(1, 3))
    assert len(rest) == 2
    assert all(torch.equal(a.images, b.images) for a, b in zip(whole[3:], rest, strict=True))


def test_augmentation_depends_on_image_and_epoch_only() -> None:
    loader, rows = TrainingLoader(dataset(), PLAN, CPU), torch.tensor([5, 80, 3])
    assert torch.equal(loader.augmented(rows, 1)[1:2], loader.augmented(rows[1:2], 1))
    assert not torch.equal(loader.augmented(rows, 1), loader.augmented(rows, 2))


def test_cutout_covers_one_square() -> None:
    x = torch.full((40, 3, 9, 8), 200, dtype=torch.uint8)
    colour = torch.tensor([1, 2, 3], dtype=torch.uint8).view(1, 3, 1, 1)
    covered = cutout(x, 4, colour, rng.stream(0, "augment", torch.arange(40))) != 200
    area = covered[:, 0].sum(dim=(1, 2))
    assert (
        covered.all(dim=1).equal(covered.any(dim=1))
        and int(area.min()) >= 4
        and int(area.max()) == 16
    )
    assert len(area.unique()) > 1


def test_a_batch_larger_than_the_data_is_refused() -> None:
    with pytest.raises(
        InputError, match="`batch_size` must be at most the number of training images, 70, got 71"
    ):
        TrainingLoader(dataset(70), dataclasses.replace(PLAN, batch_size=71), CPU)


def test_holding_out_all_images_is_refused() -> None:
    with pytest.raises(InputError, match="`held_out` must be less than the 90 images"):
        split(dataset(), dataclasses.replace(PLAN, held_out=90))
