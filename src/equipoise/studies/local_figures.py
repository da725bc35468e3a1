"""What the study of local smoothing measures beside accuracies: aimed attacks, gradients, and the policy on disk."""

from __future__ import annotations

import dataclasses
import io
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from equipoise import models
from equipoise.attacks import pgd
from equipoise.core import checks, device, losses, progress, records, rng, summary
from equipoise.core.records import Row, Run, rows_of
from equipoise.data import Dataset, batches
from equipoise.evaluation import Conditions, facts
from equipoise.local_smoothing import jacobian
from equipoise.local_smoothing.crossing import Crossing, aimed
from equipoise.local_smoothing.policy import TARGETS, AdaptiveSmoothing
from equipoise.local_smoothing.smoothing import SmoothedClassifier
from equipoise.models import formats

SEEN = 500  # images whose gradients are measured


def aimed_rows(folder: Path, rule: SmoothedClassifier, judged: Mapping[str, nn.Module], data: Dataset,
               conditions: Conditions, steps: int) -> list[Row]:
    """Rows of every model on images attacked at every γ_t of :data:`TARGETS`; alpha is γ_t / (1 + γ_t)."""
    began = time.monotonic()
    names = {name: models.weights_digest(model) for name, model in judged.items()}
    identity = {"verb": "aim", "seed": conditions.seed, "rule": rule.extra_repr(), "models": names, "steps": steps,
                "data": data.facts(),
                "threat": conditions.threat.facts(), "targets": list(TARGETS)}
    run = Run(folder, identity, facts(conditions))
    with progress.task(f"attacks aimed at {len(TARGETS)} strengths", total=len(data)) as task:
        for batch in batches(data, conditions.batch_size, device=conditions.device):
            if any((i, name, "aimed", alpha_of(TARGETS[-1])) not in run.done for i in batch.index.tolist()
                   for name in judged):
                x_adv = aimed(rule, batch.images, batch.labels, TARGETS, threat=conditions.threat, steps=steps,
                              batch_size=conditions.batch_size)
                rows = [row for name, model in judged.items() for gamma, images in zip(TARGETS, x_adv, strict=True)
                        for row in _judged(name, model, gamma, images, batch.labels, batch.index)]
                run.append([row for row in rows if records.key_of(row) not in run.done])
            task.advance(len(batch))
    rows = run.finish()
    run.summarise("aim", time.monotonic() - began, summary.results(rows, conditions.threat))
    return rows


def strength(weight: float, scale: float) -> float:
    """γ at which the robust side has this weight at the trust `scale`, whatever the units of trust are.

    To three digits: the scale is measured, rounds differently on another device, and names the rows of a run, which
    would not be known again when it is resumed there.
    """
    return float(f"{weight / (1 - weight) / scale:.3g}")


def alpha_of(gamma: float) -> float:
    """γ as a weight in [0, 1]."""
    return 1.0 if gamma == float("inf") else gamma / (1 + gamma)


@torch.no_grad()
def _judged(name: str, model: nn.Module, gamma: float, x: Tensor, y: Tensor, index: Tensor) -> list[Row]:
    with device.exactly(x.device):
        logits = model(x)
    predicted, margin = logits.argmax(dim=1), losses.probability_margin(logits, y)
    return rows_of(index.tolist(), model=name, attack="aimed", alpha=alpha_of(gamma), label=y.tolist(),
                   predicted=predicted.tolist(), correct=(predicted == y).tolist(),
                   margin=[round(value, 6) for value in margin.tolist()])


def verdicts(rows: Sequence[Row], model: str) -> Tensor:
    """(T, N) bool: which images a model answered rightly at which target."""
    places = {alpha_of(gamma): t for t, gamma in enumerate(TARGETS)}
    index = {i: n for n, i in enumerate(sorted({row["index"] for row in rows}))}
    found = torch.zeros(len(TARGETS), len(index), dtype=torch.bool)
    for row in rows:
        if row["model"] == model:
            found[places[row["alpha"]], index[row["index"]]] = row["correct"]
    return found


def told(crossing: Crossing) -> dict[str, object]:
    """As it stands in `summary.json`."""
    return dataclasses.asdict(crossing)


def with_weights(model: AdaptiveSmoothing, path: Path) -> AdaptiveSmoothing:
    """The adaptive classifier with the weights that a training left."""
    weights = formats.read_safetensors(path)[0]
    checks.require(weights.keys() == model.state_dict().keys(), str(path), "hold this classifier", len(weights))
    model.load_state_dict(weights)
    return model.eval()


def gradients(path: Path, accurate: nn.Module, robust: nn.Module, data: Dataset, conditions: Conditions,
              steps: int) -> None:
    """(N, K) sizes of the gradients of both sides on clean images and on images attacked at either side."""
    few = data.slice(0, min(SEEN, len(data)))
    found: dict[str, list[Tensor]] = {}
    with progress.task("gradients of both sides", total=len(few)) as task:
        for batch in batches(few, conditions.batch_size, device=conditions.device):
            chance = rng.stream(conditions.seed, "gradients", batch.index)
            inputs = {"clean": batch.images}
            for name, model in (("accurate", accurate), ("robust", robust)):
                inputs[f"attacked_{name}"] = pgd(model, batch.images, batch.labels, threat=conditions.threat,
                                                 stream=chance, steps=steps)
            for kind, x in inputs.items():
                for name, model in (("accurate", accurate), ("robust", robust)):
                    found.setdefault(f"gradient_{kind}_of_{name}", []).append(_sizes(model, x, conditions).cpu())
            task.advance(len(batch))
    buffer = io.BytesIO()
    kept = {name: torch.cat(parts).numpy() for name, parts in found.items()}
    np.savez_compressed(buffer, class_names=np.array(data.classes), **kept)  # type: ignore[arg-type]
    records.write(path, buffer.getvalue())


@torch.no_grad()
def _sizes(model: nn.Module, x: Tensor, conditions: Conditions) -> Tensor:
    return jacobian.each(lambda at: (model(at), ()), x, conditions.threat.norm)[1]
