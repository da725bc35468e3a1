"""Attacked points of an evaluation, reduced at its end to what the report shows.

While a run is in progress, a file for each batch under `points/` holds the robust model's logits at
attacked points, and of a bounded pool the attacked images that come nearer to a wrong class than
those before, with their margins. It is written before the rows of the batch.
At the end two groups of arrays remain: pictures of some images, and what other mixtures of the same
pair would predict.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from equipoise.attacks import BatchAttack, Clean
from equipoise.attacks.gradients import VERDICT_BLOCK
from equipoise.core import checks, device, files, memory
from equipoise.core.arrays import Array, FrontierArrays, PictureArrays
from equipoise.core.modes import inference
from equipoise.core.records import Run
from equipoise.core.rows import AttackRow, Row
from equipoise.data import Dataset, pixels
from equipoise.evaluation.frontier import AttackedPoints, compute_frontier
from equipoise.evaluation.job import Conditions, Job
from equipoise.mixing import CascadedClassifier, GatedClassifier, MixedClassifier

POINTS, REMOVED = "points", ".points-removed"
MAX_LOGITS = 1 << 22  # images × classes; above it, other mixtures are not computed
# Pixels of all pictures; larger images are sampled
MAX_PIXELS, MAX_PICTURES, MIN_PICTURES = 600_000, 512, 12
POOL = 4  # images whose attacked points are kept while the run lasts, per picture
FAILURES = 0.75  # share of the pictures that failures may take
MODELS, TOP = 3, 5  # models and classes whose probabilities are kept


@dataclass(frozen=True)
class PointRecorder:
    """Records attacked points of the jobs of an evaluation, and turns them into arrays for its
    report.

    Args:
        run: its folder holds the points until the end.
        data: the images.
        conditions: device and batch size.
        jobs: all jobs of the evaluation.
        mixture: the only mixture of the evaluation; None without one or with several.
        names: of its accurate base, its robust base and itself in rows.
    """

    run: Run
    data: Dataset
    conditions: Conditions
    jobs: Sequence[Job]
    mixture: MixedClassifier | None = None
    names: tuple[str, ...] = ()

    @cached_property
    def models(self) -> dict[str, nn.Module]:
        """The two bases and the mixture, or without one the first models of the evaluation."""
        models = {job.name: job.model for job in self.jobs}
        return {name: models[name] for name in self.names or list(models)[:MODELS]}

    @cached_property
    def shown(self) -> str:
        """The model whose attacked images are shown: the mixture, or else the first."""
        return self.names[-1] if self.names else next(iter(self.models))

    @cached_property
    def count(self) -> int:
        """How many pictures are kept."""
        _, height, width = self.data.image_shape
        return max(MIN_PICTURES, min(MAX_PICTURES, MAX_PIXELS // (height * width)))

    @cached_property
    def _pool(self) -> frozenset[int]:
        return frozenset(self.data.index[: POOL * self.count].tolist())

    @cached_property
    def _recorded(self) -> dict[str, str]:
        """The names of the models whose points are recorded, by the texts of their jobs."""
        return {
            str(job): job.name
            for job in self.jobs
            if not isinstance(job.attack, Clean)
            and job.attack.repeats is None
            and job.alpha is None
        }

    @property
    def _has_frontier(self) -> bool:
        """Whether other mixtures are computed: not for an alpha per image, randomised models or
        very many logits."""
        return (
            self.mixture is not None
            and not isinstance(self.mixture, GatedClassifier | CascadedClassifier)
            and all(job.attack.repeats is None for job in self.jobs)
            and len(self.data) * self.data.num_classes <= MAX_LOGITS
        )

    @cached_property
    def _smallest_margin(self) -> dict[int, float]:
        """By image: that of the points of the shown model that this process has stored."""
        return {}

    def observe(self, job: Job) -> nn.Module | None:
        """The robust base, if its outputs tell what other mixtures predict at the points of this
        job, which is then the base itself or the mixture."""
        if self.mixture is None or not self._has_frontier:
            return None
        serves = self._recorded.get(str(job)) in self.names[1:]
        return self.mixture.robust if serves else None

    def record(
        self,
        job: Job,
        index: Sequence[int],
        images: Tensor,
        margins: Tensor,
        robust: Tensor | None = None,
    ) -> None:
        """Store attacked points (B, C, H, W), before their rows are written; broken or not, of
        every stage.

        `margins` (B,) are those of the probabilities of the attacked model at the points, `robust`
        the outputs there of what :meth:`observe` names, if they are known.
        """
        content: dict[str, Tensor] = {}
        if (wanted := self.observe(job)) is not None:
            content["robust"] = (
                self._outputs(wanted, images) if robust is None else robust.cpu().contiguous()
            )
        rows = self._nearer(index, margins) if self._recorded.get(str(job)) == self.shown else []
        if rows:
            content["margin"] = margins[torch.tensor(rows, device=margins.device)].float().cpu()
            content["images"] = (
                images[torch.tensor(rows, device=images.device)].float().cpu().contiguous()
            )
            content["image_index"] = torch.tensor([index[row] for row in rows])
        if content:
            folder = self.run.folder / POINTS
            folder.mkdir(exist_ok=True)
            # Above those of all parts that are there
            number = len(list(folder.glob("*.safetensors")))
            content |= {
                "index": torch.tensor(list(index)),
                "job": torch.tensor(list(str(job).encode())).byte(),
            }
            files.write_atomic(
                folder / f"{self.run.world.rank}-{number}.safetensors",
                safetensors.torch.save(content),
            )

    def _nearer(self, index: Sequence[int], margins: Tensor) -> list[int]:
        """The rows of the pool with a smaller margin than all before of their image."""
        nearer, smallest = [], self._smallest_margin
        for row, (image, margin) in enumerate(zip(index, margins.tolist(), strict=True)):
            if image in self._pool and (image not in smallest or margin < smallest[image]):
                smallest[image] = margin
                nearer.append(row)
        return nearer

    def finish(self, rows: Iterable[Row]) -> tuple[PictureArrays | None, FrontierArrays | None]:
        """The arrays of a run whose rows are all there."""
        parts, attacked = (
            self._read(),
            [row for row in rows if isinstance(row, AttackRow) and row.alpha is None],
        )
        with (
            inference(*self.models.values()),
            torch.no_grad(),
            device.full_precision(self.conditions.device),
        ):
            frontier = self._frontier(parts, attacked) if self._has_frontier else None
            return self._pictures(parts, attacked), frontier

    @property
    def has_parts(self) -> bool:
        """Whether points are stored that no arrays were made of yet."""
        return (self.run.folder / POINTS).exists()

    def remove(self) -> None:
        """Remove the points, after their arrays were written: a kill leaves all of them or none
        under their name."""
        shutil.rmtree(self.run.folder / REMOVED, ignore_errors=True)
        if self.has_parts:
            (self.run.folder / POINTS).rename(self.run.folder / REMOVED)
            shutil.rmtree(self.run.folder / REMOVED)

    def _read(self) -> list[tuple[str, dict[str, Tensor]]]:
        """The stored points, with the text of their job; those of one image in the order in which
        they were found."""
        parts = []
        for path in sorted((self.run.folder / POINTS).glob("*.safetensors"), key=_order):
            try:
                content = safetensors.torch.load(path.read_bytes())
                parts.append((bytes(content["job"].tolist()).decode(errors="replace"), content))
            except (SafetensorError, KeyError) as error:
                raise checks.InputError(
                    f"{path} must hold attacked points of a run, got {error}"
                ) from None
        return parts

    def _outputs(self, model: nn.Module, images: Tensor) -> Tensor:
        """(B, …) outputs of a model on the CPU, in full precision."""
        place, size = self.conditions.device, self.conditions.batch_size
        model = model.to(place)
        with inference(model), torch.no_grad(), device.full_precision(place):
            block = min(size, VERDICT_BLOCK) if place.type == "cuda" else None
            return (
                memory.in_blocks(
                    lambda rows: model(pixels(images[rows].to(place))),
                    torch.arange(len(images)),
                    size,
                    block,
                )
                .cpu()
                .contiguous()
            )

    def _pictures(
        self, parts: Sequence[tuple[str, dict[str, Tensor]]], rows: Sequence[AttackRow]
    ) -> PictureArrays | None:
        """Images with their nearest attacked points: failures first, then a sample of the
        others."""
        attacked_rows = [row for row in rows if row.model == self.shown and row.attack != "clean"]
        # Points of a run that an earlier version began have no margins, so that the nearest are not
        # known.
        lacks_margins = any("images" in content and "margin" not in content for _, content in parts)
        if self.data.image_shape[0] not in (1, 3) or not attacked_rows or lacks_margins:
            return None
        failed = {row.index for row in rows if row.model == self.shown and not row.correct}
        pool = [index for index in self.data.index.tolist() if index in self._pool]
        failures = [index for index in pool if index in failed]
        failures = failures[
            : max(int(FAILURES * self.count), self.count - (len(pool) - len(failures)))
        ]
        others = [index for index in pool if index not in failed]
        wanted = min(self.count - len(failures), len(others))
        sample = [others[position * len(others) // wanted] for position in range(wanted)]
        place = {index: position for position, index in enumerate(self.data.index.tolist())}
        chosen = sorted([*failures, *sample], key=place.__getitem__)
        own = self.data.take(torch.tensor([place[index] for index in chosen]))
        clean = pixels(own.images).cpu().float()
        points = self._nearest(parts, set(chosen))
        attacked = torch.stack([points.get(index, clean[row]) for row, index in enumerate(chosen)])
        labels = own.labels.cpu()
        tops = [
            [_top_classes(self._outputs(model, images), labels) for model in self.models.values()]
            for images in (clean, attacked)
        ]
        classes, probabilities = (
            np.stack([np.stack([item[part] for item in side]) for side in tops]) for part in (0, 1)
        )
        small_clean, small_attacked = (
            _bytes(sampled(images, MAX_PIXELS // MIN_PICTURES)) for images in (clean, attacked)
        )
        return PictureArrays(
            index=np.array(chosen),
            clean=small_clean,
            attacked=small_attacked,
            model=self.shown,
            models=tuple(self.models),
            top_classes=classes,
            top_probabilities=probabilities,
            class_names=tuple(self.data.classes),
        )

    def _nearest(
        self, parts: Sequence[tuple[str, dict[str, Tensor]]], chosen: Collection[int]
    ) -> dict[int, Tensor]:
        """By image: its stored point of the smallest margin of the shown model; of equal ones the
        first."""
        nearest: dict[int, tuple[float, Tensor]] = {}
        for job, content in parts:
            if "margin" not in content or self._recorded.get(job) != self.shown:
                continue
            index, margins = content["image_index"].tolist(), content["margin"].tolist()
            for image, margin, point in zip(index, margins, content["images"], strict=True):
                if image in chosen and (image not in nearest or margin < nearest[image][0]):
                    nearest[image] = margin, point
        return {index: image for index, (_, image) in nearest.items()}

    def _frontier(
        self, parts: Sequence[tuple[str, dict[str, Tensor]]], rows: Sequence[AttackRow]
    ) -> FrontierArrays | None:
        """What other mixtures of the pair predict; None if the points of some rows are missing."""
        assert self.mixture is not None
        if not self._is_complete(parts, rows):
            return None
        mixture, stored = self.mixture, [content for _, content in parts if "robust" in content]
        g, h = (
            self._outputs(side, self.data.images) for side in (mixture.accurate, mixture.robust)
        )
        place = {index: position for position, index in enumerate(self.data.index.tolist())}
        images = [place[image] for content in stored for image in content["index"].tolist()]
        points = AttackedPoints(
            torch.tensor(images, dtype=torch.int64),
            torch.cat([h[:0], *(content["robust"] for content in stored)]),
        )
        return compute_frontier(
            mixture, self.names, self.data.index.cpu(), self.data.labels.cpu(), g, h, points
        )

    def _is_complete(
        self, parts: Sequence[tuple[str, dict[str, Tensor]]], rows: Sequence[AttackRow]
    ) -> bool:
        """Whether every attacked image has a point: a run that an older version started has not."""
        stored: dict[str, set[int]] = {}
        for name, content in parts:
            stored.setdefault(name, set()).update(content["index"].tolist())
        for job in self.jobs:
            if job.name not in self.names[1:] or isinstance(job.attack, Clean):
                continue
            needed = {
                row.index
                for row in rows
                if row.key == job.key(row.index)
                and (isinstance(job.attack, BatchAttack) or row.broken_by != "clean")
            }
            if not needed <= stored.get(str(job), set()):
                return False
        return True


def _order(path: Path) -> tuple[int, str, str]:
    """The place of a file of points, which is called RANK-NUMBER; numbers rise across processes."""
    rank, _, number = path.stem.partition("-")
    return len(number), number, rank


def _top_classes(logits: Tensor, labels: Tensor) -> tuple[Array, Array]:
    """(B, T) the most probable classes, the true one always among them, and their probabilities."""
    p = logits.float().softmax(dim=1)
    count = min(TOP, p.shape[1])
    classes = p.topk(count, dim=1).indices
    missing = ~(classes == labels.unsqueeze(1)).any(dim=1)
    classes[missing, -1] = labels[missing]
    return classes.numpy().astype(np.int32), p.gather(1, classes).numpy()


def sampled(images: Tensor, max_pixels: int) -> Tensor:
    """(B, C, H, W) images of at most `max_pixels` pixels each: some rows and columns of the given
    ones.

    Values are not averaged, so that a perturbation keeps its size.
    """
    height, width = images.shape[2:]
    factor = (max_pixels / (height * width)) ** 0.5
    if factor >= 1:
        return images
    rows = min(max(1, int(height * factor)), max_pixels)
    columns = min(max(1, int(width * factor)), max_pixels // rows)
    return images[:, :, _centres(height, rows)][:, :, :, _centres(width, columns)]


def _centres(side: int, count: int) -> Tensor:
    """The pixels in the middle of `count` equal parts of a side."""
    return ((torch.arange(count) + 0.5) * side / count).long()


def _bytes(images: Tensor) -> Array:
    rounded: Array = (images.clamp(0, 1) * 255).round().to(torch.uint8).numpy()
    return rounded
