"""One optimiser step: the objective forward, the gradient, the update, the average, the tally.

Everything that a step reads or changes hangs here, so that it can be saved, restored and captured whole.
Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from equipoise.core import device as devices
from equipoise.core import parallel
from equipoise.core.rng import Stream
from equipoise.data.batches import pixels
from equipoise.training.ema import Average
from equipoise.training.loader import StepBatch
from equipoise.training.objective import Memory, Objective
from equipoise.training.plan import TrainingPlan

NEVER = 2.0**62


class Forward(nn.Module):
    """Bytes and labels in, losses out. The whole objective is one forward pass, so that DDP sees one."""

    objective: Objective  # of the epoch; the learner sets it

    def __init__(self, model: nn.Module, fast: nn.Module, plan: TrainingPlan, device: torch.device) -> None:
        super().__init__()
        self.model, self._fast = model, [fast]  # in a list, because it shares its weights with the model
        self.plan, self.device = plan, device

    def forward(self, images: Tensor, y: Tensor, stream: Stream, memory: Memory, full: bool) -> tuple[
            Tensor, Tensor, Memory]:
        """(B,) losses, (B,) correct, what to remember."""
        x = pixels(images)
        if _channels_last(self.plan, self.device):
            x = x.contiguous(memory_format=torch.channels_last)
        # A compiled model is compiled for full batches; a smaller last one is not worth another compilation.
        model = self._fast[0] if full else self.model
        with devices.precision(self.plan.precision, self.device):
            outcome = self.objective(model, x, y, stream, memory)
        return outcome.losses.float(), outcome.correct, outcome.memory


class Learner:
    """The module under training with all that belongs to it."""

    def __init__(self, model: nn.Module, plan: TrainingPlan, device: torch.device, memory: Memory, compiled: bool) -> None:
        self.plan, self.world = plan, parallel.world()
        self.model = model.to(device)
        if _channels_last(plan, device):
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        fast: nn.Module = torch.compile(model, dynamic=False) if compiled else model  # type: ignore[assignment]
        self.forward = Forward(model, fast, plan, device)
        self.wrapped: nn.Module = self.forward
        if self.world.size > 1:
            self.wrapped = DistributedDataParallel(self.forward)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.rate = torch.full((), plan.lr, device=device) if device.type == "cuda" else None
        self.optimizer = _optimizer(self.parameters, plan, self.rate)
        self.average = Average(model) if plan.ema else None
        self.memory = {name: value.to(device) for name, value in memory.items()}
        # Sums of losses, of right answers and of images, and the first step whose loss was not finite.
        self.tally = torch.tensor([0.0, 0.0, 0.0, NEVER], dtype=torch.float64, device=device)

    @property
    def judged(self) -> nn.Module:
        """The module that is validated and kept: the average where there is one."""
        return self.model if self.average is None else self.average.module

    def begin(self, objective: Objective) -> None:
        """From here on, this objective."""
        self.forward.objective = objective
        self.model.train()

    def learn(self, share: StepBatch, stream: Stream, *, rate: float | Tensor, follow: float | Tensor,
              step: int | Tensor) -> None:
        """One step on this process's share of a batch.

        Args:
            share: the images.
            stream: their chance.
            rate: learning rate.
            follow: weight of the new weights in the average.
            step: its number, for the tally.
        """
        known = {name: value.index_select(0, share.rows) for name, value in self.memory.items()}
        full = share.total == self.plan.batch_size
        losses, correct, remembered = self.wrapped(share.images, share.labels, stream, known, full)
        # DDP averages over processes: their number cancels, so that what is lowered is the mean of the whole batch.
        loss = losses.sum() * (float(share.counts) * self.world.size / share.total)
        loss.backward()
        if self.plan.clip:
            nn.utils.clip_grad_norm_(self.parameters, self.plan.clip)
        self._set_rate(rate)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.follow(follow)
        if share.counts:
            for name, value in remembered.items():
                self.memory[name].index_copy_(0, share.rows, value.detach())
            self._count(losses.detach(), correct, step)

    def _set_rate(self, rate: float | Tensor) -> None:
        if self.rate is None:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
        elif isinstance(rate, Tensor):
            self.rate.copy_(rate)
        else:
            self.rate.fill_(rate)

    def _count(self, losses: Tensor, correct: Tensor, step: int | Tensor) -> None:
        total = losses.double().sum()
        number = step.to(total.dtype) if isinstance(step, Tensor) else torch.full_like(total, step)
        self.tally[0] += total
        self.tally[1] += correct.sum()
        self.tally[2] += len(losses)
        first = torch.where(total.isfinite(), NEVER, number)
        self.tally[3] = torch.minimum(self.tally[3], first)

    def gather(self, own: Tensor) -> None:
        """Bring memory and tally of all processes together; `own` (N,) says which rows this process has written."""
        if self.world.size == 1:
            return
        for value in self.memory.values():
            # Each row comes from one process, so that adding zeros to it leaves its bits alone.
            value.mul_(own.view(-1, *[1] * (value.dim() - 1)))
            dist.all_reduce(value)
        dist.all_reduce(self.tally[:3])
        dist.all_reduce(self.tally[3:], dist.ReduceOp.MIN)

    def tensors(self) -> list[Tensor]:
        """Everything that a step changes."""
        kept = [] if self.average is None else list(self.average.module.state_dict().values())
        inner = [value for state in self.optimizer.state.values() for value in state.values()
                 if isinstance(value, Tensor)]
        return [*self.model.state_dict().values(), *kept, *inner, *self.memory.values(), self.tally]

    def is_finite(self) -> bool:
        """Whether every weight is; waits for the device."""
        norms = torch._foreach_norm([p.detach() for p in self.parameters])
        return bool(torch.stack(norms).isfinite().all())

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Steps inside leave no trace (what the optimiser began inside starts at zero); for compiling and capturing."""
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


def _channels_last(plan: TrainingPlan, device: torch.device) -> bool:
    """The tensor cores of a GPU read half precision with the channels last."""
    return device.type == "cuda" and plan.precision == "bf16"


def _optimizer(parameters: list[nn.Parameter], plan: TrainingPlan, rate: Tensor | None) -> torch.optim.Optimizer:
    # On CUDA the rate is a tensor and the update one kernel, so that it can be captured and nothing waits.
    on_cuda = rate is not None
    lr: float | Tensor = plan.lr if rate is None else rate
    if plan.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr, momentum=plan.momentum, weight_decay=plan.weight_decay,
                               nesterov=plan.nesterov, fused=on_cuda or None)
    return torch.optim.AdamW(parameters, lr, betas=(plan.momentum, 0.999), weight_decay=plan.weight_decay,
                             fused=on_cuda or None, capturable=on_cuda)
