"""Settings of a fit: targets and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest

from equipoise.core.checks import InputError
from equipoise.fitting import FitSettings
from equipoise.fitting.conformal import beta, lose_at_most


def test_beta_of_the_paper_depends_on_the_number_of_classes() -> None:
    paper = FitSettings(rule="paper")
    assert [paper.target(classes) for classes in (10, 316, 317, 1000)] == [beta(0.985)] * 2 + [
        beta(0.99)
    ] * 2
    assert FitSettings(rule="paper", beta=0.9).target(1000) == beta(0.9)


def test_targets() -> None:
    assert FitSettings().target() == lose_at_most(1.0)
    assert FitSettings(lose_at_most=3.0).target() == lose_at_most(3.0)
    assert FitSettings(beta=0.9).target() == beta(0.9)
    assert FitSettings(promise="probability").target() == lose_at_most(1.0, 0.95)
    assert FitSettings(beta=0.9, promise="probability", confidence=0.8).target() == beta(0.9, 0.8)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"lose_at_most": 1.0, "beta": 0.9},
            "`target` must be at most one of lose_at_most, beta and alpha",
        ),
        ({"lose_at_most": -1.0}, r"`lose_at_most` must lie in \[0, 100\]"),
        ({"beta": 1.5}, r"`beta` must lie in \[0, 1\]"),
        ({"alpha": 2.0}, r"`alpha` must lie in \[0, 1\]"),
        ({"confidence": 0.9}, "`confidence` must be left out unless `promise` is probability"),
        ({"promise": "probability", "confidence": 1.0}, "`confidence` must lie"),
        ({"promise": "probably"}, "did you mean 'probability'"),
        ({"gate": "nowhere"}, "`gate` must be a file or folder that exists, got 'nowhere'"),
        ({"gate": ".", "alpha": 0.5}, "`gate` must be left out with alpha, which fits nothing"),
        ({"range_attack": "short"}, "`range_attack` must be left out without a gate, got 'short'"),
        (
            {"gate": ".", "range_attack": "long"},
            "`range_attack` must be one of full, short, got 'long'",
        ),
        *[
            (
                {unfitted: value, **more},
                f"`{unfitted}` must come without a target, rule or other setting of a fit",
            )
            for unfitted, value in (("alpha", 0.5), ("published", "cifar10"))
            for more in (
                {"promise": "probability"},
                {"objective": "surrogate"},
                {"clamp": "relu"},
                {"rule": "nuts"},
                {"like": "mixture:A"},
                {"rounds": 0},
                {"steps": 3},
            )
        ],
        ({"alpha": 0.5, "published": "cifar10"}, "`alpha` must come without"),
        (
            {"rule": "paper", "rounds": 5},
            "`rounds` must be 0 or 1 with rule paper, which searches once, got 5",
        ),
        (
            {"rule": "paper", "like": "mixture:A", "clamp": "relu"},
            "`clamp` must be left out with like",
        ),
        ({"like": "mixture:A", "objective": "surrogate"}, "`objective` must be left out with like"),
        ({"like": "mixture:A", "rounds": 5}, "`rounds` must be at most 1 with like"),
        ({"clamp": "gelo"}, "did you mean 'gelu'"),
        ({"rule": "swich"}, "did you mean 'switch'"),
        ({"against": "both"}, "`against` must be one of any, pair"),
        ({"objective": "mix"}, "did you mean 'mixture'"),
        ({"rounds": -1}, "`rounds` must be a whole number of at least 0"),
        ({"steps": 0}, "`steps` must be a whole number of at least 1"),
    ],
)
def test_unusable_settings(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        FitSettings(**settings)
