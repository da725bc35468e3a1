"""One optimiser step: objective, gradient, update, running average of the weights, and statistics.

All that a step reads or changes belongs to the :class:`Learner`, so that it can be saved, restored
and captured. Nothing here waits for the device, unless its docstring says so.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from equipoise.core import device as devices
from equipoise.core import parallel
from equipoise.core.rng import Stream
from equipoise.data import pixels
from equipoise.models.layers.normalization import Normalized
from equipoise.training.loader import StepBatch
from equipoise.training.objective import Memory, Objective, StepSchedule, TrainingPlan

_NEVER = 2.0**62  # as the number of a step


@dataclass(frozen=True)
class TrainingStatistics:
    """Averages over the images of an epoch so far."""

    loss: float
    accuracy: float
    first_nonfinite_step: int | None  # the first step of the epoch whose loss was NaN or infinite


class WeightAverage:
    """Exponential moving average of the weights and statistics of a module.

    Counters, buffers that are infinite (such as the log-odds of 0) and layers whose own weights are
    frozen are copied instead: an average would lose the sign of a zero, which changes their digest.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = copy.deepcopy(module).requires_grad_(False).eval()
        frozen: set[int] = set()
        for layer in module.modules():
            own = list(layer.parameters(recurse=False))
            if own and not any(weight.requires_grad for weight in own):
                frozen |= {id(value) for value in (*own, *layer.buffers(recurse=False))}
        self._averaged: list[
            tuple[Tensor, Tensor]
        ] = []  # pairs of a live tensor and its counterpart here
        self._copied: list[tuple[Tensor, Tensor]] = []
        for live, average in zip(
            [*module.parameters(), *module.buffers()],
            [*self.module.parameters(), *self.module.buffers()],
            strict=True,
        ):
            moves = (
                live.is_floating_point() and id(live) not in frozen and bool(live.isfinite().all())
            )
            (self._averaged if moves else self._copied).append((live, average))

    @torch.no_grad()
    def update(self, weight: float | Tensor) -> None:
        """average ← average + weight · (live − average)."""
        averages = [average for _, average in self._averaged]
        differences = torch._foreach_sub([live.detach() for live, _ in self._averaged], averages)
        torch._foreach_mul_(differences, weight)
        torch._foreach_add_(averages, differences)
        if self._copied:
            torch._foreach_copy_(
                [target for _, target in self._copied], [live for live, _ in self._copied]
            )


class Forward(nn.Module):
    """Bytes and labels in, losses out. The whole objective is one forward pass, as
    DistributedDataParallel needs it."""

    def __init__(
        self, model: nn.Module, plan: TrainingPlan, device: torch.device, compile_model: bool
    ) -> None:
        super().__init__()
        self.model, self.precision, self.device = model, plan.precision, device
        # The tensor cores of a GPU want half precision with the channels last. A user's network may
        # need contiguous activations, so only those of the zoo are converted.
        is_of_the_zoo = isinstance(model, Normalized) and bool(model.config)
        self.channels_last = is_of_the_zoo and device.type == "cuda" and plan.precision == "bf16"
        if self.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        # In a list, because it shares its weights with the model.
        self._compiled: list[Any] = [
            torch.compile(model, dynamic=False) if compile_model else model
        ]

    def forward(
        self,
        objective: Objective,
        images: Tensor,
        y: Tensor,
        stream: Stream,
        memory: Memory,
        is_full: bool,
    ) -> tuple[Tensor, Tensor, Memory]:
        """(B,) losses, (B,) correct, new memory."""
        x = pixels(images)
        if self.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        # The model is compiled for full batches; a smaller last one is not worth another
        # compilation.
        model = self._compiled[0] if is_full else self.model
        with devices.autocast(self.precision, self.device):
            output = objective(model, x, y, stream, memory)
        return output.losses.float(), output.correct, output.memory


