"""Probe a classifier that was brought in: is its normalisation missing or done twice, are its
outputs probabilities?

A wrong normalisation is no error: the model runs, is a little or much less accurate, and every
number that follows is wrong. Some images are classified as they are, and again with another
normalisation or its inverse in front of the model. If that makes it significantly more accurate,
the user is warned.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core.checks import EquipoiseWarning
from equipoise.core.modes import inference
from equipoise.models.layers.normalization import Normalized
from equipoise.models.loaded import info_of
from equipoise.models.outputs import select_logits

IMAGES = 64  # that are classified, eight times each or a little more
BATCH = 16  # images in a pass at most
SIGNIFICANCE = 1e-3  # of the paired sign test of a finding, over all alternatives
# Common means and standard deviations of images in [0, 1].
NORMALISATIONS = {
    "ImageNet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "CIFAR-10": ((0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)),
    "[-1, 1]": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}


@dataclass(frozen=True)
class Finding:
    """What the probe suspects, with the accuracies that it compared, if any."""

    sentence: str
    accuracy: float | None = None
    alternative: float | None = None
    count: int = 0

    def __str__(self) -> str:
        numbers = (
            ""
            if self.accuracy is None or self.alternative is None
            else (
                f": {self.accuracy:.0%} of {self.count} images are classified correctly as they are, "
                f"{self.alternative:.0%} otherwise"
            )
        )
        return f"{self.sentence}{numbers}"


def probe(
    model: nn.Module, images: Tensor, labels: Tensor, batch_size: int = BATCH
) -> list[Finding]:
    """Look for a wrong normalisation, and for probabilities in place of logits.

    Args:
        model: images in [0, 1] → logits.
        images: (B, C, H, W) in [0, 1], on the device of the model; the first :data:`IMAGES` are
            used.
        labels: (B,) of these images.
        batch_size: images per pass, at most :data:`BATCH`.
    """
    x, y = images[:IMAGES], labels[:IMAGES]

    def classify(x: Tensor) -> Any:
        outputs = [select_logits(model(part)) for part in x.split(min(batch_size, BATCH))]
        return torch.cat(outputs) if all(isinstance(output, Tensor) for output in outputs) else None

    with (
        inference(model),
        torch.no_grad(),
        torch.random.fork_rng(devices=[x.device] if x.is_cuda else []),
    ):
        z = classify(x)
        if (
            not isinstance(z, Tensor)
            or z.dim() != 2
            or len(z) != len(y)
            or not z.is_floating_point()
        ):
            return []  # classes only, or nonsense, which is refused elsewhere
        findings = (
            [
                Finding(
                    "its outputs look like probabilities, not logits: they lie in [0, 1] and add up to 1; "
                    "return the logits, or their logarithm"
                )
            ]
            if are_probabilities(z)
            else []
        )
        correct = z.argmax(1) == y
        tried = []
        for sentence, other in _alternatives(model, x):
            with suppress(Exception):  # a model may refuse values outside of [0, 1]
                tried.append((sentence, classify(other).argmax(1) == y))
    sentence, best = max(tried, key=lambda pair: int(pair[1].sum()), default=("", correct))
    if _p_value(correct, best) * len(tried) < SIGNIFICANCE and tried:
        findings.append(
            Finding(sentence, float(correct.float().mean()), float(best.float().mean()), len(y))
        )
    return findings


def warn_of_findings(
    models: Mapping[str, nn.Module], images: Tensor, labels: Tensor, batch_size: int = BATCH
) -> None:
    """Probe the models that were loaded from elsewhere, and warn of what is found.

    Models of the zoo hold their own normalisation, and every image costs a remote model a request:
    they are not probed.
    """
    for name, model in models.items():
        info = info_of(model)
        if info is not None and not info.of_zoo and not info.is_remote:
            for finding in probe(model, images, labels, batch_size):
                warnings.warn(f"{name}: {finding}", EquipoiseWarning, stacklevel=3)


def are_probabilities(outputs: Tensor) -> bool:
    """Whether every row (B, K) is a distribution over the classes; classes alone, written as 0 and
    1, are none."""
    z = outputs.double()
    is_distribution = bool((z >= 0).all()) and bool(((z.sum(1) - 1).abs() < 1e-3).all())
    return is_distribution and not bool(((z == 0) | (z == 1)).all())


def _alternatives(model: nn.Module, x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What may be wrong, and the images that would then be classified better."""
    known = (
        dict(NORMALISATIONS)
        if x.shape[1] == 3
        else {"[-1, 1]": ((0.5,) * x.shape[1], (0.5,) * x.shape[1])}
    )
    own = next(
        (
            part
            for part in model.modules()
            if isinstance(part, Normalized)
            and part.mean.shape[1] == x.shape[1]
            and not (bool((part.mean == 0).all()) and bool((part.std == 1).all()))
        ),
        None,
    )
    if own is not None:
        known["its own"] = (tuple(own.mean.flatten().tolist()), tuple(own.std.flatten().tolist()))
    for name, numbers in known.items():
        mean, std = (
            torch.tensor(values, dtype=x.dtype, device=x.device).view(1, -1, 1, 1)
            for values in numbers
        )
        given = (
            ",".join(f"{number:g}" for number in numbers[0]),
            ",".join(f"{number:g}" for number in numbers[1]),
        )
        words = f"mean {given[0]}, std {given[1]}, {name}"
        yield f"its normalisation seems to be missing ({words})", (x - mean) / std
        yield f"its images seem to be normalised twice ({words})", x * std + mean
    yield "it seems to take pixels from 0 to 255", x * 255


def _p_value(correct: Tensor, alternative: Tensor) -> float:
    """Of the one-sided sign test: that so many more images are classified correctly by chance."""
    gained, lost = int((alternative & ~correct).sum()), int((correct & ~alternative).sum())
    n = gained + lost
    return float(sum(math.comb(n, k) for k in range(gained, n + 1)) / 2**n)
