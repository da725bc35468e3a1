"""Settings of a fit: targets and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest

from equipoise.core.checks import InputError
from equipoise.fitting import FitSettings
from equipoise.fitting.conformal import beta, lose_at_most


def test_targets() -> None:
    assert FitSettings().target() == lose_at_most(1.0)
    assert FitSettings(lose_at_most=3.0).target() == lose_at_most(3.0)
    assert FitSettings(beta=0.9).target() == beta(0.9)


@pytest.mark.parametrize(("settings", "sentence"), [
    ({"lose_at_most": 1.0, "beta": 0.9}, "`target` must be at most one of lose_at_most, beta and alpha"),
    ({"lose_at_most": -1.0}, r"`lose_at_most` must lie in \[0, 100\]"),
    ({"beta": 1.5}, r"`beta` must lie in \[0, 1\]"),
    ({"alpha": 2.0}, r"`alpha` must lie in \[0, 1\]"),
    ({"gate": "nowhere"}, "`gate` must be a file or folder that exists, got 'nowhere'"),
    ({"gate": ".", "alpha": 0.5}, "`gate` must be left out with alpha, which fits nothing"),
    ({"clamp": "gelo"}, "did you mean 'gelu'"),
    ({"rule": "swich"}, "did you mean 'switch'"),
    ({"against": "both"}, "`against` must be one of any, pair"),
    ({"objective": "mix"}, "did you mean 'mixture'"),
    ({"rounds": -1}, "`rounds` must be a whole number of at least 0"),
    ({"steps": 0}, "`steps` must be a whole number of at least 1"),
])
def test_unusable_settings(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        FitSettings(**settings)
