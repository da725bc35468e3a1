"""A fit on disk: rows of the fitting images, and arrays for the page (margins, landscape, trade-off)."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from equipoise.core import records
from equipoise.core.checks import InputError
from equipoise.core.losses import signed_margin
from equipoise.core.records import Row
from equipoise.fitting.cache import Cache
from equipoise.fitting.calibration import Fit
from equipoise.fitting.conformal import allowed, lose_at_most, threshold
from equipoise.fitting.margin_grid import MarginGrid
from equipoise.mixing import gate_of, mix

LOGITS = "logits.npz"
ATTACK = "minimum-margin"
FIELDS = tuple(field.name for field in dataclasses.fields(Cache))


def rows(fit: Fit) -> list[Row]:
    """Both models on the fitting images, clean and at the points of the smallest margin.

    Of the mixture a row of the attack says whether it keeps its answer whatever the accurate model says there.
    """
    cache, mixture = fit.cache, fit.mixture
    mapped = mixture.mapped(cache.clean).exp()
    own = cache.clean.softmax(dim=1)
    answers = mapped.argmax(dim=1)
    if cache.accurate is not None:
        gap = mapped.amax(dim=1) - mapped.gather(1, cache.accurate.unsqueeze(1)).squeeze(1)
        answers = torch.where(gap <= mixture.q, cache.accurate, answers)
    worst = _attacked_margin(cache, mixture.mapped)
    plain = _attacked_margin(cache, lambda z: F.log_softmax(z, dim=1))
    first = set(cache.halves(fit.search.seed)[0].index.tolist())
    half = ["choose" if i in first else "promise" for i in cache.index.tolist()]
    right = cache.clean.argmax(dim=1) == cache.labels
    found = [("robust", "clean", right, signed_margin(own, cache.labels)),
             ("robust", ATTACK, cache.standing, plain),
             ("mixed", "clean", answers == cache.labels, signed_margin(mapped, cache.labels)),
             ("mixed", ATTACK, cache.standing & (worst > mixture.q), worst)]
    return [row for model, attack, correct, margin in found
            for row in records.rows_of(cache.index.tolist(), model=model, attack=attack, label=cache.labels.tolist(),
                                       correct=correct.tolist(), half=half,
                                       margin=[round(value, 6) for value in margin.tolist()])]


def arrays(fit: Fit) -> dict[str, NDArray[Any]]:
    """What the page draws: margins before and after the map, the landscape, and the trade-off."""
    cache, mixture = fit.cache, fit.mixture
    found: dict[str, NDArray[Any]] = {"nuts_q": np.array(mixture.q)}
    for name, log_p in (("before", lambda z: F.log_softmax(z, dim=1)), ("after", mixture.mapped)):
        top = log_p(cache.clean).exp().topk(2, dim=1).values
        found[f"nuts_clean_{name}"] = (top[:, 0] - top[:, 1]).numpy()
        found[f"nuts_attacked_{name}"] = _attacked_margin(cache, log_p).abs().numpy()
    found["nuts_clean_right"] = (cache.clean.argmax(dim=1) == cache.labels).numpy()
    found["nuts_attacked_right"] = cache.standing.numpy()
    scored = {family: fit.search.scored(fit.target, table) for family, table in fit.search.tables.items()}
    worth = {family: float(one.worth.amax()) for family, one in scored.items()}
    found["nuts_kinds"] = np.array([str(family) for family in worth])
    found["nuts_kinds_worth"] = np.array(list(worth.values()))
    best = max((family for family in worth if family.free), key=lambda family: worth[family])
    found["nuts_landscape_of"] = np.array(str(best))
    found["nuts_objective"] = np.array(fit.search.objective)
    cube = (fit.search.start.steps,) * 3
    grid = slice(fit.search.start.steps**3)  # it comes before all later candidates: s fastest, then p, then c
    found["nuts_landscape"] = scored[best].plain[grid].view(cube).numpy()
    found["nuts_landscape_usable"] = scored[best].worth[grid].isfinite().view(cube).numpy()
    for name, axis in zip("spc", fit.search.start.axes(), strict=True):
        found[f"nuts_axis_{name}"] = axis.numpy()
    if mixture.logit_map is not None:
        found["nuts_chosen"] = mixture.logit_map.numbers.numpy()
    return found | trade_off(fit)


def trade_off(fit: Fit) -> dict[str, NDArray[Any]]:
    """Clean accuracy against what is kept whatever g says, of MixedNUTS and of plain mixing, on the second half.

    Each curve is (T, 2): clean, kept.
    """
    cache = fit.cache.halves(fit.search.seed)[1]
    standing = int(cache.standing.sum())
    ends = [[_share(cache.clean.argmax(dim=1) == cache.labels), standing / len(cache)]]
    curves = {"nuts": list(ends), "plain": list(ends)}
    plain = _attacked_margin(cache, lambda z: F.log_softmax(z, dim=1))[cache.standing]
    for points in (0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32):
        lost = allowed(points / 100, len(cache))
        if lost < 0 or lost >= standing:
            continue
        choice = fit.search.choose(lose_at_most(points))
        if choice is not None:
            table = MarginGrid(cache).one(choice.family, choice.candidate)
            q = threshold(table.margins[0], lost)
            by_accurate = table.gaps[0] <= q
            right = cache.clean.argmax(dim=1) == cache.labels
            if cache.accurate is not None:
                right = torch.where(by_accurate, cache.accurate == cache.labels, right)
            curves["nuts"].append([_share(right), (standing - lost) / len(cache)])
        if cache.soft is not None:
            alpha = 1 / (1 + float(threshold(plain, lost)))
            mixed = mix(F.log_softmax(cache.soft, dim=1), F.log_softmax(cache.clean, dim=1), gate_of(alpha))
            curves["plain"].append([_share(mixed.argmax(dim=1) == cache.labels), (standing - lost) / len(cache)])
    return {f"nuts_curve_{name}": np.array(curve) for name, curve in curves.items() if len(curve) > 1}


def _attacked_margin(cache: Cache, log_p: Any) -> Tensor:
    """(N,) the smallest signed margin of the true class over the pool."""
    points, n, classes = cache.attacked.shape
    p = log_p(cache.attacked.reshape(-1, classes)).exp()
    margins: Tensor = signed_margin(p, cache.labels.repeat(points)).view(points, n).amin(dim=0)
    return margins


def _share(right: Tensor) -> float:
    return float(right.float().mean())


def save_arrays(path: Path, held: Mapping[str, NDArray[Any]]) -> None:
    """One `.npz` file, whole or not at all."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **dict(held))  # type: ignore[arg-type]
    records.write(path, buffer.getvalue())


def save_cache(folder: Path, cache: Cache) -> None:
    """Keep the logits, so that a stopped fit goes on after its attack."""
    held = {name: getattr(cache, name) for name in FIELDS}
    save_arrays(folder / LOGITS, {name: value.numpy() for name, value in held.items() if value is not None})


def load_cache(folder: Path) -> Cache | None:
    """The logits of an earlier sitting, if there are any."""
    path = folder / LOGITS
    if not path.exists():
        return None
    try:
        with np.load(path, allow_pickle=False) as held:
            return Cache(**{name: torch.from_numpy(held[name]) for name in held.files})
    except (OSError, ValueError, TypeError):
        raise InputError(f"{path} must hold the logits of this fit; remove it to compute them again") from None
