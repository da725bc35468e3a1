"""How a mixture is fitted."""

from __future__ import annotations

from dataclasses import dataclass, field

from equipoise.core import checks
from equipoise.fitting.margin_attack import AttackStrength
from equipoise.fitting.search import OBJECTIVES, RULES
from equipoise.mixing import LogitMap
from equipoise.mixing.logit_maps import CLAMPS

AGAINST = ("any", "pair")


@dataclass(frozen=True)
class FitSettings:
    """How to search; the defaults serve any pair."""

    objective: str = "mixture"
    clamp: str = "gelu-monotone"
    rule: str = "auto"
    against: str = "any"
    rounds: int = 1
    seed: int = 0
    strength: AttackStrength = field(default_factory=AttackStrength)
    like: LogitMap | None = None  # the map of a similar mixture: only the threshold is fitted

    def __post_init__(self) -> None:
        checks.one_of("objective", self.objective, OBJECTIVES)
        checks.one_of("clamp", self.clamp, CLAMPS)
        checks.one_of("rule", self.rule, RULES)
        checks.one_of("against", self.against, AGAINST)
        checks.whole("rounds", self.rounds)
