"""The nearest training images: exact against brute force, ties, weights and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from equipoise.core import geometry, rng
from equipoise.core.checks import InputError
from equipoise.local_smoothing.neighbours import Neighbours
from equipoise.local_smoothing.smoothing import SmoothedClassifier
from equipoise.models import build

N, C, H, W, K = 90, 3, 5, 7, 6


def _data(seed: int = 0, count: int = N) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, C, H, W), generator=generator, dtype=torch.uint8)
    return images, torch.randint(0, K, (count,), generator=generator)


def _brute_force(images: Tensor, query: Tensor, k: int) -> tuple[Tensor, Tensor]:
    x = images.double() / 255
    mean, std = (
        x.mean(dim=(0, 2, 3), keepdim=True),
        x.std(dim=(0, 2, 3), keepdim=True, unbiased=False),
    )
    apart = torch.cdist(
        ((query.double() - mean) / std).flatten(1),
        ((x - mean) / std).flatten(1),
        compute_mode="donot_use_mm_for_euclid_dist",
    )
    values, rows = apart.sort(dim=1, stable=True)
    return rows[:, :k], values[:, :k]


def _is_tied(oracle: Neighbours, x: Tensor) -> Tensor:
    """(B,) whether two classes share the first place."""
    top: Tensor = oracle(x).topk(2, dim=1).values
    return top[:, 0] == top[:, 1]


@pytest.mark.parametrize("k", [1, 7, N])
@pytest.mark.parametrize("block", [2**10, 2**28])
def test_the_nearest_are_those_of_brute_force(k: int, block: int) -> None:
    """Small blocks split the queries and the training images."""
    images, labels = _data()
    query = _data(1, 5)[0].float() / 255
    rows, distances = Neighbours(images, labels, K, k=k, block_bytes=block).nearest(query)
    expected, exact = _brute_force(images, query, k)
    assert torch.equal(rows, expected)
    torch.testing.assert_close(distances.double(), exact, rtol=1e-5, atol=1e-5)


def test_products_that_round_badly_do_not_hide_a_neighbour() -> None:
    """Images that differ in the last bits: products cannot rank them, direct differences can."""
    images = torch.full((62, C, H, W), 128, dtype=torch.uint8)
    images[60], images[61] = 0, 255
    images[37, 0, 0, 0] = 129
    query = images[37:38].float() / 255
    rows, distances = Neighbours(images, torch.zeros(62, dtype=torch.int64), K, k=1).nearest(query)
    assert rows.tolist() == [[37]] and float(distances) == 0


def test_equal_distances_are_taken_in_order() -> None:
    images, labels = _data()
    images[50:60] = images[40]
    rows, _ = Neighbours(images, labels, K, k=5).nearest(images[40:41].float() / 255)
    assert rows.tolist() == [[40, 50, 51, 52, 53]]


def test_votes_and_ties() -> None:
    images = torch.tensor([0, 10, 20, 200], dtype=torch.uint8).view(4, 1, 1, 1)
    labels = torch.tensor([2, 1, 2, 1])
    x = torch.tensor([0.0]).view(1, 1, 1, 1)
    three = Neighbours(images, labels, K, k=3)
    torch.testing.assert_close(three(x), torch.tensor([[-1.0, -1 / 3, 1 / 3, -1.0, -1.0, -1.0]]))
    assert not bool(_is_tied(three, x))
    two = Neighbours(images, labels, K, k=2)
    assert bool(_is_tied(two, x)) and int(two(x).argmax()) == 1  # alone, the smaller class


def test_weights_fall_with_distance_and_a_training_image_decides_alone() -> None:
    images = torch.tensor([0, 30, 90], dtype=torch.uint8).view(3, 1, 1, 1)
    oracle = Neighbours(images, torch.tensor([0, 1, 1]), 2, k=3, weights="distance")
    x = torch.tensor([10 / 255]).view(1, 1, 1, 1)
    inverse = torch.tensor([1 / 10, 1 / 20, 1 / 80])
    share = inverse[1:].sum() / inverse.sum()
    torch.testing.assert_close(
        oracle(x), torch.tensor([[1 - 2 * share, 2 * share - 1]]), rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(oracle(images[1:2].float() / 255), torch.tensor([[-1.0, 1.0]]))


def test_weighted_votes_have_a_gradient_and_plain_ones_none() -> None:
    images, labels = _data()
    x = (_data(1, 4)[0].double() / 255).requires_grad_()
    weighted = Neighbours(images.double() / 255, labels, K, k=7, weights="distance")
    assert torch.autograd.gradcheck(weighted, (x,))
    assert not Neighbours(images.double() / 255, labels, K, k=7)(x).requires_grad


def test_ties_are_broken_by_the_accurate_side() -> None:
    """Eq. (2) at a large strength gives the class of the neighbours, and g decides ties."""
    images, labels = _data()
    oracle = Neighbours(images, labels, K, k=4)
    accurate = (
        build("cnn_small", num_classes=K, image_shape=(C, H, W), seed=3)
        .eval()
        .requires_grad_(False)
    )
    x = _data(1, 40)[0].float() / 255
    tied, votes = _is_tied(oracle, x), oracle(x)
    assert 0 < int(tied.sum()) < 40
    classes = SmoothedClassifier(accurate, oracle, 1e4, trust="constant")(x).argmax(dim=1)
    assert torch.equal(classes[~tied], votes[~tied].argmax(dim=1))
    among = torch.where(votes == votes.amax(dim=1, keepdim=True), accurate(x), -torch.inf)
    assert torch.equal(classes, among.argmax(dim=1))


def test_the_neighbours_are_constant_within_the_radius() -> None:
    images, labels = _data()
    x = _data(1, 5)[0].double() / 255
    oracle = Neighbours(images.double() / 255, labels, K, k=4)
    kept = oracle.nearest(x)[0].sort(dim=1).values
    for norm, name in (("linf", "linf"), ("l2", "l2"), (2.0, "l2"), (1.0, "l2")):
        radius = oracle.constant_vote_radius(x, norm)
        assert bool((radius > 0).all())
        random_stream = rng.stream(0, "steady", torch.arange(len(x)))
        directions = [
            geometry.steepest(random_stream.at(draw).normal(C, H, W).double(), name)
            for draw in range(50)
        ]
        if norm == 1.0:  # all in one pixel
            directions = [
                d * 0 + (d == d.flatten(1).amax(dim=1).view(-1, 1, 1, 1)) for d in directions
            ]
        for direction in directions:
            moved = x + radius.view(-1, 1, 1, 1) * direction
            assert torch.equal(oracle.nearest(moved)[0].sort(dim=1).values, kept)


def test_the_radius_is_half_the_gap_between_two_points() -> None:
    images = torch.tensor([0.0, 1.0], dtype=torch.float64).view(2, 1, 1, 1)
    x = torch.tensor([0.3], dtype=torch.float64).view(1, 1, 1, 1)
    for norm in ("linf", "l2", 1.0):
        radius = Neighbours(images, torch.tensor([0, 1]), 2, k=1).constant_vote_radius(x, norm)
        torch.testing.assert_close(
            radius, torch.tensor([0.2], dtype=torch.float64), rtol=1e-4, atol=0
        )
    assert Neighbours(images, torch.tensor([0, 1]), 2, k=2).constant_vote_radius(x).tolist() == [
        float("inf")
    ]


def test_invalid_arguments_of_neighbours_are_an_error() -> None:
    images, labels = _data()
    with pytest.raises(InputError, match="at most"):
        Neighbours(images, labels, K, k=N + 1)
    with pytest.raises(InputError, match="weights"):
        Neighbours(images, labels, K, weights="distances")
    for bad, message in (
        (images.flatten(1), "shape"),
        (images.float(), "lie in"),
        (images.long(), "floating point"),
    ):
        with pytest.raises(InputError, match=f"`images` must .*{message}"):
            Neighbours(bad, labels, K)
    oracle = Neighbours(images, labels, K)
    with pytest.raises(
        InputError, match=r"shape \(B, 3, 5, 7\) of the neighbours, got \(2, 1, 5, 7\)"
    ):
        oracle(torch.rand(2, 1, H, W))


def test_the_output_has_the_precision_of_the_query() -> None:
    images, labels = _data()
    oracle, x = Neighbours(images, labels, K), _data(1, 5)[0].float() / 255
    for dtype in (torch.float64, torch.bfloat16):
        votes = oracle(x.to(dtype))
        assert votes.dtype == dtype and torch.equal(
            votes.argmax(dim=1), oracle(x.to(dtype).float()).argmax(dim=1)
        )


def test_products_are_never_computed_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    autocast: list[bool] = []
    product = torch.addmm

    def recording(shift: Tensor, one: Tensor, two: Tensor, *, alpha: float) -> Tensor:
        autocast.append(torch.is_autocast_enabled("cpu"))
        return product(shift, one, two, alpha=alpha)

    monkeypatch.setattr(torch, "addmm", recording)
    images, labels = _data()
    oracle = Neighbours(images, labels, K, k=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        oracle(images[:4].float() / 255)
    assert autocast and not any(autocast)
