from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core.checks import InputError
from equipoise.fitting import beta, lose_at_most
from equipoise.fitting.conformal import allowed, threshold


@settings(deadline=None)
@given(st.lists(st.floats(0.001, 0.999), min_size=1, max_size=30), st.integers(-1, 31))
def test_a_threshold_loses_no_more_than_it_may(margins: list[float], lost: int) -> None:
    held = torch.tensor(margins, dtype=torch.float64)
    q = threshold(held, lost)
    assert int((held <= q).sum()) <= max(lost, 0)
    assert not bool((held == q).any()), "no margin ties with it"
    # And no larger order statistic would do: the next one loses more than is allowed, or ties.
    above = held[held > q]
    if 0 <= lost < len(held) and len(above):
        assert int((held <= above.min()).sum()) > lost


def test_many_rows_at_once() -> None:
    held = torch.rand(4, 7, generator=torch.Generator().manual_seed(0))
    together = threshold(held, 2)
    assert torch.equal(together, torch.stack([threshold(row, 2) for row in held]))


def test_what_may_be_lost() -> None:
    assert [allowed(0.02, n) for n in (48, 49, 99, 500)] == [-1, 0, 1, 9]
    assert lose_at_most(2.0).allowed(500, 100) == 9 and beta(0.9).allowed(500, 100) == 9
    assert "2 points" in str(lose_at_most(2.0)) and "10 %" in str(beta(0.9))


@pytest.mark.parametrize("value", [-1.0, 101.0])
def test_targets_out_of_range(value: float) -> None:
    with pytest.raises(InputError, match="`lose_at_most` must lie in"):
        lose_at_most(value)
    with pytest.raises(InputError, match="`beta` must lie in"):
        beta(value)


def test_the_promise_holds_in_expectation() -> None:
    """Many small calibrations: the next image is lost with probability at most the share, and nearly so often."""
    chance = torch.Generator().manual_seed(1)
    share, n, trials = 0.05, 100, 20000
    drawn = torch.rand(trials, n + 1, generator=chance)
    q = threshold(drawn[:, :n], allowed(share, n))
    lost = float((drawn[:, n] <= q).float().mean())
    spread = (share * (1 - share) / trials) ** 0.5
    assert share - 0.015 < lost <= share + 3 * spread
    # The plain rule, without the correction, loses more than it says.
    plain = threshold(drawn[:, :n], int(share * n))
    assert float((drawn[:, n] <= plain).float().mean()) > share
