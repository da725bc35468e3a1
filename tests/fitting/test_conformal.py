"""Conformal risk control: thresholds and the promise they keep."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from equipoise.core.checks import InputError
from equipoise.core.promises import allowed_losses
from equipoise.fitting.conformal import ascending, beta, lose_at_most, threshold


@settings(deadline=None)
@example([0.001, 0.001, 0.0010000000000000002], 2)  # neighbouring numbers
@given(st.lists(st.floats(0.001, 0.999), min_size=1, max_size=30), st.integers(-1, 31))
def test_threshold_loses_no_more_than_allowed(values: list[float], losses: int) -> None:
    margins = torch.tensor(values, dtype=torch.float64)
    q = threshold(margins, losses)
    assert int((margins <= q).sum()) <= max(losses, 0)
    assert not bool((margins == q).any()), "no margin ties with the threshold"
    # No larger order statistic would do: the next one loses more than allowed, or ties but for
    # rounding.
    above = margins[margins > q]
    if 0 <= losses < len(margins) and len(above):
        assert int((margins <= above.min() * (1 + 2e-15)).sum()) > losses


def test_thresholds_of_many_rows() -> None:
    margins = torch.rand(4, 7, generator=torch.Generator().manual_seed(0))
    assert torch.equal(threshold(margins, 2), torch.stack([threshold(row, 2) for row in margins]))


def test_ascending_margins_are_those_that_torch_sorts() -> None:
    margins = torch.rand(5, 300, generator=torch.Generator().manual_seed(0))
    margins[margins > 0.9] = torch.inf
    margins[margins < 0.1] = 0.05
    assert torch.equal(ascending(margins), margins.sort(dim=1).values)


def test_allowed_losses() -> None:
    assert [allowed_losses(0.02, n) for n in (48, 49, 99, 500)] == [-1, 0, 1, 9]
    assert lose_at_most(2.0).allowed(500, 100) == 9 and beta(0.9).allowed(500, 100) == 9


def test_targets_as_text() -> None:
    assert str(lose_at_most(2.0)) == "2 points of robust accuracy"
    assert str(lose_at_most(1.0)) == "1 point of robust accuracy"
    assert str(beta(0.9)) == "10 % of the robust model's robust accuracy"


@pytest.mark.parametrize("value", [-1.0, 101.0])
def test_targets_out_of_range(value: float) -> None:
    with pytest.raises(InputError, match="`lose_at_most` must lie in"):
        lose_at_most(value)
    with pytest.raises(InputError, match="`beta` must lie in"):
        beta(value)


def test_promise_holds_in_expectation() -> None:
    """Over many calibrations, the next image is lost with probability at most the share, and not
    much less."""
    share, n, trials = 0.05, 100, 20000
    margins = torch.rand(trials, n + 1, generator=torch.Generator().manual_seed(1))

    def lost(q: torch.Tensor) -> float:
        return float((margins[:, n] <= q).float().mean())

    standard_error = (share * (1 - share) / trials) ** 0.5
    corrected = lost(threshold(margins[:, :n], allowed_losses(share, n)))
    assert share - 0.015 < corrected <= share + 3 * standard_error
    uncorrected = lost(threshold(margins[:, :n], int(share * n)))
    assert uncorrected > share
