"""What `fit` returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from equipoise.core import format, serialize
from equipoise.core.results import FitSummary, SelectionSummary
from equipoise.mixing import GatedClassifier, MixedClassifier
from equipoise.mixing.provenance import Frontier


@dataclass(frozen=True, eq=False)
class Fit:
    """A fitted mixture; `str()` is what the command prints."""

    mixture: MixedClassifier
    summary: FitSummary | None = None  # None for plain mixing
    gated: MixedClassifier | None = None  # with the gate over the map, if one was given
    selection: SelectionSummary | None = None  # of the range of the gate

    @property
    def helped(self) -> bool:
        """Whether the mixture is more accurate than the robust model alone; False for plain mixing."""
        return self.summary is not None and self.summary.helped

    @property
    def promise(self) -> str:
        """The promised loss and on what it rests, or why no mixture helps."""
        nothing = f"promises nothing: {self.mixture.method}, nothing was fitted"
        return nothing if self.summary is None else self.summary.promise

    @property
    def frontier(self) -> Frontier:
        """Mixtures for other targets, of which none is better in both respects."""
        return self.mixture.frontier

    def to_dict(self) -> dict[str, Any]:
        """The outcome as plain values."""
        return {"mixture": self.mixture.describe(), "fit": serialize.to_plain(self.summary),
                "frontier": [serialize.to_plain(point) for point in self.frontier],
                "gate": serialize.to_plain(self.selection)}

    def __str__(self) -> str:
        if self.summary is None:
            logit_map = "" if self.mixture.logit_map is None else f"the published {self.mixture.logit_map}, "
            return f"{self.mixture.method} with {logit_map}alpha {self.mixture.alpha:.6g}; nothing was fitted"
        lines = [f"note: {note}" for note in self.summary.notes]
        literal = self.summary.rule == "paper"  # returns its mixture also where that does not help
        lines.append(f"the mixture {self.promise}" if self.helped or literal else self.promise)
        robust = f"(robust model {format.percent(self.summary.robust_clean)})"
        if self.helped or literal:
            images = ("the images that it was fitted on, which is optimistic" if literal else
                      "images that did not select it")
            lines.append(f"on {images}: clean {format.percent(self.summary.clean)} {robust}; {self.summary.method}, "
                         f"{self.mixture.logit_map}, alpha {self.mixture.alpha:.6g}")
            if self.summary.passes is not None:
                lines.append(f"{self.summary.passes:.2f} passes of the robust model per clean image")
        elif self.frontier:
            first = self.frontier[0]
            lines.append(f"a mixture that may lose {100 * first.lose_at_most:.3g} points helps: clean "
                         f"{format.percent(first.clean)} {robust}")
        if isinstance(self.gated, GatedClassifier) and self.selection is not None:
            low, high = self.gated.alpha_range
            lines.append(f"the gate, alpha in ({low:.3g}, {high:.3g}): clean {format.percent(self.selection.clean)}; "
                         f"it {self.selection.promise}")
        return "\n".join(lines)

    def frontier_table(self) -> str:
        """The mixtures for other targets as a table."""
        if self.mixture.rule == "paper":
            return "MixedNUTS has no mixtures for other targets: fit it again with another --beta"
        if not self.frontier:
            return "no target of the frontier gives a mixture that helps"
        table = format.new_table("Mixtures for other targets", "lose at most", "clean", "alpha")
        for point in self.frontier:
            table.add_row(format.percent(point.lose_at_most), format.percent(point.clean), f"{point.alpha:.6g}")
        return format.render(table)