class Learner:
    """The module under training with its optimiser, average, per-image memory and statistics."""

    def __init__(
        self,
        model: nn.Module,
        plan: TrainingPlan,
        device: torch.device,
        memory: Memory,
        compile_model: bool = False,
    ) -> None:
        self.plan, self.world = plan, parallel.world()
        self.model = model.to(device).train()
        self.forward: nn.Module = Forward(model, plan, device, compile_model)
        if self.world.size > 1:
            self.forward = DistributedDataParallel(self.forward)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        # On CUDA the learning rate is a tensor and the update one kernel, so that a step can be
        # captured.
        on_cuda = device.type == "cuda"
        self.learning_rate = torch.full((), plan.lr, device=device) if on_cuda else None
        options: dict[str, Any] = {
            "lr": self.learning_rate if on_cuda else plan.lr,
            "weight_decay": plan.weight_decay,
            "fused": on_cuda or None,
        }
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(
                self.parameters, momentum=plan.momentum, nesterov=plan.nesterov, **options
            )
            if plan.optimizer == "sgd"
            else torch.optim.AdamW(
                self.parameters, betas=(plan.momentum, 0.999), capturable=on_cuda, **options
            )
        )
        self.average = WeightAverage(model) if plan.ema else None
        self.memory = {name: value.to(device) for name, value in memory.items()}
        # Sums of losses, of correct images and of images; the first step whose loss was not finite.
        self.sums = torch.empty(4, dtype=torch.float64, device=device)
        self.sums_by_process: Tensor | None = None  # (processes, 4), for a state within an epoch
        self.reset_statistics()

    @property
    def evaluated_model(self) -> nn.Module:
        """The module that is validated and saved: the average where there is one."""
        return self.model if self.average is None else self.average.module

    def take_step(
        self, objective: Objective, batch: StepBatch, stream: Stream, schedule: StepSchedule
    ) -> None:
        """One optimiser step on this process's part of a batch."""
        memory = {name: value.index_select(0, batch.rows) for name, value in self.memory.items()}
        is_full = batch.total == self.plan.batch_size
        losses, correct, memory = self.forward(
            objective, batch.images, batch.labels, stream, memory, is_full
        )
        # DDP averages over processes; their number cancels, so that the mean over the whole batch
        # is minimised.
        loss = losses.sum() * (float(batch.is_counted) * self.world.size / batch.total)
        loss.backward()
        if self.plan.clip:
            nn.utils.clip_grad_norm_(self.parameters, self.plan.clip)
        if self.learning_rate is None:
            self.optimizer.param_groups[0]["lr"] = schedule.learning_rate
        else:
            self.learning_rate.fill_(schedule.learning_rate)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update(schedule.average_weight)
        if batch.is_counted:
            for name, value in memory.items():
                self.memory[name].index_copy_(0, batch.rows, value.detach())
            self._add_statistics(losses.detach(), correct, schedule.number)

    def _add_statistics(self, losses: Tensor, correct: Tensor, step: int | Tensor) -> None:
        total = losses.double().sum()
        self.sums[0] += total
        self.sums[1] += correct.sum()
        self.sums[2] += len(losses)
        number = torch.zeros_like(total) + step
        self.sums[3] = torch.minimum(self.sums[3], torch.where(total.isfinite(), _NEVER, number))

    def read_statistics(self) -> TrainingStatistics:
        """The statistics of the epoch so far; waits for the device."""
        loss, correct, images, first = self.sums.tolist()
        images = max(images, 1)
        return TrainingStatistics(
            loss / images, correct / images, int(first) if first < _NEVER else None
        )

    def reset_statistics(self) -> None:
        """Start the statistics of a new epoch."""
        self.sums.copy_(torch.tensor([0.0, 0.0, 0.0, _NEVER], dtype=torch.float64))

    def gather(self, own: Tensor) -> None:
        """Exchange memory and statistics of all processes; `own` (N,) are the rows that this
        process has written."""
        self._gather_memory(own)
        dist.all_reduce(self.sums[:3])
        dist.all_reduce(self.sums[3:], dist.ReduceOp.MIN)

    def prepare_state(self, own: Tensor) -> None:
        """Within an epoch: collect in every process what :meth:`state_dict` needs from all of
        them."""
        self._gather_memory(own)
        self.sums_by_process = torch.stack(parallel.gather(self.sums.cpu()))

    def _gather_memory(self, own: Tensor) -> None:
        for value in self.memory.values():
            # Each row comes from one process; adding zeros to it keeps its bits.
            value.mul_(own.view(-1, *[1] * (value.dim() - 1)))
            dist.all_reduce(value)

    def tensors(self) -> list[Tensor]:
        """Everything that a step changes."""
        state = {
            **self.state_dict(),
            "optimizer": self.optimizer.state_dict()["state"],
        }  # without the learning rate
        return [value for value in tree_leaves(state) if isinstance(value, Tensor)]

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs, for `torch.save`."""
        return {
            "model": self.model.state_dict(),
            "average": None if self.average is None else self.average.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "memory": self.memory,
            "sums": self.sums,
            "sums_by_process": self.sums_by_process,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.model.load_state_dict(state["model"])
        if self.average is not None:
            self.average.module.load_state_dict(state["average"])
        self.optimizer.load_state_dict(state["optimizer"])
        for name, value in state["memory"].items():
            self.memory[name].copy_(value)
        by_process = state.get("sums_by_process")
        self.sums.copy_(state["sums"] if by_process is None else by_process[self.world.rank])
        # Loading replaced the learning rate by its saved value; a captured step reads this tensor.
        if self.learning_rate is not None:
            self.optimizer.param_groups[0]["lr"] = self.learning_rate

    @contextmanager
    def undo_steps(self) -> Iterator[None]:
        """Undo the steps taken inside (new optimiser state becomes zero); for warming up before a
        capture."""
        before = [(value, value.clone()) for value in self.tensors()]
        try:
            yield
        finally:
            known = {value.data_ptr() for value, _ in before}
            with torch.no_grad():
                for value, old in before:
                    value.copy_(old)
                for value in self.tensors():
                    if value.data_ptr() not in known:
                        value.zero_()
