"""Small run folders without a model, to be compared with each other or listed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from synthetic_run import write_run

from equipoise.core import aggregation, stats
from equipoise.core.records import Run
from equipoise.core.results import Result, Summary
from equipoise.core.rows import CERTIFY, AttackRow, CertificateRow, EpochRow, Row
from equipoise.core.threat import Threat

THREAT = Threat("linf", 8 / 255)
HOSTILE = "<script>alert(1)</script>"
Correct = Mapping[str, Mapping[str, Sequence[bool]]]  # model → attack → images
# Of eight images the second run gains two and loses one on clean images, and loses three under
# attack.
FIRST: Correct = {"mixed": {"clean": [1, 1, 1, 1, 1, 1, 0, 0], "pgd": [1, 1, 1, 1, 0, 0, 0, 0]}}  # type: ignore[list-item]
SECOND: Correct = {"mixed": {"clean": [1, 1, 1, 1, 1, 0, 1, 1], "pgd": [1, 0, 0, 0, 0, 0, 0, 0]}}  # type: ignore[list-item]


def evaluation(
    folder: Path,
    correct: Correct = FIRST,
    *,
    start: int = 0,
    data: str = "digits",
    digest: str = "d0",
    labels: int = 3,
    threat: Threat = THREAT,
    steps: int = 10,
    finished: bool = True,
    seed: int = 0,
    **more: Any,
) -> Path:
    """An evaluation whose images are those from position `start` on; a label is the position modulo
    `labels`."""
    rows: list[Row] = [
        AttackRow(
            index=start + i,
            model=model,
            attack=attack,
            label=(start + i) % labels,
            correct=bool(right),
        )
        for model, attacks in correct.items()
        for attack, values in attacks.items()
        for i, right in enumerate(values)
    ]
    count = len({row.index for row in rows})
    identity = {
        "command": "evaluate",
        "seed": seed,
        "threat": threat.to_dict(),
        "data": {"name": data, "split": "test", "count": count, "digest": digest},
        "models": {model: {"weights": f"{number:064x}"} for number, model in enumerate(correct)},
        "attacks": {
            model: {
                attack: {"attack": attack, **({} if attack == "clean" else {"steps": steps})}
                for attack in attacks
            }
            for model, attacks in correct.items()
        },
    }
    settings = {
        "equipoise": "0.2.0",
        "references": list(correct),
        "command": f"equipoise evaluate {' '.join(correct)}",
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not finished:
        run = Run(folder, identity, settings)
        run.append(rows[: len(rows) // 2])
        return folder
    summary = Summary(
        command="evaluate", seconds=1.0, results=tuple(aggregation.accuracies(rows, threat)), **more
    )
    return write_run(folder, summary, rows, identity, settings).folder


def certification(
    folder: Path, radii: Sequence[float], *, sigma: float = 0.25, samples: int = 100
) -> Path:
    """Certificates of one model; the radius of an image is negative where it is misclassified."""
    rows: list[Row] = [
        CertificateRow(
            index=i,
            model="base",
            attack=CERTIFY,
            label=0,
            correct=radius >= 0,
            predicted=int(radius < 0),
            radius=abs(radius),
            lower=0.9,
            samples=samples,
            top=0,
            answer=0,
            sigma=sigma,
        )
        for i, radius in enumerate(radii)
    ]
    own = [max(radius, 0.0) for radius in radii]
    results = [
        Result.of("base", "acr", stats.mean(own)),
        *(
            Result.of("base", f"certified@{at:.2f}", stats.share(radius >= at for radius in own))
            for at in (0.25, 0.5)
        ),
    ]
    identity = {
        "command": "certify",
        "models": {"base": {"weights": "a" * 64}},
        "plan": {"sigma": sigma, "samples": samples, "failure": 0.001},
        "data": {"name": "digits", "split": "test", "count": len(radii), "digest": "d0"},
    }
    return write_run(
        folder, Summary(command="certify", seconds=1.0, results=tuple(results)), rows, identity
    ).folder


def training(
    folder: Path, losses: Sequence[float], objective: str = "standard", *, finished: bool = True
) -> Path:
    """A training with one epoch per loss."""
    rows: list[Row] = [
        EpochRow(
            index=i,
            model="cnn",
            attack="epoch",
            loss=loss,
            accuracy=1 / (1 + loss),
            lr=0.1,
            seconds=1.0,
            images_per_second=100.0,
            validation={"clean": 0.5 + 0.05 * i},
        )
        for i, loss in enumerate(losses)
    ]
    identity = {
        "command": "train",
        "arch": "cnn_small",
        "objective": {"name": objective},
        "plan": {"epochs": len(losses) + (0 if finished else 2), "held_out": 50, "seed": 0},
        "data": {"name": "digits", "split": "train", "count": 100, "digest": "d1"},
    }
    if not finished:
        Run(folder, identity, {}).append(rows)
        return folder
    results = tuple(
        Result.of(name, "clean", stats.clopper_pearson(right, 50))
        for name, right in (("best", 40), ("last", 38))
    )
    summary = Summary(command="train", seconds=1.0, results=results, best_epoch=0)
    return write_run(folder, summary, rows, identity).folder


def contents(*folders: Path) -> dict[Path, tuple[int, bytes]]:
    """Every file of the folders, with its time and bytes."""
    return {
        path: (path.stat().st_mtime_ns, path.read_bytes())
        for folder in folders
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
