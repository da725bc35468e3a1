"""A trained gate in place of one alpha; its range is selected on the fitting images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from equipoise.attacks import Apgd, Attack, Suite, TargetedApgd, fast
from equipoise.core.results import SelectionSummary
from equipoise.core.rows import AttackRow
from equipoise.data import Dataset
from equipoise.evaluation import Conditions
from equipoise.evaluation.adaptive import adaptive_attacks, white_box
from equipoise.fitting.conformal import Target
from equipoise.fitting.selection import CandidateEvaluator, Selected, Selection
from equipoise.mixing import AlphaPenalty, GatedClassifier, MixedClassifier

RANGE_ATTACKS = {"short": "a short attack", "full": "the attacks of an evaluation"}
CANDIDATE_ATTACK = Suite(
    attacks=(
        Apgd(loss="margin", steps=20),
        TargetedApgd(steps=15, ranks=(1, 2, 3), order="distance"),
    )
)
BOTH_SIDES = (
    Apgd(loss="ce", steps=15),
    Apgd(loss="dlr", steps=15),
    TargetedApgd(steps=10, ranks=(1,)),
)
# Ends of ranges as thresholds q = (1 − α)/α, and shifts of the gate before the sigmoid.
THRESHOLDS = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.98)
SHIFTS = (-1.0, 0.4, 2.0)


def candidate_attack(
    model: MixedClassifier,
    attack: Suite = CANDIDATE_ATTACK,
    both_sides: Sequence[Attack] = BOTH_SIDES,
) -> Attack:
    """The attack on a candidate: short, and on both sides at once.

    A gate is attacked with and without the term that lowers alpha.
    """
    plain = white_box(model, attack, both_sides=both_sides, thorough=False)
    if not isinstance(model, GatedClassifier):
        return plain
    # The name is part of the random stream.
    return Suite(
        attacks=(replace(plain, extra=AlphaPenalty(model)), Suite(attacks=(plain,), name="unmoved"))
    )


def full_attack(model: MixedClassifier) -> Attack:
    """All attacks of an evaluation, adaptive ones and their long runs included, each on the
    survivors of those before."""
    members = adaptive_attacks(model, fast()) or {"own": fast()}
    return Suite(
        attacks=tuple(Suite(attacks=(member,), name=name) for name, member in members.items())
    )


def with_ranges(
    model: GatedClassifier,
    thresholds: Sequence[float] = THRESHOLDS,
    shifts: Sequence[float] = SHIFTS,
) -> list[MixedClassifier]:
    """The same gate over many ranges; without a map also over wide ones, in which g alone may
    decide."""
    ranges = [
        (1 / (1 + high), 1 / (1 + low)) for low in thresholds for high in thresholds if low < high
    ]
    if model.logit_map is None:
        ranges += [(low, high) for low in (0.0, 0.3) for high in (0.8, 0.9, 1.0)]
    return [model.with_range(*ends, shift=shift) for ends in ranges for shift in shifts]


@dataclass(frozen=True)
class RangeSelection:
    """The selected range of a gate, and the robust model alone under the same attack."""

    selected: Selected
    robust: Selected
    target: Target
    attack: str  # a name of RANGE_ATTACKS

    @property
    def promise(self) -> str:
        """What the range reached on the images that selected it, to follow "it"."""
        missed = (
            "" if self.selected.met else f" (no range that was tried loses at most {self.target})"
        )
        return (
            f"kept {100 * self.selected.attacked:.1f} % of the {len(self.selected.survived)} images that selected "
            f"its range under {RANGE_ATTACKS[self.attack]}, the robust model {100 * self.robust.attacked:.1f} %"
            f"{missed}; that is optimistic and promises nothing, neither in expectation nor with any confidence, "
            "so evaluate it on other images"
        )

    def summary(self) -> SelectionSummary:
        """As stored in `summary.json`."""
        return self.selected.summary(robust_attacked=self.robust.attacked, promise=self.promise)

    def rows(self, data: Dataset) -> list[AttackRow]:
        """Both models on the images that selected the range, clean and under the attacks that
        did."""
        return [
            AttackRow(index=index, model=model, attack=attack, label=label, correct=is_correct)
            for model, mixture in (("robust", self.robust), ("mixed", self.selected))
            for attack, correct in (("clean", mixture.correct), (self.attack, mixture.survived))
            for index, label, is_correct in zip(
                data.index.tolist(), data.labels.tolist(), correct.tolist(), strict=True
            )
        ]


def select_range(
    model: GatedClassifier,
    data: Dataset,
    target: Target,
    conditions: Conditions,
    folder: Path | None = None,
    attack: str = "full",
) -> RangeSelection:
    """Select the most accurate range that loses at most `target` of the robust model's accuracy on
    these images.

    With the `full` attack a selection under the short one comes first, whose attacked images it
    keeps: few candidates are then left to attack at length. With a folder, an interrupted selection
    resumes.
    """
    short = CandidateEvaluator(data, conditions, candidate_attack, folder)
    alone = Selection(
        [MixedClassifier(model.accurate, model.robust, 1.0).to(conditions.device).eval()], short
    )
    ranges, robust = Selection(with_ranges(model), short), alone.select(clean=0.0)
    selected = ranges.select(robust=target.least_accuracy(robust.attacked))
    if attack == "full":
        full = CandidateEvaluator(
            data, conditions, full_attack, None if folder is None else folder / attack
        )
        robust = alone.under(full).select(clean=0.0)
        selected = ranges.under(full).select(robust=target.least_accuracy(robust.attacked), first=0)
    return RangeSelection(selected, robust, target, attack)
