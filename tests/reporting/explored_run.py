"""Evaluations without a model that have everything an explorer shows: pictures, probabilities and a frontier."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from synthetic_run import write_run

from equipoise.core import aggregation, arrays
from equipoise.core.arrays import FrontierArrays, PictureArrays
from equipoise.core.results import Summary
from equipoise.core.rows import AttackRow, Row
from equipoise.core.threat import Threat
from equipoise.reporting.section import RunView

NAMES = ("accurate", "robust", "mixed")
THREAT = Threat("linf", 8 / 255)
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship",
           "<script>alert(1)</script>")
LOSSES = (0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08)
COMMAND = "equipoise evaluate mixture:runs/fit --data cifar10 --eps 8/255 --out runs/evaluate"
SHIFTS = {"accurate": (0.95, -0.6), "robust": (0.6, 0.35), "mixed": (0.85, 0.3)}  # of margins, clean and attacked


def make(folder: Path, n: int = 200, *, pictures: int = 40, size: int = 16, seed: int = 3) -> RunView:
    """A finished evaluation of n images, with all that its report can show."""
    run, *groups = in_memory(folder, n, pictures=pictures, size=size, seed=seed)
    shown = write_run(folder, run.summary, run.rows, dict(run.identity), dict(run.settings))
    arrays.save(folder, *groups)
    return shown


def in_memory(folder: Path, n: int, *, pictures: int, size: int = 16, seed: int = 3) -> (
        tuple[RunView, PictureArrays, FrontierArrays]):
    """The same without writing anything."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(len(CLASSES), size=n)
    others = (labels + rng.integers(1, len(CLASSES), size=n)) % len(CLASSES)
    rows: list[Row] = []
    difficulty = rng.normal(0, 0.45, n)
    for model, shifts in SHIFTS.items():
        clean, attacked = (np.tanh(2 * (shift + difficulty + rng.normal(0, 0.15, n))) for shift in shifts)
        for attack, values in (("clean", clean), ("fast", np.minimum(clean, attacked))):
            rows += [AttackRow(
                index=i, model=model, attack=attack, label=int(labels[i]), correct=bool(values[i] > 0),
                predicted=int(labels[i] if values[i] > 0 else others[i]), margin=round(float(values[i]), 6),
                broken_by=None if attack == "clean" or values[i] > 0 else "clean" if clean[i] <= 0 else
                ("apgd-ce", "apgd-t", "square")[i % 3]) for i in range(n)]
    summary = Summary(command="evaluate", seconds=3.0, results=tuple(aggregation.accuracies(rows, THREAT)),
                      differences=tuple(aggregation.differences(rows, [("mixed", "robust")], THREAT)))
    run = RunView(folder, {
        "command": "evaluate", "seed": 0, "data": {"name": "cifar10", "split": "test", "count": n},
        "threat": THREAT.to_dict()}, {"device": "cpu", "command": COMMAND}, summary, rows)
    return run, _pictures(rng, labels, pictures, size), _frontier(rows, labels, others, rng)


def _pictures(rng: np.random.Generator, labels: np.ndarray, count: int, size: int) -> PictureArrays:
    shape = (count, 3, size, size)
    clean = (rng.normal(128, 30, (count, 3, 1, 1)) + 40 * np.sin(np.arange(size) / 3)).clip(8, 247)
    clean = np.broadcast_to(clean, shape).astype(np.uint8)
    index = np.arange(count) * (len(labels) // count)
    p = rng.dirichlet(np.full(5, 0.4), size=(2, 3, count)).astype(np.float32)
    top = (labels[index][:, None] + np.arange(5)) % len(CLASSES)
    return PictureArrays(index=index, clean=clean, attacked=clean + rng.choice([-8, 8], shape).astype(np.int8).astype(
        np.uint8), model="mixed", models=NAMES, top_probabilities=-np.sort(-p, axis=-1), class_names=CLASSES,
        top_classes=np.broadcast_to(top, (2, 3, count, 5)).astype(np.int32))


def _frontier(rows: list[Row], labels: np.ndarray, others: np.ndarray, rng: np.random.Generator) -> FrontierArrays:
    n = len(labels)
    alphas = np.array([*(1 / (1 + 8 * loss) for loss in LOSSES), *(1 / (1 + step / 40) for step in range(41))])
    gap = rng.random(n)
    mine = {(row.model, row.attack, row.index): row for row in rows if isinstance(row, AttackRow)}
    g, h = (np.array([mine[name, "clean", i].correct for i in range(n)]) for name in ("accurate", "robust"))
    stands = np.array([mine["robust", "fast", i].correct for i in range(n)])
    by_accurate = gap <= (1 / alphas - 1)[:, None]
    correct = np.where(by_accurate, g, h)
    return FrontierArrays(
        index=np.arange(n), alpha=alphas, lost=np.array([*LOSSES, *[np.nan] * 41]), names=NAMES,
        predicted=np.where(correct, labels, others).astype(np.uint8), by_accurate=by_accurate,
        standing=~by_accurate & stands & correct, gaps=np.stack([gap, gap]), evaluated=float(alphas[7 + 2]),
        margins=np.stack([np.where(stands, gap, -gap)] * 2))
