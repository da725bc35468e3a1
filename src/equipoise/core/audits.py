"""Audits: a stronger attack on a random sample of the survivors of an attack, and what follows for
the others."""

from __future__ import annotations

from dataclasses import dataclass

ACCEPTED_EXCESS = 0.03  # of the worst case, above which the stronger attack should be run on all


@dataclass(frozen=True, kw_only=True)
class Audit:
    """A stronger attack on a random sample of the images that survived an attack.

    With M survivors, of which m were sampled and k of these broken, the stronger attack would break
    at most D of all M with 95 % confidence (:func:`~equipoise.core.stats.hypergeometric_upper`).
    The accuracy under the attack is M/n, whatever the sample; it lies at most D/n above that of
    both attacks together, and thus above that of the stronger one alone. The worst case counts the
    k as broken, and so lies at most (D − k)/n above.
    """

    model: str
    attack: str
    stronger: str  # the attack that audits
    n: int
    survivors: int  # M
    audited: int  # m
    broken: int  # k
    excess: float  # (D − k)/n, of the worst case, with 95 % confidence
    passes: int  # of networks with a gradient; one without counts a third
    # None after an interruption: those of the starts before are not known
    seconds: float | None = None

    @property
    def accuracy(self) -> float:
        """Under the attack, without its audit."""
        return self.survivors / self.n

    @property
    def gap(self) -> float:
        """D/n, the most by which this accuracy lies above that under the stronger attack, with 95 %
        confidence."""
        return self.excess + self.broken / self.n

    @property
    def is_poor(self) -> bool:
        """Whether the stronger attack should be run on all images."""
        return self.excess > ACCEPTED_EXCESS or (self.broken > 0 and self.audited < self.survivors)

    @property
    def explanation(self) -> str:
        """What it says about the accuracy under the attack, what it cost, and what to do where it
        says little."""
        if self.audited == self.survivors:
            number = (
                f"all {self.survivors} survivors" if self.survivors > 1 else "the only survivor"
            )
            text = f"; {self.stronger} was run on {number}"
        else:
            text = (
                f", at most {100 * self.gap:.1f} points above {self.stronger} with 95 % confidence, "
                f"{self.audited} of {self.survivors} survivors audited"
            )
        left = (
            f", which leaves {100 * (self.survivors - self.broken) / self.n:.1f} %"
            if self.broken
            else ""
        )
        seconds = "" if self.seconds is None else f", {self.seconds:.0f} s"
        text = (
            f"{self.attack} {100 * self.accuracy:.1f} %{text}, {self.broken} broken{left} "
            f"({self.passes} passes{seconds})"
        )
        if not self.is_poor:
            return text
        reason = (
            f"{self.stronger} breaks what {self.attack} does not"
            if self.broken
            else "This bound is wide"
        )
        return f"{text}. {reason}: run --attack {self.stronger}"
