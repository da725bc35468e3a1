"""The whole story in about a minute: train two classifiers, fit a mixture to a target, attack all three, report."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from equipoise import __version__, data, mixing, models, records, report, rng, summary
from equipoise.attacks import Fold, named, pgd
from equipoise.data import Dataset, pixels, shapes
from equipoise.evaluate import Attack, Conditions, Subject, attacked, begin, facts, judge, untouched
from equipoise.evaluate.adaptive import adaptive
from equipoise.evaluate.cost import costs
from equipoise.evaluate.staged import forget
from equipoise.evaluate.suspicion import suspicion
from equipoise.fit import Settings, Strength, fit, journal, lose_at_most
from equipoise.mixing import MixedClassifier
from equipoise.models import checkpoint
from equipoise.records import Row, Run
from equipoise.studies.learning import learn
from equipoise.threat import Threat

TRAINED = 4096  # images of the train split to learn from; the mixture is fitted on the others
ALPHAS = (0.0, 0.25, 0.5, 0.7, 0.8, 0.9, 0.96, 1.0)
TESTED = 1000
LOSE = 2.0  # points of the robust classifier's attacked accuracy that the mixture may lose
STRENGTH = Strength(steps=20, targets=4, pool=2)
EXAMPLES = 6
FIT = "fit.json"


@dataclass(frozen=True)
class Told:
    """What the demo found, and where it lies."""

    results: list[Row]
    promise: str
    threat: Threat
    page: Path


def demo(out: Path, device: torch.device, seed: int = 0) -> Told:
    """Tell the story into the run folder `out`; a folder of the same demo is resumed."""
    start = time.monotonic()
    threat = Threat("linf", shapes.EPS)
    conditions = Conditions(threat, device, seed, batch_size=250)
    run = Run(out, {"verb": "demo", "seed": seed, "equipoise": __version__, "threat": threat.facts()},
              {**facts(conditions), "command": f"equipoise demo --seed {seed}"})
    train, test = data.load("shapes", split="train"), data.load("shapes", split="test", count=TESTED)
    learnt, held_out = train.slice(0, TRAINED), train.slice(TRAINED, len(train) - TRAINED)
    accurate = _base(out, "accurate", learnt, conditions, epochs=6, lr=3e-3, smoothing=0.1)
    robust = _base(out, "robust", learnt, conditions, epochs=12, lr=5e-3, threat=threat)
    mixed, fitted = _fitted(out / "mixture", accurate, robust, held_out, conditions)
    _sweep(out / "sweep", accurate, robust, held_out, conditions)
    subjects = _subjects(mixed)
    for subject in subjects:
        attacked(subject, test, run, conditions)
    rows = run.finish()
    forget(run)
    results = summary.results(rows, threat)
    run.summarise("demo", time.monotonic() - start, results, **fitted,
                  differences=summary.differences(rows, [("mixed", "robust"), ("mixed", "accurate")], threat),
                  symptoms=suspicion(subjects, test, conditions, run, rows),
                  cost=[cost.facts() for cost in costs(mixed, test, device, conditions.batch_size)])
    with np.load(out / "mixture" / "arrays.npz") as held:
        journal.save_arrays(out / "arrays.npz", dict(held) | _examples(mixed, test, rows, conditions))
    return Told(results, fitted["promise"], threat, report.write(out))


def _file(out: Path, name: str) -> Path:
    return out / "mixture" / f"{name}.safetensors"


def _base(out: Path, name: str, images: Dataset, conditions: Conditions, *, epochs: int, lr: float,
          threat: Threat | None = None, smoothing: float = 0.0) -> nn.Module:
    """A base classifier, learnt now or read from an earlier sitting."""
    path = _file(out, name)
    if not path.exists():
        model = models.build("cnn_small", num_classes=images.num_classes, image_shape=images.image_shape,
                             mean=(0.35,) * 3, std=(0.2,) * 3, seed=conditions.seed).to(conditions.device).train()
        learn(name, model, images, epochs=epochs, lr=lr, seed=conditions.seed, threat=threat, smoothing=smoothing)
        path.parent.mkdir(exist_ok=True)
        checkpoint.save(path, model, {"trained": f"{name}, {epochs} epochs on shapes"})
    return models.load(str(path)).to(conditions.device)


def _fitted(
    folder: Path, accurate: nn.Module, robust: nn.Module, held_out: Dataset, conditions: Conditions
) -> tuple[MixedClassifier, dict[str, Any]]:
    """The most accurate mixture that loses at most two points, or that of an earlier sitting.

    Fitted on images that neither the classifiers nor the final figures have seen.
    """
    told = folder / FIT
    if not told.exists():
        made = fit(accurate, robust, held_out, threat=conditions.threat, target=lose_at_most(LOSE),
                   device=conditions.device, batch_size=conditions.batch_size,
                   settings=Settings(seed=conditions.seed, strength=STRENGTH))
        mixing.save(folder, made.mixture, **{side: f"file:{folder / side}.safetensors" for side in mixing.folder.SIDES})
        journal.save_arrays(folder / "arrays.npz", journal.arrays(made))
        records.write(told, json.dumps({"promise": made.promise, "helped": made.helped, "fitted": made.numbers,
                                        "rejected": made.rejected, "notes": made.notes}))
    mixed = mixing.load(f"mixture:{folder}").to(conditions.device)
    assert isinstance(mixed, MixedClassifier)
    return mixed, json.loads(told.read_text())


def _sweep(out: Path, accurate: nn.Module, robust: nn.Module, held_out: Dataset, conditions: Conditions) -> None:
    """Plain mixing at several weights, for comparison."""
    attacks: dict[str, Attack] = {"clean": untouched, "pgd": partial(pgd, steps=10)}
    subjects = [Subject("mixed", MixedClassifier(accurate, robust, alpha).eval(), name, attack, alpha)
                for alpha in ALPHAS for name, attack in attacks.items()]
    judge(subjects, held_out, conditions, begin(out, subjects, held_out, conditions))


def _subjects(mixed: MixedClassifier) -> list[Subject]:
    """All three under the same list of attacks; the mixture also under attacks that know how it is built."""
    fast = named("fast")
    assert isinstance(fast, Fold)
    bases: dict[str, nn.Module] = {"accurate": mixed.accurate, "robust": mixed.robust, "mixed": mixed}
    plain: dict[str, Attack] = {"clean": untouched, "fast": fast}
    subjects = [Subject(name, model, attack, run) for name, model in bases.items() for attack, run in plain.items()]
    return subjects + [Subject("mixed", mixed, attack, run) for attack, run in adaptive(mixed, fast).items()]


def _examples(mixed: MixedClassifier, test: Dataset, rows: list[Row], conditions: Conditions) -> dict[str, Any]:
    """Pictures for the page: images that the accurate classifier loses and the mixture keeps."""
    seen = summary.verdicts(rows)
    kept = [i for i, right in seen["mixed", None]["worst"].items()
            if right and seen["accurate", None]["clean"][i] and not seen["accurate", None]["fast"][i]]
    chosen = test.take(torch.tensor([kept[(len(kept) - 1) * k // (EXAMPLES - 1)] for k in range(EXAMPLES)]))
    x, y = pixels(chosen.images.to(conditions.device)), chosen.labels.to(conditions.device)
    x_adv = pgd(mixed.accurate, x, y, threat=conditions.threat,
                stream=rng.stream(conditions.seed, "pgd", chosen.index.to(conditions.device)), restarts=2)
    with torch.no_grad():
        predicted = torch.stack([m(x_adv).argmax(1) for m in (mixed.accurate, mixed.robust, mixed)], dim=1)
    return {"example_clean": chosen.images.numpy(), "example_label": chosen.labels.numpy(),
            "example_attacked": (x_adv * 255).round().to(torch.uint8).cpu().numpy(),
            "example_predicted": predicted.cpu().numpy(), "class_names": np.array(chosen.classes)}
