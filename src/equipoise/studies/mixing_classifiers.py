"""The study of certified mixtures [Bai2024mixing, Figure 3; Bai2024, Appendices A and C.3] on any
models.

An accurate model is mixed with randomly smoothed ones. One run of votes per smoothed model gives
the certified radii of its mixtures at every alpha, by the theorems of the paper and by our sharper
one. An attack, confirmed on the same classifier, bounds from above what any certificate could
reach.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from equipoise import models
from equipoise.attacks import Clean, MinimumNorm
from equipoise.certification import SmoothingPlan
from equipoise.certification.mixture import SmoothedBase
from equipoise.core import checks, format, stats
from equipoise.core.radius_curves import RadiusCurve, radius_curve
from equipoise.core.records import Run
from equipoise.core.results import SelectedAlpha, read_summary
from equipoise.core.rows import SELECT_ALPHA, AttackRow, Mixture, Row, certificates
from equipoise.data import Dataset
from equipoise.evaluation import Conditions, Job
from equipoise.evaluation.certificates import (
    CertificationConditions,
    CertificationJob,
    certify_images,
)
from equipoise.evaluation.certifier import COMPILE_FROM, run_certification
from equipoise.evaluation.lipschitz_estimates import estimate_lipschitz
from equipoise.studies.mixing_classifiers_attack import CONFIRMED, ConfirmedAttack
from equipoise.studies.mixing_classifiers_models import (
    EMPIRICAL,
    CertifiedModels,
    SmoothedModel,
    load_models,
    train_digits_models,
)
from equipoise.studies.mixing_classifiers_tables import ATTACK, CERTIFY, SELECT, part_tables
from equipoise.studies.overview import Requirements
from equipoise.studies.settings import StudySettings
from equipoise.studies.study import ANY_DATA, GPU, Study, jobs_for, require_part, smoke_requirements


@dataclass(frozen=True)
class CertifiedStudySize:
    """How much is computed; the defaults are the full size."""

    samples: int = 100_000  # votes per image; the paper has 10,000
    selection_samples: int = 1000  # votes per held-out image, to select alpha
    alphas: tuple[float, ...] = (0.67, 0.76, 0.9)  # beside those of equal clean accuracy and 1
    attack: ConfirmedAttack = field(default_factory=ConfirmedAttack)
    attack_images: int = 100
    lipschitz_images: int = 1000
    batch_size: int = 100


SMOKE = CertifiedStudySize(
    samples=4000,
    selection_samples=500,
    alphas=(0.6, 0.76),
    attack_images=60,
    lipschitz_images=60,
    batch_size=60,
    attack=ConfirmedAttack(MinimumNorm(steps=8, targets=2, restarts=3), copies=16, samples=500),
)


class MixingClassifiersStudy(Study):
    """Certified accuracy of mixtures against radius, beside their accuracy under attack."""

    name = "mixing-classifiers"
    paper = (
        "Mixing classifiers to alleviate the accuracy-robustness trade-off [Bai2024mixing], Figure 3; and the "
        "same figures with more alphas in [Bai2024], Appendices A and C.3"
    )
    requirements: ClassVar = {
        "smoke": smoke_requirements("under 8 minutes"),
        "full": Requirements(
            data=ANY_DATA,
            device=GPU,
            models="--accurate, and --robust with --sigma: one or several models trained "
            "under noise; --empirical, any adversarially trained model, is optional",
            time="that of certify below is for three models, 1000 images and --samples 20000, on an H200 that other "
            "jobs used too; the other parts were not timed",
        ),
    }
    minutes: ClassVar = {"certify": 8.2}
    own_settings = ("sigma", "samples", "empirical")
    takes_several_robust = True
    sizes: ClassVar = {"smoke": SMOKE, "full": CertifiedStudySize()}
    pair: CertifiedModels

    def __init__(
        self, main_run: Run, pair: CertifiedModels, size: CertifiedStudySize, conditions: Conditions
    ) -> None:
        super().__init__(main_run, pair, size, conditions)
        self.pair, self.size = pair, size

    @classmethod
    def size_for(cls, settings: StudySettings) -> CertifiedStudySize:
        """The size, with the number of samples that was given."""
        size: CertifiedStudySize = super().size_for(settings)
        return size if settings.samples is None else replace(size, samples=settings.samples)

    @classmethod
    def load_models(cls, settings: StudySettings) -> CertifiedModels:
        """The accurate, smoothed and empirically robust models that the settings name."""
        return load_models(settings)

    @classmethod
    def train_models(cls, folder: Path, conditions: Conditions) -> CertifiedModels:
        """Small networks on digits."""
        return train_digits_models(folder, conditions)

    @classmethod
    def results_table(cls, folder: Path) -> str:
        """Accuracies of the networks, and of every part that has been run its main figures."""
        networks = format.accuracy_table(read_summary(folder).results, "without perturbations")
        return "\n".join([networks, *part_tables(folder)])

    def main_jobs(self) -> list[Job]:
        """The accurate and the empirically robust model on clean images; smoothed ones are
        certified instead."""
        named = {
            name: model
            for name, model in self.pair.models.items()
            if name in ("accurate", EMPIRICAL)
        }
        return jobs_for(named, {"clean": Clean()})

    def certify_mixtures(self) -> None:
        """Certified accuracy against radius for several alphas and sigmas, by three theorems, from
        one run of votes [Bai2024mixing, Figure 3; Bai2024, Figures 6 and 7].
        """
        selected = self._select_alphas()
        alphas = tuple(sorted({*self.size.alphas, 1.0, *(item.alpha for item in selected)}))
        jobs = [
            self._job(
                base,
                SmoothingPlan(base.sigma, 1.0, alphas, samples=self.size.samples, two_sided=True),
            )
            for base in self.pair.smoothed
        ]
        run_certification(
            jobs,
            self.test,
            self._certification_conditions(self.test, self.size.samples),
            self.folder / CERTIFY,
        )

    def _job(self, base: SmoothedModel, plan: SmoothingPlan) -> CertificationJob:
        return CertificationJob(base.name, base.model, plan, self.pair.accurate)

    def _certification_conditions(self, data: Dataset, samples: int) -> CertificationConditions:
        place = self.conditions.device
        return CertificationConditions(
            place,
            self.conditions.seed,
            precision=self.conditions.precision,
            compiled=place.type == "cuda" and len(data) * samples >= COMPILE_FROM,
        )

    def _select_alphas(self) -> tuple[SelectedAlpha, ...]:
        """For every smoothed model alone, mixtures of noisier ones with its clean accuracy, on
        held-out images."""
        start_time, data, size = time.monotonic(), self.pair.held_out, self.size
        run = self.open_part(
            SELECT, [], data, models=self._identities(), samples=size.selection_samples
        )
        for base in (
            self.pair.smoothed if len(self.pair.smoothed) > 1 else ()
        ):  # else there is nothing to compare
            plan = SmoothingPlan(
                base.sigma, samples=size.selection_samples, n0=min(100, size.selection_samples)
            )
            certify_images(
                self._job(base, plan),
                data,
                run,
                self._certification_conditions(data, size.selection_samples),
                SELECT_ALPHA,
            )
        rows = run.finish()
        selected = equal_clean_alphas(rows, self.pair.smoothed) if rows else ()
        self.write_summary(run, start_time, results=(), selected_alphas=selected)
        return selected

    def _identities(self) -> dict[str, Any]:
        return {
            **{name: models.identity(model) for name, model in self.pair.models.items()},
            "sigma": {base.name: base.sigma for base in self.pair.smoothed},
        }

    def attack_mixtures(self) -> None:
        """Accuracy under attack at the radii of the certificates: an upper bound, confirmed by
        votes."""
        require_part(self.is_finished(CERTIFY), CERTIFY)
        start_time, size = time.monotonic(), self.size
        data = self.test.slice(0, min(size.attack_images, len(self.test)))
        selected = read_summary(self.folder / SELECT).selected_alphas
        alphas = {
            base.name: sorted(
                {*size.alphas, 1.0, *(item.alpha for item in selected if item.model == base.name)}
            )
            for base in self.pair.smoothed
        }
        run = self.open_part(
            ATTACK,
            [],
            data,
            models=self._identities(),
            attacks=size.attack.describe(),
            alphas=alphas,
        )
        for base in self.pair.smoothed:
            for alpha in alphas[base.name]:
                size.attack.measure(base, self.pair.accurate, alpha, data, run, self.conditions)
        self.write_summary(
            run, start_time, results=(), radius_curves=tuple(attack_curves(run.finish()))
        )

    def estimate_constants(self) -> None:
        """Local Lipschitz constants of all networks in the ball of --eps [Bai2024, C.3]: estimates,
        no certificates."""
        data = self.test.slice(0, min(self.size.lipschitz_images, len(self.test)))
        estimate_lipschitz(self.pair.models, data, self.conditions, self.folder)

    parts: ClassVar = {
        "certify": certify_mixtures,
        "attack": attack_mixtures,
        "lipschitz": estimate_constants,
    }


def equal_clean_alphas(
    rows: Sequence[Row], smoothed: Sequence[SmoothedModel]
) -> tuple[SelectedAlpha, ...]:
    """Mixtures as accurate on clean images as a less noisy model alone: the largest alpha that
    reaches it.

    `smoothed` is in order of sigma. A model that cannot reach the accuracy at any alpha of at least
    1/2 has none.
    """
    bases = {
        item.name: SmoothedBase.of_rows(certificates(rows, item.name, SELECT_ALPHA))
        for item in smoothed
    }
    selected = []
    for baseline in smoothed:
        target = bases[baseline.name].clean_accuracy(1.0)
        for item in smoothed:
            base = bases[item.name]
            if item.sigma > baseline.sigma and base.best_clean_accuracy() >= target:
                alpha = base.largest_alpha(target)
                estimate = stats.share(base.correct(alpha))
                selected.append(
                    SelectedAlpha(
                        model=item.name,
                        alpha=alpha,
                        sigma=item.sigma,
                        target=target,
                        clean_estimate=estimate.value,
                        low=estimate.low,
                        high=estimate.high,
                        n=estimate.n,
                        baseline=baseline.name,
                    )
                )
    return tuple(selected)


def attack_curves(rows: Sequence[Row]) -> list[RadiusCurve]:
    """Accuracy against radius under the confirmed attack, of every smoothed model and alpha."""
    radii: dict[Mixture, dict[int, float]] = {}
    largest: dict[Mixture, float] = {}
    for row in rows:
        if isinstance(row, AttackRow) and row.attack == CONFIRMED:
            mixture = row.model, row.alpha
            radii.setdefault(mixture, {})[row.index] = (
                float("inf") if row.radius is None else row.radius
            )
            largest[mixture] = checks.positive("max_radius", row.max_radius or 0.0)
    names = format.mixture_names(radii)
    return [
        radius_curve(names[mixture], "l2", own, largest[mixture]) for mixture, own in radii.items()
    ]
