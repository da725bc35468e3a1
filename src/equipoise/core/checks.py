"""Checks of what callers pass in.

Every message has the form "`name` must …, got …", and every error is an :class:`InputError`, so that the command line
can distinguish a user's mistake (one sentence, exit code 2) from a bug (a traceback). Public functions check; internal
ones do not check again.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from fractions import Fraction

import torch
from torch import Tensor


class InputError(ValueError):
    """A value passed by the caller that cannot be used; its text is one sentence for the user."""


class EquipoiseWarning(UserWarning):
    """Something that a user should know about a result; the command line prints it as one line."""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def require(ok: bool, name: str, must: str, got: object) -> None:
    """Raise "`name` must …, got …" unless `ok`."""
    if not ok:
        raise InputError(f"`{name}` must {must}, got {got!r}")


def fraction(name: str, text: str | float) -> float:
    """Parse "8/255", "0.03" or a number; nothing is evaluated as code."""
    try:
        value = float(Fraction(text.replace(" ", ""))) if isinstance(text, str) else float(text)
    except (TypeError, ValueError, ZeroDivisionError, OverflowError):
        raise InputError(f"`{name}` must be a number or a fraction such as 8/255, got {text!r}") from None
    require(math.isfinite(value), name, "be finite", text)
    return value


def positive(name: str, value: float) -> float:
    """A finite number above zero."""
    require(_is_number(value) and math.isfinite(value) and value > 0, name, "be positive", value)
    return value


def whole(name: str, value: int, *, least: int = 0) -> int:
    """An integer of at least `least`."""
    ok = _is_number(value) and isinstance(value, int) and value >= least
    require(ok, name, f"be a whole number of at least {least}", value)
    return value


def within(name: str, value: float, low: float, high: float) -> float:
    """A number in the closed interval [low, high]."""
    require(_is_number(value) and low <= value <= high, name, f"lie in [{low:g}, {high:g}]", value)
    return value


def strictly_within(name: str, value: float, low: float, high: float) -> float:
    """A number in the open interval (low, high)."""
    require(_is_number(value) and low < value < high, name, f"lie in ({low:g}, {high:g})", value)
    return value


def one_of(name: str, value: str, options: Iterable[str]) -> str:
    """One of the options; the error suggests the nearest one."""
    names = sorted(options)
    if value in names:
        return value
    near = difflib.get_close_matches(str(value), names, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise InputError(f"`{name}` must be one of {', '.join(names)}, got {value!r}{hint}")


def images(x: Tensor, name: str = "images") -> Tensor:
    """(B, C, H, W) floating point, every value in [0, 1]."""
    require(isinstance(x, Tensor), name, "be a tensor", type(x).__name__)
    require(x.dim() == 4, name, "have shape (B, C, H, W)", tuple(x.shape))
    require(x.is_floating_point(), name, "be floating point in [0, 1]", str(x.dtype))
    if x.numel():
        low, high = (float(end) for end in torch.aminmax(x.detach()))
        # NaN fails both comparisons, so it is caught here too.
        require(low >= 0 and high <= 1, name, "lie in [0, 1]", f"values from {low:.6g} to {high:.6g}")
    return x


def labels(y: Tensor, classes: int, count: int | None = None, name: str = "labels") -> Tensor:
    """(B,) whole numbers in [0, classes)."""
    require(isinstance(y, Tensor), name, "be a tensor", type(y).__name__)
    ok = y.dim() == 1 and not y.is_floating_point() and y.dtype != torch.bool
    require(ok, name, "be whole numbers of shape (B,)", f"{y.dtype} of shape {tuple(y.shape)}")
    if count is not None:
        require(len(y) == count, name, f"be as many as the images, {count}", len(y))
    if y.numel():
        low, high = (int(end) for end in torch.aminmax(y))
        require(low >= 0 and high < classes, name, f"lie in 0..{classes - 1}", f"values from {low} to {high}")
    return y


def logits(z: Tensor, count: int, name: str = "logits") -> Tensor:
    """(count, K) with K ≥ 2 and no NaN."""
    require(isinstance(z, Tensor), name, "be one tensor", type(z).__name__)
    ok = z.dim() == 2 and z.shape[0] == count and z.shape[1] >= 2
    require(ok, name, f"have shape ({count}, K) with K ≥ 2", tuple(z.shape))
    require(not bool(torch.isnan(z.detach()).any()), name, "not contain NaN", "NaN")
    return z
