"""Settings of a certificate by randomized smoothing, and the statement that comes out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from equipoise.core import checks
from equipoise.core.settings import Settings, setting

ABSTAIN = -1
# Certificates whose radius, at any alpha, follows from their bounds
SHARED_BOUNDS = "votes", "soft"
MAX_SIGMA = 100.0
MAX_SIGMAS = 100  # in one run


@dataclass(frozen=True, kw_only=True)
class SamplingSettings(Settings):
    """How many noisy copies are drawn and how they become a certificate."""

    samples: int = setting(
        100_000,
        "Noisy copies per image; with tolerance or decide-radius the maximum.",
        least=1,
        most=checks.MAX_COUNT,
    )
    n0: int = setting(
        100,
        "Noisy copies that select the class; they are not used for its bound.",
        least=1,
        most=checks.MAX_COUNT,
    )
    failure: float = setting(
        0.001, "Probability with which the certificate of an image may be wrong."
    )
    tolerance: float | None = setting(
        None,
        "Stop early; radii are expected to lose about this on average, a single "
        "one at most twice this, against all samples.",
        positive=True,
    )
    decide_radius: float | None = setting(
        None, "Stop when it is decided whether the radius reaches this.", positive=True
    )
    two_sided: bool = setting(
        False, "Bound the other classes as well, half of the failure probability for each side."
    )
    randomized: bool = setting(
        False,
        "Randomised bounds of the votes, which spend the failure probability in full: "
        "larger radii, or fewer samples for a tolerance.",
    )
    certificate: str = setting(
        "votes",
        "votes (of classes), soft (mean probabilities), or the name of one that an "
        "installed package adds.",
    )
    sound: bool = setting(
        False, "Draw noise whose sum with an 8-bit image is exact in floating point."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.require(
            self.samples >= self.n0, "samples", f"be at least n0, {self.n0}", self.samples
        )
        checks.strictly_within("failure", self.failure, 0, 1)
        checks.require(
            self.tolerance is None or self.decide_radius is None,
            "decide_radius",
            "be left out beside `tolerance`",
            self.decide_radius,
        )
        for name in ("two_sided", "randomized"):
            checks.require(
                not getattr(self, name) or self.certificate == "votes",
                name,
                f"be left out with the certificate {self.certificate}",
                True,
            )


@dataclass(frozen=True)
class SmoothingPlan(SamplingSettings):
    """How a smoothed classifier is certified; `sigma` and all radii are in units of [0, 1] pixels,
    in ℓ2.

    Args:
        sigma: standard deviation of the Gaussian noise.
        alpha: weight of the smoothed classifier in a mixture with an arbitrary one; 1 is no
            mixture.
        alphas: several weights that share the votes, in place of `alpha`; sampling stops when it
            may for all of them.
    """

    sigma: float
    alpha: float = 1.0
    alphas: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        checks.positive("sigma", self.sigma)
        checks.require(
            self.sigma <= MAX_SIGMA,
            "sigma",
            f"be at most {MAX_SIGMA:g}, in [0, 1] pixels",
            self.sigma,
        )
        checks.require(
            0.5 <= self.alpha <= 1, "alpha", "lie in [0.5, 1] for a certificate", self.alpha
        )
        for alpha in self.alphas:
            checks.require(0.5 <= alpha <= 1, "alphas", "lie in [0.5, 1] for a certificate", alpha)
        checks.require(
            not self.alphas or self.certificate in SHARED_BOUNDS,
            "alphas",
            f"be left out with the certificate {self.certificate}",
            self.alphas,
        )
        super().__post_init__()

    @property
    def per_alpha(self) -> tuple[SmoothingPlan, ...]:
        """A plan for each of `alphas`, or this plan alone."""
        return tuple(replace(self, alpha=alpha, alphas=()) for alpha in self.alphas) or (self,)

    def describe(self) -> dict[str, Any]:
        """Identity for `run.toml`; settings that are off are left out, and `alpha` beside
        `alphas`."""
        return {
            name: value
            for name, value in self.to_dict().items()
            if value is not False and value != () and not (name == "alpha" and self.alphas)
        }


@dataclass(frozen=True, eq=False)
class Certificate:
    """For each of B images: with probability at least 1 − failure, the class is constant within the
    radius.

    All tensors are on the CPU. `predicted` is ABSTAIN where no radius above zero could be
    certified.
    """

    predicted: Tensor  # (B,) int64
    radius: Tensor  # (B,) float64, ℓ2, in [0, 1] pixels; 0 where abstained
    lower: Tensor  # (B,) float64: lower bound on the probability of `top`
    upper: Tensor  # (B,) float64: upper bound on the probability of every other class
    top: Tensor  # (B,) int64: the class that the first samples selected
    samples: Tensor  # (B,) int64: forward passes, including those that selected the class
    votes: Tensor  # (B, K) float64: votes of each class (soft: summed probabilities) after the selection
    n: Tensor  # (B,) int64: samples behind `votes`
    failure: Tensor  # (B,) float64: failure probability of a statement derived from `votes`

    @classmethod
    def of(
        cls,
        *,
        top: Tensor,
        radius: Tensor,
        lower: Tensor,
        votes: Tensor,
        n: Tensor,
        selection_samples: Tensor | int,
        failure: Tensor | float,
        upper: Tensor | None = None,
    ) -> Certificate:
        """Certificates that abstain where the radius is zero; without `upper`, the other classes
        share the rest."""
        certified = radius > 0
        return cls(
            torch.where(certified, top, ABSTAIN),
            torch.where(certified, radius, 0.0),
            lower,
            1 - lower if upper is None else upper,
            top,
            n + selection_samples,
            votes,
            n,
            torch.as_tensor(failure, dtype=torch.float64).expand(len(n)).clone(),
        )

    def gap(self, classes: Tensor) -> Tensor:
        """(B,) estimated probability of the top class minus that of `classes` (B,)."""
        shares = self.votes / self.n.unsqueeze(1)
        return (
            shares.gather(1, self.top.unsqueeze(1)) - shares.gather(1, classes.unsqueeze(1))
        ).squeeze(1)
