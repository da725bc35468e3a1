"""Mixtures selected by attacks on the fitting images: the alpha of plain mixing, and the ranges of
gates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from torch import nn

from equipoise import models
from equipoise.core import checks, config, files, serialize
from equipoise.core.results import SelectionSummary
from equipoise.data import Dataset
from equipoise.evaluation import Conditions
from equipoise.fitting.conformal import Target
from equipoise.fitting.gated import RANGE_ATTACKS, full_attack
from equipoise.fitting.selection import Selected, Selection
from equipoise.mixing import MixedClassifier, Provenance, save_mixture
from equipoise.mixing.folder import NAME, load_mixture
from equipoise.models import Normalized, checkpoint
from equipoise.studies.attack_list import folder_name
from equipoise.studies.shared_pool import SharedPool

FILE = "selection.json"


@dataclass(frozen=True, eq=False)
class MixtureSelector:
    """Selects mixtures of one pair for one target and stores each under `mixtures/`; all share one
    pool."""

    folder: Path
    bases: tuple[nn.Module, nn.Module]
    data: Dataset  # the images that select
    conditions: Conditions
    target: Target
    rounds: int
    attack: str  # a name of RANGE_ATTACKS
    keep: bool  # whether the folder outlives the comparison
    promises: dict[str, str] = field(default_factory=dict)  # by the name of the selection

    @cached_property
    def pool(self) -> SharedPool:
        """The attacked images of all selections."""
        return SharedPool(self.data, self.conditions, self.folder / "pool")

    @cached_property
    def full_pool(self) -> SharedPool:
        """The same under the attacks of an evaluation."""
        return SharedPool(self.data, self.conditions, self.folder / "pool-full", full_attack)

    @cached_property
    def alone(self) -> MixedClassifier:
        """The robust model as a mixture."""
        return MixedClassifier(*self.bases, 1.0).to(self.conditions.device).eval()

    def select(
        self, name: str, family: str, candidates: Sequence[MixedClassifier]
    ) -> MixedClassifier:
        """The most accurate candidate that reaches the target on these images, selected now or
        earlier."""
        path = self.folder / "mixtures" / folder_name(name) / FILE
        identity = models.identity(candidates[0])
        if path.exists() and (path.parent / NAME).exists():
            stored = config.read_json(path)
            checks.require(
                stored.get("of") == identity,
                "out",
                f"be a new folder: {path.parent} holds a selection among other mixtures",
                str(self.folder),
            )
            summary = serialize.from_plain(SelectionSummary, stored["summary"], str(path))
            model = load_mixture(path.parent, bases=self.bases).to(self.conditions.device)
        else:
            selected, robust = self._select(name, family, candidates)
            model = selected.model
            summary = selected.summary(
                robust_attacked=robust, promise=_kept(selected, robust, self.attack)
            )
            model.provenance = Provenance.of(self.data, summary.promise or "")
            if self.keep:
                accurate, robust_reference = self._references()
                save_mixture(path.parent, model, accurate=accurate, robust=robust_reference)
                content = {"of": identity, "summary": serialize.to_plain(summary)}
                files.write_atomic(path, json.dumps(content, indent=1) + "\n")
        self.promises[name] = summary.promise or ""
        return model

    def _select(
        self, name: str, family: str, candidates: Sequence[MixedClassifier]
    ) -> tuple[Selected, float]:
        """The selected candidate, and the accuracy of the robust model alone; the full attack
        follows the short one."""
        robust = self.pool.accuracy(self.alone, "robust")
        ranges = Selection(candidates, self.pool)
        selected = self.pool.select(
            name, family, ranges, self.target.least_accuracy(robust), self.rounds
        )
        if self.attack == "short":
            return selected, robust
        robust = self.full_pool.accuracy(self.alone, "robust")
        ranges = ranges.under(self.full_pool)
        least = self.target.least_accuracy(robust)
        return self.full_pool.select(name, family, ranges, least, self.rounds, first=0), robust

    def _references(self) -> list[str]:
        """References of the accurate and the robust base; a model without one is saved in the run
        folder."""
        references = []
        for side, base in zip(("accurate", "robust"), self.bases, strict=True):
            path = self.folder / f"{side}.safetensors"
            if (
                models.reference_of(base) is None
                and isinstance(base, Normalized)
                and not path.exists()
            ):
                checkpoint.save(path, base)
            references.append(models.reference_of(base) or f"file:{path}")
        return references


def _kept(selected: Selected, robust: float, attack: str) -> str:
    missed = (
        "" if selected.met else " (below the target, which no candidate that was tried reaches)"
    )
    return (
        f"kept {100 * selected.attacked:.1f} % of the {len(selected.survived)} images that selected it under "
        f"{RANGE_ATTACKS[attack]}{missed}, the robust model {100 * robust:.1f} %; it promises nothing"
    )
