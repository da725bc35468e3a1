"""What a section of the page is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from equipoise.reporting.style import Palette

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Cell:
    """A value, the small print under it, and the model whose colour marks it."""

    text: str
    note: str = ""
    model: str = ""


@dataclass(frozen=True)
class Table:
    """Rows under a head; the first cell of a row names it. Words stand left, numbers right."""

    caption: str
    head: Sequence[str]
    body: Sequence[Sequence[Cell]]
    words: bool = False
    folded: bool = False


@dataclass(frozen=True)
class Picture:
    """A figure: `draw` makes it anew for each palette; `name` is its file under `figures/`."""

    name: str
    alt: str
    draw: Callable[[Palette], Figure]


@dataclass(frozen=True)
class Section:
    """Title, one or two plain sentences on what is shown and how it was obtained, and the evidence."""

    title: str
    prose: Sequence[str]
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()
    code: str = ""
