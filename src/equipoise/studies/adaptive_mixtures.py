"""Mixtures of one pair of models, selected to be equally robust on held-out images and stored on
disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from equipoise import fitting
from equipoise.attacks import Attack, Suite
from equipoise.core import checks, config, files, serialize
from equipoise.core.results import SelectionSummary
from equipoise.evaluation import Conditions
from equipoise.fitting.gated import (
    BOTH_SIDES,
    CANDIDATE_ATTACK,
    SHIFTS,
    THRESHOLDS,
    candidate_attack,
    with_ranges,
)
from equipoise.fitting.selection import CandidateEvaluator, Selection
from equipoise.mixing import GatedClassifier, LogitMap, MixedClassifier, save_mixture
from equipoise.mixing.folder import load_mixture
from equipoise.mixing.provenance import RULES
from equipoise.studies.study import Pair, require_part

SWITCH = RULES["switch"]
FIXED, GATED = ("plain", SWITCH), ("gate", f"gate on the {SWITCH}")
MIXTURES = (*FIXED, *GATED)


@dataclass(frozen=True)
class SelectionSize:
    """Which candidates there are, and how they are attacked; the defaults are the full size."""

    keep: float = (
        0.93  # share of the robust model's attacked accuracy that the compared mixtures keep
    )
    plain_alphas: tuple[float, ...] = tuple(round(0.5 + 0.01 * step, 2) for step in range(50))
    switch_thresholds: tuple[float, ...] = tuple(round(0.02 * step, 2) for step in range(1, 49))
    gate_thresholds: tuple[float, ...] = THRESHOLDS
    gate_shifts: tuple[float, ...] = SHIFTS
    rounds: int = 6  # candidates of one mixture attacked at most, for every share
    attack: Suite = CANDIDATE_ATTACK
    both_sides: tuple[Attack, ...] = BOTH_SIDES
    map_steps: int = 50  # of the attack that fits the map
    map_targets: int = 9


class MixtureStore:
    """Selected mixtures, one folder for each of :data:`MIXTURES` and each share of the robust
    model's accuracy.

    They are selected on the held-out images of the pair; `trained_gate` gives the gate, where one
    is needed.
    """

    def __init__(
        self,
        folder: Path,
        pair: Pair,
        size: SelectionSize,
        conditions: Conditions,
        trained_gate: Callable[[], GatedClassifier],
    ) -> None:
        self.folder, self.pair, self.size, self.conditions = folder, pair, size, conditions
        self.trained_gate = trained_gate
        self.evaluator = CandidateEvaluator(
            pair.held_out,
            conditions,
            lambda model: candidate_attack(model, size.attack, size.both_sides),
            folder / "pool",
        )

    def select(self, shares: Sequence[float], names: Sequence[str] = MIXTURES) -> None:
        """Of each mixture the most accurate one that keeps each share; those in the store are not
        selected again."""
        for name in names:
            if missing := [share for share in shares if not self._path(name, share).exists()]:
                selection = Selection(self.candidates(name), self.evaluator)
                for share in missing:
                    target = share * self.robust_accuracy
                    selected = selection.select(robust=target, rounds=self.size.rounds)
                    accurate, robust = self.pair.references
                    save_mixture(
                        self._path(name, share).parent,
                        selected.model,
                        accurate=accurate,
                        robust=robust,
                    )
                    summary = serialize.to_plain(selected.summary(keep=share, target=target))
                    files.write_atomic(
                        self._path(name, share), json.dumps(summary, indent=1) + "\n"
                    )

    @cached_property
    def robust_accuracy(self) -> float:
        """Accuracy of the robust model on the held-out images, under the attack on candidates."""
        alone = self.mixture(1.0)
        return float(self.evaluator.attacked(alone).correct(alone).float().mean())

    def candidates(self, name: str) -> list[MixedClassifier]:
        """The mixtures from which one is selected."""
        size = self.size
        if name == "plain":
            return [self.mixture(alpha) for alpha in size.plain_alphas]
        if name == "gate":
            return with_ranges(self.trained_gate(), size.gate_thresholds, size.gate_shifts)
        fitted = self._fit_switch()
        if name == SWITCH:
            return [
                self.mixture(
                    1 / (1 + q),
                    logit_map=fitted.logit_map,
                    hard=True,
                    surrogate_alpha=fitted.surrogate_alpha,
                )
                for q in size.switch_thresholds
            ]
        return with_ranges(
            self.trained_gate().with_settings_of(fitted), size.gate_thresholds, size.gate_shifts
        )

    def mixture(self, alpha: float, **settings: Any) -> MixedClassifier:
        """The pair mixed with one alpha; plain mixing if there are no further settings."""
        model = MixedClassifier(self.pair.accurate, self.pair.robust, alpha, **settings)
        return model.to(self.conditions.device).eval()

    def _fit_switch(self) -> MixedClassifier:
        """The confidence switch, fitted on the held-out images for the loss that is allowed
        here."""
        conditions = self.conditions
        points = 100 * (1 - self.size.keep) * self.robust_accuracy
        fitted = fitting.fit(
            *self.pair.references,
            self.pair.held_out,
            threat=conditions.threat,
            lose_at_most=points,
            rule="switch",
            out=self.folder / "switch-fit",
            device=conditions.device,
            batch_size=conditions.batch_size,
            seed=conditions.seed,
            steps=self.size.map_steps,
            targets=self.size.map_targets,
        ).mixture
        return self.mixture(
            fitted.alpha,
            hard=True,
            logit_map=nearest_map(fitted, points),
            surrogate_alpha=fitted.surrogate_alpha,
        )

    def _path(self, name: str, share: float) -> Path:
        return self.folder / f"{name.replace(' ', '-').lower()}-{share:g}" / "selection.json"

    def load(self, name: str, share: float | None = None) -> MixedClassifier:
        """The mixture that was selected to keep a share, that of the comparison if none is
        given."""
        path = self._path(name, self.size.keep if share is None else share)
        require_part(path.exists(), "choose")
        model = load_mixture(path.parent, bases=(self.pair.accurate, self.pair.robust))
        return model.to(self.conditions.device).eval()

    def selections(self) -> dict[str, SelectionSummary]:
        """The selected mixtures of the comparison, and what they reached on the images that
        selected them."""
        paths = {name: self._path(name, self.size.keep) for name in MIXTURES}
        return {
            name: serialize.from_plain(SelectionSummary, config.read_json(path), str(path))
            for name, path in paths.items()
            if path.exists()
        }


def nearest_map(mixture: MixedClassifier, points: float) -> LogitMap:
    """The map of a fitted mixture, or of its frontier the one that was fitted for the nearest loss.

    A fit that does not help is the robust model alone. Its frontier still has maps, which are
    selected and evaluated here: without a map plain mixing would be compared under the name of the
    switch. `points` of 100 may be lost.
    """
    if mixture.logit_map is not None:
        return mixture.logit_map
    checks.require(
        bool(mixture.frontier),
        "models",
        f"allow a {SWITCH} on the held-out images, for any loss",
        "no map",
    )
    return min(
        mixture.frontier, key=lambda point: abs(100 * point.lose_at_most - points)
    ).logit_map()
