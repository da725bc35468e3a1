"""The study of SmoothMix: training methods for smoothed classifiers, certified, and what attacks do
to them.

Every classifier is trained and certified in run folders of its own, `training/NAME` and
`certificates/NAME`, so that a study can be run bit by bit: by parts, methods and sigmas,
interrupted and resumed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from equipoise import models, reporting
from equipoise.certification import SmoothingPlan
from equipoise.certification.certificate import MAX_SIGMAS
from equipoise.core import checks
from equipoise.core.device import single_thread
from equipoise.core.records import Run, nothing_left_on_refusal
from equipoise.core.results import Result, Summary, read_summary
from equipoise.data import Dataset, load_data, mnist
from equipoise.data.sampling import Part
from equipoise.data.sources import data_directory
from equipoise.evaluation import Conditions, Job
from equipoise.evaluation.certificates import CertificationConditions, CertificationJob
from equipoise.evaluation.certifier import run_certification
from equipoise.evaluation.diagnosis import Diagnosis
from equipoise.studies.overview import OWN_MODELS, Requirements
from equipoise.studies.settings import TOLERANCE, StudySettings
from equipoise.studies.smoothmix_models import (
    ETA,
    FIGURE_7,
    INTERPOLATION,
    METHODS,
    RESNET110,
    TABLE_1,
    TABLE_2,
    TABLE_3,
    StudyModel,
    full_models,
    smoke_models,
)
from equipoise.studies.smoothmix_seeds import CERTIFICATES, join_certificates, joined_folders
from equipoise.studies.smoothmix_tables import study_tables
from equipoise.studies.study import GPU, Study

TRAINING = "training"
RADII = Diagnosis(at=(0.0, 1.0, 2.0, 3.0, 4.0, 5.0))  # [Table 1]
LINE = Diagnosis(
    at=(0.0,), along=tuple(round(0.1 * step, 1) for step in range(11))
)  # [Figures 2, 3]


@dataclass(frozen=True)
class SmoothMixStudySize:
    """How much is computed; the defaults are the full size."""

    samples: int = 100_000
    n0: int = 100
    tolerance: float | None = (
        TOLERANCE  # a radius is expected to lose about this on average, at most twice this
    )
    every: Mapping[str, int] = field(
        default_factory=lambda: {"mnist": 1, "cifar10": 20}
    )  # N-th image is certified
    precision: Mapping[str, str] = field(
        default_factory=lambda: {"cifar10": "bf16"}
    )  # of votes, fp32 if not named
    training_images: int | None = None
    diagnosed: int = 500  # test images at most
    radii: Diagnosis = RADII
    line: Diagnosis = LINE
    batch_size: int = (
        500  # of attacks, which this study does not have: votes fill the device by themselves
    )


SMOKE = SmoothMixStudySize(
    samples=1000,
    n0=50,
    tolerance=None,
    every={"mnist": 250, "digits": 9},
    precision={},
    training_images=1500,
    diagnosed=16,
    radii=Diagnosis(at=(0.0, 0.5, 1.0, 2.0), far=2.0, steps=10, samples=100),
    line=Diagnosis(
        at=(0.0,), far=4.0, steps=20, along=tuple(0.25 * step for step in range(5)), samples=100
    ),
)


@dataclass(frozen=True)
class ModelSelection:
    """The classifiers that a run is restricted to: by method and sigma; all but optional ones if
    none is named."""

    methods: tuple[str, ...] = ()
    sigmas: tuple[float, ...] = ()

    @classmethod
    def parse(
        cls, methods: str | None, sigmas: str | float | Sequence[float] | None
    ) -> ModelSelection:
        """From text with commas, or from numbers."""
        named = [] if methods is None else methods.split(",")
        for method in named:
            checks.one_of("method", method, METHODS)
        return cls(
            tuple(named),
            () if sigmas is None else tuple(checks.fractions("sigma", sigmas, most=MAX_SIGMAS)),
        )

    def has(self, model: StudyModel) -> bool:
        """Whether it holds a classifier."""
        named = model.method in self.methods if self.methods else not METHODS[model.method].optional
        return named and (not self.sigmas or model.sigma in self.sigmas)


class SmoothMixStudy(Study):
    """All training methods of the paper, certified; confidences under attack; ablations of
    SmoothMix."""

    name = "smoothmix"
    paper = (
        "Jeong et al., SmoothMix: Training Confidence-calibrated Smoothed Classifiers for Certified Robustness "
        "(NeurIPS 2021); Tables 1 to 3 and Figures 2 to 7"
    )
    requirements: ClassVar = {
        "smoke": Requirements(
            data="MNIST if its files are there, else 8×8 digits",
            models=OWN_MODELS,
            device="one core of a CPU",
            time="under seven minutes with MNIST, two with digits",
        ),
        "full": Requirements(
            data="MNIST and CIFAR-10",
            models="none: every classifier is trained by a recipe of configs/",
            device=GPU,
            time="minutes to hours for each classifier; restrict it by "
            "--part, --method and --sigma. On an H200 that other jobs used too, MACER took 5 minutes "
            "to train and 15 to certify 9500 images (table-2), SmoothMix with one step 18 minutes to "
            "train (table-3)",
        ),
    }
    minutes: ClassVar = {TABLE_2: 20}
    minutes_per: ClassVar = "classifier"
    own_settings = ("sigma", "method", "tolerance", "configs", "join")
    uses_pair = False
    sizes: ClassVar = {"smoke": SMOKE, "full": SmoothMixStudySize()}

    def __init__(
        self,
        main_run: Run,
        trained: Sequence[StudyModel],
        size: SmoothMixStudySize,
        conditions: Conditions,
        load: Callable[[str, str], Dataset],
        selection: ModelSelection | None = None,
    ) -> None:
        # Without the bases of the other studies; `load` maps the name of a data set and a split to
        # its images.
        self.main_run, self.folder, self.size, self.conditions = (
            main_run,
            main_run.folder,
            size,
            conditions,
        )
        self.models, self.selection, self.load = (
            tuple(trained),
            selection or ModelSelection(),
            cache(load),
        )

    @classmethod
    def reproduce(
        cls,
        folder: Path,
        settings: StudySettings,
        conditions: Conditions,
        recorded: Mapping[str, Any],
        parts: Sequence[str],
        *,
        report: bool = True,
    ) -> Path:
        """Open the run folder, read the recipes and run parts; returns the report, or without it
        the summary."""
        load, is_smoke = partial(load_data, data_dir=settings.data_dir), settings.size == "smoke"
        data = settings.data or (
            "mnist" if mnist.is_present(data_directory(settings.data_dir)) else "digits"
        )
        checks.one_of("data", data, ("mnist", "digits"))
        checks.require(
            settings.configs is None or not is_smoke,
            "configs",
            "be left out for the smoke size, which has its own recipes",
            settings.configs,
        )
        size, selection = (
            cls.sizes[settings.size],
            ModelSelection.parse(settings.method, settings.sigma),
        )
        if settings.tolerance is not None:
            size = replace(size, tolerance=settings.tolerance)
        trained = (
            smoke_models(load(data, "train"), settings.seed)
            if is_smoke
            else full_models(settings.configs or Path("configs"), settings.seed)
        )
        identity = {**cls.identity(settings), **({"data": data} if is_smoke else {})}
        with nothing_left_on_refusal(folder), single_thread() if is_smoke else nullcontext():
            study = cls(Run(folder, identity, recorded), trained, size, conditions, load, selection)
            for other in settings.joined_folders:
                join_certificates(folder, other)
            return (
                study.run(parts, report=report)
                if parts or not settings.joined_folders
                else study.finish(report=report)
            )

    @classmethod
    def results_table(cls, folder: Path) -> str:
        """Average certified radii beside the published ones, and confidences under attack."""
        return study_tables(folder)

    def run(self, parts: Sequence[str] = (), *, report: bool = True) -> Path:
        """Run parts in their order (all that have classifiers if none is named), then report all
        that has been run."""
        start_time = time.monotonic()
        sigmas = ", ".join(f"{sigma:g}" for sigma in sorted({model.sigma for model in self.models}))
        checks.require(
            any(map(self.selection.has, self.models)),
            "sigma",
            f"be among those of this size, {sigmas}",
            list(self.selection.sigmas),
        )
        for part in parts:
            checks.one_of("part", part, self.parts)
            checks.require(
                bool(self._selected(part)),
                "part",
                "have classifiers of this size, method and sigma",
                part,
            )
        chosen = [
            part for part in self.parts if part in parts or (not parts and self._selected(part))
        ]
        for part in chosen:
            self.parts[part](self)
        return self.finish(time.monotonic() - start_time, report=report)

    def finish(self, seconds: float = 0.0, *, report: bool = True) -> Path:
        """Write the summary of all that has been run or joined, and the report."""
        self.main_run.finish()
        self.main_run.write_summary(
            Summary(
                command="reproduce",
                study=self.name,
                results=tuple(self._acrs()),
                seconds=seconds,
                notes=self._missing(),
            )
        )
        return reporting.report(self.folder) if report else self.folder / "summary.json"

    def main_jobs(self) -> list[Job]:
        """The study's own run folder has no rows."""
        return []

    def _selected(self, part: str) -> list[StudyModel]:
        """The classifiers of a part, without those that the user did not ask for."""
        return [model for model in self.models if model.is_in(part) and self.selection.has(model)]

    def _acrs(self) -> list[Result]:
        """The ACR of every certified classifier, by the name of its folder."""
        return [
            Result(**{**vars(result), "model": folder.name})
            for model in self.models
            for folder in joined_folders(self.folder, model.recipe.name)
            for result in read_summary(folder).results
            if result.metric == "acr"
        ]

    def _missing(self) -> tuple[str, ...]:
        names = [
            model.recipe.name
            for model in self.models
            if not METHODS[model.method].optional and not self._is_certified(model)
        ]
        return (f"not certified yet: {', '.join(names)}",) if names else ()

    def _certificates(self, model: StudyModel) -> Path:
        return self.folder / CERTIFICATES / model.recipe.name

    def _is_certified(self, model: StudyModel) -> bool:
        return (self._certificates(model) / "summary.json").exists()

    def _train(self, model: StudyModel) -> nn.Module:
        """The trained classifier, now or in an earlier run; the weights of the last epoch, as in
        the official code."""
        images = self.load(model.recipe.data, "train")
        if self.size.training_images is not None:
            images = images.slice(0, min(self.size.training_images, len(images)))
        return model.recipe.train(
            images, self.conditions.device, self.folder / TRAINING / model.recipe.name
        ).model

    def _test_images(self, name: str) -> Dataset:
        return Part(0, None, self.size.every[name]).of(self.load(name, "test"))

    def _job(self, model: StudyModel) -> CertificationJob:
        plan = SmoothingPlan(
            model.sigma, samples=self.size.samples, n0=self.size.n0, tolerance=self.size.tolerance
        )
        return CertificationJob(model.label, self._train(model).to(self.conditions.device), plan)

    def _certification_conditions(self, model: StudyModel) -> CertificationConditions:
        device = self.conditions.device
        return CertificationConditions(
            device,
            self.conditions.seed,
            compiled=device.type == "cuda",
            precision=self.size.precision.get(model.recipe.data, "fp32"),
        )

    def _certify(self, part: str) -> None:
        """Train and certify the classifiers of a part, one after another."""
        for model in self._selected(part):
            run_certification(
                [self._job(model)],
                self._test_images(model.recipe.data),
                self._certification_conditions(model),
                self._certificates(model),
                settings=model.described(self.models.index(model)),
            )

    def _diagnose(self, part: str, diagnosis: Diagnosis) -> None:
        """Measure confidences of the classifiers of a part at adversarial images, each in
        `PART/NAME`."""
        settings = {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in vars(diagnosis).items()
        }
        for model in self._selected(part):
            start_time, job, images = (
                time.monotonic(),
                self._job(model),
                self._test_images(model.recipe.data),
            )
            images = images.slice(0, min(self.size.diagnosed, len(images)))
            identity: dict[str, Any] = {
                "command": "diagnose",
                "part": part,
                "seed": self.conditions.seed,
                "sigma": model.sigma,
                "model": models.identity(job.model),
                "data": images.describe(),
                "diagnosis": settings,
            }
            run = Run(
                self.folder / part / model.recipe.name,
                identity,
                {**self.conditions.environment(), **model.described(self.models.index(model))},
                labels=images.labels_by_index(),
            )
            diagnosis.measure(job, images, [], run, self._certification_conditions(model))
            results = diagnosis.results(run.finish(), job.plan)
            run.write_summary(
                Summary(
                    command="diagnose",
                    seconds=time.monotonic() - start_time,
                    results=tuple(results),
                )
            )

    def measure_off_class_confidence(self) -> None:
        """Confidence in the true and in the best other class under attacks of radius 1 to 5 [Table
        1]."""
        self._diagnose(TABLE_1, self.size.radii)

    def measure_interpolation(self) -> None:
        """Confidences on the line to the adversarial image [Figure 2], equal-confidence mixing
        ratios [Figure 3]."""
        self._diagnose(INTERPOLATION, self.size.line)

    def certify_mnist(self) -> None:
        """All methods on MNIST with LeNet [Table 2, Figure 4]."""
        self._certify(TABLE_2)

    def certify_cifar10(self) -> None:
        """Methods on CIFAR-10 with a ResNet-18, by fast recipes of our own [Table 3, Figure 5]."""
        self._certify(TABLE_3)

    def certify_resnet110(self) -> None:
        """Methods on CIFAR-10 with the paper's ResNet-110 [Table 3, Figure 5]."""
        self._certify(RESNET110)

    def certify_eta(self) -> None:
        """The weight of the mixed images [Figure 6]."""
        self._certify(ETA)

    def certify_attack_settings(self) -> None:
        """Steps against step size, the largest norm of the attack, and the number of noises [Figure
        7]."""
        self._certify(FIGURE_7)

    parts: ClassVar = {
        TABLE_2: certify_mnist,
        TABLE_3: certify_cifar10,
        TABLE_1: measure_off_class_confidence,
        INTERPOLATION: measure_interpolation,
        ETA: certify_eta,
        FIGURE_7: certify_attack_settings,
        RESNET110: certify_resnet110,
    }
