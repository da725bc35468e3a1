"""What is asked of a certificate: the noise, the samples, the failure probability, and when to stop."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from equipoise.core import checks


@dataclass(frozen=True)
class SmoothingPlan:
    """How a smoothed classifier is certified; `sigma` and all radii are in units of [0, 1] pixels, in ℓ2.

    Args:
        sigma: standard deviation of the Gaussian noise.
        samples: noisy copies of an image that bound its class probability [Cohen2019: n]; the most, where
            `tolerance` or `decide_radius` may end earlier.
        n0: noisy copies that choose the class; they are never counted again.
        failure: probability with which the certificate of an image may be wrong.
        alpha: weight of the smoothed side in a mixture with an arbitrary classifier; 1 is no mixture.
        tolerance: stop when the radius is within this of what all `samples` would be expected to give.
        decide_radius: stop when it is decided whether the radius reaches this.
        two_sided: bound the other classes as well, half of the failure for each side.
        soft: smooth probabilities instead of votes.
        sound: draw noise whose sum with an 8-bit image is exact in floating point.
    """

    sigma: float
    samples: int = 100_000
    n0: int = 100
    failure: float = 0.001
    alpha: float = 1.0
    tolerance: float | None = None
    decide_radius: float | None = None
    two_sided: bool = False
    soft: bool = False
    sound: bool = False

    def __post_init__(self) -> None:
        checks.positive("sigma", self.sigma)
        checks.whole("n0", self.n0, least=1)
        checks.whole("samples", self.samples, least=1)
        checks.require(self.samples >= self.n0, "samples", f"be at least n0, {self.n0}", self.samples)
        checks.strictly_within("failure", self.failure, 0, 1)
        checks.require(0.5 <= self.alpha <= 1, "alpha", "lie in [0.5, 1] for a certificate", self.alpha)
        if self.tolerance is not None:
            checks.positive("tolerance", self.tolerance)
        if self.decide_radius is not None:
            checks.positive("decide_radius", self.decide_radius)
            checks.require(self.tolerance is None, "decide_radius", "be left out beside `tolerance`",
                           self.decide_radius)
        checks.require(not (self.soft and self.two_sided), "two_sided", "be left out beside `soft`", self.two_sided)

    def facts(self) -> dict[str, Any]:
        """As it stands in `run.toml`; settings that are off are left out."""
        told = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in told.items() if value is not None and value is not False}
