"""Where candidates are judged: images that are never evaluated on, attacked once for each candidate."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from equipoise import models
from equipoise.attacks import Suite
from equipoise.core import memory, progress, rng
from equipoise.core.modes import inference
from equipoise.core.threat import Threat
from equipoise.data import Dataset, pixels
from equipoise.mixing import GatedClassifier, MixedClassifier, mix
from equipoise.models import formats


@dataclass(frozen=True)
class CandidateLogits:
    """Both sides and the gate's own answer on N images, whatever range, scale and shift turn it into an alpha."""

    g: Tensor  # (N, K) log-probabilities
    h: Tensor  # (N, K)
    u: Tensor  # (N,) the gate before scale and shift; zero without a gate
    y: Tensor  # (N,)

    def right(self, candidate: MixedClassifier) -> Tensor:
        """(N,) which images a candidate answers rightly."""
        gate = candidate.gate
        if isinstance(candidate, GatedClassifier):
            gate = candidate.ranged(candidate.scale * self.u + candidate.shift)
        return mix(self.g, self.h, gate.to(self.u.device)).argmax(dim=1) == self.y


@dataclass(frozen=True)
class CandidateEvaluator:
    """The images that choose, and what the adversary may do."""

    data: Dataset
    threat: Threat
    device: torch.device
    seed: int = 0
    batch_size: int = 128

    def look(self, model: MixedClassifier, images: Tensor | None = None) -> CandidateLogits:
        """What both sides say of the images, or of attacked ones in their place."""

        def some(rows: slice) -> tuple[Tensor, Tensor, Tensor]:
            x = pixels(self.data.images[rows].to(self.device)) if images is None else images[rows].to(self.device)
            if isinstance(model, GatedClassifier):
                g, h, z = model.parts(x)
                return g, h, (z - model.shift) / model.scale
            return (*model.both(x), x.new_zeros(len(x)))

        with inference(model), torch.no_grad():
            parts = [part for _, part in memory.in_batches(some, len(self.data), self.batch_size)]
        g, h, u = (torch.cat(side) for side in zip(*parts, strict=True))
        return CandidateLogits(g, h, u, self.data.labels.to(self.device))

    def struck(self, model: MixedClassifier, fold: Suite) -> CandidateLogits:
        """What both sides say of the images that an attack on this model leaves."""
        def some(rows: slice) -> Tensor:
            x = pixels(self.data.images[rows].to(self.device)).contiguous(memory_format=torch.channels_last)
            y = self.data.labels[rows].to(self.device)
            chance = rng.stream(self.seed, "candidates", self.data.index[rows].to(self.device))
            return fold(model, x, y, threat=self.threat, stream=chance)

        with progress.task(f"attacking a candidate (alpha {model.alpha:g})", total=len(self.data)) as task, \
                inference(model):
            images = []
            for rows, part in memory.in_batches(some, len(self.data), self.batch_size):
                images.append(part)
                task.advance(rows.stop - rows.start)
        return self.look(model, torch.cat(images))


class Pool:
    """Attacks on candidates, each made once: what lies in the folder is read, so that a choice can be stopped.

    Args:
        arena: images that are never evaluated on.
        strike: the attack on a candidate.
        folder: where what both sides said of the attacked images is kept; of one arena and one kind of attack.
    """

    def __init__(self, arena: CandidateEvaluator, strike: Callable[[MixedClassifier], Suite], folder: Path | None = None) -> None:
        self.arena, self.strike, self.folder = arena, strike, folder

    def struck(self, model: MixedClassifier) -> CandidateLogits:
        """What both sides say of the images that the attack on this model leaves."""
        if self.folder is None:
            return self.arena.struck(model, self.strike(model))
        path = self.folder / f"{hashlib.sha256(models.model_identity(model).encode()).hexdigest()[:24]}.safetensors"
        if not path.exists():
            seen = self.arena.struck(model, self.strike(model))
            self.folder.mkdir(parents=True, exist_ok=True)
            said = {"g": seen.g, "h": seen.h, "u": seen.u}
            formats.write_safetensors(path, {key: value.cpu().contiguous() for key, value in said.items()},
                                      {"mixture": model.extra_repr()})
        kept = {key: value.to(self.arena.device) for key, value in formats.read_safetensors(path)[0].items()}
        return CandidateLogits(kept["g"], kept["h"], kept["u"], self.arena.data.labels.to(self.arena.device))
