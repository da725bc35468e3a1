"""How long an evaluation may take: the passes of its attacks, and the time of one pass on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from equipoise.attacks import CACHED, BatchAttack
from equipoise.core import losses, memory
from equipoise.core.ascent import value_and_gradient
from equipoise.core.modes import inference
from equipoise.core.progress_display import duration
from equipoise.data import Dataset, pixels
from equipoise.evaluation.job import Conditions, Job

IMAGES = 16  # in the timed pass
MIN_PASSES = 50_000  # of images in all; less work starts at once


@dataclass(frozen=True)
class TimeEstimate:
    """The most that an evaluation can cost: images that break early cost less."""

    images: int
    passes: float  # with a gradient, per image over all jobs
    seconds: float

    def __str__(self) -> str:
        return (f"at most {self.passes:.0f} passes per image for {self.images} images, about {duration(self.seconds)} "
                "on this machine; images that break early need less")


def passes_per_image(job: Job) -> float:
    """The most network passes with a gradient that the attack of a job makes for one image."""
    attack = job.attack
    if isinstance(attack, BatchAttack) and hasattr(attack, "steps"):
        return float(attack.steps * getattr(attack, "restarts", 1))
    return sum(stage.cost for stage in attack.stages())


def planned_passes(jobs: Sequence[Job], data: Dataset) -> dict[str, float]:
    """The tasks of these jobs, by the titles of their progress, and the most passes that they cost."""
    passes: dict[str, float] = {}
    for job in jobs:
        passes[str(job)] = len(data) * max(passes_per_image(job), 1.0)
        if job.audit is not None:
            passes[audit_title(job)] = min(job.audit.count, len(data)) * sum(
                stage.cost for stage in job.audit.attack.stages())
    return passes


def audit_title(job: Job) -> str:
    """The title of the progress of an audit."""
    return f"{job}, audit"


def estimate_time(jobs: Sequence[Job], data: Dataset, conditions: Conditions) -> TimeEstimate | None:
    """Time one pass of each model and multiply; None where the run is short, which is not worth timing."""
    audits = [(job, min(job.audit.count, len(data)) * sum(stage.cost for stage in job.audit.attack.stages()))
              for job in jobs if job.audit is not None]
    # Jobs whose attack keeps its images for all of them cost as much as one.
    once = {id(job.attack) if job.attack.name == CACHED else (id(job),): job for job in reversed(jobs)}
    work = [(job, len(data) * passes_per_image(job)) for job in once.values()] + audits
    total = sum(passes for _, passes in work)
    if total < MIN_PASSES:
        return None
    seconds: dict[int, float] = {}
    for job, _ in work:
        if id(job.model) not in seconds:
            seconds[id(job.model)] = time_pass(job.model, data, conditions)
    return TimeEstimate(len(data), total / len(data), sum(seconds[id(job.model)] * passes for job, passes in work))


def time_pass(model: nn.Module, data: Dataset, conditions: Conditions) -> float:
    """Seconds of one pass with a gradient, per image, in the second of two passes."""
    first = data.slice(0, min(IMAGES, len(data)))
    x, y = pixels(first.images.to(conditions.device)), first.labels.to(conditions.device)

    def run(part: slice) -> float:
        start = time.monotonic()
        value_and_gradient(lambda point: losses.cross_entropy(model(point), y[part]))(x[part])
        if conditions.device.type == "cuda":
            torch.cuda.synchronize(conditions.device)
        return (time.monotonic() - start) / len(y[part])

    with inference(model):
        times: list[float] = [next(memory.in_batches(run, len(first), IMAGES))[1] for _ in range(2)]
    return times[-1]
