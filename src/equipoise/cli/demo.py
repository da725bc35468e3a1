"""The demo: train two classifiers, fit a mixture, attack all three and report."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from equipoise import models, reporting
from equipoise.attacks import Attack, Clean, Pgd, Suite, fast
from equipoise.core import arrays, format, parallel, results, serialize
from equipoise.core.arrays import FitArrays, FrontierArrays, PictureArrays
from equipoise.core.device import resolve, single_thread
from equipoise.core.records import Run, nothing_left_on_refusal
from equipoise.core.results import Summary
from equipoise.core.threat import Threat
from equipoise.data import Dataset, load_data, shapes
from equipoise.evaluation import Conditions, Job, open_run, run_jobs
from equipoise.evaluation.adaptive import adaptive_attacks
from equipoise.evaluation.adversarial import AdversarialImages
from equipoise.evaluation.points import PointRecorder
from equipoise.fitting import fit
from equipoise.mixing import MixedClassifier
from equipoise.training import TrainingPlan, fit_model
from equipoise.training.objective import Objective
from equipoise.training.objectives import Adversarial, Standard

CHECKPOINT = "best.safetensors"  # that of the last epoch, because no image is held out


@dataclass(frozen=True)
class DemoSize:
    """How much the demo computes; the attack of the fit is weaker than usual, to save time."""

    training_images: int = 4096  # the first of the train split
    fit_images: int = 1024  # the next
    test_images: int = 512
    epochs: tuple[int, int] = (6, 12)  # of the accurate and of the robust model
    lose_at_most: float = 1.0  # percentage points of robust accuracy
    fit_steps: int = 20
    fit_targets: int = 4
    fit_pool: int = 2
    attack: Suite = field(default_factory=fast)
    plain_alphas: tuple[float, ...] = (
        0.0,
        0.3,
        0.5,
        0.6,
        0.7,
        0.8,
        0.9,
        1.0,
    )  # of plain mixing, for comparison
    plain_images: int = 256  # fitting images that plain mixing is measured on

    def describe(self) -> dict[str, Any]:
        """For the identity of the run."""
        return {
            **serialize.to_plain(replace(self, attack=Suite())),
            "attack": self.attack.describe(),
        }


@dataclass(frozen=True)
class DemoResult:
    """Results of the demo; `str()` is what the command prints."""

    summary: Summary
    threat: Threat
    report: Path | None

    def __str__(self) -> str:
        table, fitted = (
            format.accuracy_table(self.summary.results, str(self.threat)),
            self.summary.fit,
        )
        assert fitted is not None
        promise = f"the mixture {fitted.promise}" if fitted.helped else fitted.promise
        report = "" if self.report is None else f"\nreport: {self.report}"
        return f"{table}\npromise, calibrated on images of its own: {promise}{report}"


def run_demo(
    out: Path | str = "runs/demo",
    device: str = "auto",
    seed: int = 0,
    size: DemoSize | None = None,
    *,
    report: bool = True,
) -> DemoResult:
    """Train two classifiers on drawn shapes, fit a mixture, attack all three and write a report.

    The classifiers are trained on the first part of the train split, the mixture is fitted on the
    rest, and all three are evaluated on images of the test split. No image has two uses. A run
    folder `out` of the same demo is resumed. Without `report` no report is written.
    """
    parallel.require_one_process("demo")
    with nothing_left_on_refusal(out), single_thread():
        summary, threat = _run_demo(Path(out), device, seed, size or DemoSize())
        return DemoResult(summary, threat, reporting.report_after_run(out) if report else None)


def _run_demo(out: Path, device: str, seed: int, size: DemoSize) -> tuple[Summary, Threat]:
    start_time, threat = time.monotonic(), Threat("linf", shapes.EPS)
    conditions = Conditions(threat, resolve(device), seed, batch_size=256)
    images, test = (
        load_data("shapes", split="train"),
        load_data("shapes", split="test", count=size.test_images),
    )
    run = Run(
        out,
        {
            "command": "demo",
            "version": 1,
            "seed": seed,
            "size": size.describe(),
            "threat": threat.to_dict(),
        },
        {
            **conditions.environment(),
            "command": f"equipoise demo --seed {seed}",
            "data": test.describe(),
        },
    )
    training = images.slice(0, size.training_images)
    held_out = images.slice(size.training_images, size.fit_images)
    _train_small(
        out / "accurate",
        Standard(label_smoothing=0.1),
        training,
        conditions,
        epochs=size.epochs[0],
        lr=3e-3,
    )
    _train_small(
        out / "robust",
        Adversarial(norm=threat.norm, eps=threat.eps, steps=4),
        training,
        conditions,
        epochs=size.epochs[1],
        lr=5e-3,
    )
    accurate, robust = (f"file:{out / side / CHECKPOINT}" for side in ("accurate", "robust"))
    mixture = fit(
        accurate,
        robust,
        held_out,
        threat=threat,
        lose_at_most=size.lose_at_most,
        out=out / "mixture",
        device=device,
        seed=seed,
        batch_size=conditions.batch_size,
        steps=size.fit_steps,
        targets=size.fit_targets,
        pool=size.fit_pool,
    ).mixture.to(conditions.device)
    # The same two models without a map, at several alphas.
    plain = [
        job
        for alpha in size.plain_alphas
        for job in _jobs(
            "mixed",
            MixedClassifier(mixture.accurate, mixture.robust, alpha).eval(),
            {"clean": Clean(), "pgd": Pgd(steps=10)},
            alpha,
        )
    ]
    few = held_out.slice(0, min(size.plain_images, len(held_out)))
    run_jobs(plain, few, conditions, open_run(out / "sweep", plain, few, conditions))
    # All three models under the same suite; the mixture also under attacks that know how it is
    # built.
    attacks = {"clean": Clean(), "fast": size.attack}
    jobs = [
        *_jobs("accurate", mixture.accurate, attacks),
        *_jobs("robust", mixture.robust, attacks),
        *_jobs("mixed", mixture, attacks),
        *_jobs("mixed", mixture, adaptive_attacks(mixture, size.attack, thorough=False)),
    ]
    fitted = results.read_summary(out / "mixture")
    points = PointRecorder(run, test, conditions, jobs, mixture, ("accurate", "robust", "mixed"))
    summary = run_jobs(
        jobs,
        test,
        conditions,
        run,
        [("mixed", "robust"), ("mixed", "accurate")],
        command="demo",
        start_time=start_time,
        fit=fitted.fit,
        costs=fitted.costs,
        images=AdversarialImages(run, test.image_shape, frozenset(), points),
    )
    arrays.save(
        out,
        FitArrays.load(out / "mixture"),
        PictureArrays.load(out),
        FrontierArrays.load(out),
    )
    return summary, threat


def _train_small(
    out: Path,
    objective: Objective,
    images: Dataset,
    conditions: Conditions,
    *,
    epochs: int,
    lr: float,
) -> None:
    """Train a small network on all images, unless an earlier run has."""
    model = models.build(
        "cnn_small",
        num_classes=images.num_classes,
        image_shape=images.image_shape,
        mean=(0.35,) * 3,
        std=(0.2,) * 3,
        seed=conditions.seed,
    )
    plan = TrainingPlan(
        epochs=epochs,
        optimizer="adamw",
        lr=lr,
        weight_decay=1e-4,
        schedule="one-cycle",
        warmup=epochs / 5,
        held_out=0,
        seed=conditions.seed,
    )
    fit_model(
        model,
        objective,
        images,
        plan,
        device=conditions.device,
        out=out,
        metadata={"arch": "cnn_small"},
    )


def _jobs(
    name: str, model: nn.Module, attacks: Mapping[str, Attack], alpha: float | None = None
) -> list[Job]:
    return [Job(name, model, key, attack, alpha) for key, attack in attacks.items()]
