"""Training images on the device, in the order of each epoch, augmented there; every image once an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.core import checks, parallel, rng
from equipoise.core.rng import Stream
from equipoise.data.augment import crop, flip
from equipoise.data.batches import order
from equipoise.data.dataset import Dataset
from equipoise.training.plan import TrainingPlan

AHEAD = 4096  # images augmented at a time: few enough for any memory, many enough that launches do not count
RESIDENT = 0.25  # share of the free device memory that the images may take


@dataclass(frozen=True)
class StepBatch:
    """What one process sees of one optimiser step."""

    images: Tensor  # (B, C, H, W) uint8
    labels: Tensor  # (B,)
    rows: Tensor  # (B,) positions in the training set
    index: Tensor  # (B,) which image of its split each is: what chance follows
    total: int  # images of the step over all processes
    counts: bool = True  # whether this process has images of its own in this step


def split(data: Dataset, plan: TrainingPlan) -> tuple[Dataset, Dataset]:
    """The images to train on and those held out, drawn by the seed."""
    held_out = min(1000, len(data) // 10) if plan.held_out is None else plan.held_out
    checks.require(held_out < len(data), "held_out", f"be less than the {len(data)} images there are", held_out)
    chance = rng.stream(plan.seed, "held out", data.index).words().argsort(stable=True)
    return data.take(chance[held_out:].sort().values), data.take(chance[:held_out].sort().values)


class TrainingLoader:
    """The training set as a source of steps."""

    def __init__(self, data: Dataset, plan: TrainingPlan, device: torch.device) -> None:
        size = plan.batch_size
        checks.require(size <= len(data), "batch_size", f"be at most the number of training images, {len(data)}", size)
        self.plan, self.device, self.world = plan, device, parallel.world()
        self.images = data.images.to(device) if _fits(data.images, device) else data.images
        self.labels, self.index = data.labels.to(device), data.index.to(device)
        self.steps = -(-len(data) // size)
        # The colour of the blot: what a network of normalised images sees as nothing.
        self.grey = data.images.float().mean(dim=(0, 2, 3)).round().to(torch.uint8).view(1, -1, 1, 1).to(device)

    def __len__(self) -> int:
        return len(self.labels)

    def images_in(self, steps: int) -> int:
        """How many images the first `steps` steps of a run see."""
        epochs, rest = divmod(steps, self.steps)
        return epochs * len(self) + rest * self.plan.batch_size

    def order(self, epoch: int) -> Tensor:
        """(N,) positions in the order of the epoch."""
        return order(self.index, seed=self.plan.seed, epoch=epoch)

    def chance(self, epoch: int, index: Tensor, purpose: str = "train") -> Stream:
        """The chance of images in an epoch."""
        return rng.stream(self.plan.seed, purpose, index).at("epoch", epoch)

    def shares(self, epoch: int, first: int) -> Iterator[StepBatch]:
        """What this process sees of the steps of an epoch from step `first` on."""
        whole, size = self.order(epoch), self.plan.batch_size
        per_block = max(1, AHEAD // size)
        for block in range(first, self.steps, per_block):
            batches = whole[block * size : (block + per_block) * size].split(size)
            # A process without images of its own in a small last batch repeats one, which then counts nothing.
            own = [self.world.shard(rows) if len(rows) > self.world.rank else rows[:1] for rows in batches]
            images = self.look(torch.cat(own), epoch).split([len(rows) for rows in own])
            for seen, rows, batch in zip(images, own, batches, strict=True):
                yield StepBatch(seen, self.labels[rows], rows, self.index[rows], len(batch), len(batch) > self.world.rank)

    def own(self, epoch: int) -> Tensor:
        """(N,) bool: the positions whose images this process sees in an epoch."""
        mine = torch.zeros(len(self), dtype=torch.bool, device=self.device)
        for rows in self.order(epoch).split(self.plan.batch_size):
            mine[self.world.shard(rows)] = True
        return mine

    def look(self, rows: Tensor, epoch: int) -> Tensor:
        """(B, C, H, W) uint8: the images at these positions as they look in this epoch."""
        images = self.images[rows.to(self.images.device)].to(self.device)
        chance, plan = self.chance(epoch, self.index[rows], "augment"), self.plan
        if plan.pad:
            images = crop(images, plan.pad, chance)
        if plan.flip:
            images = flip(images, chance)
        return blot(images, plan.cutout, self.grey, chance) if plan.cutout else images


def blot(x: Tensor, side: int, grey: Tensor, stream: Stream) -> Tensor:
    """Cover a square of each image, its centre anywhere in the image [DeVries2017].

    Args:
        x: (B, C, H, W).
        side: of the square, in pixels; what lies outside the image is cut off.
        grey: (1, C, 1, 1) the colour that covers.
        stream: the chance of these images.
    """
    chance, (height, width) = stream.at("blot"), x.shape[2:]
    spans = []
    for name, extent in (("row", height), ("column", width)):
        low = chance.at(name).integers(extent) - side // 2
        place = torch.arange(extent, device=x.device)
        spans.append((place >= low.unsqueeze(1)) & (place < low.unsqueeze(1) + side))
    covered = spans[0].view(-1, 1, height, 1) & spans[1].view(-1, 1, 1, width)
    return torch.where(covered, grey, x)


def _fits(images: Tensor, device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    return images.numel() < RESIDENT * free
