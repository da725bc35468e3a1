"""What the studies share: two models with their images, parts in run folders of their own, and the
whole study."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from equipoise import models, reporting
from equipoise.attacks import Attack
from equipoise.core import aggregation, checks, format
from equipoise.core.device import single_thread
from equipoise.core.records import Run, nothing_left_on_refusal
from equipoise.core.results import Summary, read_summary
from equipoise.core.rows import Row
from equipoise.data import Dataset, load_data
from equipoise.data.sampling import Part
from equipoise.data.sources import default_sample
from equipoise.evaluation import Conditions, Job, job, measure
from equipoise.evaluation.stage_log import remove_stage_logs
from equipoise.mixing import load_model
from equipoise.models import LoadOptions
from equipoise.studies.overview import (
    DIGITS_DATA,
    OWN_MODELS,
    Requirements,
    StudyOverview,
    study_overview,
)
from equipoise.studies.settings import COUNT, StudySettings
from equipoise.training import TrainingPlan, fit_model
from equipoise.training.objective import Objective
from equipoise.training.objectives import Adversarial, Standard

CHECKPOINT = "best.safetensors"  # that of the last epoch, because no image is held out
GPU = "a GPU"
PAIR = "--accurate and --robust, any two classifiers of the data set"
ANY_DATA = "any data set, cifar10 if not given"
DIGITS_MEAN, DIGITS_STD = (0.3,), (0.37,)
DIGITS_HELD_OUT, DIGITS_TESTED = 200, 240  # so that a study stays under five minutes on two cores


@dataclass(frozen=True)
class Pair:
    """An accurate and a robust model with the images of a study; no image has two uses."""

    accurate: nn.Module
    robust: nn.Module
    references: tuple[str, str]  # of the accurate and of the robust model
    held_out: Dataset  # for selection and calibration; neither model was trained on it
    test: Dataset
    load_training: Callable[[], Dataset]  # called once, when a part needs the training images

    @property
    def models(self) -> dict[str, nn.Module]:
        """Both models by their names in rows."""
        return {"accurate": self.accurate, "robust": self.robust}

    @property
    def all_references(self) -> tuple[str, ...]:
        """The references of all models, as they are recorded."""
        return self.references

    @cached_property
    def training(self) -> Dataset:
        """All training images."""
        return self.load_training()


def load_pair(
    accurate: str,
    robust: str,
    data: str,
    data_dir: Path | None,
    options: LoadOptions | None = None,
    count: int = COUNT,
    sample: str | None = None,
) -> Pair:
    """Any two classifiers of any data set; up to `count` test images are evaluated, and as many
    from the end held out.

    `sample` is the order in which they are taken, if not given that of `load_data`.
    """
    test = load_data(data, split="test", data_dir=data_dir)
    count, sample = min(count, len(test) // 2), sample or default_sample(data)
    held_out, tested = (
        Part(start, count, sample=sample).of(test) for start in (len(test) - count, 0)
    )
    return Pair(
        load_model(accurate, options),
        load_model(robust, options),
        (accurate, robust),
        held_out,
        tested,
        partial(load_data, data, split="train", data_dir=data_dir),
    )


def train_digits_pair(out: Path, conditions: Conditions) -> Pair:
    """Train two small networks on 8×8 digits, or read those that an earlier run trained."""
    images = load_data("digits", split="train")
    count = len(images) - DIGITS_HELD_OUT
    training, held_out = images.slice(0, count), images.slice(count, DIGITS_HELD_OUT)
    # Few epochs: with more, on so few digits, the robust network is also the more accurate one.
    accurate, robust = train_bases(
        out, training, conditions, epochs=(30, 4), mean=DIGITS_MEAN, std=DIGITS_STD, seed_offset=5
    )
    return Pair(
        accurate,
        robust,
        (str(out / "accurate" / CHECKPOINT), str(out / "robust" / CHECKPOINT)),
        held_out,
        load_data("digits", split="test", count=DIGITS_TESTED),
        lambda: training,
    )


def train_bases(
    out: Path,
    images: Dataset,
    conditions: Conditions,
    *,
    epochs: tuple[int, int],
    mean: tuple[float, ...],
    std: tuple[float, ...],
    seed_offset: int = 0,
) -> list[nn.Module]:
    """Train a small accurate and a small robust network on all images, or read them from `out`.

    `mean` and `std` are those of the images, per channel; `seed_offset` is added to the seed of the
    initial weights of the robust network.
    """
    adversarial = Adversarial(norm=conditions.threat.norm, eps=conditions.threat.eps, steps=4)
    return [
        train_small(
            out / name,
            objective,
            images,
            conditions,
            epochs=count,
            lr=lr,
            mean=mean,
            std=std,
            seed=seed,
        )
        for name, objective, count, lr, seed in (
            ("accurate", Standard(label_smoothing=0.1), epochs[0], 3e-3, conditions.seed),
            ("robust", adversarial, epochs[1], 5e-3, conditions.seed + seed_offset),
        )
    ]


def train_small(
    out: Path,
    objective: Objective,
    images: Dataset,
    conditions: Conditions,
    *,
    epochs: int,
    lr: float,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    seed: int,
) -> nn.Module:
    """Train a small network on all images, or read it from `out`; `seed` is that of its initial
    weights."""
    model = models.build(
        "cnn_small",
        num_classes=images.num_classes,
        image_shape=images.image_shape,
        mean=mean,
        std=std,
        seed=seed,
    )
    plan = TrainingPlan(
        epochs=epochs,
        optimizer="adamw",
        lr=lr,
        weight_decay=1e-4,
        schedule="one-cycle",
        warmup=epochs / 5,
        held_out=0,
        seed=conditions.seed,
    )
    return fit_model(
        model,
        objective,
        images,
        plan,
        device=conditions.device,
        out=out,
        metadata={"arch": "cnn_small"},
    )


def smoke_requirements(time: str) -> Requirements:
    """Those of every study at smoke size."""
    return Requirements(data=DIGITS_DATA, models=OWN_MODELS, device="one core of a CPU", time=time)


class Study(ABC):
    """A study of a paper on two models; its parts can be run one at a time, repeated and resumed.

    `main_run` is the run folder of the study, and each part has a folder inside it.
    """

    name: ClassVar[str]
    paper: ClassVar[str] = ""  # authors, title and what of it is reproduced
    requirements: ClassVar[Mapping[str, Requirements]] = {}  # by size
    minutes: ClassVar[Mapping[str, float]] = {}  # measured, of parts at full size on an H200
    minutes_per: ClassVar[str] = ""  # what they are for, if not a whole part
    own_settings: ClassVar[tuple[str, ...]] = ()  # those of `OWN_SETTINGS` that it has
    parts: ClassVar[Mapping[str, Callable[[Any], object]]]  # in the order in which they run
    sizes: ClassVar[
        Mapping[str, Any]
    ]  # `smoke` and `full`: how much is computed, with at least a `batch_size`
    compared: ClassVar[
        Sequence[tuple[str, str]]
    ] = ()  # models whose accuracies are compared image by image
    uses_pair: ClassVar[bool] = (
        True  # whether it is about two given models; else it trains its own by recipes
    )
    takes_several_robust: ClassVar[bool] = False  # whether several robust models may be given

    def __init__(self, main_run: Run, pair: Pair, size: Any, conditions: Conditions) -> None:
        self.main_run, self.folder = main_run, main_run.folder
        self.pair, self.test, self.size, self.conditions = pair, pair.test, size, conditions
        for model in pair.models.values():
            model.to(conditions.device).eval().requires_grad_(False)

    @classmethod
    def size_for(cls, settings: StudySettings) -> Any:
        """How much is computed."""
        return cls.sizes[settings.size]

    @classmethod
    def load_models(cls, settings: StudySettings) -> Pair:
        """The models and images of the full size."""
        assert settings.accurate is not None
        return load_pair(
            settings.accurate,
            settings.robust_references[0],
            settings.data or "cifar10",
            settings.data_dir,
            settings.load_options,
            settings.count or COUNT,
            settings.sample,
        )

    @classmethod
    def train_models(cls, folder: Path, conditions: Conditions) -> Pair:
        """The models of the smoke size, trained now or in an earlier run, and their images."""
        return train_digits_pair(folder, conditions)

    @classmethod
    def overview(cls) -> StudyOverview:
        """What the study reproduces, needs and takes."""
        return study_overview(
            cls.name, cls.paper, cls.parts, cls.requirements, cls.minutes, cls.minutes_per
        )

    @classmethod
    def results_table(cls, folder: Path) -> str:
        """The results of a finished study as text, with its notes; empty where it has no
        accuracies."""
        summary = read_summary(folder)
        threat = next(
            (result.threat for result in summary.results if result.threat is not None), None
        )
        if threat is None:
            return ""
        return "\n".join(
            [format.accuracy_table(summary.results, str(threat)), *format.data_notes(summary)]
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
        """Open the run folder, load or train the models, and run parts; returns the report, else
        the summary."""
        identity, pair = cls.identity(settings), None
        identity["threat"] = conditions.threat.to_dict()
        if settings.size == "full":
            # Loaded before the folder is created: an unknown name leaves no folder behind.
            pair = cls.load_models(settings)
            identity |= {
                "models": {side: models.identity(model) for side, model in pair.models.items()},
                "data": pair.test.describe(),
            }
            recorded = {**recorded, "references": list(pair.all_references)}
        with nothing_left_on_refusal(folder), single_thread() if pair is None else nullcontext():
            run = Run(folder, identity, recorded)
            return cls(
                run,
                pair or cls.train_models(folder / "bases", conditions),
                cls.size_for(settings),
                conditions,
            ).run(parts, report=report)

    @classmethod
    def identity(cls, settings: StudySettings) -> dict[str, Any]:
        """What makes two runs of any study the same, without its models and images."""
        return {
            "command": "reproduce",
            "study": cls.name,
            "size": settings.size,
            "seed": settings.seed,
        }

    def run(self, parts: Sequence[str] = (), *, report: bool = True) -> Path:
        """Run parts in their order (all if none is named), then write the report of all that have
        been run.

        Returns:
            The report, or without `report` the summary.
        """
        start_time, threat = time.monotonic(), self.conditions.threat
        for part in parts:
            checks.one_of("part", part, self.parts)
        chosen = [part for part in self.parts if part in parts or not parts]
        for part in chosen:
            self.parts[part](self)
        for main_job in self.main_jobs():
            self.measure(main_job, self.test, self.main_run, self.conditions)
        rows = self.main_run.finish()
        self.write_summary(
            self.main_run,
            start_time,
            command="reproduce",
            study=self.name,
            differences=tuple(aggregation.differences(rows, self.compared, threat)),
            **self.main_sections(rows),
        )
        return reporting.report(self.folder) if report else self.folder / "summary.json"

    @abstractmethod
    def main_jobs(self) -> list[Job]:
        """Jobs of the study's own run folder."""

    def main_sections(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Further fields of the study's own summary."""
        return {}

    def sections(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Further fields of every summary."""
        return {}

    def describe_jobs(self, jobs: Sequence[Job], data: Dataset) -> dict[str, Any]:
        """What makes two runs of a part the same."""
        return job.identity(jobs, data, self.conditions)

    def measure(self, job: Job, data: Dataset, run: Run, conditions: Conditions) -> None:
        """Attack every image that the run has no row for yet."""
        measure(job, data, run, conditions)

    def open_part(self, part: str, jobs: Sequence[Job], data: Dataset, **identity: Any) -> Run:
        """Open the run folder of a part, new or to be resumed; `identity` adds to what identifies
        it."""
        return Run(
            self.folder / part,
            {**self.describe_jobs(jobs, data), "part": part, **identity},
            self.conditions.environment(),
            labels=data.labels_by_index(),
        )

    def measure_part(
        self,
        part: str,
        jobs: Sequence[Job],
        data: Dataset | None = None,
        conditions: Conditions | None = None,
        *,
        clean_target: float | None = None,
        **identity: Any,
    ) -> None:
        """Measure jobs in the run folder of a part, on the test images if no others are given."""
        start_time, images = time.monotonic(), self.test if data is None else data
        run = self.open_part(part, jobs, images, **identity)
        for part_job in jobs:
            self.measure(part_job, images, run, conditions or self.conditions)
        self.write_summary(run, start_time, clean_target=clean_target)

    def write_summary(
        self, run: Run, start_time: float, *, command: str = "evaluate", **sections: Any
    ) -> list[Row]:
        """Finish a run and write its accuracies, with further fields of the summary; returns its
        rows."""
        rows = run.finish()
        remove_stage_logs(run)
        fields = {
            "results": tuple(aggregation.accuracies(rows, self.conditions.threat)),
            **self.sections(rows),
            **sections,
        }
        run.write_summary(Summary(command=command, seconds=time.monotonic() - start_time, **fields))
        return rows

    def is_finished(self, part: str) -> bool:
        """Whether the run folder of a part has a summary."""
        return (self.folder / part / "summary.json").exists()


def jobs_for(
    models: Mapping[str, nn.Module], attacks: Mapping[str, Attack], alpha: float | None = None
) -> list[Job]:
    """One job for every model and every attack."""
    return [
        Job(name, model, attack_name, attack, alpha)
        for name, model in models.items()
        for attack_name, attack in attacks.items()
    ]


def require_part(done: bool, part: str) -> None:
    """Refuse to run a part before another one that it needs."""
    if not done:
        raise checks.InputError(
            f"`part` must come after the part {part}, which this study has not run yet"
        )
