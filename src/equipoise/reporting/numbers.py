"""How numbers are written, in the page and on the terminal alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def percent(value: float | str) -> str:
    """A share as percent.

    >>> percent(0.826)
    '82.6 %'
    """
    return f"{_tenths(value)} %"


def interval(low: float | str, high: float | str) -> str:
    """The ends of an interval of shares, in percent.

    >>> interval(0.801, 0.849)
    '[80.1, 84.9]'
    """
    return f"[{_tenths(low)}, {_tenths(high)}]"


def estimate(result: Mapping[str, Any]) -> str:
    """A result of `summary.json` in full.

    >>> estimate({"value": 0.826, "low": 0.801, "high": 0.849, "n": 1000})
    '82.6 % [80.1, 84.9], n = 1000'
    """
    return f"{percent(result['value'])} {interval(result['low'], result['high'])}, n = {result['n']}"


def points(value: float | str) -> str:
    """A difference of two shares in percentage points, with its sign.

    >>> points(0.097)
    '+9.7'
    """
    text = _tenths(value)
    return text if text == "0.0" or text.startswith("−") else f"+{text}"


def _tenths(value: float | str) -> str:
    # Adding 0.0 after rounding turns a negative zero into a plain one.
    return f"{round(100 * float(value), 1) + 0.0:.1f}".replace("-", "−")
