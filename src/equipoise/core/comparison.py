"""What a comparison of rules for mixing says about each method."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ComparedMethod:
    """One line of the table of a comparison; its accuracies are those of the model
    `measured_as`."""

    name: str
    family: str  # the same for gates that differ in their training only
    mixture: str  # the map and alpha
    # Of the robust model that a clean image needs, on average, if it has several
    views: float | None = None
    measured_as: str  # the model of the rows: equal mixtures are attacked once
    settings: str = ""  # all settings of the mixture
    promise: str = ""  # of the fit, to follow the name

    @property
    def description(self) -> str:
        """The map, alpha and views."""
        return self.mixture if self.views is None else f"{self.mixture}, {self.views:.3g} views"
