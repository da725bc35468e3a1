"""Settings of a fit; their fields are the options of `equipoise fit`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from equipoise.core import checks
from equipoise.core.device import attack_batch_setting
from equipoise.core.settings import Settings, setting
from equipoise.fitting import conformal
from equipoise.fitting.conformal import Target
from equipoise.fitting.paper import PUBLISHED, published_for
from equipoise.mixing.logit_maps import CLAMPS
from equipoise.models.layers.tta import SHIFTS

DEFAULT_CONFIDENCE = 0.95
DEFAULT_VIEWS, DEFAULT_PASSES = 6, 2.6  # of a cascade


@dataclass(frozen=True, kw_only=True)
class FitSettings(Settings):
    """What to fit, and how to attack and search; the defaults serve any pair of models."""

    lose_at_most: float | None = setting(
        None, "Points (of 100) of robust accuracy that may be lost; 1 if no target is given."
    )
    beta: float | None = setting(
        None,
        "Share of the robust model's attacked accuracy to keep; with rule paper the "
        "paper's if no target is given: 0.985, from 317 classes on 0.99.",
    )
    promise: str = setting(
        "expectation",
        "In which sense the target holds: expectation (on average over fits; single "
        "fits exceed it in about a third of the cases) or probability (all but a share 1 − "
        "confidence of the fits keep it).",
        among=("expectation", "probability"),
    )
    confidence: float | None = setting(None, "Of --promise probability; 0.95 if not given.")
    alpha: float | None = setting(
        None, "Plain mixing with this weight; nothing is fitted.", share=True
    )
    published: str | None = setting(
        None,
        "MixedNUTS with the published s, p, c and alpha for this data set; nothing is fitted.",
        among=PUBLISHED,
    )
    gate: str | None = setting(
        None,
        "A gate from `equipoise train gate`, file or folder, which gives every image an "
        "alpha of its own over the fitted map.",
    )
    range_attack: str = setting(
        "full",
        "Attack under which the range of a gate is selected: full (the attacks of "
        "`evaluate`, with long runs) or short, which is faster and lets gates lose more than "
        "they should.",
        among=("full", "short"),
    )
    objective: str | None = setting(
        None,
        "What the search optimizes: mixture (clean accuracy of the mixture), "
        "surrogate (how many clean errors of the robust model it leaves to the accurate "
        "one) or conditional (how many of those that the accurate one corrects); mixture "
        "if not given, surrogate with rule paper.",
        among=("mixture", "surrogate", "conditional"),
    )
    clamp: str | None = setting(
        None,
        "gelu-monotone, gelu, relu, elu, softplus or linear; gelu-monotone if not given, "
        "gelu with rule paper.",
        among=CLAMPS,
    )
    rule: str = setting(
        "auto",
        "What chooses the map: paper (MixedNUTS, Algorithm 1 literally; promises nothing), "
        "nuts (our search of the paper's maps), switch (the confidence switch), auto (the better of "
        "nuts and switch) or cascade (a switch over one view of the robust model, then over all).",
        among=("auto", "nuts", "switch", "paper", "cascade"),
    )
    views: int | None = setting(
        None,
        "Views of the robust model with rule cascade, as of tta:N:REFERENCE: 2, 6 or 10; "
        "6 if not given.",
    )
    passes: float | None = setting(
        None,
        "With rule cascade: most passes of the robust model per clean image, on "
        "average; 2.6 if not given.",
    )
    accurate_temperature: float | None = setting(
        None,
        "Temperature of the accurate model's probabilities, with rule "
        "paper, published or alpha: 0 is its class alone; 0 if not given, 1 "
        "with alpha.",
    )
    against: str = setting(
        "any",
        "Adversary of the promise: any (the accurate model may predict any class at attacked "
        "points) or pair (an attack on both models at once).",
        among=("any", "pair"),
    )
    rounds: int = setting(
        1, "Attacks on the mapped model, each followed by a new search.", least=0, most=1000
    )
    steps: int = setting(50, "Steps of the margin attack.", least=1)
    targets: int = setting(9, "Target classes of the margin attack.", least=1, most=1000)
    pool: int = setting(3, "Attacked points kept per image and attack.", least=1, most=1000)
    gradient_free: bool = setting(False, "Attack by random search.")
    like: str | None = setting(
        None, "A mixture whose map is reused, or published:NAME; only the threshold is fitted."
    )
    bundle: bool = setting(
        False,
        "Write the weights of both bases into the mixture folder, which then loads alone, on "
        "any machine.",
    )
    batch_size: int | None = attack_batch_setting()
    seed: int = setting(0, "Random seed.", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [
            name for name in ("lose_at_most", "beta", "alpha") if getattr(self, name) is not None
        ]
        checks.require(
            len(given) <= 1, "target", "be at most one of lose_at_most, beta and alpha", given
        )
        checks.require(
            self.confidence is None or self.promise == "probability",
            "confidence",
            "be left out unless `promise` is probability",
            self.confidence,
        )
        self.target()
        if self.gate is not None:
            checks.require(
                Path(self.gate).exists(), "gate", "be a file or folder that exists", self.gate
            )
            checks.require(
                self.alpha is None, "gate", "be left out with alpha, which fits nothing", self.gate
            )
        checks.require(
            self.gate is not None or self.range_attack == "full",
            "range_attack",
            "be left out without a gate",
            self.range_attack,
        )
        self._check_unfitted()
        self._check_rule()

    def _check_unfitted(self) -> None:
        """Where nothing is fitted, refuse every setting but the temperature of the accurate side
        and `bundle`."""
        for unfitted in ("alpha", "published"):
            if getattr(self, unfitted) is None:
                continue
            allowed = (unfitted, "accurate_temperature", "bundle")
            ignored = [
                item.name
                for item in fields(self)
                if item.name not in allowed and getattr(self, item.name) != item.default
            ]
            checks.require(
                not ignored,
                unfitted,
                "come without a target, rule or other setting of a fit, because nothing is fitted",
                ignored,
            )

    def _check_rule(self) -> None:
        """Refuse settings that the rule does not have."""
        paper = self.rule == "paper"
        if self.like is not None:
            checks.require(
                self.clamp is None,
                "clamp",
                "be left out with like, whose map has its own",
                self.clamp,
            )
            checks.require(
                paper or self.objective is None,
                "objective",
                "be left out with like, because nothing is searched",
                self.objective,
            )
            checks.require(
                self.rounds <= 1,
                "rounds",
                "be at most 1 with like, because nothing is searched",
                self.rounds,
            )
        if paper:
            checks.require(
                self.promise == "expectation",
                "promise",
                "be left out with rule paper, which promises nothing",
                self.promise,
            )
            checks.require(self.against == "any", "against", "be any with rule paper", self.against)
            checks.require(
                self.objective != "mixture",
                "objective",
                "be surrogate or conditional with rule paper",
                self.objective,
            )
            checks.require(
                self.clamp != "gelu-monotone",
                "clamp",
                "be one of the paper with rule paper",
                self.clamp,
            )
            checks.require(
                self.rounds <= 1,
                "rounds",
                "be 0 or 1 with rule paper, which searches once",
                self.rounds,
            )
        self._check_cascade()
        if self.accurate_temperature is not None:
            checks.require(
                self.accurate_temperature >= 0,
                "accurate_temperature",
                "not be negative",
                self.accurate_temperature,
            )
            allowed = (
                paper
                or self.alpha is not None
                or self.published is not None
                or self.accurate_temperature == 0
            )
            checks.require(
                allowed,
                "accurate_temperature",
                "be 0 with this rule, whose promise and search rest on the "
                "accurate model's class alone",
                self.accurate_temperature,
            )

    def _check_cascade(self) -> None:
        """Refuse settings of a cascade with other rules, and those that it does not have."""
        if self.rule != "cascade":
            for name in ("views", "passes"):
                value = getattr(self, name)
                checks.require(value is None, name, "be left out unless `rule` is cascade", value)
            return
        checks.require(
            self.views is None or self.views in SHIFTS,
            "views",
            f"be one of {', '.join(map(str, SHIFTS))}",
            self.views,
        )
        checks.require(
            self.passes is None or self.passes >= 1, "passes", "be at least 1", self.passes
        )
        checks.require(self.against == "any", "against", "be any with rule cascade", self.against)
        for name in ("gate", "like"):
            value = getattr(self, name)
            checks.require(value is None, name, "be left out with rule cascade", value)

    @property
    def target_is_default(self) -> bool:
        """Whether no target was given."""
        return self.lose_at_most is None and self.beta is None and self.alpha is None

    @property
    def cascade_views(self) -> int | None:
        """Views of the robust model with rule cascade; None with other rules."""
        return (self.views or DEFAULT_VIEWS) if self.rule == "cascade" else None

    @property
    def pass_budget(self) -> float:
        """Most passes of the robust model per clean image, of a cascade."""
        return DEFAULT_PASSES if self.passes is None else self.passes

    @property
    def search_objective(self) -> str:
        """The objective, or its default for the rule."""
        return self.objective or ("surrogate" if self.rule == "paper" else "mixture")

    @property
    def search_clamp(self) -> str:
        """The clamp, or its default for the rule."""
        return self.clamp or ("gelu" if self.rule == "paper" else "gelu-monotone")

    @property
    def accurate_side(self) -> dict[str, Any]:
        """The arguments of a mixture for the temperature of its accurate side, or their
        defaults."""
        temperature = self.accurate_temperature
        if temperature is None:
            temperature = 0.0 if self.alpha is None else 1.0
        return (
            {"hard": True}
            if temperature == 0
            else {"hard": False, "accurate_temperature": temperature}
        )

    def target(self, classes: int = 10) -> Target:
        """What may be lost, and in which sense; the paper's β depends on the number of classes."""
        confidence = None
        if self.promise == "probability":
            confidence = DEFAULT_CONFIDENCE if self.confidence is None else self.confidence
        if self.beta is not None or (self.rule == "paper" and self.target_is_default):
            return conformal.beta(
                PUBLISHED[published_for(classes)].beta if self.beta is None else self.beta,
                confidence,
            )
        return conformal.lose_at_most(
            1.0 if self.lose_at_most is None else self.lose_at_most, confidence
        )
