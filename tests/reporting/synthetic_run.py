"""A run folder without a model: rows drawn from a seeded generator, summarised as a real run is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from equipoise.core import summary
from equipoise.core.records import Row, Run
from equipoise.core.threat import Threat

THREAT = Threat("linf", 8 / 255)
RIGHT = {"accurate": (0.96, 0.02), "robust": (0.85, 0.66), "mixed": (0.94, 0.62)}
PAIRS = [("mixed", "accurate"), ("mixed", "robust")]
ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)


def make(folder: Path, *, n: int = 200, sweep: bool = True, arrays: bool = True, names: dict[str, str] | None = None,
         attacks: tuple[str, ...] = ("pgd", "apgd"), command: str = "equipoise evaluate mixture:m") -> Path:
    """A finished run of the three models; `names` renames some."""
    chance = np.random.default_rng(7)
    names = names or {}
    rows = [row for model, (clean, robust) in RIGHT.items()
            for row in _rows(chance, names.get(model, model), n, clean, robust, attacks)]
    _finish(folder, rows, {"attack": {"alpha": 0.75, "steps": 20}}, {"command": command},
            [(names.get(a, a), names.get(b, b)) for a, b in PAIRS])
    if sweep:
        swept = [{**row, "alpha": alpha} for alpha in ALPHAS
                 for row in _rows(chance, "mixed", n // 2, 0.96 - 0.1 * alpha**4, 0.02 + 0.64 * alpha, ("pgd",))]
        _finish(folder / "sweep", swept, {}, {}, [])
    if arrays:
        _arrays(folder / "arrays.npz", chance)
    return folder


def _rows(chance: np.random.Generator, model: str, n: int, clean: float, robust: float,
          attacks: tuple[str, ...]) -> list[Row]:
    luck = chance.random(n)
    found = []
    for attack in ("clean", *attacks):
        share = clean if attack == "clean" else robust
        margin = np.tanh(3.0 * (share - luck) + 0.05 * chance.standard_normal(n))
        found += [{"index": i, "model": model, "attack": attack, "label": 0, "predicted": int(margin[i] <= 0),
                   "correct": bool(margin[i] > 0), "margin": round(float(margin[i]), 6)} for i in range(n)]
    return found


def _finish(folder: Path, rows: list[Row], identity: dict[str, Any], settings: dict[str, Any],
            pairs: list[tuple[str, str]]) -> None:
    told = {"verb": "evaluate", "seed": 0, "data": {"name": "synthetic", "count": 200}, "threat": THREAT.facts()}
    run = Run(folder, told | identity, {"device": "cpu", "torch": "2.13.0"} | settings)
    run.append(rows)
    rows = run.finish()
    run.summarise("evaluate", 1.5, summary.results(rows, THREAT), differences=summary.differences(rows, pairs, THREAT))


def _arrays(path: Path, chance: np.random.Generator) -> None:
    shape = (5, 3, 12, 14)
    ramp = np.linspace(60, 190, shape[2] * shape[3]).reshape(shape[2:])
    clean = np.clip(ramp + chance.normal(0, 12, shape) + chance.normal(0, 40, (5, 3, 1, 1)), 0, 255).astype(np.uint8)
    change = chance.choice([-8, 8], shape)
    np.savez(path, example_clean=clean, example_attacked=np.clip(clean + change, 0, 255).astype(np.uint8),
             example_label=np.array([0, 1, 2, 3, 0]),
             example_predicted=np.array([[1, 0, 0], [2, 1, 1], [0, 2, 2], [1, 0, 3], [3, 0, 1]]),
             class_names=np.array(["ship", "horse", "frog", "<b>truck</b>"]))
