"""The attack type: an algorithm with its settings. A suite of attacks is an attack, and suites nest.

`attack(model, x, y, threat=…, stream=…)` attacks one batch, :func:`attack_dataset` a whole data set. Both run the
stages of the attack with one :class:`~equipoise.attacks.engine.Driver`.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from equipoise import models
from equipoise.attacks.engine import CPU_BLOCK, AttackState, Driver, MakeSearch, ProgressMeter, Stage
from equipoise.attacks.gradients import Extra, GradientSettings, GradientSource
from equipoise.attacks.search import AttackBatch, SearchResult, SearchState
from equipoise.core import checks, geometry, progress, rng
from equipoise.core.device import autocast, exclusive, full_precision
from equipoise.core.modes import inference
from equipoise.core.rng import Stream
from equipoise.core.threat import Threat
from equipoise.data import Dataset, pixels

CUDA_BLOCK = 512  # images per network pass on CUDA, at most: larger ones are hardly faster, and wasted on few survivors
BATCH_BLOCK = 128  # images per network pass when an attack is called on a larger batch


@dataclass(frozen=True)
class Attack(ABC):
    """An algorithm with its settings, which are the fields of the subclass.

    Args:
        surrogate: gives the gradients instead of the model under attack.
        extra: images → (B,), added to the objective; the identity of a run has its `describe()`.
        follow: with a surrogate, whose loss decides which iterate is best: "model" or "surrogate".
        margin_ratio_below: attack only images that have less than this share of their clean logit margin left.
        eot: for a randomised model: passes over which each gradient is averaged (expectation over transformation).
        repeats: for a randomised model: passes per verdict; an image is broken if none classifies it correctly.
    """

    surrogate: nn.Module | None = field(default=None, kw_only=True)
    extra: Extra | None = field(default=None, kw_only=True)
    follow: str = field(default="model", kw_only=True)
    margin_ratio_below: float | None = field(default=None, kw_only=True)
    eot: int | None = field(default=None, kw_only=True)
    repeats: int | None = field(default=None, kw_only=True)

    version: ClassVar[int] = 1  # raised when an algorithm gives other results with the same settings
    if TYPE_CHECKING:  # a class variable of algorithms and a field of suites, which a property here would shadow
        @property
        def name(self) -> str:
            """What the attack is called in reports; for algorithms also in the identity of a run."""

    @abstractmethod
    def stages(self) -> tuple[Stage, ...]:
        """The runs of the algorithm in order, as the driver schedules them: one per restart or target class."""

    def stage(self, name: str, make_search: MakeSearch, cost: float) -> Stage:
        """One run, with where its gradients come from; `cost` is in passes with a gradient."""
        gradients = GradientSettings(self.surrogate, self.extra, self.follow, self.eot, self.repeats)
        return Stage(name, make_search, cost, self.margin_ratio_below, gradients)

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, *, threat: Threat, stream: Stream,
                 precision: str = "auto") -> Tensor:
        """Attack one batch; every network pass has one batch size, so results do not depend on which images break.

        Args:
            model: decides success: images (B, C, H, W) in [0, 1] → logits (B, K).
            x: (B, C, H, W) images in [0, 1].
            y: (B,) labels.
            threat: the ball.
            stream: random stream of these images.
            precision: of gradients: auto, fp32 or bf16; success is always judged in full precision.

        Returns:
            (B, C, H, W), detached, inside the ball and [0, 1]: what fools the model, or else comes nearest to it.
        """
        batch, stages = AttackBatch(x, y, stream).checked(), self.stages()
        state = AttackState.new([stage.name for stage in stages], len(x), batch.x.clone())
        driver = Driver(model, batch.select, batch, threat=threat, precision=precision, slots=len(x), batching="fixed",
                        block=BATCH_BLOCK)
        with self._reproducible(batch.stream):
            driver.run(stages, state)
        assert state.images is not None
        return state.images

    def _reproducible(self, stream: Stream) -> AbstractContextManager[None]:
        """For attacks on randomised models: their random numbers follow the stream."""
        return nullcontext() if self.eot is None and self.repeats is None else rng.seed_global(stream.at("passes"))

    def describe(self) -> dict[str, Any]:
        """The identity of the attack in `run.toml`: every setting that affects the result, by stable names."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.metadata.get("described", True)}
        if self.follow == "model":
            del values["follow"]
        return {"attack": self.name, "version": self.version,
                **{key: _plain(value) for key, value in values.items() if value is not None}}


