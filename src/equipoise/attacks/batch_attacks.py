"""Attacks on one batch at a time, such as PGD, and any function as an attack."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from equipoise.attacks.engine import Stage
from equipoise.attacks.gradients import GradientSource
from equipoise.attacks.search_state import AttackBatch, SearchState
from equipoise.attacks.suite import Attack
from equipoise.core import checks, geometry
from equipoise.core.device import autocast, exclusive, full_precision
from equipoise.core.modes import inference
from equipoise.core.rng import Stream
from equipoise.core.threat import Threat


@dataclass(frozen=True)
class BatchAttack(Attack):
    """An attack on one batch at a time, such as PGD: no early exit, no slots to refill.

    In a suite or on a data set it is a single stage, with the random stream for its name.
    """

    @abstractmethod
    def run(
        self, model: nn.Module, x: Tensor, y: Tensor, *, threat: Threat, stream: Stream
    ) -> Tensor:
        """Attack images (B, C, H, W), which are checked and detached; model and surrogate are in
        inference mode."""

    def run_checked(
        self, model: nn.Module, x: Tensor, y: Tensor, *, threat: Threat, stream: Stream
    ) -> Tensor:
        """Run the attack; images outside of the ball or of [0, 1] are an error, so that no attack
        can cheat."""
        x_adv = self.run(model, x, y, threat=threat, stream=stream).detach()
        checks.require(
            x_adv.shape == x.shape,
            self.name,
            f"return images of shape {tuple(x.shape)}",
            tuple(x_adv.shape),
        )
        checks.images(x_adv, f"images of {self.name}")
        distance = float(geometry.size(x_adv - x, threat.norm).max()) if len(x) else 0.0
        checks.require(
            distance <= threat.eps * (1 + 1e-5), self.name, f"stay within {threat}", distance
        )
        return x_adv

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
        """Attack one batch; see :class:`Attack`. Here `precision` is that of all passes, and auto
        is fp32 with TF32."""
        batch = AttackBatch(x, y, stream).checked()
        with (
            exclusive(x.device),
            inference(model, self.surrogate),
            _pass_precision(precision, x.device),
            self._reproducible(batch.stream),
        ):
            return self.run_checked(model, batch.x, y, threat=threat, stream=batch.stream)

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
        """Attack one batch under several threats, one call each."""
        for threat, stream in zip(threats, streams, strict=True):
            yield self(model, x, y, threat=threat, stream=stream, precision=precision)

    def stages(self) -> tuple[Stage, ...]:
        """One."""
        return (
            self.stage(
                self.name,
                lambda source, threat, stop_at_success: _SinglePass(self, source, threat),
                20,
            ),
        )


class _SinglePass:
    """The search of a :class:`BatchAttack`: one pass, which is the whole attack."""

    passes = 1

    def __init__(self, attack: BatchAttack, source: GradientSource, threat: Threat) -> None:
        self.attack, self.source, self.threat = attack, source, threat

    def start(self, x: Tensor, y: Tensor, stream: Stream) -> SearchState:
        unknown = x.new_full((len(x),), torch.inf)
        return SearchState(
            x=x, y=y, index=stream.index, nearest=x, margin=unknown, logit_margin=unknown
        )

    def advance(
        self, state: SearchState, stream: Stream, ages: Sequence[int], passes: int
    ) -> SearchState:
        own, size = stream.at(self.attack.name), self.source.block or len(ages)
        parts = [slice(start, start + size) for start in range(0, len(ages), size)]
        with _pass_precision(self.source.precision, state.x.device):
            images = [
                self.attack.run_checked(
                    self.source.model,
                    state.x[part],
                    state.y[part],
                    threat=self.threat,
                    stream=own[part],
                )
                for part in parts
            ]
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

    def run(
        self, model: nn.Module, x: Tensor, y: Tensor, *, threat: Threat, stream: Stream
    ) -> Tensor:
        """The images themselves."""
        return x


@dataclass(frozen=True)
class FunctionAttack(BatchAttack):
    """Any function `function(model, x, y, *, threat, stream, surrogate, extra) → x_adv` as an
    attack.

    `settings` are those that affect its results, for the identity of a run.
    """

    name: str
    function: Callable[..., Tensor] = field(metadata={"described": False})  # it has no stable name
    settings: Mapping[str, Any] = field(default_factory=dict)

    def run(
        self, model: nn.Module, x: Tensor, y: Tensor, *, threat: Threat, stream: Stream
    ) -> Tensor:
        """Call the function."""
        return self.function(
            model, x, y, threat=threat, stream=stream, surrogate=self.surrogate, extra=self.extra
        )
