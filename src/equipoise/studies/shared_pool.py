"""Selections on one pool of attacked images: what was found against one mixture is tried on all
later ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from equipoise.attacks import Attack
from equipoise.core import checks
from equipoise.data import Dataset
from equipoise.evaluation import Conditions
from equipoise.fitting.gated import candidate_attack
from equipoise.fitting.selection import FIRST, CandidateEvaluator, Selected, Selection
from equipoise.mixing import MixedClassifier
from equipoise.models import checkpoint


class SharedPool(CandidateEvaluator):
    """Attacks candidates of several selections and keeps the attacked images of all of them in a
    folder."""

    def __init__(
        self,
        data: Dataset,
        conditions: Conditions,
        folder: Path,
        attack_for: Callable[[MixedClassifier], Attack] | None = None,
    ) -> None:
        super().__init__(data, conditions, attack_for or candidate_attack, folder)
        self.images, self.selection, self.family = folder / "images", "", ""

    def _attack(self, model: MixedClassifier) -> Tensor:
        attacked = super()._attack(model)
        self.images.mkdir(parents=True, exist_ok=True)
        number = len(list(self.images.glob("*.safetensors")))
        checkpoint.write_safetensors(
            self.images / f"{number:04d}.safetensors",
            {"images": attacked.cpu().contiguous()},
            {"selection": self.selection, "family": self.family},
        )
        return attacked

    def _stored(self) -> list[tuple[Tensor, dict[str, str]]]:
        """Attacked images of other selections than the present one, with what they were found
        for."""
        stored = []
        for path in sorted(self.images.glob("*.safetensors")):
            tensors, metadata = checkpoint.read_safetensors(path)
            shapes = {name: tuple(value.shape) for name, value in tensors.items()}
            valid = shapes == {"images": tuple(self.data.images.shape)} and {
                "selection",
                "family",
            } <= set(metadata)
            checks.require(valid, str(path), "hold attacked images of these selections", shapes)
            if metadata["selection"] != self.selection:
                stored.append((tensors["images"], metadata))
        return stored

    def select(
        self,
        selection: str,
        family: str,
        candidates: Selection | Sequence[MixedClassifier],
        robust: float,
        rounds: int,
        first: int = FIRST,
    ) -> Selected:
        """The most accurate candidate that keeps this robust accuracy on the pool; it has been
        attacked itself.

        The first selection of a family begins with attacks on `first` candidates; later ones begin
        with its images.
        """
        self.selection, self.family = selection, family
        stored, own = (
            self._stored(),
            candidates if isinstance(candidates, Selection) else Selection(candidates, self),
        )
        for images, _ in stored:
            logits = self._outputs(own.candidates[0], images)
            own.survived &= torch.stack([logits.correct(candidate) for candidate in own.candidates])
        is_first = all(metadata["family"] != family for _, metadata in stored)
        return own.select(robust=robust, rounds=rounds, first=first if is_first else 0)

    def accuracy(self, model: MixedClassifier, name: str) -> float:
        """Accuracy of one model under the attack on it."""
        self.selection = self.family = name
        return float(self.attacked(model).correct(model).float().mean())
