"""What can be reproduced: papers, the parts of their studies, what they need and how long they
take."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from equipoise.core import checks, format

DIGITS_DATA = "8×8 digits of scikit-learn, nothing to download"
OWN_MODELS = "none: small networks are trained first"


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """What a study needs at one size, and how long it takes."""

    data: str
    models: str
    device: str
    time: str


@dataclass(frozen=True, kw_only=True)
class PartOverview:
    """A part of a study: a table or figure of the paper."""

    name: str
    description: str
    minutes: float | None  # at full size on one H200; None: not measured
    minutes_per: str = ""  # what they are for, if not the whole part

    @property
    def time(self) -> str:
        """How long the part takes, as text."""
        per = f" per {self.minutes_per}" if self.minutes_per else ""
        return "not measured" if self.minutes is None else f"{self.minutes:g} min{per}"


@dataclass(frozen=True, kw_only=True)
class StudyOverview:
    """A study with its parts, and what it needs at every size; `str()` is what `equipoise reproduce
    --list` prints."""

    name: str
    paper: str
    parts: tuple[PartOverview, ...]
    requirements: Mapping[str, Requirements]

    def __str__(self) -> str:
        lines = [*textwrap.wrap(f"{self.name}: {self.paper}", format.WIDTH, subsequent_indent="  ")]
        for size, needed in self.requirements.items():
            fields = (
                ("data", needed.data),
                ("models", needed.models),
                ("device", needed.device),
                ("time", needed.time),
            )
            lines.append(f"  --size {size}")
            lines += [line for name, text in fields for line in _paragraph(name, text, 8)]
        lines.append("  --part, with its time at full size on an H200")
        longest = max((len(part.name) for part in self.parts), default=0)
        for part in self.parts:
            lines += _paragraph(part.name, f"{part.description} ({part.time})", longest + 2)
        return "\n".join(lines)


def _paragraph(name: str, text: str, width: int) -> list[str]:
    """A name, and beside it a text in lines that are not too long."""
    return textwrap.wrap(
        text,
        format.WIDTH,
        initial_indent=f"    {name:<{width}}",
        subsequent_indent=" " * (width + 4),
        break_on_hyphens=False,
    )


def study_overview(
    name: str,
    paper: str,
    parts: Mapping[str, Callable[..., object]],
    requirements: Mapping[str, Requirements],
    minutes: Mapping[str, float],
    minutes_per: str = "",
) -> StudyOverview:
    """The overview of a study; a part is described by the first sentence of its docstring."""
    for part in minutes:
        checks.one_of("part", part, parts)
    return StudyOverview(
        name=name,
        paper=paper,
        requirements=requirements,
        parts=tuple(
            PartOverview(
                name=part,
                description=_first_paragraph(function),
                minutes=minutes.get(part),
                minutes_per=minutes_per,
            )
            for part, function in parts.items()
        ),
    )


def _first_paragraph(function: Callable[..., object]) -> str:
    return " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