def _plain(value: Any) -> Any:
    if isinstance(value, nn.Module):
        return models.identity(value)
    if callable(value):
        describe = getattr(value, "describe", None)
        checks.require(describe is not None, "attack", "have a describe() in each of its parts", type(value).__name__)
        return value.describe()
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


@dataclass(frozen=True)
class Suite(Attack):
    """A sequence of attacks, each on the images that survived the previous ones.

    A member without a surrogate (with its `follow`), extra term, `margin_ratio_below`, `eot` or `repeats` of its own
    inherits the suite's. Stages of a suite with a name are called "name/stage", and their random stream is the one for
    that name.
    """

    attacks: tuple[Attack, ...] = ()
    name: str = ""

    def stages(self) -> tuple[Stage, ...]:
        """The stages of all members."""
        stages = [stage for attack in self.attacks for stage in self._with_inherited(attack).stages()]
        return tuple(stage.inside(self.name) if self.name else stage for stage in stages)

    def _with_inherited(self, attack: Attack) -> Attack:
        names = ("surrogate", "extra", "margin_ratio_below", "eot", "repeats")
        inherited = {name: getattr(self, name) for name in names
                     if getattr(attack, name) is None and getattr(self, name) is not None}
        if "surrogate" in inherited:
            inherited["follow"] = self.follow
        return dataclasses.replace(attack, **inherited)

    def describe(self) -> dict[str, Any]:
        """Those of the members, in order."""
        return {**super().describe(), "attack": "suite"}


@dataclass(frozen=True)
class BatchAttack(Attack):
    """An attack on one batch at a time, such as PGD: no early exit, no slots to refill.

    In a suite or on a data set it is a single stage, with the random stream for its name.
    """

    @abstractmethod
    def run(self, model: nn.Module, x: Tensor, y: Tensor, *, threat: Threat, stream: Stream) -> Tensor:
        """Attack images (B, C, H, W), which are checked and detached; model and surrogate are in inference mode."""

    def run_checked(self, model: nn.Module, x: Tensor, y: Tensor, *, threat: Threat, stream: Stream) -> Tensor:
        """Run the attack; images outside of the ball or of [0, 1] are an error, so that no attack can cheat."""
        x_adv = self.run(model, x, y, threat=threat, stream=stream).detach()
        checks.require(x_adv.shape == x.shape, self.name, f"return images of shape {tuple(x.shape)}",
                       tuple(x_adv.shape))
        checks.images(x_adv, f"images of {self.name}")
        distance = float(geometry.size(x_adv - x, threat.norm).max()) if len(x) else 0.0
        checks.require(distance <= threat.eps * (1 + 1e-5), self.name, f"stay within {threat}", distance)
        return x_adv

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, *, threat: Threat, stream: Stream,
                 precision: str = "auto") -> Tensor:
        """Attack one batch; see :class:`Attack`. Here `precision` is that of all passes, and auto is fp32 with TF32."""
        batch = AttackBatch(x, y, stream).checked()
        with (exclusive(x.device), inference(model, self.surrogate), _pass_precision(precision, x.device),
              self._reproducible(batch.stream)):
            return self.run_checked(model, batch.x, y, threat=threat, stream=batch.stream)

    def stages(self) -> tuple[Stage, ...]:
        """One."""
        return (self.stage(self.name, lambda source, threat, stop_at_success: _SinglePass(self, source, threat), 20),)


class _SinglePass:
    """The search of a :class:`BatchAttack`: one pass, which is the whole attack."""

    passes = 1

    def __init__(self, attack: BatchAttack, source: GradientSource, threat: Threat) -> None:
        self.attack, self.source, self.threat = attack, source, threat

    def start(self, x: Tensor, y: Tensor, stream: Stream) -> SearchState:
        unknown = x.new_full((len(x),), torch.inf)
        return SearchState(x=x, y=y, index=stream.index, nearest=x, margin=unknown, logit_margin=unknown)

    def advance(self, state: SearchState, stream: Stream, ages: Sequence[int], passes: int) -> SearchState:
        own, size = stream.at(self.attack.name), self.source.block or len(ages)
        parts = [slice(start, start + size) for start in range(0, len(ages), size)]
        with _pass_precision(self.source.precision, state.x.device):
            images = [self.attack.run_checked(self.source.model, state.x[part], state.y[part], threat=self.threat,
                                              stream=own[part]) for part in parts]
        return dataclasses.replace(state, nearest=torch.cat(images))


