"""Four kinds of mixtures of one pair, chosen to be equally robust on held-out images, and kept on disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from equipoise import fitting, mixing
from equipoise.core import checks, records
from equipoise.evaluation import Conditions
from equipoise.fitting.candidates import CandidateEvaluator, Pool
from equipoise.fitting.gated import ranged, strike
from equipoise.fitting.run import fit_into
from equipoise.fitting.selection import Selected, Selection
from equipoise.mixing import GatedClassifier, MixedClassifier
from equipoise.studies.adaptive_size import AdaptiveStudySize
from equipoise.studies.local_pair import Pair

FIXED, GATED = ("plain", "MixedNUTS"), ("gate", "gate on MixedNUTS")
KINDS = (*FIXED, *GATED)


class MixtureStore:
    """One folder per kind and share; what is there is not chosen again."""

    def __init__(self, folder: Path, pair: Pair, size: AdaptiveStudySize, conditions: Conditions) -> None:
        self.folder, self.pair, self.size, self.conditions = folder, pair, size, conditions

    def choose(self, gate: Callable[[], GatedClassifier], shares: Sequence[float],
               kinds: Sequence[str] = KINDS) -> None:
        """Each kind the most accurate that keeps the same share of h's robustness on held-out images."""
        for kind in kinds:
            if missing := [share for share in shares if not self._path(kind, share).exists()]:
                contest = Selection(self._candidates(kind, gate), self._pool())
                for share in missing:
                    found = contest.choose(robust=share * self._standard(), rounds=self.size.rounds)
                    self._keep(kind, share, found)

    def arena(self) -> CandidateEvaluator:
        """The held-out images; none of them is evaluated on."""
        return CandidateEvaluator(self.pair.held_out, self.conditions.threat, self.conditions.device, self.conditions.seed,
                     self.conditions.batch_size)

    def _pool(self) -> Pool:
        return Pool(self.arena(), lambda model: strike(model, self.size.strike(), self.size.both()),
                    self.folder / "pool")

    def _standard(self) -> float:
        """Robust accuracy of h on the held-out images, under the attack that candidates meet."""
        path = self.folder / "robust.json"
        if not path.exists():
            alone = MixedClassifier(self.pair.accurate, self.pair.robust, 1.0).to(self.conditions.device).eval()
            _write(path, {"attacked": float(self._pool().struck(alone).right(alone).float().mean())})
        return float(_read(path)["attacked"])

    def _candidates(self, kind: str, trained: Callable[[], GatedClassifier]) -> list[MixedClassifier]:
        pair, size = self.pair, self.size
        if kind == "plain":
            return [self.placed(MixedClassifier(pair.accurate, pair.robust, alpha)) for alpha in size.plain]
        if kind == "gate":
            return ranged(trained(), size.gaps, size.shifts)
        nuts = self._nuts()
        if kind == "MixedNUTS":
            return [self.placed(MixedClassifier(pair.accurate, pair.robust, 1 / (1 + q), logit_map=nuts.logit_map,
                                                 hard=True, surrogate_alpha=nuts.surrogate_alpha))
                    for q in size.thresholds]
        return ranged(trained().on(nuts), size.gaps, size.shifts)

    def placed(self, model: MixedClassifier) -> MixedClassifier:
        """Where it is computed, in evaluation mode."""
        return model.to(self.conditions.device).eval()

    def _nuts(self) -> MixedClassifier:
        """The map of MixedNUTS, fitted on the held-out images for the loss that is allowed here.

        A fit that its own guard calls no help answers with h alone. Its frontier still has maps, and a contest judges
        them here, so the one for the nearest loss is taken: without a map there would be no MixedNUTS to compare.
        """
        pair, conditions = self.pair, self.conditions
        points = 100 * (1 - self.size.keep) * self._standard()
        kept = fit_into(self.folder / "nuts-fit", pair.references, pair.held_out, threat=conditions.threat,
                        target=fitting.lose_at_most(points), device=conditions.device, batch_size=conditions.batch_size,
                        settings=fitting.FitSettings(seed=conditions.seed, strength=fitting.AttackStrength(*self.size.nuts)))
        logit_map = kept.logit_map
        if logit_map is None and kept.frontier:
            logit_map = min(kept.frontier, key=lambda point: abs(100 * point.lose_at_most - points)).logit_map()
        return self.placed(MixedClassifier(pair.accurate, pair.robust, kept.alpha, logit_map=logit_map, hard=True,
                                            surrogate_alpha=kept.surrogate_alpha))

    def _path(self, kind: str, share: float | None = None) -> Path:
        share = self.size.keep if share is None else share
        return self.folder / f"{kind.replace(' ', '-').lower()}-{share:g}" / "match.json"

    def _keep(self, kind: str, share: float, found: Selected) -> None:
        path = self._path(kind, share)
        mixing.save(path.parent, found.model, accurate=self.pair.references[0], robust=self.pair.references[1])
        _write(path, {**found.facts(), "keep": share, "target": share * self._standard()})

    def kept(self, kind: str, share: float | None = None) -> MixedClassifier:
        """The mixture of a kind that was chosen to keep this share."""
        path = self._path(kind, share)
        if not path.exists():
            raise checks.InputError("`part` must come after the part choose, which this study has not done yet")
        return self._loaded(path.parent)

    def _loaded(self, folder: Path) -> MixedClassifier:
        model = mixing.load(f"mixture:{folder}")
        assert isinstance(model, MixedClassifier)
        return self.placed(model)

    def told(self) -> dict[str, Any]:
        """What was chosen, and what it reached on the images that chose it."""
        return {kind: _read(self._path(kind)) for kind in KINDS if self._path(kind).exists()}


def _read(path: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return told


def _write(path: Path, told: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    records.write(path, json.dumps(told, indent=1) + "\n")
