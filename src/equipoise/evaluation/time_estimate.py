"""How long an evaluation may take: the passes of its attacks, and the time of one pass on this
machine.

Images that break early need few passes, so that the most that a suite of attacks can cost says
little. What it usually costs is estimated from its first attack on a few images: how many survive
it, and how far the others are from breaking.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from equipoise.attacks import CACHED, Attack, BatchAttack, Suite, attack_dataset
from equipoise.core import losses, memory
from equipoise.core.ascent import value_and_gradient
from equipoise.core.modes import inference
from equipoise.core.progress_display import duration
from equipoise.data import Dataset, pixels
from equipoise.evaluation.job import Conditions, Job

IMAGES = 16  # that the first attack of a suite is tried on, and in the timed pass on a CPU
MIN_PASSES = 50_000  # of images in all; less work starts at once
MIN_SECONDS = 120.0  # of the most that it can take; where it is less, nothing is tried
LARGEST_TRIAL = 0.05  # of the most passes of a job


@dataclass(frozen=True)
class TimeEstimate:
    """What an evaluation can cost at most, and what it costs if all images are like the first."""

    images: int
    passes: float  # with a gradient, per image over all jobs
    seconds: float
    usual_passes: float | None = None  # per image; None if it is not known
    usual_seconds: float | None = None
    tasks: Mapping[str, float] = field(
        default_factory=dict
    )  # passes of all images, by the titles of their progress

    def __str__(self) -> str:
        if self.usual_passes is None or self.usual_seconds is None:
            return (
                f"at most {self.passes:.0f} passes per image for {self.images} images, about "
                f"{duration(self.seconds)} on this machine"
            )
        return (
            f"about {self.usual_passes:.0f} passes per image for {self.images} images, "
            f"{duration(self.usual_seconds)} on this machine, if they break as the first "
            f"{min(IMAGES, self.images)} do; at most {self.passes:.0f} passes, {duration(self.seconds)}"
        )


@dataclass(frozen=True)
class Trial:
    """The first attack of a suite on a few images, and what the whole suite costs if all images are
    like them."""

    passes: float  # per image
    survived: float  # share of the images


def passes_per_image(job: Job) -> float:
    """The most network passes with a gradient that the attack of a job makes for one image."""
    attack = job.attack
    if isinstance(attack, BatchAttack) and hasattr(attack, "steps"):
        return float(attack.steps * getattr(attack, "restarts", 1) * (attack.eot or 1))
    return _cost(attack)


def planned_passes(
    jobs: Sequence[Job], data: Dataset, trials: Mapping[str, Trial] | None = None
) -> dict[str, float]:
    """The tasks of these jobs, by the titles of their progress, and the most passes that they cost.

    With `trials`, by the text of a job, the passes that it usually costs.
    """
    passes: dict[str, float] = {}
    for job in jobs:
        trial = (trials or {}).get(str(job)) or Trial(passes_per_image(job), 1.0)
        passes[str(job)] = len(data) * max(trial.passes, 1.0)
        if job.audit is not None:
            survivors = max(trial.survived * len(data), 1.0)
            passes[audit_title(job)] = min(job.audit.count, survivors) * _cost(job.audit.attack)
    return passes


def audit_title(job: Job) -> str:
    """The title of the progress of an audit."""
    return f"{job}, audit"


def estimate_time(
    jobs: Sequence[Job], data: Dataset, conditions: Conditions
) -> TimeEstimate | None:
    """Time one pass of each model and multiply; None where the run is short, which is not worth
    timing."""
    # Jobs whose attack keeps its images for all of them cost as much as one; clean images cost next
    # to nothing.
    once = {
        id(job.attack) if job.attack.name == CACHED else (id(job),): job for job in reversed(jobs)
    }
    work = [job for job in once.values() if passes_per_image(job) > 0]
    most = planned_passes(work, data)
    total = sum(most.values())
    if total < MIN_PASSES:
        return None
    times: dict[int, float] = {}
    for job in work:
        if id(job.model) not in times:
            times[id(job.model)] = time_pass(job.model, data, conditions)

    def seconds(passes: Mapping[str, float]) -> float:
        return sum(
            times[id(job.model)] * (passes[str(job)] + passes.get(audit_title(job), 0.0))
            for job in work
        )

    estimate = TimeEstimate(
        len(data), total / len(data), seconds(most), tasks=planned_passes(jobs, data)
    )
    trials = (
        {
            str(job): trial
            for job in work
            if (trial := _run_trial(job, data, conditions)) is not None
        }
        if estimate.seconds >= MIN_SECONDS
        else {}
    )
    if not trials:
        return estimate
    usual = planned_passes(work, data, trials)
    return replace(
        estimate,
        tasks=planned_passes(jobs, data, trials),
        usual_passes=sum(usual.values()) / len(data),
        usual_seconds=seconds(usual),
    )


def _run_trial(job: Job, data: Dataset, conditions: Conditions) -> Trial | None:
    """The first attack of a suite on the first images; None if it is all of it, or a large part of
    the work."""
    first, stages = _first_attack(job.attack), job.attack.stages()
    own = len(first.stages())
    if (
        own == len(stages)
        or job.attack.repeats is not None
        or IMAGES * _cost(first) > LARGEST_TRIAL * len(data) * _cost(job.attack)
    ):
        return None
    state = attack_dataset(
        first,
        job.model.to(conditions.device),
        data.slice(0, min(IMAGES, len(data))),
        threat=conditions.threat,
        seed=conditions.seed,
        precision=conditions.precision,
        batch_size=conditions.batch_size,
        device=conditions.device,
        title=f"{job}, estimating time",
    )
    passes = state.passes.clone()
    for stage in stages[own:]:
        limit = stage.margin_ratio_below
        passes += stage.cost * (
            state.survived if limit is None else state.survived & (state.margin_ratio < limit)
        )
    return Trial(float(passes.mean()), float(state.survived.float().mean()))


def _first_attack(attack: Attack) -> Attack:
    """A suite with its first member alone."""
    if not isinstance(attack, Suite) or not attack.attacks:
        return attack
    return replace(attack, attacks=(_first_attack(attack.attacks[0]),))


def _cost(attack: Attack) -> float:
    return sum(stage.cost * (stage.gradients.eot or 1) for stage in attack.stages())


def time_pass(model: nn.Module, data: Dataset, conditions: Conditions) -> float:
    """Seconds of one pass with a gradient, per image, in the second of two passes.

    On CUDA a pass has as many images as in an attack: smaller ones take as long.
    """
    count = min(conditions.batch_size if conditions.device.type == "cuda" else IMAGES, len(data))
    first = data.slice(0, count)
    x, y = pixels(first.images.to(conditions.device)), first.labels.to(conditions.device)

    def run(part: slice) -> float:
        start = time.monotonic()
        value_and_gradient(lambda point: losses.cross_entropy(model(point), y[part]))(x[part])
        if conditions.device.type == "cuda":
            torch.cuda.synchronize(conditions.device)
        return (time.monotonic() - start) / len(y[part])

    with inference(model):
        times: list[float] = [next(memory.in_batches(run, len(first), count))[1] for _ in range(2)]
    return times[-1]
