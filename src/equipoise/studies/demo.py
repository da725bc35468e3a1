"""The whole story in about a minute: train two classifiers, mix them, choose alpha, attack all three, report."""

from __future__ import annotations

import io
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from equipoise import __version__, data, mixing, models, records, report, rng, summary
from equipoise.attacks import pgd
from equipoise.data import Dataset, pixels, shapes
from equipoise.evaluate import Attack, Conditions, Subject, attacked, begin, facts, judge, untouched
from equipoise.evaluate.suspicion import suspicion
from equipoise.mixing import MixedClassifier
from equipoise.models import checkpoint
from equipoise.records import Row, Run
from equipoise.studies.learning import learn
from equipoise.threat import Threat

TRAINED = 4096  # images of the train split to learn from; the others choose alpha
EPOCHS = (6, 12)  # of the accurate and of the robust classifier
ALPHAS = (0.0, 0.2, 0.4, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93, 0.96, 0.98, 1.0)
TESTED = 1000
KEEP = 0.95  # share of the robust classifier's attacked accuracy that the mixture has to keep
EXAMPLES = 6


@dataclass(frozen=True)
class Told:
    """What the demo found, and where it lies."""

    results: list[Row]
    alpha: float
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
    accurate = _base(out, "accurate", learnt, conditions, epochs=EPOCHS[0], lr=3e-3, smoothing=0.1)
    robust = _base(out, "robust", learnt, conditions, epochs=EPOCHS[1], lr=5e-3, threat=threat)
    alpha = _choose(out / "sweep", accurate, robust, held_out, conditions)
    mixed = MixedClassifier(accurate, robust, alpha).to(device).eval()
    mixing.save(out / "mixture", mixed, **{side: f"file:{_file(out, side)}" for side in ("accurate", "robust")})
    subjects = _judge(run, mixed, test, conditions)
    rows = run.finish()
    results = summary.results(rows, threat)
    run.summarise("demo", time.monotonic() - start, results, alpha=alpha,
                  symptoms=suspicion(subjects, test, conditions, run, rows),
                  differences=summary.differences(rows, [("mixed", "robust"), ("mixed", "accurate")], threat))
    _examples(out / "arrays.npz", mixed, test, rows, conditions)
    return Told(results, alpha, threat, report.write(out))


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


def _choose(out: Path, accurate: nn.Module, robust: nn.Module, held_out: Dataset, conditions: Conditions) -> float:
    """The alpha with the best clean accuracy among those that keep what robustness must be kept.

    On images that neither the classifiers nor the final figures have seen.
    """
    attacks: dict[str, Attack] = {"clean": untouched, "pgd": partial(pgd, steps=10)}
    subjects = [Subject("mixed", MixedClassifier(accurate, robust, alpha).eval(), name, attack, alpha)
                for alpha in ALPHAS for name, attack in attacks.items()]
    run = begin(out, subjects, held_out, conditions)
    results = judge(subjects, held_out, conditions, run)
    found = {metric: {row["alpha"]: row["value"] for row in results if row["metric"] == metric}
             for metric in ("clean", "worst")}
    kept = [alpha for alpha in ALPHAS if found["worst"][alpha] >= KEEP * found["worst"][1.0]]
    return max(kept, key=lambda alpha: (found["clean"][alpha], alpha))


def _judge(run: Run, mixed: MixedClassifier, test: Dataset, conditions: Conditions) -> list[Subject]:
    """All three on the same images; the mixture also under gradients of either base alone."""
    bases: dict[str, nn.Module] = {"accurate": mixed.accurate, "robust": mixed.robust, "mixed": mixed}
    sources = {"pgd": None, "pgd-std": mixed.accurate, "pgd-rob": mixed.robust}
    subjects = [Subject(name, model, "clean", untouched) for name, model in bases.items()]
    subjects += [Subject(name, model, attack, partial(pgd, restarts=2, surrogate=source))
                 for name, model in bases.items() for attack, source in sources.items()
                 if name == "mixed" or source is None]
    for subject in subjects:
        attacked(subject, test, run, conditions)
    return subjects


def _examples(path: Path, mixed: MixedClassifier, test: Dataset, rows: list[Row], conditions: Conditions) -> None:
    """Pictures for the page: images that the accurate classifier loses and the mixture keeps."""
    seen = summary.verdicts(rows)
    kept = [i for i, right in seen["mixed", None]["worst"].items()
            if right and seen["accurate", None]["clean"][i] and not seen["accurate", None]["pgd"][i]]
    if not kept:
        return
    chosen = test.take(torch.tensor([kept[(len(kept) - 1) * k // (EXAMPLES - 1)] for k in range(EXAMPLES)]))
    x, y = pixels(chosen.images.to(conditions.device)), chosen.labels.to(conditions.device)
    x_adv = pgd(mixed.accurate, x, y, threat=conditions.threat,
                stream=rng.stream(conditions.seed, "pgd", chosen.index.to(conditions.device)), restarts=2)
    with torch.no_grad():
        predicted = torch.stack([m(x_adv).argmax(1) for m in (mixed.accurate, mixed.robust, mixed)], dim=1)
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer, example_clean=chosen.images.numpy(), example_label=chosen.labels.numpy(),
        example_attacked=(x_adv * 255).round().to(torch.uint8).cpu().numpy(),
        example_predicted=predicted.cpu().numpy(), class_names=np.array(chosen.classes))
    records.write(path, buffer.getvalue())
