"""Settings of `compare_rules`, which are also options of `equipoise compare-rules`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from equipoise.core import checks
from equipoise.core.device import PRECISIONS, attack_batch_setting
from equipoise.core.settings import Settings, setting
from equipoise.fitting import FitSettings
from equipoise.mixing.provenance import RULES

PLAIN, AUTO, CASCADE = "plain", "auto", "cascade"
DEFAULT_RULES = (PLAIN, "paper", "nuts", "switch", AUTO)
COMPARED = (*DEFAULT_RULES, CASCADE)


@dataclass(frozen=True, kw_only=True)
class ComparisonSettings(Settings):
    """What is compared, and how; the fields are options of `equipoise compare-rules`."""

    lose_at_most: float | None = setting(
        None, "Points (of 100) of robust accuracy that may be lost; 2 if no target is given."
    )
    beta: float | None = setting(None, "Share of the robust model's attacked accuracy to keep.")
    promise: str = setting(
        "expectation",
        "In which sense the target of nuts, switch, auto and cascade holds: "
        "expectation or probability, as for `fit`.",
        among=("expectation", "probability"),
    )
    confidence: float | None = setting(None, "Of --promise probability; 0.95 if not given.")
    rules: str = setting(
        ",".join(DEFAULT_RULES),
        "Rules to fit, with commas: "
        + ", ".join(f"{rule} ({RULES.get(rule, 'nuts or switch')})" for rule in COMPARED)
        + ", for which the robust model "
        "must have views, such as tta:6:REFERENCE.",
    )
    passes: float | None = setting(
        None,
        "With rule cascade: most passes of the robust model per clean image, on "
        "average; 2.6 if not given.",
    )
    over: str = setting(
        "plain,nuts,switch", "What each gate is put over, with commas: plain, nuts, switch."
    )
    attack: str = setting(
        "fast", "Attack, or several with commas; adaptive versions for mixtures come with it."
    )
    range_count: int | None = setting(
        None,
        "Fitting images, the first ones, that select the alpha of plain mixing and "
        "the ranges of gates; all if not given.",
        least=1,
    )
    range_attack: str = setting(
        "full",
        "Attack under which they are selected: full (the attacks of `evaluate`, with "
        "long runs) or short, which is faster and lets gates lose more than they should.",
        among=("full", "short"),
    )
    candidates: int = setting(
        4, "Candidates attacked at most for a gate or plain mixing, after the first few.", least=1
    )
    margin_steps: int = setting(50, "Steps of the margin attack of the fits.", least=1)
    margin_targets: int = setting(
        9, "Target classes of the margin attack of the fits.", least=1, most=1000
    )
    batch_size: int | None = attack_batch_setting()
    precision: str = setting("auto", "auto, fp32 or bf16.", among=PRECISIONS)
    seed: int = setting(0, "Random seed.", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in (("rules", COMPARED), ("over", (PLAIN, "nuts", "switch"))):
            for word in self.listed(name):
                checks.one_of(name, word, known)
        self.fit_settings("nuts")
        compares_cascade = CASCADE in self.listed("rules")
        checks.require(
            self.passes is None or compares_cascade,
            "passes",
            "be left out where cascade is not compared",
            self.passes,
        )
        if compares_cascade:
            self.fit_settings(CASCADE)
        checks.require(
            self.promise == "expectation" or bool({*self.listed("rules")} - {PLAIN, "paper"}),
            "promise",
            "be left out where none of nuts, switch, auto and cascade is compared",
            self.promise,
        )

    def listed(self, name: str) -> list[str]:
        """The words of a setting with commas, each once."""
        return list(dict.fromkeys(word.strip() for word in getattr(self, name).split(",")))

    def fit_settings(self, rule: str, views: int | None = None) -> FitSettings:
        """The settings of the fit of one rule, for a cascade with its views; rule paper promises
        nothing."""
        promised: dict[str, Any] = (
            {} if rule == "paper" else {"promise": self.promise, "confidence": self.confidence}
        )
        points = 2.0 if self.lose_at_most is None and self.beta is None else self.lose_at_most
        return FitSettings(
            rule=rule,
            lose_at_most=points,
            beta=self.beta,
            steps=self.margin_steps,
            targets=self.margin_targets,
            batch_size=self.batch_size,
            seed=self.seed,
            views=views if rule == CASCADE else None,
            passes=self.passes if rule == CASCADE else None,
            **promised,
        )
