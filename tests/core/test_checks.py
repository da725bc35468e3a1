from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from equipoise.core import checks
from equipoise.core.checks import InputError


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.rand(4, 3, 5, generator=torch.Generator().manual_seed(0)), "shape"),
        (torch.zeros(4, 3, 5, 7, dtype=torch.uint8), "floating point"),
        (torch.full((4, 3, 5, 7), 1.01), r"lie in \[0, 1\]"),
        (torch.full((4, 3, 5, 7), -0.01), r"lie in \[0, 1\]"),
        (torch.full((4, 3, 5, 7), float("nan")), r"lie in \[0, 1\]"),
    ],
)
def test_images(x: torch.Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        checks.images(x)


def test_good_images_pass() -> None:
    checks.images(torch.zeros(0, 3, 5, 7))
    checks.images(torch.ones(4, 3, 5, 7))


@pytest.mark.parametrize(
    "y", [torch.tensor([0, 6]), torch.tensor([-1, 0]), torch.zeros(2), torch.zeros(2, 1).long()]
)
def test_labels(y: torch.Tensor) -> None:
    with pytest.raises(InputError, match="`labels` must"):
        checks.labels(y, 6)


def test_labels_count() -> None:
    with pytest.raises(InputError, match="as many as the images, 3, got 2"):
        checks.labels(torch.tensor([0, 1]), 6, 3)


@pytest.mark.parametrize(
    "z", [torch.zeros(4, 1), torch.zeros(3, 6), torch.zeros(4), torch.full((4, 6), torch.nan)]
)
def test_logits(z: torch.Tensor) -> None:
    with pytest.raises(InputError, match="`logits` must"):
        checks.logits(z, 4)


def test_messages_are_one_sentence() -> None:
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: checks.positive("eps", -1), "`eps` must be positive, got -1"),
        (
            lambda: checks.whole("steps", 0, least=1),
            "`steps` must be a whole number of at least 1, got 0",
        ),
        (lambda: checks.within("alpha", 1.5, 0, 1), "`alpha` must lie in [0, 1], got 1.5"),
        (lambda: checks.strictly_within("failure", 1, 0, 1), "`failure` must lie in (0, 1), got 1"),
        (
            lambda: checks.one_of("attack", "pdg", ["pgd"]),
            "`attack` must be one of pgd, got 'pdg' (did you mean 'pgd'?)",
        ),
    ]
    for call, text in calls:
        with pytest.raises(InputError) as caught:
            call()
        assert str(caught.value) == text


@pytest.mark.parametrize("number", range(5))
def test_values_in_messages_are_short(number: int) -> None:
    value = [
        "x" * 10**6,
        list(range(10**5)),
        {"a": "b" * 9999},
        10**5000,
        {str(i): i for i in range(999)},
    ][number]
    assert len(checks.shown(value)) <= checks.VALUE_LENGTH
    with pytest.raises(InputError) as caught:
        checks.require(False, "name" * 1000, "be short " * 1000, value)
    assert len(str(caught.value)) == checks.SENTENCE_LENGTH and "…" in str(caught.value)


def test_long_lists_of_options_are_cut() -> None:
    with pytest.raises(InputError, match=r"got 'option' .did you mean 'option") as caught:
        checks.one_of("name", "option", [f"option{i}" for i in range(10_000)])
    assert str(caught.value).startswith("`name` must be one of 10000 names, such as option")
    assert len(str(caught.value)) <= checks.SENTENCE_LENGTH and "…" not in str(caught.value)
