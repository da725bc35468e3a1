"""Attacked images of an evaluation: kept while it runs, and written as tensors or as a few pictures
at the end.

While a run is in progress, images lie under `adversarial/`, in a file for each batch, which is
written before the rows of the batch: every row of a killed run has its image. A suite of attacks
stores the images that it breaks; like the original AutoAttack, the final files hold the clean image
where nothing broke it. What only the audit of an attack broke is in the file of the worst case, not
under the name of the attack.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from equipoise.attacks import BatchAttack, Clean
from equipoise.core import arrays, checks, files, format
from equipoise.core.arrays import AttackedArrays, FrontierArrays, PictureArrays
from equipoise.core.records import Run
from equipoise.core.rows import AttackRow, Row
from equipoise.core.threat import Threat
from equipoise.data import Dataset, pixels
from equipoise.evaluation.job import Job
from equipoise.evaluation.points import PointRecorder, sampled

PARTS, FILE = "adversarial", "adversarial.safetensors"
REMOVED = ".adversarial-removed"  # the parts, renamed at once when they are not needed any more
PICTURES = 32  # images among which the pictures of a report are selected
SHOWN, SHOWN_PIXELS = 6, 128 * 128  # pictures of a report, and pixels that each may have
Attacked = Sequence[tuple[Job, Mapping[int, Tensor]]]  # jobs with their attacked images by index


@dataclass(frozen=True)
class AdversarialImages:
    """The attacked images that a run keeps: all, or only those of the given indices for the
    pictures of its report."""

    run: Run
    shape: tuple[int, int, int]
    keep: frozenset[int] | None  # None: all
    points: PointRecorder | None = None  # for the pictures of the report

    def write(self, job: Job, index: Sequence[int], images: Tensor) -> None:
        """Store attacked images (B, C, H, W), before their rows are written."""
        rows = [row for row, image in enumerate(index) if self.keep is None or image in self.keep]
        if not rows or isinstance(job.attack, Clean):
            return
        folder = self.run.folder / PARTS
        folder.mkdir(exist_ok=True)
        content = {
            "index": torch.tensor([index[row] for row in rows]),
            "images": images[torch.tensor(rows, device=images.device)].float().cpu().contiguous(),
            "job": torch.tensor(list(_name(job).encode()), dtype=torch.uint8),
        }
        number = sum(
            path.name.startswith(f"{self.run.world.rank}-") for path in folder.glob("*.safetensors")
        )
        files.write_atomic(
            folder / f"{self.run.world.rank}-{number}.safetensors", safetensors.torch.save(content)
        )

    def callbacks(self) -> dict[str, Any]:
        """What a measurement calls with attacked images."""
        points = self.points
        return {
            "keep": self.write,
            **({} if points is None else {"record": points.record, "observe": points.observe}),
        }

    def read(self) -> dict[str, dict[int, Tensor]]:
        """Stored images by job and index."""
        images_by_job: dict[str, dict[int, Tensor]] = {}
        for path in sorted((self.run.folder / PARTS).glob("*.safetensors")):
            try:
                # safe_open needs a name in UTF-8
                content = safetensors.torch.load(path.read_bytes())
                index, images, job = (content[key] for key in ("index", "images", "job"))
            except (SafetensorError, KeyError) as error:
                raise checks.InputError(
                    f"{path} must hold attacked images of a run, got {error}"
                ) from None
            valid = (
                index.shape == images.shape[:1]
                and images.shape[1:] == self.shape
                and images.dtype == torch.float32
            )
            checks.require(
                valid, str(path), f"hold images of shape {self.shape}", tuple(images.shape)
            )
            name = bytes(job.flatten().to(torch.uint8).tolist()).decode(errors="replace")
            images_by_job.setdefault(name, {}).update(zip(index.tolist(), images, strict=True))
        return images_by_job

    def check_complete(self, jobs: Sequence[Job]) -> None:
        """Refuse a run that was started without keeping all images, and so has rows without one."""
        if not self.run.done or (self.run.folder / FILE).exists():
            return
        stored, rows = self.read(), self.run.read_rows()
        for job in (job for job in jobs if not isinstance(job.attack, Clean)):
            for row in rows:
                if row.key == job.key(row.index) and needs_image(job, row):
                    checks.require(
                        row.index in stored.get(_name(job), {}),
                        "save_adversarial",
                        "be given at the first "
                        f"start of a run: {self.run.folder} has rows without images",
                        True,
                    )


def needs_image(job: Job, row: Row) -> bool:
    """Whether the attacked image of a row is not the clean one."""
    return isinstance(row, AttackRow) and (
        isinstance(job.attack, BatchAttack) or (not row.correct and row.broken_by != "clean")
    )


def finish(
    images: AdversarialImages,
    jobs: Sequence[Job],
    data: Dataset,
    rows: Iterable[Row],
    threat: Threat,
) -> None:
    """Write `adversarial.safetensors` and a `.pt` per model if all images are kept, and pictures
    for the report."""
    if not images.run.world.is_leader:
        return
    folder, stored = images.run.folder, images.read()
    if stored or (images.keep is None and not (folder / FILE).exists()):
        _write(images, stored, jobs, data, rows, threat)
    if images.points is not None:
        if images.points.has_parts:
            arrays.save(folder, AttackedArrays.load(folder), *images.points.finish(rows))
        images.points.remove()
    _remove_parts(folder)


def _remove_parts(folder: Path) -> None:
    """Remove the parts so that a kill leaves all of them or none under their name."""
    if (folder / REMOVED).exists():
        shutil.rmtree(folder / REMOVED)
    if (folder / PARTS).exists():
        (folder / PARTS).rename(folder / REMOVED)
        shutil.rmtree(folder / REMOVED)


def _write(
    images: AdversarialImages,
    stored: Mapping[str, dict[int, Tensor]],
    jobs: Sequence[Job],
    data: Dataset,
    rows: Iterable[Row],
    threat: Threat,
) -> None:
    folder = images.run.folder
    by_job: dict[str, dict[int, AttackRow]] = {}
    for row in rows:
        if isinstance(row, AttackRow):
            by_job.setdefault(json.dumps([row.model, row.attack, row.alpha]), {})[row.index] = row
    attacked = [
        (job, stored.get(_name(job), {})) for job in jobs if not isinstance(job.attack, Clean)
    ]
    # Of the last attack that broke any, which for a mixture is an adaptive one.
    pictures = (_pictures(job, own, data, by_job) for job, own in reversed(attacked))
    if (selected := next((item for item in pictures if item is not None), None)) is not None:
        arrays.save(folder, selected, PictureArrays.load(folder), FrontierArrays.load(folder))
    if images.keep is None:
        _write_tensors(folder, attacked, data, by_job, threat)


def _write_tensors(
    folder: Path,
    attacked: Attacked,
    data: Dataset,
    rows: Mapping[str, Mapping[int, AttackRow]],
    threat: Threat,
) -> None:
    index = data.index.tolist()
    content = {"index": data.index.cpu(), "labels": data.labels.cpu()}
    clean = pixels(data.images).cpu().float()
    worst = {
        job.name: (clean.clone(), torch.zeros(len(data), dtype=torch.bool)) for job, _ in attacked
    }
    for job, own in attacked:
        x, by_index = clean.clone(), rows[_name(job)]
        if stored := [position for position, image in enumerate(index) if image in own]:
            x[stored] = torch.stack([own[index[position]] for position in stored])
        # What only the audit broke is in the worst case alone.
        audited = torch.tensor([by_index[i].only_audit_broke for i in index])
        content[f"{job.name}/{job.attack_name}/images"] = torch.where(
            audited.view(-1, 1, 1, 1), clean, x
        )
        content[f"{job.name}/{job.attack_name}/predicted"] = torch.where(
            audited, content["labels"], torch.tensor(_predictions(by_index, index))
        )
        strongest, is_broken = worst[job.name]
        new = (
            torch.tensor([needs_image(job, by_index[i]) and not by_index[i].correct for i in index])
            & ~is_broken
        )
        strongest[new] = x[new]
        is_broken |= new
    for name, (
        tensor,
        _,
    ) in worst.items():  # RobustBench asks for one tensor in the order of the data
        with files.atomic_writer(folder / f"adversarial-{_slug(name, worst)}.pt") as file:
            torch.save(tensor, file)
    # One key, because the order of several is not defined, and the same run should give the same
    # bytes.
    description = {
        "threat": threat.to_dict(),
        "jobs": [[job.name, job.attack_name] for job, _ in attacked],
    }
    files.write_atomic(
        folder / FILE, safetensors.torch.save(content, {"equipoise": json.dumps(description)})
    )


def _pictures(
    job: Job, own: Mapping[int, Tensor], data: Dataset, rows: Mapping[str, Mapping[int, AttackRow]]
) -> AttackedArrays | None:
    """A few images under the attack of a job: mostly broken ones, and two that it did not break;
    None if none broke."""
    if data.image_shape[0] not in (1, 3):
        return None
    by_index, clean = rows[_name(job)], rows.get(json.dumps([job.name, "clean", job.alpha]), {})
    first = [
        i
        for i in data.index.tolist()[:PICTURES]
        if (i not in clean or clean[i].correct) and not by_index[i].only_audit_broke
    ]
    broken = [i for i in first if i in own and not by_index[i].correct]
    survived = [i for i in first if by_index[i].correct]
    chosen = sorted(
        [*broken[: SHOWN - min(2, len(survived))], *survived[: max(2, SHOWN - len(broken))]][:SHOWN]
    )
    if not broken:
        return None
    place = {image: position for position, image in enumerate(data.index.tolist())}
    part = data.take(torch.tensor([place[i] for i in chosen]))
    x = pixels(part.images).cpu().float()
    x_adv = torch.stack([own.get(i, x[row]) for row, i in enumerate(chosen)])
    small, small_adv = (
        sampled(images, SHOWN_PIXELS).numpy().astype(np.float16) for images in (x, x_adv)
    )
    return AttackedArrays(
        clean=small,
        attacked=small_adv,
        index=np.array(chosen),
        label=part.labels.cpu().numpy(),
        predicted=np.array(_predictions(by_index, chosen)),
        model=job.name,
        attack=job.attack_name,
        alpha=job.alpha,
        class_names=tuple(data.classes),
    )


def _predictions(rows: Mapping[int, AttackRow], index: Iterable[int]) -> list[int]:
    predicted = [rows[image].predicted for image in index]
    checks.require(
        None not in predicted,
        "rows",
        "hold a prediction for every attacked image",
        "a row without one",
    )
    return [label for label in predicted if label is not None]


def _name(job: Job) -> str:
    return json.dumps([job.name, job.attack_name, job.alpha])


def _slug(name: str, names: Collection[str]) -> str:
    """A model's short name as part of a file name, different for all `names`."""
    slugs = {
        full: re.sub(r"[^\w.]+", "-", short).strip("-.") or "model"
        for full, short in format.short_names(names).items()
    }
    own = slugs[name]
    return own if list(slugs.values()).count(own) == 1 else f"{own}-{list(slugs).index(name) + 1}"
