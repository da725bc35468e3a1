"""Settings of one model: given in its reference, `file:net.pt?arch=resnet20&mean=0.5,0.5,0.5`, or
to a function."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from equipoise.core import checks
from equipoise.core.settings import Settings, setting

MAX_CHANNELS = 1000
MAX_SETTINGS = 100  # of one reference
WEIGHT_FILES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".tar")
DATA_OPTIONS = (
    "num_classes",
    "image_shape",
    "seed",
)  # known from the data and the run; no scheme refuses them
EXPLICIT_PATH = r"((?:\.{1,2}|~)?[/\\].*|\.\.?|[A-Za-z]:\\.*)"  # text that begins like a path, which no name does
_ESCAPED = {"3F": "?", "26": "&"}


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Settings):
    """Settings of one model; None is "not given". Which of them a model takes depends on its
    scheme.

    `mean` and `std` may be text such as "0.49,0.48,0.45". `num_classes` and `image_shape` are
    required for `zoo:`; a checkpoint must agree with them. `seed` is for the random weights of
    `zoo:` and the noise of `smoothed:`.
    """

    arch: str | None = setting(
        None,
        "Architecture of .pt and .pth files without an arch of their own, as in "
        "file:net.pt?arch=resnet20.",
    )
    mean: str | Sequence[float] | None = setting(
        None, "Per-channel means subtracted by the model of a .pt file, e.g. 0.49,0.48,0.45."
    )
    std: str | Sequence[float] | None = setting(
        None, "Per-channel standard deviations that it divides by."
    )
    num_classes: int | None = None
    image_shape: tuple[int, int, int] | None = None
    seed: int | None = None
    preset: str | None = None  # preprocessing, such as Res256Crop224
    labels: str | None = None  # which classes, in which order
    weights: str | None = None  # path of a file, or the name of published weights

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("mean", "std"):
            value = getattr(self, name)
            numbers = (
                None if value is None else tuple(checks.fractions(name, value, most=MAX_CHANNELS))
            )
            if not isinstance(value, list | tuple):
                object.__setattr__(self, name, numbers)

        if self.weights is not None and self.weights.endswith(
            WEIGHT_FILES
        ):  # a path, not the name of weights
            object.__setattr__(self, "weights", explicit_path(self.weights))
        shape = self.image_shape
        valid = shape is None or (
            isinstance(shape, tuple | list)
            and len(shape) == 3
            and all(type(side) is int and side >= 1 for side in shape)
        )
        checks.require(valid, "image_shape", "be (C, H, W)", shape)

    @classmethod
    def of(cls, other: ModelSettings) -> Self:
        """The settings of a model among other options."""
        return cls(
            **{
                field.name: getattr(other, field.name)
                for field in dataclasses.fields(ModelSettings)
            }
        )

    @classmethod
    def parse(cls, query: str, reference: str) -> Self:
        """Parse `key=value&key=value`, the part of a reference after its question mark.

        >>> ModelSettings.parse("arch=resnet20&image_shape=3,32,32", "").image_shape
        (3, 32, 32)
        """
        pairs = [pair.partition("=") for pair in query.split("&")]
        checks.require(
            len(pairs) <= MAX_SETTINGS, "model", f"have at most {MAX_SETTINGS} settings", reference
        )
        values: dict[str, Any] = {}
        for key, _, value in pairs:
            checks.one_of(f"setting of {reference}", key, ModelSettings.names())
            checks.require(
                bool(value) and key not in values, key, f"have one value in {reference}", value
            )
            values[key] = _PARSERS.get(key, str)(unescape(value))
        return cls(**values)

    def given(self) -> dict[str, Any]:
        """The settings of a model that have a value."""
        return {
            name: value
            for name in ModelSettings.names()
            if (value := getattr(self, name)) is not None
        }

    def query(self) -> str:
        """The settings as text that :meth:`parse` reads.

        >>> ModelSettings(arch="resnet20", mean=(0.5, 0.25, 1)).query()
        'arch=resnet20&mean=0.5,0.25,1'
        """
        return "&".join(
            f"{key}={escape(_written(value), '?&')}" for key, value in self.given().items()
        )

    def relocate(self, move: Callable[[str], str]) -> Self:
        """The settings with those that begin like a path changed by `move`, and written so that
        they still do."""
        moved: Mapping[str, Any] = {
            key: explicit_path(move(expand_home(value)))
            for key, value in self.given().items()
            if isinstance(value, str) and is_explicit_path(value)
        }
        return dataclasses.replace(self, **moved)


@dataclass(frozen=True, kw_only=True)
class LoadOptions(ModelSettings):
    """How to load models beside their references: defaults for references without such a setting,
    and permissions."""

    allow_code: bool = setting(
        False,
        "Run the code that a mixture folder names, such as python:MODULE:NAME, and "
        "download its models; only for folders whose author you trust.",
    )


def _whole(name: str) -> Callable[[str], int]:
    def parse(text: str) -> int:
        checks.require(
            text.isascii() and text.isdigit() and len(text) < 20, name, "be a whole number", text
        )
        return int(text)

    return parse


def _sizes(text: str) -> tuple[int, ...]:
    parts = text.split(",", 3)
    checks.require(len(parts) == 3, "image_shape", "be C,H,W", text)
    return tuple(map(_whole("image_shape"), parts))


_PARSERS: dict[str, Callable[[str], Any]] = {
    "num_classes": _whole("num_classes"),
    "image_shape": _sizes,
    "seed": _whole("seed"),
}


def _written(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(_written, value))
    return repr(float(value)) if isinstance(value, float) else str(value)


def is_explicit_path(text: str) -> bool:
    """Whether text begins like a path.

    >>> is_explicit_path("./resnet18"), is_explicit_path("/models/a"), is_explicit_path("resnet18")
    (True, True, False)
    """
    return re.fullmatch(EXPLICIT_PATH, text, re.DOTALL) is not None


def explicit_path(path: str) -> str:
    """The path, written so that it begins like one."""
    return path if is_explicit_path(path) else f"./{path}"


def expand_home(path: str) -> str:
    """The path with a leading ~ replaced by the user's folder."""
    return str(Path(path).expanduser()) if path.startswith("~/") else path


def unescape(text: str) -> str:
    """Decode %3F and %26, the characters that separate settings; %253F is a literal %3F. Nothing
    else is changed.

    >>> unescape("a%3Fb%253Fc%20d")
    'a?b%3Fc%20d'
    """
    return re.sub(
        "%((?:25)*)(3F|26)",
        lambda match: _ESCAPED[match[2]] if not match[1] else f"%{match[1][2:]}{match[2]}",
        text,
    )


def escape(text: str, separators: str = "?") -> str:
    """Encode text so that :func:`unescape` gives it back.

    >>> escape("a?b%3Fc&d")
    'a%3Fb%253Fc&d'
    """
    text = re.sub("%((?:25)*)(3F|26)", r"%25\1\2", text)
    for code, character in _ESCAPED.items():
        text = text.replace(character, f"%{code}") if character in separators else text
    return text
