"""A fit told into a run folder of its own, which is then the `mixture:DIR` that was asked for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from equipoise import __version__, mixing, models
from equipoise.core import records, summary
from equipoise.core.records import Run
from equipoise.core.threat import Threat
from equipoise.data import Dataset
from equipoise.evaluation.cost import costs
from equipoise.fitting import Fit, FitSettings, Target, artifacts, fit
from equipoise.fitting.margin_attack import MarginAttack
from equipoise.mixing import MixedClassifier


def fit_into(
    out: Path, references: Sequence[str], images: Dataset, *, threat: Threat, target: Target, settings: FitSettings,
    device: torch.device, batch_size: int, command: str | None = None, **wishes: Any,
) -> MixedClassifier:
    """Fit, and leave rows, arrays, `summary.json` and `mixture.toml` in `out`; a folder of the same fit is resumed.

    Args:
        out: run folder.
        references: of the accurate and of the robust model.
        images: never evaluated on.
        threat, target, settings, device, batch_size: see :func:`equipoise.fitting.fit`.
        command: what was typed, for the record.
        wishes: how to load the models, such as the architecture of a `.pt` file.
    """
    begun = time.monotonic()
    bases = [models.load(text, num_classes=images.num_classes, image_shape=images.image_shape, **wishes)
             for text in references]
    MarginAttack(bases[0], bases[1], images, threat, device).probe()  # models that cannot work leave no folder
    identity = identity_of(bases, images, threat, target, settings)
    run = Run(out, identity, _facts(references, device, batch_size, command))
    if not ((out / mixing.folder.NAME).exists() and (out / "summary.json").exists()):
        made = fit(bases[0], bases[1], images, threat=threat, target=target, device=device, batch_size=batch_size,
                   settings=settings, cache=artifacts.load_cache(out), keep=lambda cache: artifacts.save_cache(out, cache))
        _write(run, made, images, threat, device, batch_size, begun)
        mixing.save(out, made.mixture, accurate=references[0], robust=references[1])
    mixture = mixing.load(f"mixture:{out}", **wishes)
    assert isinstance(mixture, MixedClassifier)
    return mixture


def identity_of(bases: list[nn.Module], images: Dataset, threat: Threat, target: Target,
                settings: FitSettings) -> dict[str, Any]:
    """What makes two fits the same."""
    like = None if settings.like is None else settings.like.facts()
    search = {key: value for key, value in asdict(settings).items() if key not in ("like", "strength")}
    return {"verb": "fit", "target": str(target), "threat": threat.facts(), "search": search | {"like": like},
            "attack": asdict(settings.strength),
            "models": dict(zip(("accurate", "robust"), map(models.weights_digest, bases), strict=True)),
            "data": images.facts()}


def _facts(references: Sequence[str], device: torch.device, batch_size: int, command: str | None) -> dict[str, Any]:
    typed = {} if command is None else {"command": command}
    return {"device": str(device), "batch_size": batch_size, "equipoise": __version__, "torch": torch.__version__,
            "references": list(references), **typed}


def _write(run: Run, made: Fit, images: Dataset, threat: Threat, device: torch.device, batch_size: int,
           begun: float) -> None:
    run.append([row for row in artifacts.rows(made) if records.key_of(row) not in run.done])
    rows = run.finish()
    artifacts.save_arrays(run.folder / "arrays.npz", artifacts.arrays(made))
    run.summarise("fit", time.monotonic() - begun, summary.results(rows, threat), helped=made.helped,
                  promise=made.promise, fitted=made.numbers, rejected=made.rejected, notes=made.notes,
                  cost=[cost.facts() for cost in costs(made.mixture, images, device, batch_size)])
