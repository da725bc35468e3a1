"""The whole story in about two minutes: train two classifiers, fit a mixture, attack all three, report."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from equipoise import __version__, attacks, data, models, reporting
from equipoise.core import records, rng, summary
from equipoise.core.records import Row, Run
from equipoise.core.threat import Threat
from equipoise.data import Dataset, pixels, shapes
from equipoise.evaluation import Attack, Conditions, Job, begin, facts, judge, untouched
from equipoise.evaluation.adaptive import adaptive
from equipoise.fitting import AttackStrength, FitSettings, artifacts, lose_at_most
from equipoise.fitting.run import fit_into
from equipoise.mixing import MixedClassifier
from equipoise.reporting.view import Arrays
from equipoise.training import Objective, TrainingPlan, train
from equipoise.training.objectives import Adversarial, Standard

TRAINED = 4096  # images of the train split to learn from; the mixture is fitted on the others
EPOCHS = (6, 12)  # of the accurate and of the robust classifier
LOSE = 1.0  # points of robust accuracy that the mixture may lose
STRENGTH = AttackStrength(steps=20, targets=4, pool=2)  # weaker than usual, for the sake of time
ALPHAS = (0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)  # of plain mixing, for comparison
SWEPT = 256  # fitting images that plain mixing is measured on
TESTED = 512
EXAMPLES = 6
FITTED = ("helped", "promise", "fitted", "rejected", "notes", "cost")  # what the page tells of the fit


@dataclass(frozen=True)
class DemoResult:
    """What the demo found, and where it lies."""

    results: list[Row]
    helped: bool
    promise: str
    threat: Threat
    page: Path


def demo(out: Path, device: torch.device, seed: int = 0) -> DemoResult:
    """Tell the story into the run folder `out`; a folder of the same demo is resumed.

    The classifiers learn from the first part of the train split, the mixture is fitted on the rest, and all three
    are judged on images of the test split. No image has two uses.
    """
    begun = time.monotonic()
    threat = Threat("linf", shapes.EPS)
    conditions = Conditions(threat, device, seed, batch_size=256)
    run = Run(out, {"verb": "demo", "seed": seed, "equipoise": __version__, "threat": threat.facts()},
              {**facts(conditions), "command": f"equipoise demo --seed {seed}"})
    images, test = data.load("shapes", split="train"), data.load("shapes", split="test", count=TESTED)
    learnt, held_out = images.slice(0, TRAINED), images.slice(TRAINED, len(images) - TRAINED)
    _base(out / "accurate", Standard(label_smoothing=0.1), learnt, conditions, epochs=EPOCHS[0], lr=3e-3)
    _base(out / "robust", Adversarial(norm=threat.norm, eps=threat.eps, steps=4), learnt, conditions,
          epochs=EPOCHS[1], lr=5e-3)
    references = [f"file:{out / side / 'last.safetensors'}" for side in ("accurate", "robust")]
    mixed = fit_into(out / "mixture", references, held_out, threat=threat, target=lose_at_most(LOSE), device=device,
                     settings=FitSettings(seed=seed, strength=STRENGTH), batch_size=conditions.batch_size).to(device)
    _sweep(out / "sweep", mixed, held_out.slice(0, min(SWEPT, len(held_out))), conditions)
    fitted = records.summary(out / "mixture")
    told = {key: fitted[key] for key in FITTED}
    results = judge(_subjects(mixed), test, conditions, run, [("mixed", "robust"), ("mixed", "accurate")], told,
                    verb="demo", begun=begun)
    artifacts.save_arrays(out / "arrays.npz", {**Arrays(out / "mixture" / "arrays.npz"),
                                             **_examples(mixed, test, records.read(out), conditions)})
    return DemoResult(results, told["helped"], told["promise"], threat, reporting.write(out))


def _base(out: Path, objective: Objective, images: Dataset, conditions: Conditions, *, epochs: int, lr: float) -> None:
    """A base classifier, learnt now or in an earlier sitting."""
    model = models.build("cnn_small", num_classes=images.num_classes, image_shape=images.image_shape,
                         mean=(0.35,) * 3, std=(0.2,) * 3, seed=conditions.seed)
    plan = TrainingPlan(epochs=epochs, optimizer="adamw", lr=lr, weight_decay=1e-4, schedule="one-cycle", warmup=epochs / 5,
                held_out=0, seed=conditions.seed)
    train(model, objective, images, plan, device=conditions.device, out=out, facts={"arch": "cnn_small"})


def _sweep(out: Path, mixed: MixedClassifier, images: Dataset, conditions: Conditions) -> None:
    """Plain mixing of the same two at several weights."""
    tried: dict[str, Attack] = {"clean": untouched, "pgd": partial(attacks.pgd, steps=10)}
    subjects = [Job("mixed", MixedClassifier(mixed.accurate, mixed.robust, alpha).eval(), name, attack, alpha)
                for alpha in ALPHAS for name, attack in tried.items()]
    judge(subjects, images, conditions, begin(out, subjects, images, conditions))


def _subjects(mixed: MixedClassifier) -> list[Job]:
    """All three under the same list of attacks; the mixture also under attacks that know how it is built."""
    fast = attacks.named("fast")
    bases: dict[str, nn.Module] = {"accurate": mixed.accurate, "robust": mixed.robust, "mixed": mixed}
    plain: dict[str, Attack] = {"clean": untouched, "fast": fast}
    listed = {name: plain | (adaptive(mixed, fast) if name == "mixed" else {}) for name in bases}
    return [Job(name, bases[name], attack, run) for name, own in listed.items() for attack, run in own.items()]


def _examples(mixed: MixedClassifier, test: Dataset, rows: list[Row], conditions: Conditions) -> dict[str, Any]:
    """Pictures for the page: images that the accurate classifier loses and the mixture keeps."""
    seen = summary.verdicts(rows)
    kept = [i for i, right in seen["mixed", None]["worst"].items()
            if right and seen["accurate", None]["clean"][i] and not seen["accurate", None]["fast"][i]]
    if not kept:
        return {}
    chosen = test.take(torch.tensor([kept[(len(kept) - 1) * k // (EXAMPLES - 1)] for k in range(EXAMPLES)]))
    x, y = pixels(chosen.images.to(conditions.device)), chosen.labels.to(conditions.device)
    x_adv = attacks.pgd(mixed.accurate, x, y, threat=conditions.threat, restarts=2,
                        stream=rng.stream(conditions.seed, "pgd", chosen.index.to(conditions.device)))
    with torch.no_grad():
        predicted = torch.stack([m(x_adv).argmax(1) for m in (mixed.accurate, mixed.robust, mixed)], dim=1)
    return {"example_clean": chosen.images.numpy(), "example_label": chosen.labels.numpy(),
            "example_attacked": (x_adv * 255).round().to(torch.uint8).cpu().numpy(),
            "example_predicted": predicted.cpu().numpy(), "class_names": np.array(chosen.classes)}
