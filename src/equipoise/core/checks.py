"""Checks of what callers pass in.

Every message has the form "`name` must …, got …", and every error is an :class:`InputError`, so
that the command line can distinguish a user's mistake (one sentence, exit code 2) from a bug (a
traceback). Public functions check; internal ones do not check again.
"""

from __future__ import annotations

import difflib
import math
import reprlib
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # the checks of tensors import torch, which takes seconds, when they are called
    from torch import Tensor

T = TypeVar("T")
MAX_COUNT = 10**9  # of any count that has no limit of its own
MAX_CLASSES = 100_000
MAX_STEPS = 10**6  # of an attack or a training
_LONGEST_NUMBER = 100  # characters
VALUE_LENGTH, SENTENCE_LENGTH = 120, 400  # characters of a message
MOST_LISTED = 60  # options that a message names


def shorten(text: str, length: int = SENTENCE_LENGTH) -> str:
    """The text, with its middle replaced by "…" if it is longer than `length`.

    >>> shorten("a" * 30 + "end", 12)
    'aaaaaaa…aend'
    """
    if len(text) <= length:
        return text
    tail = length // 3
    return f"{text[: length - tail - 1]}…{text[-tail:]}"


_REPR = reprlib.Repr()
_REPR.maxdict = _REPR.maxlist = _REPR.maxtuple = _REPR.maxset = _REPR.maxfrozenset = 20
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = VALUE_LENGTH


def shown(value: object) -> str:
    """The `repr` of a value that a user gave on one line, at most :data:`VALUE_LENGTH` characters
    of it."""
    if isinstance(value, int) and value.bit_length() > 10_000:
        return f"a number of {value.bit_length()} bits"  # Python refuses to write out such numbers
    try:
        return shorten(" ".join(_REPR.repr(value).split("\n")), VALUE_LENGTH)
    except (
        Exception
    ):  # such as integers of many digits; an error message must not raise another error
        return f"a value of type {type(value).__name__}"


class InputError(ValueError):
    """A value passed by the caller that cannot be used; its text is one sentence for the user, of
    limited length."""

    def __init__(self, sentence: str = "") -> None:
        super().__init__(shorten(str(sentence)))


class EquipoiseWarning(UserWarning):
    """Something that a user should know about a result; the command line prints it as one line."""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def require(ok: bool, name: str, must: str, got: object) -> None:
    """Raise "`name` must …, got …" unless `ok`."""
    if not ok:
        raise InputError(f"`{name}` must {must}, got {shown(got)}")


def instance(name: str, value: Any, kinds: type[T] | tuple[type[T], ...], must: str) -> T:
    """A value of one of these types; `must` says so in words, such as "be a torch module"."""
    require(isinstance(value, kinds), name, must, type(value).__name__)
    return value  # type: ignore[no-any-return]


def optional(name: str, value: Any, kinds: type[T] | tuple[type[T], ...], must: str) -> T | None:
    """None, or a value of one of these types."""
    return None if value is None else instance(name, value, kinds, must)


def path(name: str, value: Any) -> Path | None:
    """A path, if one is given."""
    optional(name, value, (str, Path), "be a path")
    require("\0" not in str(value), name, "be a path without null characters", value)
    return None if value is None else Path(value)


def fraction(name: str, text: str | float) -> float:
    """Parse "8/255", "0.03" or a number; nothing is evaluated as code, and the time does not depend
    on the value."""
    if isinstance(text, str):
        require(
            len(text) <= _LONGEST_NUMBER,
            name,
            f"be a number of at most {_LONGEST_NUMBER} characters",
            f"{len(text)} characters",
        )
    try:
        value = (
            _parse(text.replace(" ", "")) if isinstance(text, str) else float(number(name, text))
        )
    except InputError:
        raise
    except (ValueError, ZeroDivisionError):
        raise InputError(
            f"`{name}` must be a number or a fraction such as 8/255, got {shown(text)}"
        ) from None
    except OverflowError:  # of a fraction
        value = math.inf
    require(math.isfinite(value), name, "be finite", text)
    return value


def _parse(text: str) -> float:
    """Fraction(text) would compute the power of ten of 1e999999999; this gives the same rounded
    number at once."""
    numerator, slash, denominator = text.partition("/")
    return float(Fraction(int(numerator), int(denominator))) if slash else float(text)


