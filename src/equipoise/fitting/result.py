"""What `fit` returns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equipoise.core import format, serialize, stats
from equipoise.core.notebook import NotebookResult
from equipoise.core.results import FitSummary, SelectionSummary, Summary
from equipoise.core.rows import Row
from equipoise.mixing import GatedClassifier, MixedClassifier
from equipoise.mixing.provenance import Frontier


@dataclass(frozen=True, eq=False)
class Fit(NotebookResult):
    """A fitted mixture; `str()` is what the command prints."""

    mixture: MixedClassifier
    summary: FitSummary | None = None  # None for plain mixing
    gated: MixedClassifier | None = None  # with the gate over the map, if one was given
    selection: SelectionSummary | None = None  # of the range of the gate
    out: Path | None = None  # run folder, if one was given

    @property
    def helped(self) -> bool:
        """Whether the mixture is more accurate than the robust model alone; False for plain
        mixing."""
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
        return {
            "mixture": self.mixture.describe(),
            "fit": serialize.to_plain(self.summary),
            "frontier": [serialize.to_plain(point) for point in self.frontier],
            "gate": serialize.to_plain(self.selection),
        }

    def notebook_content(self) -> tuple[Summary, list[Row], Path | None]:
        """What a notebook shows: of a fit that was not kept, the outcome alone."""
        return (
            Summary(command="fit", seconds=0.0, fit=self.summary, gate=self.selection),
            [],
            self.out,
        )

    def __str__(self) -> str:
        if self.summary is None:
            logit_map = (
                ""
                if self.mixture.logit_map is None
                else f"the published {self.mixture.logit_map}, "
            )
            return f"{self.mixture.method} with {logit_map}alpha {self.mixture.alpha:.6g}; nothing was fitted"
        lines = [self._table(self.summary), *(f"note: {note}" for note in self.summary.notes)]
        literal = self.summary.rule == "paper"  # returns its mixture also where that does not help
        lines.append(f"the mixture {self.promise}" if self.helped or literal else self.promise)
        if self.helped or literal:
            own = self.mixture.logit_map
            lines.append(
                f"{self.summary.method}{'' if own is None else f', {own.extra_repr()}'}, "
                f"alpha {self.mixture.alpha:.6g}"
            )
            if self.summary.passes is not None:
                attacked = self.summary.attacked_passes
                more = "" if attacked is None else f", up to {attacked:.2f} per attacked one"
                lines.append(
                    f"{self.summary.passes:.2f} passes of the robust model per clean image{more}"
                )
        elif self.frontier:
            first = self.frontier[0]
            lines.append(
                f"a mixture that may lose {100 * first.lose_at_most:.3g} points helps: clean "
                f"{format.percent(first.clean)}"
            )
        if isinstance(self.gated, GatedClassifier) and self.selection is not None:
            low, high = self.gated.alpha_range
            lines.append(
                f"the gate, alpha in ({low:.3g}, {high:.3g}): clean {format.percent(self.selection.clean)}; "
                f"it {self.selection.promise}"
            )
        return "\n".join(lines)

    def _table(self, summary: FitSummary) -> str:
        """Clean accuracies, and that of the robust model under the attack of the fit."""
        is_paper = summary.rule == "paper"
        which = (
            "the images that it was fitted on, which is optimistic"
            if is_paper
            else "the fitting images that did not select its map"
        )
        n = summary.images

        def cell(share: float) -> str:
            interval = "" if not n else f" {format.bounds(stats.of_share(share, n))}"
            return format.percent(share) + interval

        counted = f"\nn = {n}, 95 % intervals" if n else ""
        table = format.new_table(f"Accuracy on {which}{counted}", "model", "clean", "attacked")
        table.add_row("robust", cell(summary.robust_clean), cell(summary.robust_attacked))
        if self.helped or is_paper:
            table.add_row("mixed", cell(summary.clean), "see below")
        return format.render(table)

    def frontier_table(self) -> str:
        """The mixtures for other targets as a table."""
        if self.mixture.rule == "paper":
            return "MixedNUTS has no mixtures for other targets: fit it again with another --beta"
        if not self.frontier:
            return "no target of the frontier gives a mixture that helps"
        table = format.new_table("Mixtures for other targets", "lose at most", "clean", "alpha")
        for point in self.frontier:
            table.add_row(
                format.percent(point.lose_at_most),
                format.percent(point.clean),
                f"{point.alpha:.6g}",
            )
        return format.render(table)
