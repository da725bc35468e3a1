"""Both models on the fitting images: clean once, then at the points where an adversary comes nearest."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equipoise import models
from equipoise.attacks import minimum_margin
from equipoise.core import checks, memory, progress, rng
from equipoise.core.checks import InputError
from equipoise.core.modes import inference
from equipoise.core.threat import Threat
from equipoise.data import Dataset, pixels
from equipoise.fitting.cache import Cache, enough
from equipoise.mixing import LogitMap, MixedClassifier
from equipoise.mixing.surrogate import Surrogate

PAIR_ALPHA = 0.9  # weight of the robust side in the gradients of an attack on both: of .3 … .99 the strongest


@dataclass(frozen=True)
class AttackStrength:
    """How hard the margin attack works."""

    steps: int = 50
    targets: int = 9
    pool: int = 3  # points kept per image and attack
    gradient_free: bool = False

    def __post_init__(self) -> None:
        checks.whole("steps", self.steps, least=1)
        checks.whole("targets", self.targets, least=1)
        checks.whole("pool", self.pool, least=1)


@dataclass(frozen=True, eq=False)
class MarginAttack:
    """Two models, the images to fit on, and what the adversary may do."""

    accurate: nn.Module
    robust: nn.Module
    data: Dataset
    threat: Threat
    device: torch.device
    seed: int = 0
    batch_size: int = 128
    strength: AttackStrength = AttackStrength()

    def __post_init__(self) -> None:
        for model in (self.accurate, self.robust):
            model.to(self.device)

    def probe(self) -> None:
        """Count the images, and show both models one: h must answer with logits, g with logits or classes."""
        enough(len(self.data))
        image = pixels(self.data.images[:1].to(self.device))
        for side, model, dims, must in (("robust", self.robust, (2,), "logits (B, K)"),
                                        ("accurate", self.accurate, (1, 2), "logits (B, K) or classes (B,)")):
            told = models.probe(side, model, image)
            checks.require(told.dim() in dims and len(told) == 1, side, f"answer with {must}",
                           f"shape {tuple(told.shape)} for one image")

    def clean(self) -> Cache:
        """Logits of h and classes of g on the clean images; no attacked points yet."""
        with inference(self.accurate, self.robust), torch.no_grad():
            pairs = [pair for _, pair in memory.in_batches(
                lambda rows: self._answers(pixels(self.data.images[rows].to(self.device))), len(self.data),
                self.batch_size)]
        clean, g = (torch.cat(side) for side in zip(*pairs, strict=True))
        soft = g if g.dim() == 2 else None
        return Cache(clean, clean.new_empty(0, *clean.shape), self.data.labels, self.data.index, _classes(g),
                     soft=soft)

    def _answers(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h, g = self.robust(x).float(), self.accurate(x)
        if not bool(h.isfinite().all()):
            raise InputError("the robust model must answer with finite logits, got NaN or inf")
        if g.dim() == 2:
            checks.require(g.shape == h.shape, "accurate and robust", "have equal numbers of classes",
                           (g.shape[1], h.shape[1]))
            if not bool(g.isfinite().all()):
                raise InputError("the accurate model must answer with finite logits, got NaN or inf")
        else:
            g = checks.labels(g, h.shape[1], len(x), "classes of the accurate model").long()
        return h.cpu(), g.cpu()

    def has_gradients(self) -> bool:
        """Whether h can be differentiated: its logits know where they come from."""
        x = pixels(self.data.images[:1].to(self.device)).requires_grad_()
        with inference(self.robust), torch.enable_grad():
            return bool(self.robust(x).requires_grad)

    def on(self, rows: Tensor) -> MarginAttack:
        """The same with some of the images."""
        return dataclasses.replace(self, data=self.data.take(rows))

    def nearest(self, logit_map: LogitMap, *, both: bool = False) -> tuple[Tensor, Tensor]:
        """Points of the smallest margin, as h and g see them.

        Args:
            logit_map: of the robust side.
            both: attack the accurate side too: the smallest margin of M(h) against the class that g names
                there. A mixture with α = 1/2 is wrong wherever g is, so its margin orders such points by that
                of M(h) alone, for every threshold.

        Returns:
            (P, N, K) logits of h and (P, N) classes of g.
        """
        model: nn.Module = nn.Sequential(self.robust, logit_map.to(self.device))
        surrogate = None
        if both:
            model = MixedClassifier(self.accurate, self.robust, 0.5, logit_map=logit_map, hard=True).to(self.device)
            surrogate = Surrogate(self.accurate, self.robust, logit_map, PAIR_ALPHA)
        # To a switch all other classes are one.
        targets = 1 if logit_map.flat else self.strength.targets
        found: list[tuple[Tensor, Tensor]] = []
        name = "attacking both sides" if both else "attacking the robust side"
        with progress.task(name, total=len(self.data)) as task:

            def attack(rows: slice) -> tuple[Tensor, Tensor]:
                part = self.data.take(torch.arange(rows.start, rows.stop))
                x, y = pixels(part.images.to(self.device)), part.labels.to(self.device)
                points = minimum_margin(
                    model, x, y, threat=self.threat, stream=rng.stream(self.seed, "fit", part.index.to(self.device)),
                    surrogate=surrogate,
                    pool=self.strength.pool, steps=self.strength.steps, targets=targets,
                    gradient_free=self.strength.gradient_free, spare_broken=not both)
                with inference(self.accurate, self.robust), torch.no_grad():
                    told = [self._answers(at) for at in points.images]
                return torch.stack([h for h, _ in told]), torch.stack([_classes(g) for _, g in told])

            for rows, pair in memory.in_batches(attack, len(self.data), self.batch_size):
                found.append(pair)
                task.advance(rows.stop - rows.start)
        return torch.cat([h for h, _ in found], dim=1), torch.cat([g for _, g in found], dim=1)


def _classes(g: Tensor) -> Tensor:
    return g.argmax(dim=1) if g.dim() == 2 else g
