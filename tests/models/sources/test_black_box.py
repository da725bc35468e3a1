"""Models that compute outside of torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import equipoise as eq
from equipoise import models
from equipoise.attacks.fused import fuse
from equipoise.core.checks import InputError
from equipoise.mixing import MixedClassifier
from equipoise.models import BlackBox
from equipoise.models.sources.black_box import ImageInput

NET = (
    models.build("cnn_small", num_classes=4, image_shape=(3, 8, 8), seed=3)
    .eval()
    .requires_grad_(False)
)
X = torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Elsewhere(BlackBox):
    description = ("elsewhere",)

    def query(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            answers = torch.from_numpy(NET(torch.from_numpy(x.numpy())).numpy())
        return answers[: x.shape[0]]  # as of a batch that was filled up


def test_a_black_box_must_say_how_it_is_queried() -> None:
    class Silent(BlackBox):
        description = ("silent",)

    with pytest.raises(TypeError, match=r"abstract.*query"):
        Silent(None, b"")  # type: ignore[abstract]


def test_a_fused_copy_does_not_keep_the_answers_of_the_first_images() -> None:
    """A mixture of a black box and a network whose layers can be fused."""
    robust = models.build("resnet8", num_classes=4, image_shape=(3, 8, 8), seed=1).eval()
    mixture = MixedClassifier(Elsewhere(None, b""), robust, 0.1).eval()
    other = 1 - X
    with torch.no_grad():
        copy = fuse(mixture, X)
        torch.testing.assert_close(copy(other), mixture(other), rtol=1e-3, atol=1e-3)


def test_a_mixture_with_a_black_box_is_attacked_through_its_robust_side(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And by random search, which sees its other side."""
    from equipoise.evaluation import random_search

    monkeypatch.setattr(random_search, "QUERIES", 20)
    robust = models.build("resnet8", num_classes=4, image_shape=(3, 8, 8), seed=1).eval()
    with torch.no_grad():
        y = robust(X).argmax(1)
    y[-1] = 3
    mixture = MixedClassifier(Elsewhere(None, b""), robust, 0.9).eval()
    result = eq.evaluate(
        mixture, (X, y), threat=eq.Threat("linf", 0.3), attack="pgd", steps=3, batch_size=6
    )
    attacks = {
        model: {row.attack for row in result.rows if row.model == model}
        for model in ("accurate", "robust", "mixed")
    }
    assert attacks["accurate"] == {"clean", "square"} and attacks["robust"] == {"clean", "pgd"}
    assert attacks["mixed"] == {"clean", "pgd", "adaptive", "square"}
    assert not mixture.differentiable
    assert "accurate has no gradients and was attacked by random search alone" in str(result)
    assert (
        "the accurate side of mixed has no gradients: attacks had those of its robust side alone"
        in str(result)
    )
    checked = {
        (check.model, check.attack)
        for check in result.summary.sanity_checks
        if check.name == "vanishing gradients"
    }
    assert checked == {("robust", "pgd"), ("mixed", "pgd"), ("mixed", "adaptive")}


@pytest.mark.parametrize(
    ("sizes", "last"),
    [
        ((None, 3, 8, 8), False),
        ((None, 8, 8, 3), True),
        ((None, 1, 3, 3), False),
        ((None, 3, 8, 3), False),
        ((2, None, None, 1), True),
    ],
)
def test_channels_come_last_only_where_nothing_else_fits(
    sizes: tuple[int | None, ...], last: bool
) -> None:
    assert ImageInput.of("x", sizes, is_bytes=False).channels_last == last


def test_whole_numbers_as_classes() -> None:
    class Classes(Elsewhere):
        def query(self, x: Tensor) -> Tensor:
            return super().query(x).argmax(1, keepdim=True)

    with torch.no_grad():
        assert torch.equal(Classes(4, b"")(X).argmax(1), NET(X).argmax(1))
    with pytest.raises(InputError, match="`num_classes` must be given"):
        Classes(None, b"")(X)


def test_one_score_is_no_classifier() -> None:
    class Score(Elsewhere):
        def query(self, x: Tensor) -> Tensor:
            return super().query(x)[:, :1]

    with pytest.raises(
        InputError, match=r"must return scores of at least two classes, got 'shape \(6, 1\)'"
    ):
        Score(4, b"")(X)