def _pass_precision(precision: str, place: torch.device) -> AbstractContextManager[object]:
    return full_precision(place) if precision == "fp32" else autocast(precision, place)


@dataclass(frozen=True)
class Clean(BatchAttack):
    """No attack: accuracy under it is clean accuracy."""

    name: ClassVar[str] = "clean"

    def stages(self) -> tuple[Stage, ...]:
        """None: the clean images are always classified first."""
        return ()

    def run(self, model: nn.Module, x: Tensor, y: Tensor, *, threat: Threat, stream: Stream) -> Tensor:
        """The images themselves."""
        return x


@dataclass(frozen=True)
class FunctionAttack(BatchAttack):
    """Any function `function(model, x, y, *, threat, stream, surrogate, extra) → x_adv` as an attack.

    `settings` are those that affect its results, for the identity of a run.
    """

    name: str
    function: Callable[..., Tensor] = field(metadata={"described": False})  # it has no stable name
    settings: Mapping[str, Any] = field(default_factory=dict)

    def run(self, model: nn.Module, x: Tensor, y: Tensor, *, threat: Threat, stream: Stream) -> Tensor:
        """Call the function."""
        return self.function(model, x, y, threat=threat, stream=stream, surrogate=self.surrogate, extra=self.extra)


def attack_dataset(
    attack: Attack, model: nn.Module, data: Dataset, *, threat: Threat, seed: int, precision: str = "auto",
    batch_size: int = 128, device: torch.device | str = "cpu", whole: Dataset | None = None,
    state: AttackState | None = None, on_result: Callable[[int, SearchResult, AttackState], None] | None = None,
    keep_images: bool = False, title: str = "attacking",
) -> AttackState:
    """Attack a data set; a batch at a time is in memory, refilled across the whole data set as images break.

    Verdict and margin of an image do not depend on the other images, on the number of processes, or on where a run was
    interrupted; on the CPU not on the batch size either. On CUDA every pass sees exactly `batch_size` images, at
    most 512 or as many as `whole` has, so a smaller batch size rounds differently, and so does a batch halved for lack
    of memory.

    Args:
        attack: usually a suite, cheap and strong attacks first.
        model, threat, precision: as for :meth:`Attack.__call__`; the model is on `device`.
        data: the images.
        seed: random seed.
        batch_size: images attacked at a time; halved when memory runs out.
        device: where to compute.
        whole: the set of which `data` is a part, if it is one: batch shapes and tests of precision follow it, so that
            every part has the same.
        state: of an interrupted run, which is continued; it is copied.
        on_result: called with the number of the stage (0 for the clean images), every result, and the state after it.
        keep_images: also keep the nearest point of every image.
        title: of the progress bar.
    """
    checks.whole("batch_size", batch_size, least=1)
    checks.require(len(data) > 0, "data", "hold at least one image", 0)
    stages, place, whole = attack.stages(), torch.device(device), data if whole is None else whole
    nearest = pixels(data.images).clone() if keep_images else None  # floats would be the caller's own images
    current = AttackState.new([stage.name for stage in stages], len(data), nearest)
    current = current if state is None else current.resumed(state)

    def load(part: Dataset) -> AttackBatch:
        x = pixels(part.images.to(place)).contiguous(memory_format=torch.channels_last)
        return AttackBatch(x, part.labels.to(place), rng.stream(seed, "attack", part.index.to(place)))

    driver = Driver(model, lambda rows: load(data.take(rows)), load(whole.take(torch.arange(CPU_BLOCK) % len(whole))),
                    threat=threat, precision=precision, slots=min(batch_size, len(whole)),
                    batching="fixed" if place.type == "cuda" else "measured", block=CUDA_BLOCK,
                    many_passes=True)
    with progress.task(title, total=len(data)) as task:
        meter = ProgressMeter(task, stages, current)

        def report(number: int, result: SearchResult) -> None:
            if on_result is not None:
                on_result(number, result, current)
            meter.show()

        driver.run(stages, current, report)
        meter.show()
    return current
