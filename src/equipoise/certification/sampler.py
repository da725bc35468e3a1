"""Logits of a model at many noisy copies of many images, in memory that does not grow with their
number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from equipoise.certification import noise
from equipoise.certification.certificate import SmoothingPlan
from equipoise.core import checks, memory, rng
from equipoise.core.rng import Stream

_MAX_WORKERS = 8  # more would wait for Python's lock
MapBatches = Callable[[Callable[[slice], Any], Iterable[slice]], Iterator[Any]]
Accumulate = Callable[
    [Tensor, Tensor, Tensor], None
]  # position (R,), logits (R, K), False where padding (R,)


@dataclass(frozen=True)
class SamplerOptions:
    """How the forward passes are done; nothing here changes a certificate beyond rounding.

    Args:
        batch_size: noisy images per forward pass; halved when memory runs out. If not given, 64 on
            a CPU and 4096 on a GPU.
        compiled: fuse noise and model with `torch.compile` and keep every batch the same shape,
            which pays off for millions of samples.
        on_samples: called with the number of samples drawn since the last call.
    """

    batch_size: int | None = None
    compiled: bool = False
    on_samples: Callable[[int], None] | None = None

    def batch_size_on(self, device: torch.device) -> int:
        """The batch size that is used on this device."""
        return self.batch_size or (64 if device.type == "cpu" else 4096)


class Sampler:
    """Draws any range of the noisy copies of B images, for any purpose, and classifies them.

    The arguments are those of :func:`~equipoise.certification.certify`; of the plan only the noise
    matters, and whether bounds are randomised.
    """

    def __init__(
        self,
        model: nn.Module,
        x: Tensor,
        stream: Stream,
        plan: SmoothingPlan,
        options: SamplerOptions | None = None,
    ) -> None:
        checks.images(x)
        checks.require(
            len(stream) == len(x), "stream", f"have one index per image, {len(x)}", len(stream)
        )
        self.model, self.x, self.plan, self.options = model, x, plan, options or SamplerOptions()
        self.stream = stream.to(x.device)
        self.table = noise.alias_table(plan.sigma, x.device) if plan.sound else None
        self.clean = noise.levels(x) if plan.sound else x
        self.sigma = torch.tensor(plan.sigma, dtype=x.dtype, device=x.device)
        self.name = f"logits of the model {type(model).__name__}"
        self.num_classes = checks.logits(model(x[:1]), 1, self.name).shape[1]
        self.has_softmax = torch.ones((), dtype=torch.bool, device=x.device)

    @property
    def probability_error(self) -> float:
        """How far the sampler's own error may shift any probability; known only for sound noise."""
        return 0.0 if self.table is None else self.x[0].numel() * noise.ERROR_PER_PIXEL

    def uniforms(self) -> NDArray[np.float64] | None:
        """(B,) uniform numbers that are independent of the votes, if the plan randomises its
        bounds."""
        if not self.plan.randomized:
            return None
        # In (0, 1]: drawn from 24 bits, a number stands for itself and the gap below it.
        return np.asarray(self.stream.at("randomize").uniform().double().cpu().numpy() + 2.0**-24)

    def votes(self, purpose: str, start: Tensor, stop: Tensor) -> Tensor:
        """(B, K) int64 on the CPU: how often each class won among the samples start … stop − 1 of
        each image."""
        counts = torch.zeros(
            len(self.x) * self.num_classes, dtype=torch.int64, device=self.x.device
        )

        def count(position: Tensor, logits: Tensor, valid: Tensor) -> None:
            counts.scatter_add_(
                0, position * self.num_classes + logits.argmax(dim=1), valid.to(torch.int64)
            )

        self.accumulate(purpose, start, stop, count)
        return counts.view(-1, self.num_classes).cpu()

    def accumulate(self, purpose: str, start: Tensor, stop: Tensor, use: Accumulate) -> None:
        """Pass the logits of samples start … stop − 1 of every image to `use`, many images per
        forward pass.

        Nothing is read back from the device before the end, so that it never waits.
        """
        device, size = self.x.device, self.options.batch_size_on(self.x.device)
        lengths = stop - start
        total = int(lengths.sum())
        start, lengths = start.to(device), lengths.to(device)
        ends = lengths.cumsum(0)
        key = rng.key_words(self.stream.at(purpose).key, device)
        forward = _compiled_forward() if self.options.compiled else _forward

        def classify(rows: slice) -> tuple[Tensor, Tensor, Tensor]:
            width = (
                size
                if self.options.compiled and rows.stop - rows.start <= size
                else rows.stop - rows.start
            )
            row = torch.arange(rows.start, rows.start + width, device=device)
            valid = row < total
            row = row.clamp(max=total - 1)
            position = torch.bucketize(row, ends, right=True)
            sample = row - ends[position] + lengths[position] + start[position]
            logits = forward(
                self.model,
                self.clean[position],
                self.stream.index[position],
                sample,
                key,
                self.sigma,
                self.table,
            )
            return position, logits, valid

        with workers(device) as (map_batches, batches_ahead):

            def work(rows: slice) -> None:
                parts = [
                    slice(at, min(at + size, rows.stop))
                    for at in range(rows.start, rows.stop, size)
                ]
                # All are computed before the first is used, so that nothing counts twice if memory
                # runs out.
                for position, logits, valid in list(map_batches(classify, parts)):
                    # A single row would be broadcast, and count as a vote of every sample.
                    checks.require(
                        logits.shape == (len(position), self.num_classes),
                        "logits",
                        f"have shape {(len(position), self.num_classes)}",
                        tuple(logits.shape),
                    )
                    self.has_softmax &= logits.amax(dim=1).isfinite().all()
                    use(position, logits, valid)

            for rows, _ in memory.in_batches(work, total, batches_ahead * size):
                if self.options.on_samples is not None:
                    self.options.on_samples(rows.stop - rows.start)
        checks.require(bool(self.has_softmax), self.name, "not contain NaN or +inf", "NaN or inf")


@contextmanager
def workers(device: torch.device) -> Iterator[tuple[MapBatches, int]]:
    """A function that maps over batches, in order, and how many batches to give it at a time.

    On a CPU each batch is computed by one thread: operations as small as these gain little from
    several.
    """
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    if threads == 1:
        yield map, 1
        return
    count = min(threads, _MAX_WORKERS)
    # All three are per thread, so they are passed on.
    grad, cast, dtype = (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
    )

    def map_batches(function: Callable[[slice], Any], batches: Iterable[slice]) -> Iterator[Any]:
        def call(rows: slice) -> Any:
            with torch.set_grad_enabled(grad), torch.autocast("cpu", dtype=dtype, enabled=cast):
                return function(rows)

        return pool.map(call, batches)

    try:
        with ThreadPoolExecutor(
            count, initializer=torch.set_num_threads, initargs=(threads // count,)
        ) as pool:
            yield map_batches, 4 * count
    finally:
        torch.set_num_threads(threads)  # also the default of threads that start later


def _forward(
    model: nn.Module,
    x: Tensor,
    index: Tensor,
    sample: Tensor,
    key: Tensor,
    sigma: Tensor,
    table: noise.AliasTable | None,
) -> Tensor:
    """(R, K) logits of x plus the noise of (index, sample); nothing is clamped."""
    if table is None:
        noisy = x + sigma * noise.gaussian(key, index, sample, x.shape[1:]).to(x.dtype)
    else:
        noisy = noise.noisy_levels(x, key, index, sample, table, sigma.dtype)
    logits: Tensor = model(noisy.contiguous())
    return logits.float()


@cache
def _compiled_forward() -> Any:
    return torch.compile(_forward, dynamic=False)
