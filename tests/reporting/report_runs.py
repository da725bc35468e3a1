"""Folders of an evaluation, a training run and certificates without a model, for reports in a
browser."""

from __future__ import annotations

from pathlib import Path

import explored_run
import numpy as np
from synthetic_run import result, write_run

from equipoise.core import stats
from equipoise.core.results import Result, Summary
from equipoise.core.rows import CertificateRow, EpochRow
from equipoise.reporting.run_view import RunView

EPOCHS, HELD_OUT, CERTIFIED = 8, 200, 60
ALPHAS = (0.6, 0.8, 1.0)


def evaluation(folder: Path) -> RunView:
    """An evaluation with pictures and a frontier."""
    return explored_run.make(folder, n=60, pictures=6)


def training(folder: Path) -> RunView:
    """A training run of a few epochs."""
    rows = [
        EpochRow(
            index=epoch,
            model="trained",
            attack="epoch",
            loss=2 / (1 + epoch),
            accuracy=0.5 + 0.05 * epoch,
            lr=0.1 * 0.5**epoch,
            seconds=1.0,
            images_per_second=90.0,
            validation={"clean": 0.5 + 0.04 * epoch, "attacked": 0.2 + 0.02 * epoch},
        )
        for epoch in range(EPOCHS)
    ]
    summary = Summary(
        command="train",
        seconds=2.0,
        best_epoch=7,
        results=(result("best", "clean", 0.78, n=HELD_OUT),),
    )
    return write_run(
        folder,
        summary,
        rows,
        {"command": "train", "arch": "resnet8", "objective": {"name": "trades"}},
    )


def certificates(folder: Path) -> RunView:
    """Certificates of one smoothed model in mixtures of several alphas."""
    rng, rows, results = np.random.default_rng(5), [], list[Result]()
    lower = rng.uniform(0.45, 0.999, CERTIFIED)
    for alpha in ALPHAS:
        radii = np.maximum(0.0, alpha * (lower - 0.5))
        rows += [
            CertificateRow(
                index=i,
                model="smooth",
                attack="certify",
                alpha=alpha,
                label=0,
                predicted=0 if radius > 0 else -1,
                correct=bool(radius > 0),
                radius=float(radius),
                lower=float(lower[i]),
                samples=1000,
                top=0,
                answer=0,
                sigma=0.25,
                accurate=0,
                gap=0.0,
            )
            for i, radius in enumerate(radii)
        ]
        for metric, count in (
            ("certified@0.00", (radii > 0).sum()),
            ("certified@0.25", (radii >= 0.25).sum()),
        ):
            results.append(
                Result.of(
                    "smooth", metric, stats.clopper_pearson(int(count), CERTIFIED), alpha=alpha
                )
            )
        results.append(result("smooth", "acr", float(radii.mean()), alpha=alpha, n=CERTIFIED))
    return write_run(
        folder,
        Summary(command="certify", seconds=1.0, results=tuple(results)),
        rows,
        {"command": "certify", "plan": {"sigma": 0.25, "failure": 0.001}},
        {"command": "equipoise certify m"},
    )
