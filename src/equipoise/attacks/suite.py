"""The attack type: an algorithm with its settings. A suite of attacks is an attack, and suites
nest.

`attack(model, x, y, threat=…, stream=…)` attacks one batch, :func:`attack_dataset` a whole data
set. Both run the stages of the attack with one :class:`~equipoise.attacks.engine.Driver`.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from equipoise import models
from equipoise.attacks.attack_state import AttackState
from equipoise.attacks.engine import Driver, MakeSearch, ProgressMeter, Stage
from equipoise.attacks.gradients import Extra, GradientSettings
from equipoise.attacks.prepared import EXAMPLES
from equipoise.attacks.search_state import AttackBatch, SearchResult
from equipoise.core import checks, progress, rng
from equipoise.core.rng import Stream
from equipoise.core.threat import Threat
from equipoise.data import Dataset, pixels

# Images per network pass on CUDA: as many as keep it busy, which of large images are fewer.
CUDA_BLOCK, CUDA_PIXELS, LEAST_CUDA_BLOCK = 512, 512 * 32 * 32, 64
CPU_BLOCK = 16  # the same on the CPU
LARGE_IMAGE, LARGE_IMAGE_BLOCK = 64 * 64, 8  # from so many pixels on, fewer images, for memory
BATCH_BLOCK = 128  # images per network pass when an attack is called on a larger batch


@dataclass(frozen=True)
class Attack(ABC):
    """An algorithm with its settings, which are the fields of the subclass.

    Args:
        surrogate: gives the gradients instead of the model under attack.
        extra: images → (B,), added to the objective; the identity of a run has its `describe()`.
        follow: with a surrogate, whose loss decides which iterate is best: "model" or "surrogate".
        margin_ratio_below: attack only images that have less than this share of their clean logit
            margin left.
        eot: for a randomised model: passes over which each gradient is averaged (expectation over
            transformation).
        repeats: for a randomised model: passes per verdict; an image is broken if none classifies
            it correctly.
    """

    surrogate: nn.Module | None = field(default=None, kw_only=True)
    extra: Extra | None = field(default=None, kw_only=True)
    follow: str = field(default="model", kw_only=True)
    margin_ratio_below: float | None = field(default=None, kw_only=True)
    eot: int | None = field(default=None, kw_only=True)
    repeats: int | None = field(default=None, kw_only=True)

    # Raised when an algorithm gives other results with the same settings
    version: ClassVar[int] = 1
    # Whether the size of what breaks an image is as small as possible
    measures_radius: ClassVar[bool] = False
    # A class variable of algorithms and a field of suites, which a property here would shadow
    if TYPE_CHECKING:

        @property
        def name(self) -> str:
            """What the attack is called in reports; for algorithms also in the identity of a
            run."""

    @abstractmethod
    def stages(self) -> tuple[Stage, ...]:
        """The runs of the algorithm in order, as the driver schedules them: one per restart or
        target class."""

    def stage(
        self, name: str, make_search: MakeSearch, cost: float, group: Hashable = None
    ) -> Stage:
        """One run, with where its gradients come from; `cost` is in passes with a gradient.

        Consecutive runs of one `group` that differ only in their start, such as in their target,
        share batches.
        """
        gradients = GradientSettings(
            self.surrogate, self.extra, self.follow, self.eot, self.repeats
        )
        return Stage(name, make_search, cost, self.margin_ratio_below, gradients, group=group)

    def __call__(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        *,
        threat: Threat,
        stream: Stream,
        precision: str = "auto",
    ) -> Tensor:
        """Attack one batch; network passes have fixed sizes, so results do not depend on which
        images break.

        Args:
            model: decides success: images (B, C, H, W) in [0, 1] → logits (B, K).
            x: (B, C, H, W) images in [0, 1].
            y: (B,) labels.
            threat: the ball.
            stream: random stream of these images, with an index of its own for every one.
            precision: of gradients: auto, fp32 or bf16; success is always judged in full precision.

        Returns:
            (B, C, H, W), detached, inside the ball and [0, 1]: what fools the model, or else comes
                nearest to it.
        """
        return next(
            self.at_threats(model, x, y, threats=[threat], streams=[stream], precision=precision)
        )

    def at_threats(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        *,
        threats: Sequence[Threat],
        streams: Sequence[Stream],
        precision: str = "auto",
    ) -> Iterator[Tensor]:
        """Attack one batch under several threats, each with its random stream; networks are
        prepared once."""
        batches, stages = [AttackBatch(x, y, stream).checked() for stream in streams], self.stages()
        driver = Driver(
            model,
            batches[0].select,
            batches[0],
            threat=threats[0],
            precision=precision,
            slots=len(x),
            block=min(len(x), BATCH_BLOCK),
        )
        for batch, threat in zip(batches, threats, strict=True):
            state = AttackState.new([stage.name for stage in stages], len(x), batch.x.clone())
            driver.load, driver.threat = batch.select, threat
            with self._reproducible(batch.stream):
                driver.run(stages, state)
            assert state.images is not None
            yield state.images

    def _reproducible(self, stream: Stream) -> AbstractContextManager[None]:
        """For attacks on randomised models: their random numbers follow the stream."""
        return (
            nullcontext()
            if self.eot is None and self.repeats is None
            else rng.seed_global(stream.at("passes"))
        )

    def describe(self) -> dict[str, Any]:
        """The identity of the attack in `run.toml`: every setting that affects the result, by
        stable names."""
        values = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.metadata.get("described", True)
        }
        if self.follow == "model":
            del values["follow"]
        return {
            "attack": self.name,
            "version": self.version,
            **{key: _plain(value) for key, value in values.items() if value is not None},
        }


def _plain(value: Any) -> Any:
    if isinstance(value, nn.Module):
        return models.identity(value)
    if callable(value):
        describe = getattr(value, "describe", None)
        checks.require(
            describe is not None,
            "attack",
            "have a describe() in each of its parts",
            type(value).__name__,
        )
        return value.describe()
    if not isinstance(value, tuple):
        return value
    if not any(isinstance(item, Attack) for item in value):
        return [_plain(item) for item in value]
    with (
        ThreadPoolExecutor() as pool
    ):  # digests of weights take long, and leave the interpreter to other threads
        return list(pool.map(_plain, value))


@dataclass(frozen=True)
class Suite(Attack):
    """A sequence of attacks, each on the images that survived the previous ones.

    A member without a surrogate (with its `follow`), extra term, `margin_ratio_below`, `eot` or
    `repeats` of its own inherits the suite's. Stages of a suite with a name are called
    "name/stage", and their random stream is the one for that name.
    """

    attacks: tuple[Attack, ...] = ()
    name: str = ""

    def stages(self) -> tuple[Stage, ...]:
        """The stages of all members."""
        stages = [
            stage for attack in self.attacks for stage in self._with_inherited(attack).stages()
        ]
        return tuple(stage.inside(self.name) if self.name else stage for stage in stages)

    def _with_inherited(self, attack: Attack) -> Attack:
        names = ("surrogate", "extra", "margin_ratio_below", "eot", "repeats")
        inherited = {
            name: getattr(self, name)
            for name in names
            if getattr(attack, name) is None and getattr(self, name) is not None
        }
        if "surrogate" in inherited:
            inherited["follow"] = self.follow
        return dataclasses.replace(attack, **inherited)

    def describe(self) -> dict[str, Any]:
        """Those of the members, in order."""
        return {**super().describe(), "attack": "suite"}


def attack_dataset(
    attack: Attack,
    model: nn.Module,
    data: Dataset,
    *,
    threat: Threat,
    seed: int,
    precision: str = "auto",
    batch_size: int = 128,
    device: torch.device | str = "cpu",
    whole: Dataset | None = None,
    state: AttackState | None = None,
    on_result: Callable[[int, SearchResult, AttackState], None] | None = None,
    keep_images: bool = False,
    observe: nn.Module | None = None,
    title: str = "attacking",
) -> AttackState:
    """Attack a data set; a batch at a time is in memory, refilled across the whole data set as
    images break.

    Verdict and margin of an image do not depend on the other images, on the number of processes, or
    on where a run was interrupted; on the CPU not on the batch size either, because every pass sees
    16 images there (8 of 64 × 64 pixels or more). On CUDA every pass of a search sees exactly
    `batch_size` images, at most 512 (128 of 64 × 64 pixels, 64 of larger images), and one of a
    verdict at most 128 or 16. All see at most as many as `whole` has. So on CUDA a smaller batch
    size rounds differently, and so does everywhere a batch halved for lack of memory.

    Args:
        attack: usually a suite, cheap and strong attacks first.
        model, threat, precision: as for :meth:`Attack.__call__`; the model is on `device`.
        data: the images.
        seed: random seed.
        batch_size: images attacked at a time, on the CPU at least those of one pass; halved when
            memory runs out.
        device: where to compute.
        whole: the set of which `data` is a part, if it is one: batch shapes and tests of precision
            follow it, so that every part has the same.
        state: of an interrupted run, which is continued; it is copied.
        on_result: called with the number of the stage (0 for the clean images), every result, and
            the state after it.
        keep_images: also keep the nearest point of every image.
        observe: a part of the model; results hold what it returned at their points, in the passes
            of the verdict.
        title: of the progress bar.
    """
    checks.whole("batch_size", batch_size, least=1)
    checks.require(len(data) > 0, "data", "hold at least one image", 0)
    stages, place, whole = attack.stages(), torch.device(device), data if whole is None else whole
    # Floats would be the caller's own images
    nearest = pixels(data.images).clone() if keep_images else None
    current = AttackState.new([stage.name for stage in stages], len(data), nearest)
    current = current if state is None else current.resumed(state)

    def load(part: Dataset) -> AttackBatch:
        x = pixels(part.images.to(place))
        return AttackBatch(
            x, part.labels.to(place), rng.stream(seed, "attack", part.index.to(place))
        )

    block = min(batch_size, _cuda_block(data)) if place.type == "cuda" else _cpu_block(data)
    driver = Driver(
        model,
        lambda rows: load(data.take(rows)),
        load(whole.take(torch.arange(EXAMPLES) % len(whole))),
        threat=threat,
        precision=precision,
        slots=min(max(batch_size, block), len(whole)),
        block=min(block, len(whole)),
        observe=observe,
    )
    with progress.stage(title, total=len(data)) as task:
        meter = ProgressMeter(task, stages, current)

        def report(number: int, result: SearchResult) -> None:
            if on_result is not None:
                on_result(number, result, current)
            meter.show()

        driver.run(stages, current, report)
        meter.show()
    return current


def _cuda_block(data: Dataset) -> int:
    """Images per network pass on CUDA, a power of two."""
    _, height, width = data.image_shape
    busy = CUDA_PIXELS // (height * width)
    return max(LEAST_CUDA_BLOCK, min(CUDA_BLOCK, 1 << max(busy.bit_length() - 1, 0)))


def _cpu_block(data: Dataset) -> int:
    """Images per network pass on the CPU: the same on every machine, and so are the rows."""
    _, height, width = data.image_shape
    return LARGE_IMAGE_BLOCK if height * width >= LARGE_IMAGE else CPU_BLOCK
