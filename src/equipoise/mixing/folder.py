"""`mixture:DIR`: a mixture on disk is one small TOML file beside, or pointing at, its two bases."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn

from equipoise import models
from equipoise.core import checks, config, records
from equipoise.mixing import frontier as frontiers
from equipoise.mixing.classifier import MixedClassifier
from equipoise.mixing.gate import load_gate, save_gate
from equipoise.mixing.gated import GatedClassifier
from equipoise.mixing.logit_maps import LogitMap
from equipoise.mixing.provenance import from_facts

SCHEMA = 1
NAME = "mixture.toml"
GATE = "gate.safetensors"
GATED = ("alpha_max", "scale", "shift", "sharpness")
SIDES = ("accurate", "robust")


def save(folder: Path | str, mixture: MixedClassifier, *, accurate: str, robust: str) -> None:
    """Write `mixture.toml`: the numbers of the formula, and the model reference and digest of each base; a gate
    goes into a file beside it.

    Paths are kept relative to the folder, so that a folder with its checkpoints can be moved or sent.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    told: dict[str, Any] = {"schema": SCHEMA, "alpha": mixture.alpha}
    if mixture.hard:
        told["hard"] = True
    if not mixture.differentiable:
        told["surrogate_alpha"] = mixture.surrogate_alpha
    if mixture.logit_map is not None:
        told["map"] = mixture.logit_map.facts()
    if isinstance(mixture, GatedClassifier):
        told["gate"] = {"alpha_max": mixture.range[1], "scale": mixture.scale, "shift": mixture.shift,
                        "sharpness": list(mixture.sharpness)}
        save_gate(folder / GATE, mixture.network, mixture.accurate, mixture.robust)
    if mixture.fitted is not None:
        told["fitted"] = mixture.fitted.facts()
    if mixture.frontier:
        told["frontier"] = frontiers.columns(mixture.frontier)
    for side, text in zip(SIDES, (accurate, robust), strict=True):
        near = models.placed(text, lambda path: os.path.relpath(path, folder))
        told[side] = {"reference": near, "digest": models.weights_digest(getattr(mixture, side))}
    records.write(folder / NAME, config.dumps(told))


def load(reference: str, **settings: Any) -> nn.Module:
    """A module from any model reference: `mixture:DIR`, or one of :data:`equipoise.models.SCHEMES`."""
    folder = _folder(reference)
    if folder is not None:
        return _mixture(folder, **settings)
    scheme, colon, _ = reference.partition(":")
    if colon and scheme not in models.SCHEMES and not Path(reference).exists():
        checks.one_of("scheme of a model", scheme, [*models.SCHEMES, "mixture"])
    return models.load(reference, **settings)


def _folder(reference: str) -> Path | None:
    if reference.startswith("mixture:"):
        return Path(reference.removeprefix("mixture:"))
    return Path(reference) if (Path(reference) / NAME).exists() else None


def _mixture(folder: Path, **settings: Any) -> MixedClassifier:
    checks.require((folder / NAME).exists(), "mixture", f"be a folder that holds {NAME}", str(folder))
    told = config.read(folder / NAME)
    where = str(folder / NAME)
    config.known(told, ("schema", "alpha", "hard", "surrogate_alpha", "map", "gate", "fitted", "frontier", *SIDES),
                 where)
    checks.require(told.get("schema") == SCHEMA, "schema", f"be {SCHEMA} in {folder / NAME}", told.get("schema"))
    bases = [_base(folder, side, told.get(side, {}), **settings) for side in SIDES]
    alpha = checks.fraction("alpha", told.get("alpha", "missing"))
    shared: dict[str, Any] = {
        "logit_map": _map(told["map"], where) if "map" in told else None, "hard": bool(told.get("hard", False)),
        "surrogate_alpha": checks.fraction("surrogate_alpha", told.get("surrogate_alpha", 0.9)),
        "fitted": from_facts(told["fitted"], where) if "fitted" in told else None}
    if "gate" in told:
        return _gated(folder, bases, alpha, told["gate"], shared)
    frontier = frontiers.from_columns(told["frontier"], where) if "frontier" in told else ()
    return MixedClassifier(bases[0], bases[1], alpha, frontier=frontier, **shared).eval()


def _gated(folder: Path, bases: list[nn.Module], alpha_min: float, told: dict[str, Any],
           shared: dict[str, Any]) -> GatedClassifier:
    where = f"[gate] of {folder / NAME}"
    config.known(told, GATED, where)
    checks.require(set(told) == set(GATED) and isinstance(told["sharpness"], list) and len(told["sharpness"]) == 2,
                   where, f"hold {', '.join(GATED)}, the last one two numbers", told)
    numbers: dict[str, Any] = {key: checks.fraction(key, told[key]) for key in GATED[:3]}
    sharpness = (checks.fraction("sharpness", told["sharpness"][0]), checks.fraction("sharpness", told["sharpness"][1]))
    network = load_gate(folder / GATE, bases[0], bases[1])
    return GatedClassifier(bases[0], bases[1], network, alpha_min=alpha_min, sharpness=sharpness, **numbers,
                           **shared).eval()


def _map(told: dict[str, Any], where: str) -> LogitMap:
    keys = ("clamp", "scale", "power", "shift", "rivals")
    config.known(told, (*keys, "unit"), f"[map] of {where}")
    checks.require(all(key in told for key in keys), f"[map] of {where}", f"hold {', '.join(keys)}", sorted(told))
    scale, power, shift, rivals = (checks.fraction(key, told[key]) for key in keys[1:])
    unit = checks.fraction("unit", told["unit"]) if "unit" in told else None
    return LogitMap(scale, power, shift, str(told["clamp"]), rivals=rivals, unit=unit)


def _base(folder: Path, side: str, told: dict[str, Any], **settings: Any) -> nn.Module:
    config.known(told, ("reference", "digest"), f"[{side}] of {folder / NAME}")
    checks.require("reference" in told, side, f"have a reference in {folder / NAME}", told)
    text = models.placed(told["reference"], lambda path: str(folder / path))
    base = models.load(text, **settings)
    if models.weights_digest(base) != told.get("digest"):
        raise checks.InputError(f"the {side} base {text} must be the one {folder / NAME} was made with, "
                                "but its weights have changed")
    return base
