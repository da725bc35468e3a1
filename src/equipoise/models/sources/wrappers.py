"""Schemes around another reference, `scheme:OWN:REFERENCE`: test-time augmentation and randomized
smoothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from equipoise.core import checks
from equipoise.models.layers.smoothed import MAX_SAMPLES, SAMPLES, RandomlySmoothedClassifier
from equipoise.models.layers.tta import SHIFTS, TTAClassifier
from equipoise.models.options import LoadOptions


def _smooth(network: nn.Module, own: str, options: LoadOptions) -> nn.Module:
    sigma, samples, fresh = *own.split(","), *("", "")[own.count(",") :]
    return RandomlySmoothedClassifier(
        network,
        checks.positive("sigma", checks.fraction("sigma", sigma)),
        checks.whole("samples", int(samples or SAMPLES), least=1, most=MAX_SAMPLES),
        seed=options.seed or 0,
        fresh=bool(fresh),
    )


@dataclass(frozen=True)
class Wrapper:
    """A scheme around another reference, scheme:OWN:REFERENCE; what OWN looks like, as a pattern
    and in words."""

    wrap: Callable[[nn.Module, str, LoadOptions], nn.Module]
    pattern: str
    words: str


WRAPPERS = {
    "tta": Wrapper(
        lambda network, own, options: TTAClassifier(network, int(own)),
        "|".join(map(str, SHIFTS)),
        f"tta:N:REFERENCE with N among {', '.join(map(str, SHIFTS))}",
    ),
    "smoothed": Wrapper(
        _smooth,
        r"[0-9][^,]{0,30}(,[0-9]{1,9}(,fresh)?)?",
        "smoothed:SIGMA:REFERENCE, smoothed:SIGMA,N:REFERENCE or smoothed:SIGMA,N,fresh:REFERENCE",
    ),
}
