"""Noisy copies of many images through a model, with counts on the device and memory that does not grow with n."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.certification import noise, sound
from equipoise.certification.plan import SmoothingPlan
from equipoise.core import checks, memory
from equipoise.core.rng import Stream

_MOST_HANDS = 8  # more would wait for Python's lock
Spread = Callable[[Callable[[slice], Any], Iterable[slice]], Iterator[Any]]
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

    def __init__(self, model: nn.Module, x: Tensor, stream: Stream, plan: SmoothingPlan, engine: Engine) -> None:
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

        def look(rows: slice) -> tuple[Tensor, Tensor, Tensor]:
            width = size if self.engine.compiled and rows.stop - rows.start <= size else rows.stop - rows.start
            row = torch.arange(rows.start, rows.start + width, device=device)
            live = row < total
            row = row.clamp(max=total - 1)
            position = torch.bucketize(row, ends, right=True)
            sample = row - ends[position] + lengths[position] + start[position]
            return position, self._logits(position, sample, key), live

        with hands(device) as (spread, ahead):
            def work(rows: slice) -> None:
                parts = [slice(at, min(at + size, rows.stop)) for at in range(rows.start, rows.stop, size)]
                # All are computed before the first is used, so that nothing counts twice if memory runs out.
                for position, logits, live in list(spread(look, parts)):
                    self.broken |= torch.isnan(logits).any()
                    use(position, logits, live)

            for rows, _ in memory.in_batches(work, total, ahead * size):
                self.engine.watch(rows.stop - rows.start)
        checks.require(not bool(self.broken), "logits", "not contain NaN", "NaN")

    def _logits(self, position: Tensor, sample: Tensor, key: Tensor) -> Tensor:
        x, index = self.source[position], self.stream.index[position]
        forward = _compiled() if self.engine.compiled else _forward
        logits: Tensor = forward(self.model, x, index, sample, key, self.sigma, self.law)
        return logits


@contextmanager
def hands(device: torch.device) -> Iterator[tuple[Spread, int]]:
    """How to map a function over batches, and how many batches at a time are worth it.

    On a CPU each batch is one thread's own. Operations as small as these gain little from being shared by several
    cores, and where others use the cores too, every one of them waits for the slowest. Results come in order.
    """
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    if threads == 1:
        yield map, 1
        return
    workers = min(threads, _MOST_HANDS)
    # All three belong to a thread, so they are handed on.
    grad, cast, dtype = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    def spread(look: Callable[[slice], Any], parts: Iterable[slice]) -> Iterator[Any]:
        def alone(rows: slice) -> Any:
            with torch.set_grad_enabled(grad), torch.autocast("cpu", dtype=dtype, enabled=cast):
                return look(rows)

        return pool.map(alone, parts)

    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(threads // workers,)) as pool:
            yield spread, 4 * workers
    finally:
        torch.set_num_threads(threads)  # what threads of the future begin with


def _forward(model: nn.Module, x: Tensor, index: Tensor, sample: Tensor, key: Tensor, sigma: Tensor,
             law: sound.NoiseTable | None) -> Tensor:
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
