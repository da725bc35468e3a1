"""MixedNUTS [Bai2024nuts]: attack the robust model once, then find the map and the weight that keep a promise."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import nn

from equipoise import models
from equipoise.core import checks
from equipoise.core.checks import InputError
from equipoise.core.threat import Threat
from equipoise.data import Dataset
from equipoise.fitting.cache import ANY, Cache, checked
from equipoise.fitting.calibration import Calibration, Fit
from equipoise.fitting.conformal import Target, lose_at_most
from equipoise.fitting.margin_attack import MarginAttack
from equipoise.fitting.search import MapSearch, families
from equipoise.fitting.settings import FitSettings
from equipoise.mixing import LogitMap


def fit(
    accurate: nn.Module, robust: nn.Module, data: Dataset, *, threat: Threat, target: Target | None = None,
    device: torch.device | str = "cpu", batch_size: int = 128, settings: FitSettings | None = None,
    cache: Cache | None = None, keep: Callable[[Cache], None] | None = None,
) -> Fit:
    """The most accurate mixture that loses at most so much robust accuracy.

    The points where the robust model's margin is smallest are found once; then candidates are tried on
    cached logits. The map is chosen on one half of the images and the threshold on the other, with a
    finite-sample correction, so that the promise holds in expectation for a further image and the attack
    used here. If the mixture is not more accurate than the robust model on that other half, the robust
    model is returned (α = 1) and `helped` is False; targets that allow a larger loss may still help, and are its
    frontier then.

    Args:
        accurate: g, images in [0, 1] → logits, or classes.
        robust: h, images → logits. Without gradients it is attacked by random search.
        data: images that are never evaluated on; at least 50, better 1000.
        threat: what the adversary may do.
        target: what may be lost; one point of robust accuracy if not given.
        device: where to compute.
        batch_size: images at a time; halved when memory runs out.
        settings: how to search.
        cache: logits of an earlier fit on the same images.
        keep: called with the logits after the first attack, to be handed in as `cache` next time.
    """
    settings = settings or FitSettings()
    target = target or lose_at_most(1.0)
    checks.require(models.weights_digest(accurate) != models.weights_digest(robust) or not list(robust.parameters()),
                   "accurate and robust", "be different models", "equal weights")
    bench = MarginAttack(accurate, robust, data, threat, torch.device(device), settings.seed, batch_size, settings.strength)
    notes: list[str] = []
    bench.probe()
    if not bench.strength.gradient_free and not bench.has_gradients():
        notes.append("the robust model gives no gradients: its margins were attacked by random search (Square)")
        bench = dataclasses.replace(bench, strength=dataclasses.replace(bench.strength, gradient_free=True))
    if cache is None:
        cache = _attacked(bench, settings)
        if keep is not None:
            keep(cache)
    cache = checked(cache)
    search, cache = _searched(bench, cache, target, settings, notes)
    made = Calibration(search, cache, target, settings)
    return made.fit(accurate, robust, data, notes)


def _attacked(bench: MarginAttack, settings: FitSettings) -> Cache:
    cache = bench.clean()
    checked(cache.join(cache.clean.unsqueeze(0)))  # what is wrong without an attack is said before it
    h, g = bench.nearest(LogitMap(1.0, 1.0, 0.0, "linear"))
    cache = checked(cache.join(h, g if settings.against == "pair" else None))
    if settings.rule == "nuts":
        return cache
    # A switch asks how sure h is of its class, so the points that make it least sure are wanted too.
    return _join(bench, cache, _switch(cache), both=False, said=settings.against == "pair")


def _switch(cache: Cache) -> LogitMap:
    """The plain switch: how probable h finds its first class."""
    unit = float(cache.clean.std(dim=1).mean())
    return LogitMap(unit, 1.0, 0.0, "linear", rivals=0.0, unit=unit)


def _searched(
    bench: MarginAttack, cache: Cache, target: Target, settings: FitSettings, notes: list[str]
) -> tuple[MapSearch, Cache]:
    """MapSearch, attack what was found, search again with the new points in the pool [Bai2024nuts, D.9]."""
    both = settings.against == "pair"
    if both and settings.rule != "switch":
        cache = _join(bench, cache, LogitMap(1.0, 1.0, 0.0, "linear"), both)
    if both and settings.rule != "nuts":
        cache = _join(bench, cache, _switch(cache), both)
    for number in range(settings.rounds + 1):
        half = cache.halves(settings.seed)[0]
        search = MapSearch(half, families(settings.rule, half, settings.clamp), settings.objective, settings.seed)
        search.widen(target)
        search.refine(target)
        choice = search.choose(target)
        if settings.like is not None or choice is None:
            break
        if number < settings.rounds:
            chosen = choice.map()
            notes.append(f"round {number + 1}: {chosen.extra_repr()} reached {100 * choice.worth:.1f} % on the "
                         "choosing half; its mapped model was attacked again")
            cache = _join(bench, cache, chosen, both)
    notes += search.notes
    return search, cache


def _join(bench: MarginAttack, cache: Cache, logit_map: LogitMap, both: bool, said: bool | None = None) -> Cache:
    """Attack the images that still stand; the others keep a point they have."""
    rows = cache.standing.nonzero().squeeze(1)
    if not len(rows):
        raise InputError("the robust model must be right on at least one attacked image, got none: there is no "
                         "robustness to keep")
    h, g = bench.on(rows).nearest(logit_map, both=both)
    points = cache.attacked[:1].expand(len(h), -1, -1).clone()
    points[:, rows] = h
    if not (both if said is None else said):
        return checked(cache.join(points))
    named = torch.full((len(h), len(cache)), ANY)
    named[:, rows] = g
    return checked(cache.join(points, named))