def fractions(name: str, values: Any, *, most: int) -> list[float]:
    """A number or several, as a sequence or as text with commas, such as 0.49,0.48,0.45."""
    if isinstance(values, str):
        require(values.count(",") < most, name, f"be at most {most} numbers", values.count(",") + 1)
        values = values.split(",")
    parts = instance(
        name, [values] if _is_number(values) else values, (list, tuple), "be a number or several"
    )
    require(0 < len(parts) <= most, name, f"be 1 to {most} numbers", len(parts))
    return [fraction(name, part) for part in parts]


def number(name: str, value: float) -> float:
    """A finite number."""
    try:
        ok = _is_number(value) and math.isfinite(value)
    except OverflowError:  # a whole number that no float can hold
        ok = False
    require(ok, name, "be finite" if _is_number(value) else "be a number", value)
    return value


def positive(name: str, value: float) -> float:
    """A finite number above zero."""
    require(_is_number(value), name, "be positive", value)
    require(number(name, value) > 0, name, "be positive", value)
    return value


def whole(name: str, value: int, *, least: int = 0, most: int = MAX_COUNT) -> int:
    """An integer in least … most."""
    ok = _is_number(value) and isinstance(value, int)
    require(ok and value >= least, name, f"be a whole number of at least {least}", value)
    require(value <= most, name, f"be at most {most}", value)
    return value


def seed(value: int) -> int:
    """A random seed."""
    require(not isinstance(value, int) or value < 2**63, "seed", "be less than 2**63", value)
    return whole("seed", value, most=2**63)


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
    if isinstance(value, str) and value in names:
        return value
    near = difflib.get_close_matches(value[:VALUE_LENGTH], names) if isinstance(value, str) else []
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    listed = ", ".join(names)
    if len(names) > MOST_LISTED:
        listed = f"{len(names)} names{', such as ' + ', '.join(near) if near else ''}"
    raise InputError(
        f"`{name}` must be one of {shorten(listed, 2 * VALUE_LENGTH)}, got {shown(value)}{hint}"
    )


def images(x: Tensor, name: str = "images") -> Tensor:
    """(B, C, H, W) floating point, every value in [0, 1]."""
    import torch

    require(isinstance(x, torch.Tensor), name, "be a tensor", type(x).__name__)
    require(x.dim() == 4, name, "have shape (B, C, H, W)", tuple(x.shape))
    require(x.is_floating_point(), name, "be floating point in [0, 1]", str(x.dtype))
    if x.numel():
        low, high = (float(end) for end in torch.aminmax(x.detach()))
        # NaN fails both comparisons, so it is caught here too.
        require(
            low >= 0 and high <= 1, name, "lie in [0, 1]", f"values from {low:.6g} to {high:.6g}"
        )
    return x


def labels(y: Tensor, classes: int, count: int | None = None, name: str = "labels") -> Tensor:
    """(B,) whole numbers in [0, classes)."""
    import torch

    require(isinstance(y, torch.Tensor), name, "be a tensor", type(y).__name__)
    ok = y.dim() == 1 and not (y.is_floating_point() or y.is_complex() or y.dtype == torch.bool)
    require(ok, name, "be whole numbers of shape (B,)", f"{y.dtype} of shape {tuple(y.shape)}")
    if count is not None:
        require(len(y) == count, name, f"be as many as the images, {count}", len(y))
    if y.numel():
        low, high = (int(end) for end in torch.aminmax(y))
        require(
            low >= 0 and high < classes,
            name,
            f"lie in 0..{classes - 1}",
            f"values from {low} to {high}",
        )
    return y


def logits(z: Tensor, count: int, name: str = "logits") -> Tensor:
    """(count, K) with K ≥ 2, no NaN, no +inf, and not −inf for all classes: every row has a
    softmax."""
    import torch

    require(isinstance(z, torch.Tensor), name, "be one tensor", type(z).__name__)
    ok = z.dim() == 2 and z.shape[0] == count and z.shape[1] >= 2
    require(ok, name, f"have shape ({count}, K) with K ≥ 2", tuple(z.shape))
    require(z.is_floating_point(), name, "be floating point", z.dtype)
    largest = z.detach().amax(dim=1)  # NaN in any column is NaN here
    if not bool(
        largest.isfinite().all()
    ):  # one synchronisation with a GPU unless something is wrong
        require(not bool(largest.isnan().any()), name, "not contain NaN", "NaN")
        require(not bool(largest.isposinf().any()), name, "not contain +inf", "+inf")
        raise InputError(
            f"`{name}` must hold a finite number for every image, got −inf for all classes"
        )
    return z
