"""The nearest training images: exact against brute force, ties, weights, and slopes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from equipoise.core import geometry, rng
from equipoise.core.checks import InputError
from equipoise.local_smoothing import neighbours
from equipoise.local_smoothing.neighbours import Neighbours
from equipoise.local_smoothing.smoothing import SmoothedClassifier
from equipoise.models import build

N, C, H, W, K = 90, 3, 5, 7, 6


def _set(seed: int = 0, count: int = N) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, C, H, W), generator=chance, dtype=torch.uint8)
    return images, torch.randint(0, K, (count,), generator=chance)


def _brute(images: Tensor, query: Tensor, k: int) -> tuple[Tensor, Tensor]:
    x = images.double() / 255
    mean, std = x.mean(dim=(0, 2, 3), keepdim=True), x.std(dim=(0, 2, 3), keepdim=True, unbiased=False)
    apart = torch.cdist(((query.double() - mean) / std).flatten(1), ((x - mean) / std).flatten(1),
                        compute_mode="donot_use_mm_for_euclid_dist")
    values, rows = apart.sort(dim=1, stable=True)
    return rows[:, :k], values[:, :k]


@pytest.mark.parametrize("k", [1, 7, N])
@pytest.mark.parametrize("block", [2**10, 2**28])
def test_the_nearest_are_those_of_brute_force(k: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "BYTES", block)  # small blocks: many of them for queries and for images
    images, labels = _set()
    query = _set(1, 5)[0].float() / 255
    rows, distances = Neighbours(images, labels, K, k=k).nearest(query)
    wanted, apart = _brute(images, query, k)
    assert torch.equal(rows, wanted)
    torch.testing.assert_close(distances.double(), apart, rtol=1e-5, atol=1e-5)


def test_products_that_round_badly_do_not_hide_a_neighbour() -> None:
    """Images that differ in the last bits: products cannot rank them, direct differences can."""
    images = torch.full((62, C, H, W), 128, dtype=torch.uint8)
    images[60], images[61] = 0, 255
    images[37, 0, 0, 0] = 129
    query = images[37:38].float() / 255
    rows, distances = Neighbours(images, torch.zeros(62, dtype=torch.int64), K, k=1).nearest(query)
    assert rows.tolist() == [[37]] and float(distances) == 0


def test_equal_distances_are_taken_in_order() -> None:
    images, labels = _set()
    images[50:60] = images[40]
    rows, _ = Neighbours(images, labels, K, k=5).nearest(images[40:41].float() / 255)
    assert rows.tolist() == [[40, 50, 51, 52, 53]]


def test_votes_and_ties() -> None:
    images = torch.tensor([0, 10, 20, 200], dtype=torch.uint8).view(4, 1, 1, 1)
    labels = torch.tensor([2, 1, 2, 1])
    x = torch.tensor([0.0]).view(1, 1, 1, 1)
    three = Neighbours(images, labels, K, k=3)
    torch.testing.assert_close(three(x), torch.tensor([[-1.0, -1 / 3, 1 / 3, -1.0, -1.0, -1.0]]))
    assert not bool(three.tied(x))
    two = Neighbours(images, labels, K, k=2)
    assert bool(two.tied(x)) and int(two(x).argmax()) == 1  # alone, the smaller class


def test_weights_fall_with_distance_and_an_image_met_before_decides() -> None:
    images = torch.tensor([0, 30, 90], dtype=torch.uint8).view(3, 1, 1, 1)
    oracle = Neighbours(images, torch.tensor([0, 1, 1]), 2, k=3, weights="distance")
    x = torch.tensor([10 / 255]).view(1, 1, 1, 1)
    inverse = torch.tensor([1 / 10, 1 / 20, 1 / 80])
    share = inverse[1:].sum() / inverse.sum()
    torch.testing.assert_close(oracle(x), torch.tensor([[1 - 2 * share, 2 * share - 1]]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(oracle(images[1:2].float() / 255), torch.tensor([[-1.0, 1.0]]))


def test_weighted_votes_have_a_slope_and_plain_ones_none() -> None:
    images, labels = _set()
    x = (_set(1, 4)[0].double() / 255).requires_grad_()
    weighted = Neighbours(images.double() / 255, labels, K, k=7, weights="distance")
    assert torch.autograd.gradcheck(weighted, (x,))
    assert not Neighbours(images.double() / 255, labels, K, k=7)(x).requires_grad


def test_ties_are_broken_by_the_accurate_side() -> None:
    """Eq. (2) at a large strength is the neighbours' answer, and g's where they tie."""
    images, labels = _set()
    oracle = Neighbours(images, labels, K, k=4)
    accurate = build("cnn_small", num_classes=K, image_shape=(C, H, W), seed=3).eval().requires_grad_(False)
    x = _set(1, 40)[0].float() / 255
    tied, votes = oracle.tied(x), oracle(x)
    assert 0 < int(tied.sum()) < 40
    found = SmoothedClassifier(accurate, oracle, 1e4, trust="constant")(x).argmax(dim=1)
    assert torch.equal(found[~tied], votes[~tied].argmax(dim=1))
    among = torch.where(votes == votes.amax(dim=1, keepdim=True), accurate(x), -torch.inf)
    assert torch.equal(found, among.argmax(dim=1))


def test_nobody_new_comes_near_within_the_steady_radius() -> None:
    images, labels = _set()
    x = _set(1, 5)[0].double() / 255
    oracle = Neighbours(images.double() / 255, labels, K, k=4)
    kept = oracle.nearest(x)[0].sort(dim=1).values
    for norm, name in (("linf", "linf"), ("l2", "l2"), (2.0, "l2"), (1.0, "l2")):
        radius = oracle.steady(x, norm)
        assert bool((radius > 0).all())
        chance = rng.stream(0, "steady", torch.arange(len(x)))
        ways = [geometry.steepest(chance.at(draw).normal(C, H, W).double(), name) for draw in range(50)]
        if norm == 1.0:  # all in one pixel
            ways = [way * 0 + (way == way.flatten(1).amax(dim=1).view(-1, 1, 1, 1)) for way in ways]
        for way in ways:
            moved = x + radius.view(-1, 1, 1, 1) * way
            assert torch.equal(oracle.nearest(moved)[0].sort(dim=1).values, kept)


def test_the_steady_radius_ends_half_way_between_two_points() -> None:
    images = torch.tensor([0.0, 1.0], dtype=torch.float64).view(2, 1, 1, 1)
    x = torch.tensor([0.3], dtype=torch.float64).view(1, 1, 1, 1)
    for norm in ("linf", "l2", 1.0):
        found = Neighbours(images, torch.tensor([0, 1]), 2, k=1).steady(x, norm)
        torch.testing.assert_close(found, torch.tensor([0.2], dtype=torch.float64), rtol=1e-4, atol=0)
    assert Neighbours(images, torch.tensor([0, 1]), 2, k=2).steady(x).tolist() == [float("inf")]


def test_mistakes_are_named() -> None:
    images, labels = _set()
    with pytest.raises(InputError, match="at most"):
        Neighbours(images, labels, K, k=N + 1)
    with pytest.raises(InputError, match="weights"):
        Neighbours(images, labels, K, weights="distances")
    for bad, said in ((images.flatten(1), "shape"), (images.float(), "lie in"), (images.long(), "floating point")):
        with pytest.raises(InputError, match=f"`images` must .*{said}"):
            Neighbours(bad, labels, K)
    oracle = Neighbours(images, labels, K)
    with pytest.raises(InputError, match=r"shape \(B, 3, 5, 7\) of the neighbours, got \(2, 1, 5, 7\)"):
        oracle(torch.rand(2, 1, H, W))


def test_queries_of_any_precision_are_answered_in_it() -> None:
    images, labels = _set()
    oracle, x = Neighbours(images, labels, K), _set(1, 5)[0].float() / 255
    for dtype in (torch.float64, torch.bfloat16):
        found = oracle(x.to(dtype))
        assert found.dtype == dtype and torch.equal(found.argmax(dim=1), oracle(x.to(dtype).float()).argmax(dim=1))


def test_products_are_never_taken_in_fewer_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    product = torch.addmm

    def watched(shift: Tensor, one: Tensor, two: Tensor, *, alpha: float) -> Tensor:
        seen.append(torch.is_autocast_enabled("cpu"))
        return product(shift, one, two, alpha=alpha)

    monkeypatch.setattr(torch, "addmm", watched)
    images, labels = _set()
    oracle = Neighbours(images, labels, K, k=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        oracle(images[:4].float() / 255)
    assert seen and not any(seen)
