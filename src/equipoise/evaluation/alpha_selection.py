"""The alpha of every mixture for a wanted clean accuracy, chosen on images that are not certified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from equipoise.certification import mixture
from equipoise.core import checks, stats
from equipoise.core.records import Row, Run
from equipoise.data import Dataset
from equipoise.evaluation.certified import CertificationConditions, CertificationJob, certify_all
from equipoise.evaluation.certified_summary import ATTACK, STEP

CHOOSE = "choose"  # in the place where other rows name their attack
SAMPLES = 1000  # votes per image; an estimate is enough to choose by
FEWEST = 100  # images to choose on, where there are so many


@dataclass(frozen=True)
class CleanTarget:
    """A clean accuracy for all mixtures: each gets the largest alpha that reaches it on `images` (an estimate).

    The radii stay valid whatever is chosen, because the bound of a base holds for every alpha at once; only the
    clean accuracy would be flattered by images that chose alpha.
    """

    clean: float
    images: Dataset

    def __post_init__(self) -> None:
        checks.within("clean", self.clean, 0, 1)

    def facts(self) -> dict[str, Any]:
        """For the identity of the run."""
        return {"clean": self.clean, "count": len(self.images), "digest": self.images.digest()}

    def __call__(self, subjects: Sequence[CertificationJob], run: Run, terms: CertificationConditions) -> list[CertificationJob]:
        """Votes on the choosing images, as rows; a base that cannot reach the accuracy is left out."""
        for subject in subjects:
            plan = terms.of(subject).plan
            # The class, its votes and what the accurate model says: no radius is wanted of these images.
            quick = replace(plan, samples=min(plan.samples, max(SAMPLES, plan.n0)), alpha=1.0, tolerance=None,
                            decide_radius=None, two_sided=False)
            certify_all(subject, self.images, run, replace(terms, plan=quick), CHOOSE)
        rows = run.finish()
        plans = [terms.of(subject).plan for subject in subjects]
        bases = [mixture.Base.of_rows(_of(rows, subject, CHOOSE), plan.sigma)
                 for subject, plan in zip(subjects, plans, strict=True)]
        most = [mixture.most_clean(base) for base in bases]
        checks.require(max(most) >= self.clean, "clean", f"be reachable with alpha in [0.5, 1], at most {max(most):g}",
                       self.clean)
        return [replace(subject, plan=replace(plan, alpha=mixture.alpha_for(base, self.clean)))
                for subject, plan, base, best in zip(subjects, plans, bases, most, strict=True) if best >= self.clean]

    def told(self, subjects: Sequence[CertificationJob], rows: Sequence[Row], terms: CertificationConditions) -> dict[str, Any]:
        """`chosen`: alpha and sigma per mixture; `frontier`: per radius the best of them [Bai2024, Figures 6, 7].

        `left-out`: those that were to be certified but cannot reach the accuracy, with the most that they reach.
        """
        chosen, mixtures = [], []
        for subject in subjects:
            plan = terms.of(subject).plan
            before = mixture.Base.of_rows(_of(rows, subject, CHOOSE), plan.sigma)
            e = stats.share(mixture.winners(before, plan.alpha) == before.labels)
            chosen.append({"model": subject.name, "alpha": plan.alpha, "sigma": plan.sigma, "wanted": self.clean,
                           "clean-estimate": e.value, "low": e.low, "high": e.high, "n": e.n})
            mixtures.append((mixture.Base.of_rows(_of(rows, subject, ATTACK), plan.sigma), plan.alpha))
        longest = max(float(base.radius(alpha).max(initial=0.0)) for base, alpha in mixtures)
        reach = np.arange(int(longest / STEP) + 1) * STEP
        _, which = mixture.frontier(mixtures, reach)
        points = []
        for radius, place in zip(reach.tolist(), which, strict=True):
            base, alpha = mixtures[place]
            e = stats.share(base.radius(alpha) >= max(radius, 1e-300))
            points.append({"radius": radius, "value": e.value, "low": e.low, "high": e.high, "n": e.n,
                           "model": chosen[place]["model"], "alpha": alpha, "sigma": base.sigma})
        kept = {subject.name for subject in subjects}
        lost: dict[str, list[Row]] = {}
        for row in rows:
            if row["attack"] == CHOOSE and row["model"] not in kept:
                lost.setdefault(row["model"], []).append(row)
        left_out = [{"model": model, "wanted": self.clean, "most": mixture.most_clean(mixture.Base.of_rows(own, 1.0)),
                     "n": len(own)} for model, own in lost.items()]
        return {"chosen": chosen, "frontier": points, "left-out": left_out}


def others(whole: Dataset, images: Dataset) -> Dataset:
    """As many images of the split, a hundred at least, evenly spread over those that are not certified."""
    rest = whole.take(~torch.isin(whole.index, images.index))
    checks.require(len(rest) > 0, "count", "leave images of the split to choose alpha on", len(images))
    count = min(len(rest), max(len(images), FEWEST))
    return rest.take(torch.arange(count) * len(rest) // count)


def _of(rows: Sequence[Row], subject: CertificationJob, attack: str) -> list[Row]:
    return [row for row in rows if row["model"] == subject.name and row["attack"] == attack]
