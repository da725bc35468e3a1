"""Noisy copies of many images through a model, with counts on the device and memory that does not grow with n."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from equipoise import checks, memory
from equipoise.certify import noise, sound
from equipoise.certify.plan import Plan
from equipoise.rng import Stream

Use = Callable[[Tensor, Tensor, Tensor], None]  # position (R,), logits (R, K), counts or not (R,)


def unwatched(samples: int) -> None:
    """Nobody looks."""


@dataclass(frozen=True)
class Engine:
    """How the forward passes are done; nothing here changes a certificate beyond rounding.

    Args:
        batch_size: noisy images per forward pass; halved when memory runs out. If not given, 64 on a CPU
            (more does not fit its caches) and 4096 on a GPU.
        compiled: fuse noise and model with `torch.compile` and keep every batch the same shape; it costs
            about half a minute once and pays for millions of samples.
        watch: told how many samples have been drawn.
    """

    batch_size: int | None = None
    compiled: bool = False
    watch: Callable[[int], None] = unwatched

    def batch_on(self, device: torch.device) -> int:
        """Noisy images per forward pass."""
        return self.batch_size or (64 if device.type == "cpu" else 4096)


class Sampler:
    """The smoothed classifier at B images: each may be asked for any range of its samples, for any purpose."""

    def __init__(self, model: nn.Module, x: Tensor, stream: Stream, plan: Plan, engine: Engine) -> None:
        """`x` (B, C, H, W) lies in [0, 1]; `stream` is the chance of these images."""
        checks.images(x)
        checks.require(len(stream) == len(x), "stream", f"have one index per image, {len(x)}", len(stream))
        self.model, self.x, self.plan, self.engine = model, x, plan, engine
        self.stream = stream.to(x.device)
        self.law = sound.table(plan.sigma).to(x.device) if plan.sound else None
        self.source = sound.levels(x) if plan.sound else x
        self.sigma = torch.tensor(plan.sigma, dtype=x.dtype, device=x.device)
        self.classes = checks.logits(model(x[:1]), 1).shape[1]
        self.broken = torch.zeros((), dtype=torch.bool, device=x.device)

    @property
    def slack(self) -> float:
        """What the sampler's own error may add to any probability; known only for the sound one."""
        return sound.slack(self.x[0].numel()) if self.plan.sound else 0.0

    def votes(self, purpose: str, start: Tensor, stop: Tensor) -> Tensor:
        """(B, K) int64 on the CPU: how often each class won among the samples start … stop − 1 of each image."""
        counts = torch.zeros(len(self.x) * self.classes, dtype=torch.int64, device=self.x.device)

        def count(position: Tensor, logits: Tensor, live: Tensor) -> None:
            counts.scatter_add_(0, position * self.classes + logits.argmax(dim=1), live.to(torch.int64))

        self.visit(purpose, start, stop, count)
        return counts.view(-1, self.classes).cpu()

    def visit(self, purpose: str, start: Tensor, stop: Tensor, use: Use) -> None:
        """Hand the logits of samples start … stop − 1 of every image to `use`, many images per forward pass.

        Nothing is read back from the device before the end, so that it never waits.
        """
        device, size = self.x.device, self.engine.batch_on(self.x.device)
        lengths = stop - start
        total = int(lengths.sum())
        start, lengths = start.to(device), lengths.to(device)
        ends = lengths.cumsum(0)
        key = noise.key_of(self.stream.at(purpose))

        def work(rows: slice) -> None:
            width = size if self.engine.compiled and rows.stop - rows.start <= size else rows.stop - rows.start
            row = torch.arange(rows.start, rows.start + width, device=device)
            live = row < total
            row = row.clamp(max=total - 1)
            position = torch.bucketize(row, ends, right=True)
            sample = row - ends[position] + lengths[position] + start[position]
            logits = self._logits(position, sample, key)
            self.broken |= torch.isnan(logits).any()
            use(position, logits, live)

        for rows, _ in memory.in_batches(work, total, size):
            self.engine.watch(rows.stop - rows.start)
        checks.require(not bool(self.broken), "logits", "not contain NaN", "NaN")

    def _logits(self, position: Tensor, sample: Tensor, key: Tensor) -> Tensor:
        x, index = self.source[position], self.stream.index[position]
        forward = _compiled() if self.engine.compiled else _forward
        logits: Tensor = forward(self.model, x, index, sample, key, self.sigma, self.law)
        return logits


def _forward(model: nn.Module, x: Tensor, index: Tensor, sample: Tensor, key: Tensor, sigma: Tensor,
             law: sound.Table | None) -> Tensor:
    """(R, K) logits of x plus the noise of (index, sample)."""
    if law is None:
        noisy = noise.noisy(x, key, index, sample, sigma)
    else:
        noisy = sound.noisy(x, key, index, sample, law, sigma.dtype)
    # Convolutions run faster with channels last, on CPUs as on GPUs.
    logits: Tensor = model(noisy.contiguous(memory_format=torch.channels_last))
    return logits.float()


@cache
def _compiled() -> Any:
    return torch.compile(_forward, dynamic=False)
