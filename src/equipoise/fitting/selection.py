"""Select among mixtures of one kind, such as the ranges of a gate, by their accuracy on held-out
images.

[Bai2024, D.1] sets α_min "by enforcing a desired level of either clean validation accuracy or
robustness". The robustness of a candidate is unknown before it is attacked, and attacking every one
is expensive. So attacked images are pooled: all candidates are scored on the whole pool, the best
one is attacked itself and its images join the pool, until the best candidate has been attacked. The
selected candidate has always been attacked itself.

The best of many candidates is optimistic on the images that selected it, so a selection promises
nothing about others.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from equipoise import models
from equipoise.attacks import Attack
from equipoise.core import checks, memory, progress, rng
from equipoise.core.modes import inference
from equipoise.core.results import SelectionSummary
from equipoise.data import Dataset, pixels
from equipoise.evaluation import Conditions
from equipoise.mixing import GatedClassifier, MixedClassifier, mix
from equipoise.models import checkpoint

FIRST = 3  # candidates attacked before any selection
ROUNDS = 6
TOLERANCE = 1e-6


@dataclass(frozen=True)
class CandidateLogits:
    """Outputs of both models and of the gate on N images; they serve all candidates with the same
    models and gate."""

    g: Tensor  # (N, K) log-probabilities
    h: Tensor  # (N, K)
    u: Tensor  # (N,) output of the gate before scale and shift; zero without a gate
    y: Tensor  # (N,)

    def correct(self, candidate: MixedClassifier) -> Tensor:
        """(N,) which images a candidate classifies correctly."""
        gate = candidate.gate
        if isinstance(candidate, GatedClassifier):
            gate = candidate.restrict_gate(candidate.scale * self.u + candidate.shift)
        return mix(self.g, self.h, gate.to(self.u.device)).argmax(dim=1) == self.y


class CandidateEvaluator:
    """Runs and attacks candidates on images that are never evaluated on; each attack is run once.

    `attack_for` gives the attack on a candidate. With a folder, which is for these images and this
    kind of attack only, outputs on attacked images are kept, so that an interrupted selection
    resumes.
    """

    def __init__(
        self,
        data: Dataset,
        conditions: Conditions,
        attack_for: Callable[[MixedClassifier], Attack],
        folder: Path | None = None,
    ) -> None:
        self.data, self.conditions, self.attack_for, self.folder = (
            data,
            conditions,
            attack_for,
            folder,
        )
        self.labels = data.labels.to(conditions.device)

    def clean(self, model: MixedClassifier) -> CandidateLogits:
        """Outputs on the clean images."""
        return self._outputs(model, None)

    def attacked(self, model: MixedClassifier) -> CandidateLogits:
        """Outputs on the images that the attack on this model returns."""
        if self.folder is None:
            return self._outputs(model, self._attack(model))
        identity = json.dumps(models.identity(model), sort_keys=True)
        path = self.folder / f"{hashlib.sha256(identity.encode()).hexdigest()[:24]}.safetensors"
        if not path.exists():
            logits = self._outputs(model, self._attack(model))
            self.folder.mkdir(parents=True, exist_ok=True)
            tensors = {name: getattr(logits, name).cpu().contiguous() for name in ("g", "h", "u")}
            checkpoint.write_safetensors(path, tensors, {"mixture": model.extra_repr()})
        stored = checkpoint.read_safetensors(path)[0]
        grid = (len(self.data), self.data.num_classes)
        expected = {"g": grid, "h": grid, "u": grid[:1]}
        checks.require(
            {
                name: tuple(value.shape)
                for name, value in stored.items()
                if value.is_floating_point()
            }
            == expected,
            str(path),
            "hold the outputs on these images (remove it to compute them again)",
            sorted(stored),
        )
        g, h, u = (stored[name].to(self.conditions.device) for name in expected)
        return CandidateLogits(g, h, u, self.labels)

    def _outputs(self, model: MixedClassifier, images: Tensor | None) -> CandidateLogits:
        device = self.conditions.device

        def outputs(rows: slice) -> tuple[Tensor, Tensor, Tensor]:
            x = (
                pixels(self.data.images[rows].to(device))
                if images is None
                else images[rows].to(device)
            )
            if isinstance(model, GatedClassifier):
                g, h, z = model.log_probabilities_and_gate(x)
                return g, h, (z - model.shift) / model.scale
            return (*model.log_probabilities(x), x.new_zeros(len(x)))

        with inference(model), torch.no_grad():
            parts = [
                part
                for _, part in memory.in_batches(
                    outputs, len(self.data), self.conditions.batch_size
                )
            ]
        g, h, u = (torch.cat(side) for side in zip(*parts, strict=True))
        return CandidateLogits(g, h, u, self.labels)

    def _attack(self, model: MixedClassifier) -> Tensor:
        """(N, C, H, W) the images that the attack on this model returns."""
        attack, conditions = self.attack_for(model), self.conditions

        def run(rows: slice) -> Tensor:
            x = pixels(self.data.images[rows].to(conditions.device))
            stream = rng.stream(
                conditions.seed, "candidates", self.data.index[rows].to(conditions.device)
            )
            return attack(model, x, self.labels[rows], threat=conditions.threat, stream=stream)

        title, images = f"attacking a candidate (alpha {model.alpha:g})", []
        with progress.stage(title, total=len(self.data)) as stage, inference(model):
            for rows, part in memory.in_batches(run, len(self.data), conditions.batch_size):
                images.append(part)
                stage.advance(rows.stop - rows.start)
        return torch.cat(images)


@dataclass(frozen=True)
class Selected:
    """A selected mixture and its accuracies on the images that selected it, which are
    optimistic."""

    model: MixedClassifier
    correct: Tensor  # (N,) bool: clean images classified correctly
    survived: Tensor  # (N,) bool: images classified correctly under every attack of the pool
    met: bool  # whether it reaches the target
    candidates_attacked: int

    @property
    def clean(self) -> float:
        """Clean accuracy."""
        return float(self.correct.float().mean())

    @property
    def attacked(self) -> float:
        """Accuracy under every attack of the pool."""
        return float(self.survived.float().mean())

    def summary(
        self, *, robust_attacked: float | None = None, promise: str | None = None
    ) -> SelectionSummary:
        """As stored in `summary.json`."""
        return SelectionSummary(
            clean=round(self.clean, 6),
            attacked=round(self.attacked, 6),
            met=self.met,
            mixture=self.model.extra_repr(),
            candidates_attacked=self.candidates_attacked,
            robust_attacked=robust_attacked,
            promise=promise,
        )


class Selection:
    """Selects among candidates that share both models, map and gate, and differ in alpha, range,
    scale or shift."""

    def __init__(
        self, candidates: Sequence[MixedClassifier], evaluator: CandidateEvaluator
    ) -> None:
        checks.require(len(candidates) > 0, "candidates", "not be empty", 0)
        self.candidates, self.evaluator = candidates, evaluator
        logits = evaluator.clean(candidates[0])
        self.correct = torch.stack([logits.correct(candidate) for candidate in candidates])
        self.survived = torch.ones_like(self.correct)
        self.clean = self.correct.float().mean(dim=1)
        self.attacked_candidates: list[int] = []

    def under(self, evaluator: CandidateEvaluator) -> Selection:
        """The same selection under another attack: what survived so far is kept, and no candidate
        counts as attacked.

        Select with `first=0` from it: the pool already says which candidates are worth an attack.
        """
        other = copy.copy(self)
        other.evaluator, other.survived, other.attacked_candidates = (
            evaluator,
            self.survived.clone(),
            [],
        )
        return other

    def select(
        self,
        *,
        robust: float | None = None,
        clean: float | None = None,
        rounds: int = ROUNDS,
        first: int = FIRST,
    ) -> Selected:
        """The candidate with the highest clean accuracy that reaches a robust one on the pool, or
        the other way round.

        Exactly one of both is given. After the `first` few, at most `rounds` candidates are
        attacked.
        """
        checks.require(
            (robust is None) != (clean is None),
            "robust or clean",
            "be given, one of them",
            (robust, clean),
        )
        if not self.attacked_candidates:
            order, last = self.clean.argsort(stable=True).tolist(), len(self.candidates) - 1
            for number in dict.fromkeys(
                order[last * place // (first + 1)] for place in range(1, first + 1)
            ):
                self._attack(number)
        for _ in range(rounds):
            number = _best(self.clean, self.robust, robust, clean)
            if number in self.attacked_candidates:
                break
            self._attack(number)
        attacked = torch.tensor(self.attacked_candidates, device=self.clean.device)
        number = self.attacked_candidates[
            _best(self.clean[attacked], self.robust[attacked], robust, clean)
        ]
        reached, target = (self.robust, robust) if robust is not None else (self.clean, clean)
        met = float(reached[number]) >= float(target or 0) - TOLERANCE
        return Selected(
            self.candidates[number],
            self.correct[number],
            self.survived[number],
            met,
            len(self.attacked_candidates),
        )

    @property
    def robust(self) -> Tensor:
        """(candidates,) accuracy over the pool so far."""
        return self.survived.float().mean(dim=1)

    def _attack(self, number: int) -> None:
        logits = self.evaluator.attacked(self.candidates[number])
        for row, candidate in enumerate(self.candidates):
            self.survived[row] &= logits.correct(candidate)
        self.attacked_candidates.append(number)


def _best(
    clean: Tensor, robust: Tensor, robust_target: float | None, clean_target: float | None
) -> int:
    """Of the candidates that reach the target the best in the other accuracy; otherwise the nearest
    to the target."""
    constrained, other, target = (
        (robust, clean, robust_target)
        if robust_target is not None
        else (clean, robust, clean_target)
    )
    reaches = constrained >= float(target or 0) - TOLERANCE
    # Ties in the first accuracy are broken by the second.
    score = torch.where(reaches, 10 + other + 1e-3 * constrained, constrained + 1e-3 * other)
    return int(score.argmax())
