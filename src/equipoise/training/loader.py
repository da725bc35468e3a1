"""Training images on the device, shuffled and augmented there; every image once an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.core import checks, parallel, rng
from equipoise.core.rng import Stream
from equipoise.data.dataset import Dataset, crop, flip, order
from equipoise.training.objective import StepSchedule, TrainingPlan

AUGMENT_AT_ONCE = 4096  # images: few enough for any memory, many enough to hide the launch overhead
RESIDENT_SHARE = 0.25  # share of the free device memory that the images may take


@dataclass(frozen=True)
class StepBatch:
    """The images of one process in one optimiser step."""

    images: Tensor  # (B, C, H, W), as in the data set
    labels: Tensor  # (B,)
    rows: Tensor  # (B,) positions in the training set
    index: Tensor  # (B,) index of each image in its split, which its random stream depends on
    total: int  # images of the step over all processes
    is_counted: bool = True  # False for a process without images of its own in this step


def split(data: Dataset, plan: TrainingPlan) -> tuple[Dataset, Dataset]:
    """The images to train on and those held out, drawn by the seed."""
    held_out = min(1000, len(data) // 10) if plan.held_out is None else plan.held_out
    checks.require(
        held_out < len(data), "held_out", f"be less than the {len(data)} images there are", held_out
    )
    shuffled = rng.stream(plan.seed, "held out", data.index).words().argsort(stable=True)
    return data.take(shuffled[held_out:].sort().values), data.take(
        shuffled[:held_out].sort().values
    )


class TrainingLoader:
    """Batches of the training set for every step of a run, with their random streams and
    schedules."""

    def __init__(self, data: Dataset, plan: TrainingPlan, device: torch.device) -> None:
        size = plan.batch_size
        checks.require(
            size <= len(data),
            "batch_size",
            f"be at most the number of training images, {len(data)}",
            size,
        )
        self.plan, self.device, self.world = plan, device, parallel.world()
        checks.require(
            self.world.size <= size, "batch_size", "be at least the number of processes", size
        )
        self.images = data.images.to(device) if _fits(data.images, device) else data.images
        self.labels, self.index = data.labels.to(device), data.index.to(device)
        self.steps_per_epoch = -(-len(data) // size)
        if plan.cutout:
            # The mean colour fills the cutout: it is zero for a network that normalises its images.
            mean = data.images.float().mean(dim=(0, 2, 3)).view(1, -1, 1, 1).to(device)
            self.mean_colour = (
                mean if data.images.is_floating_point() else mean.round().to(data.images.dtype)
            )

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def has_room_for_epoch(self) -> bool:
        """Whether the device also has room for the augmented images of an epoch, beside those of
        the data set."""
        return self.images.device.type == self.device.type and _fits(self.images, self.device)

    def count_images(self, steps: int) -> int:
        """Number of images in the first `steps` steps of a run."""
        epochs, rest = divmod(steps, self.steps_per_epoch)
        return epochs * len(self) + rest * self.plan.batch_size

    def order(self, epoch: int) -> Tensor:
        """(N,) positions in the order of the epoch."""
        return order(self.index, seed=self.plan.seed, epoch=epoch)

    def stream(self, epoch: int, index: Tensor, purpose: str = "train") -> Stream:
        """The random stream of images in an epoch."""
        return rng.stream(self.plan.seed, purpose, index).at("epoch", epoch)

    def schedule(self, step: int) -> StepSchedule:
        """The scheduled values of a step of the run."""
        return self.plan.schedule_at(step, self.steps_per_epoch)

    def batches(self, epoch: int, first: int) -> Iterator[StepBatch]:
        """The batches of this process in an epoch, from step `first` of the epoch on."""
        order, size = self.order(epoch), self.plan.batch_size
        steps_at_once = max(1, AUGMENT_AT_ONCE // size)
        for start in range(first, self.steps_per_epoch, steps_at_once):
            batches = order[start * size : (start + steps_at_once) * size].split(size)
            # A process without images of its own in a small last batch repeats one, which then is
            # not counted.
            own = [
                self.world.shard(rows) if len(rows) > self.world.rank else rows[:1]
                for rows in batches
            ]
            images = self.augmented(torch.cat(own), epoch).split([len(rows) for rows in own])
            for part, rows, batch in zip(images, own, batches, strict=True):
                yield StepBatch(
                    part,
                    self.labels[rows],
                    rows,
                    self.index[rows],
                    len(batch),
                    len(batch) > self.world.rank,
                )

    def own_rows(self, epoch: int) -> Tensor:
        """(N,) bool: the positions of the images that this process trains on in an epoch."""
        own = torch.zeros(len(self), dtype=torch.bool, device=self.device)
        for rows in self.order(epoch).split(self.plan.batch_size):
            own[self.world.shard(rows)] = True
        return own

    def augmented(self, rows: Tensor, epoch: int) -> Tensor:
        """(B, C, H, W) the images at these positions, augmented for this epoch."""
        images = self.images[rows.to(self.images.device)].to(self.device)
        stream, plan = self.stream(epoch, self.index[rows], "augment"), self.plan
        if plan.pad:
            images = crop(images, plan.pad, stream)
        if plan.flip:
            images = flip(images, stream)
        return cutout(images, plan.cutout, self.mean_colour, stream) if plan.cutout else images


def _fits(images: Tensor, device: torch.device) -> bool:
    """Whether images take a small share of the free memory of a GPU; on a CPU they are there
    already."""
    return (
        device.type != "cuda" or images.nbytes < RESIDENT_SHARE * torch.cuda.mem_get_info(device)[0]
    )


def cutout(x: Tensor, side: int, colour: Tensor, stream: Stream) -> Tensor:
    """Cover a square of `side` pixels in each image with a colour (1, C, 1, 1), its centre anywhere
    [DeVries2017]."""
    stream, (height, width) = stream.at("blot"), x.shape[2:]
    spans = []
    for name, extent in (("row", height), ("column", width)):
        low = stream.at(name).integers(extent) - side // 2
        pixel = torch.arange(extent, device=x.device)
        spans.append((pixel >= low.unsqueeze(1)) & (pixel < low.unsqueeze(1) + side))
    covered = spans[0].view(-1, 1, height, 1) & spans[1].view(-1, 1, 1, width)
    return torch.where(covered, colour, x)
