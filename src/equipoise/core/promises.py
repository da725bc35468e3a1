"""What a fit promises to lose at most: the number of calibration images it may lose, and whether a
run kept it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy.special import bdtr, bdtrik

from equipoise.core import checks
from equipoise.core.serialize import Share
from equipoise.core.stats import Estimate
from equipoise.core.threat import Threat


@dataclass(frozen=True)
class Target:
    """The loss a fit may cause: a share of all images, or with `of_robust` of those on which the
    robust model survives.

    `lose_at_most` points of robust accuracy are a share of all images; 1 − β is a share of the
    robust ones. The promise holds on average over fits, or with `confidence` for all but a share 1
    − confidence of the fits.
    """

    share: Share
    of_robust: bool = False
    confidence: Share | None = None  # None: in expectation

    def __post_init__(self) -> None:
        checks.within("beta" if self.of_robust else "lose_at_most", self.share, 0, 1)
        if self.confidence is not None:
            checks.strictly_within("confidence", self.confidence, 0, 1)

    def __str__(self) -> str:
        if self.of_robust:
            return f"{100 * self.share:.3g} % of the robust model's robust accuracy"
        points = f"{100 * self.share:.3g}"
        return f"{points} point{'' if points == '1' else 's'} of robust accuracy"

    @property
    def kind(self) -> str:
        """In which sense the promise holds."""
        return (
            "in expectation"
            if self.confidence is None
            else f"with {100 * self.confidence:g} % confidence"
        )

    def least_accuracy(self, robust: float) -> float:
        """The robust accuracy that loses just what is allowed of that of the robust model; nothing
        is promised."""
        return max(robust * (1 - self.share) if self.of_robust else robust - self.share, 0.0)

    def allowed(self, images: int, robust: int) -> int:
        """How many of the calibration images may be lost; −1 if there are too few to promise
        anything."""
        n = robust if self.of_robust else images
        if self.confidence is None:
            return allowed_losses(self.share, n)
        return allowed_losses_with_confidence(self.share, n, self.confidence)

    @property
    def least_images(self) -> int | None:
        """How many calibration images (robust ones, with `of_robust`) allow a promise; None if no
        number does."""
        if self.share == 0:
            return None
        if self.share == 1:
            return 1
        if self.confidence is None:
            return math.ceil(1 / self.share - 1 - 1e-9)
        return math.ceil(math.log1p(-self.confidence) / math.log1p(-self.share) - 1e-9)


def allowed_losses(share: float, n: int) -> int:
    """The largest m with (m + 1)/(n + 1) ≤ share: conformal risk control [Angelopoulos2022, Thm.
    1].

    The loss of an image is 0 or 1 and does not decrease in the threshold. If the threshold loses at
    most m of n images, the next image of the same distribution is lost with probability at most
    `share`, on average over fits.

    >>> allowed_losses(0.02, 500), allowed_losses(0.001, 500)
    (9, -1)
    """
    return math.floor(share * (n + 1) - 1 + 1e-9)


def allowed_losses_with_confidence(share: float, n: int, confidence: float) -> int:
    """The largest m with P(Bin(n, share) ≤ m) ≤ 1 − confidence, or −1: risk control by an exact
    bound [Bates2021].

    If the threshold loses at most m of n images, then with probability at least `confidence` over
    the n images it loses at most a share `share` of the distribution. Otherwise the least threshold
    that loses more than that would lose at most m of n images, each with probability at least
    `share`.

    >>> allowed_losses_with_confidence(0.02, 500, 0.95), allowed_losses_with_confidence(0.02, 100, 0.95)
    (4, -1)
    """
    if n == 0 or share == 0:
        return -1
    if share == 1:
        return n - 1
    tail = 1 - confidence
    # bdtrik inverts the distribution function over the real numbers; the whole number is found by
    # comparison.
    most = min(n, math.ceil(float(bdtrik(tail, n, share))) + 1) if tail > (1 - share) ** n else 0
    while most >= 0 and float(bdtr(most, n, share)) > tail * (1 + 1e-12):
        most -= 1
    return most


@dataclass(frozen=True, kw_only=True)
class PromiseCheck(Estimate):
    """The attacked accuracy that a fitted mixture lost against its robust base, and what its fit
    promised.

    Both models are measured on the same n images of one run. The value with its 95 % interval is a
    share of all images, or for a promise about robust images of those that the base classifies
    correctly under attack.
    """

    model: str
    versus: str
    promised: Target
    threat: Threat

    @property
    def kept(self) -> bool:
        """Whether the measured loss is at most the promised one."""
        return self.value <= self.promised.share + 1e-12

    @property
    def is_clear(self) -> bool:
        """Whether the interval lies on one side of the promised loss."""
        return not self.low <= self.promised.share <= self.high

    @property
    def explanation(self) -> str:
        """The measured loss, what was promised, and whether it was kept."""
        unit = (
            "% of the robust images" if self.promised.of_robust else "points of attacked accuracy"
        )
        numbers = (self.value, self.low, self.high)
        value, low, high = (f"{100 * number:.1f}".replace("-0.0", "0.0") for number in numbers)
        measured = f"{value} [{low}, {high}] {unit}"
        excess = f"{100 * (self.value - self.promised.share):.1f} {'%' if self.promised.of_robust else 'points'}"
        verdict = "kept" if self.kept else f"exceeded by {excess}"
        text = (
            f"the promise was {verdict} on these {self.n} images: {measured} lost against {self.versus}, at most "
            f"{100 * self.promised.share:.3g} promised {self.promised.kind}"
        )
        if not self.is_clear:
            text += "; the 95 % interval includes the promised loss"
        if not self.kept and self.promised.confidence is None:
            text += "; about a third of all fits exceed a promise in expectation (see --promise probability)"
        return text
