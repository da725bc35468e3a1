"""One look for every figure and for the page around it, by daylight and in the dark."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import Any

MODELS = ("accurate", "robust", "mixed")
WIDTH = 5.6  # inches; at 9 pt the text of a figure stays legible on a phone


@dataclass(frozen=True)
class Palette:
    """Colours told apart by colour-blind readers too: the models are blue, vermilion and bluish green."""

    paper: str
    ink: str
    muted: str
    rule: str
    accurate: str
    robust: str
    mixed: str
    wrong: str
    others: tuple[str, ...]

    def of(self, models: Iterable[str]) -> dict[str, str]:
        """A colour for every model: the three always keep theirs, others take turns."""
        spare = cycle(self.others)
        own = dict(zip(MODELS, (self.accurate, self.robust, self.mixed), strict=True))
        return {model: own[model] if model in own else next(spare) for model in models}


def short(models: Iterable[str]) -> dict[str, str]:
    """What a key calls each model: as much of the end of a path as tells them apart, without the ending.

    >>> short(["file:/a/b/last.safetensors", "file:/a/c/last.safetensors (alpha 0.8)"])
    {'file:/a/b/last.safetensors': 'b/last', 'file:/a/c/last.safetensors (alpha 0.8)': 'c/last (alpha 0.8)'}
    """
    split = {name: name.partition(" (") for name in models}
    paths = {path: path.split("/") for path, _, _ in split.values()}
    depth, deepest = 1, max(map(len, paths.values()), default=1)
    while depth < deepest and len({"/".join(parts[-depth:]) for parts in paths.values()}) < len(paths):
        depth += 1
    return {name: re.sub(r"\.(safetensors|pth?)$", "", "/".join(paths[path][-depth:])) + mark + rest
            for name, (path, mark, rest) in split.items()}


LIGHT = Palette(paper="#ffffff", ink="#1f2328", muted="#636c76", rule="#d8dde3", accurate="#0072b2",
                robust="#d55e00", mixed="#009e73", wrong="#b3123a",
                others=("#8a5a83", "#8c6d1f", "#5b6770"))
DARK = Palette(paper="#15181c", ink="#e4e7eb", muted="#98a2ad", rule="#343a41", accurate="#56b4e9",
               robust="#f28e4b", mixed="#3cc79a", wrong="#ff7d92",
               others=("#cc9fc6", "#d8bb62", "#a9b4bd"))


@contextmanager
def styled(palette: Palette) -> Iterator[None]:
    """Figures made and saved inside look alike; the caller's own settings are back afterwards.

    Draw with `matplotlib.figure.Figure`: pyplot and its global list of figures stay out of it.
    """
    import matplotlib.style

    with matplotlib.style.context(["default", _settings(palette)]):
        yield


def _settings(palette: Palette) -> dict[str, Any]:
    return {
        "figure.facecolor": palette.paper, "savefig.facecolor": palette.paper, "axes.facecolor": palette.paper,
        "text.color": palette.ink, "axes.labelcolor": palette.muted, "axes.edgecolor": palette.rule,
        "xtick.color": palette.rule, "xtick.labelcolor": palette.muted,
        "ytick.color": palette.rule, "ytick.labelcolor": palette.muted,
        "font.family": ["DejaVu Sans"], "font.size": 9, "axes.labelsize": 9, "axes.titlesize": 9,
        "axes.titleweight": "normal", "xtick.labelsize": 8, "ytick.labelsize": 8,
        "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.8,
        "axes.grid": True, "axes.grid.axis": "y", "grid.color": palette.rule, "grid.linewidth": 0.5,
        "axes.axisbelow": True, "lines.linewidth": 1.8, "lines.markersize": 4.5,
        "legend.frameon": False, "legend.fontsize": 8,
        "figure.constrained_layout.use": True, "savefig.dpi": 200,
        # Same rows, same bytes; and a model called "$x" is a name, not a formula.
        "svg.hashsalt": "equipoise", "svg.fonttype": "path", "text.parse_math": False,
    }
