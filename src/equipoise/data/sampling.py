"""Which images of a split a command takes: the first, a random or a stratified sample, and whether
it is a fair one."""

from __future__ import annotations

import heapq
import warnings
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from equipoise.core import checks, format, rng, stats
from equipoise.data.dataset import Dataset

FIRST, RANDOM, STRATIFIED = SAMPLES = ("first", "random", "stratified")
LEVEL = 0.001  # of the test for other class shares than those of the split
_SHOWN = 3  # classes in the warning


@dataclass(frozen=True)
class Part:
    """A part of a split: `sample` orders its images, and `count` of them are taken from the
    position `start` on.

    Parts of one order that do not overlap have no image in common, and a longer part with the same
    start contains the shorter one. The images keep their index and are in this order, so that a
    slice of a sample is a sample; all images of a split stay in its own order.

    Args:
        start, count, every: exactly `count` images (all if None) from `start` on, and of those
            every N-th by its position in the split.
        sample: `first` is the order of the split, `random` a random order, and `stratified` a
            random order in which the number of images of each class among the first n is within 1
            of n times its share, for every n.
        seed: of the random orders.
    """

    start: int = 0
    count: int | None = None
    every: int = 1
    sample: str = FIRST
    seed: int = 0

    def __post_init__(self) -> None:
        checks.whole("start", self.start)
        checks.whole("every", self.every, least=1)
        checks.whole("count", 1 if self.count is None else self.count, least=1)
        checks.one_of("sample", self.sample, SAMPLES)
        checks.whole("sample_seed", self.seed)

    def of(self, split: Dataset) -> Dataset:
        """The images of this part; one that does not fit into the split is an error."""
        rows = split.rows(
            self.start, max(len(split) - self.start, 1) if self.count is None else self.count
        )
        is_sampled = self.sample != FIRST and len(rows) < len(split)
        if is_sampled:
            rows = sample_order(split, self.sample, self.seed)[rows]
        if self.every > 1:
            rows = rows[torch.isin(rows, rows.sort().values[:: self.every])]
        data = split.take(rows)
        return replace(data, sample=f"{self.sample}, seed {self.seed}") if is_sampled else data


def sample_order(split: Dataset, sample: str, seed: int) -> Tensor:
    """(N,) the rows of a split in the order in which a sample takes them; it depends on the index
    and the labels."""
    if sample == FIRST:
        return torch.arange(len(split))
    words = rng.stream(seed, "sample", split.index.cpu()).words()
    shuffled = words.argsort(stable=True)
    return shuffled if sample == RANDOM else _balanced(split.labels.cpu(), shuffled)


def _balanced(labels: Tensor, shuffled: Tensor) -> Tensor:
    """Shuffled rows, reordered so that every prefix has less than one image of each class too many
    or too few.

    The j-th image of a class with a share p is at one of the positions ⌊(j − 1)/p⌋ + 1 … ⌈j/p⌉.
    Serving the earliest deadline first meets all of them, because some order does [Tijdeman1980].
    """
    total, position = len(labels), shuffled.argsort().tolist()
    by_class = shuffled[labels[shuffled].argsort(stable=True)]
    rows = [own.tolist() for own in by_class.split(torch.bincount(labels).tolist())]
    waiting = [(1, label) for label, own in enumerate(rows) if own]  # position from which on, class
    ready: list[tuple[int, int, int]] = []  # last position, rank in the random order, class
    taken, order = [0] * len(rows), []
    for now in range(1, total + 1):
        while waiting and waiting[0][0] <= now:
            label = heapq.heappop(waiting)[1]
            row = rows[label][taken[label]]
            heapq.heappush(
                ready, (-(-(taken[label] + 1) * total // len(rows[label])), position[row], label)
            )
        label = heapq.heappop(ready)[2]
        order.append(rows[label][taken[label]])
        taken[label] += 1
        if taken[label] < len(rows[label]):
            heapq.heappush(waiting, (taken[label] * total // len(rows[label]) + 1, label))
    return torch.tensor(order)


def class_share_notes(data: Dataset) -> tuple[str, ...]:
    """A sentence if the class shares of the images differ significantly from those of their split,
    else nothing."""
    counts = torch.bincount(data.labels.cpu(), minlength=data.num_classes).tolist()
    there = [*data.split_counts, *[0] * (data.num_classes - len(data.split_counts))]
    if not data.split_counts or stats.is_random_sample(counts, there, LEVEL):
        return ()
    shares = [
        (count / len(data), whole / sum(there), name)
        for count, whole, name in zip(counts, there, data.classes, strict=True)
    ]
    shares.sort(key=lambda item: -abs(item[0] - item[1]))
    shown = [
        f"{checks.shorten(name, 40)} {format.percent(own)} instead of {format.percent(whole)}"
        for own, whole, name in shares[:_SHOWN]
    ]
    missing = sum(whole > 0 and own == 0 for own, whole, _ in shares)
    ending = (
        f"; {missing} of {sum(whole > 0 for whole in there)} classes are missing" if missing else ""
    )
    return (
        f"the class shares of these {len(data)} images differ significantly from those of {data.name} {data.split} "
        f"(level {LEVEL:g}): {', '.join(shown)}{ending}. Accuracies and promises hold for images like these only; "
        "a stratified sample has the shares of the split",
    )


def warn_of_class_shares(data: Dataset) -> Dataset:
    """The images, with a warning if their class shares are not those of their split."""
    for note in class_share_notes(data):
        warnings.warn(note, checks.EquipoiseWarning, stacklevel=4)
    return data
