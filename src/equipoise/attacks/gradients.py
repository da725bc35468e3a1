"""What an adversary holds: the model that judges, where gradients come from, and how exactly to compute."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.attacks.cuda_graphs import CudaGraphFunction
from equipoise.attacks.fused import agree, frozen, swift
from equipoise.core import checks, device, losses

Extra = Callable[[Tensor], Tensor]
Objective = Callable[[Tensor, Tensor, Tensor | None], Tensor]
FOLLOW = ("model", "surrogate")
_LEAST = -1e4  # a logit of −inf, as a hard decision gives it, would make ratios of margins meaningless


@dataclass(frozen=True)
class Verdict:
    """What the model itself, in full precision, says of B images."""

    predicted: Tensor  # (B,) class
    margin: Tensor  # (B,) signed probability margin of the true class

    def wrong(self, y: Tensor) -> Tensor:
        """(B,) where another class wins."""
        return self.predicted != y


@dataclass
class GradientSource:
    """A model under attack.

    `model` judges success. Gradients come from `surrogate` where one is given; which iterate is best and
    when steps shrink then follows the loss of the judged model, as in the official code of MixedNUTS, or
    with `follow="surrogate"` that of the surrogate, as in its paper. `extra` (images → (B,)) is added to
    every objective.

    The many passes of a search run on :func:`~equipoise.attacks.fused.swift` copies, in bfloat16 where the
    device gains by it; :meth:`judge` is the model itself in full precision, and only it counts.

    Args:
        model, surrogate: images (B, C, H, W) in [0, 1] → logits (B, K), in inference mode.
        extra: a further term of the objective.
        follow: model or surrogate.
        precision: fp32, bf16 (for gradients), or auto: bf16 on CUDA.
        example: some of the images, to try the copies on.
        persist: go on after a success, for the smallest margin of all.
        lasting: many passes lie ahead, so that preparing for them pays.
        block: every pass sees exactly so many images, if the batch is a multiple of it; None: the whole batch.
        memory: what was found out about an image and is needed again, by purpose and index.
    """

    model: nn.Module
    surrogate: nn.Module | None
    extra: Extra | None
    follow: str
    precision: str
    example: Tensor
    persist: bool = False
    lasting: bool = False
    block: int | None = None
    memory: dict[tuple[str, int], bytes] = field(default_factory=dict)
    _passes: dict[object, CudaGraphFunction] = field(default_factory=dict)
    _pool: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        checks.one_of("follow", self.follow, FOLLOW)
        device.usable(self.precision, self.example.device)
        self.example = self.example[:8]
        truth = self._said(self.model, "the model")
        self.classes = truth.shape[1]
        self.judged = self.source = self._swift(self.model)
        both = [(self.judged, truth)]
        if self.surrogate is not None:
            self.source = self._swift(self.surrogate)
            both.append((self.source, self._said(self.surrogate, "the surrogate")))
        self.reduced = all(self._agrees(torch.bfloat16, *pair, tolerance=0.05) for pair in both)
        self.half = self.example.device.type == "cuda" and self._agrees(torch.float16, *both[0], tolerance=0.005)

    @torch.no_grad()
    def _said(self, model: nn.Module, who: str) -> Tensor:
        with device.exactly(self.example.device):
            return checks.logits(model(self.example), len(self.example), f"logits of {who}")

    def release(self) -> None:
        """Let go of recorded passes and their memory; they are recorded anew when they come again."""
        for each in self._passes.values():
            each.forget()
        self._pool.clear()

    def _swift(self, model: nn.Module) -> nn.Module:
        return swift(model, self.example) if self.example.dtype == torch.float32 else model

    def _agrees(self, dtype: torch.dtype, network: nn.Module, truth: Tensor, tolerance: float) -> bool:
        """Whether `dtype` is wanted here and gives the logits that full precision gives.

        bf16 halves the time on tensor cores. Few CPUs gain by it, so there it must be asked for.
        """
        kind = self.example.device.type
        if self.precision == "fp32" or self.example.dtype != torch.float32:
            return False
        if self.precision == "auto" and kind != "cuda":
            return False
        with torch.no_grad(), torch.autocast(kind, dtype=dtype, cache_enabled=False):
            return agree(network(self.example).float(), truth, tolerance)

    def _finely(self, x: Tensor) -> AbstractContextManager[object]:
        """Random search lives on differences that bfloat16 cannot see.

        Half precision on CUDA has the ten bits of TF32, which torch allows in convolutions by default, and
        moves half the bytes; where its range is too small for the network, TF32 it is.
        """
        if self.precision == "fp32":
            return device.exactly(x.device)
        if self.half:
            return torch.autocast(x.device.type, dtype=torch.float16, cache_enabled=False)
        return nullcontext()

    def _cast(self) -> AbstractContextManager[object]:
        kind = self.example.device.type
        if not self.reduced:
            return device.exactly(self.example.device) if self.precision == "fp32" else nullcontext()
        # Casts are not cached: a recorded graph must not point at a cache that is emptied.
        return torch.autocast(kind, dtype=torch.bfloat16, cache_enabled=False)

    @torch.no_grad()
    def judge(self, x: Tensor, y: Tensor) -> Verdict:
        """The verdict that counts."""
        z = checks.logits(self.logits(x), len(x), "logits of the model")
        return Verdict(z.argmax(dim=1), losses.probability_margin(z, y))

    @torch.no_grad()
    def logits(self, x: Tensor) -> Tensor:
        """(B, K) of the model itself."""
        with device.exactly(x.device):
            return self._blocks(lambda part: (self.model(part),), x)[0]

    def ascend(
        self, name: object, objective: Objective, *, plain: bool = False
    ) -> Callable[..., tuple[Tensor, ...]]:
        """x, y, aim → value (B,), gradient (B, C, H, W), probability margin (B,), in one pass.

        `name` tells objectives apart, so that a pass that was recorded once serves every stage. `plain` leaves
        the extra term out, where the value is no objective but the distance to a decision.
        """
        if name not in self._passes:
            look = partial(self._ascend, objective, None if plain else self.extra)
            self._passes[name] = CudaGraphFunction(lambda x, y, aim: self._blocks(look, x, y, aim), self._pool)
        return self._passes[name]

    def query(self) -> Callable[..., tuple[Tensor, ...]]:
        """x, y → logit margin (B,), probability margin (B,): a pass without gradients."""
        if "query" not in self._passes:
            forward_only = self.lasting and self.example.device.type == "cpu" and self.judged is not self.model
            self.asked = frozen(self.model, self.example) if forward_only else self.judged
            self._passes["query"] = CudaGraphFunction(lambda x, y: self._blocks(self._query, x, y), self._pool)
        return self._passes["query"]

    def _blocks(self, look: Callable[..., tuple[Tensor, ...]], *inputs: Tensor | None) -> tuple[Tensor, ...]:
        """`look` on consecutive blocks of the batch."""
        x = inputs[0]
        assert x is not None
        if self.block is None or len(x) <= self.block:
            return look(*inputs)
        seen = [look(*(None if value is None else value[start : start + self.block] for value in inputs))
                for start in range(0, len(x), self.block)]
        return tuple(torch.cat(parts) for parts in zip(*seen, strict=True))

    def _ascend(
        self, objective: Objective, extra: Extra | None, x: Tensor, y: Tensor, aim: Tensor | None
    ) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            point = x.detach().requires_grad_()
            with self._cast():
                z = self.source(point)
            value = objective(z.to(x.dtype), y, aim)
            if extra is not None:
                value = value + extra(point)
            # A hard decision has no gradient at all: the search then stands still, and `symptoms` says so.
            gradient = (torch.autograd.grad(value.sum(), point)[0] if value.requires_grad
                        else torch.zeros_like(point))
        value, seen = value.detach(), z.detach().to(x.dtype)
        if self.surrogate is not None:
            with torch.no_grad():
                with self._cast():
                    seen = self.judged(x).to(x.dtype)
                if self.follow == "model":
                    value = objective(seen.clamp(min=_LEAST), y, aim)
                    if extra is not None:
                        value = value + extra(x)
        return value, torch.nan_to_num(gradient), losses.probability_margin(seen, y)

    @torch.no_grad()
    def _query(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        with self._finely(x):
            z = self.asked(x).to(x.dtype)
        return losses.signed_margin(z, y), losses.probability_margin(z, y)
