"""Evaluations without a model that have everything an explorer shows: pictures, probabilities and a
frontier."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from synthetic_run import write_run

from equipoise.core import aggregation, arrays
from equipoise.core.arrays import FrontierArrays, PictureArrays
from equipoise.core.results import Summary
from equipoise.core.rows import AttackRow, Row
from equipoise.core.threat import Threat
from equipoise.reporting.run_view import RunView

NAMES = ("accurate", "robust", "mixed")
THREAT = Threat("linf", 8 / 255)
CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "<script>alert(1)</script>",
)
STAGES = ("apgd-ce", "apgd-t", "square")
LOSSES = (0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08)
COMMAND = "equipoise evaluate mixture:runs/fit --data cifar10 --eps 8/255 --out runs/evaluate"
SHIFTS = {"accurate": (0.95, -0.6), "robust": (0.6, 0.35)}  # of margins, clean and attacked
ALPHAS = (*(1 / (1 + 8 * loss) for loss in LOSSES), *(1 / (1 + step / 40) for step in range(41)))
OWN = len(LOSSES) + 6  # the step of the mixture that was evaluated
Margins = tuple[
    np.ndarray, np.ndarray
]  # signed ones of the true class: clean, and the smallest of clean and attacked


def make(
    folder: Path, n: int = 200, *, pictures: int = 40, size: int = 16, seed: int = 3
) -> RunView:
    """A finished evaluation of n images, with all that its report can show."""
    run, *groups = in_memory(folder, n, pictures=pictures, size=size, seed=seed)
    shown = write_run(folder, run.summary, run.rows, dict(run.identity), dict(run.settings))
    arrays.save(folder, *groups)
    return shown


def in_memory(
    folder: Path, n: int, *, pictures: int, size: int = 16, seed: int = 3
) -> tuple[RunView, PictureArrays, FrontierArrays]:
    """The same without writing anything."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(len(CLASSES), size=n)
    others = (labels + rng.integers(1, len(CLASSES), size=n)) % len(CLASSES)
    rows: list[Row] = []
    difficulty = rng.normal(0, 0.45, n)
    margins: dict[str, Margins] = {}
    for model, shifts in SHIFTS.items():
        clean, attacked = (
            np.tanh(2 * (shift + difficulty + rng.normal(0, 0.15, n))) for shift in shifts
        )
        margins[model] = clean, np.minimum(clean, attacked)
    margins["mixed"] = _mixed(margins["accurate"], margins["robust"])
    for model, (clean, attacked) in margins.items():
        for attack, values in (("clean", clean), ("fast", attacked)):
            rows += [
                AttackRow(
                    index=i,
                    model=model,
                    attack=attack,
                    label=int(labels[i]),
                    correct=bool(values[i] > 0),
                    predicted=int(labels[i] if values[i] > 0 else others[i]),
                    margin=round(float(values[i]), 6),
                    broken_by=None
                    if attack == "clean" or values[i] > 0
                    else "clean"
                    if clean[i] <= 0
                    else STAGES[i % 3],
                    attack_passes=None
                    if attack == "clean"
                    else 0
                    if clean[i] <= 0
                    else 100
                    if values[i] > 0
                    else 10 + 30 * (i % 3),
                )
                for i in range(n)
            ]
    summary = Summary(
        command="evaluate",
        seconds=3.0,
        results=tuple(aggregation.accuracies(rows, THREAT)),
        differences=tuple(aggregation.differences(rows, [("mixed", "robust")], THREAT)),
    )
    run = RunView(
        folder,
        {
            "command": "evaluate",
            "seed": 0,
            "data": {"name": "cifar10", "split": "test", "count": n},
            "threat": THREAT.to_dict(),
        },
        {"device": "cpu", "command": COMMAND},
        summary,
        rows,
    )
    frontier = _frontier(margins["accurate"], margins["robust"], labels, others)
    return run, _pictures(rng, labels, pictures, size), frontier


def _mixed(accurate: Margins, robust: Margins) -> Margins:
    """Of a mixture in which g decides where the gap of h is at most q; under attack, g is right on
    every other image.

    So it stands on more images than an estimate says that assumes the worst answers of g.
    """
    (g, _), (h, smallest), q = accurate, robust, 1 / ALPHAS[OWN] - 1
    clean = np.where(np.abs(h) <= q, g, h)
    stands = (clean > 0) & ((smallest > q) | ((smallest > 0) & (np.arange(len(g)) % 2 == 0)))
    return clean, np.where(stands, np.minimum(clean, np.abs(smallest)), -np.abs(smallest))


def _pictures(rng: np.random.Generator, labels: np.ndarray, count: int, size: int) -> PictureArrays:
    shape = (count, 3, size, size)
    clean = (rng.normal(128, 30, (count, 3, 1, 1)) + 40 * np.sin(np.arange(size) / 3)).clip(8, 247)
    clean = np.broadcast_to(clean, shape).astype(np.uint8)
    index = np.arange(count) * (len(labels) // count)
    p = rng.dirichlet(np.full(5, 0.4), size=(2, 3, count)).astype(np.float32)
    top = (labels[index][:, None] + np.arange(5)) % len(CLASSES)
    attacked = clean + rng.choice([-8, 8], shape).astype(np.int8).astype(np.uint8)
    attacked[:, :, 0, 0] = np.where(
        clean[:, :, 0, 0] < 128, 255, 0
    )  # as a sparse attack changes a pixel
    return PictureArrays(
        index=index,
        clean=clean,
        attacked=attacked,
        model="mixed",
        models=NAMES,
        class_names=CLASSES,
        top_probabilities=-np.sort(-p, axis=-1),
        top_classes=np.broadcast_to(top, (2, 3, count, 5)).astype(np.int32),
    )


def _frontier(
    accurate: Margins, robust: Margins, labels: np.ndarray, others: np.ndarray
) -> FrontierArrays:
    n, alphas = len(labels), np.array(ALPHAS)
    (g, _), (h, smallest), q = accurate, robust, (1 / alphas - 1)[:, None]
    by_accurate = np.abs(h) <= q
    correct = np.where(by_accurate, g, h) > 0
    return FrontierArrays(
        index=np.arange(n),
        alpha=alphas,
        lost=np.array([*LOSSES, *[np.nan] * 41]),
        names=NAMES,
        predicted=np.where(correct, labels, others).astype(np.uint8),
        by_accurate=by_accurate,
        standing=correct & (smallest > q),
        gaps=np.stack([np.abs(h) / 2, np.abs(h)]),
        evaluated=ALPHAS[OWN],
        clean_margins=np.stack([h / 2, h]),
        margins=np.stack([smallest / 2, smallest]),
    )
