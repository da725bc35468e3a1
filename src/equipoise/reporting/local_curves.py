"""Accuracies against the strength γ: which rows make a curve, where its ends are, and the axis it stands on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from equipoise.core.records import Row
from equipoise.reporting.view import RunView

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STUDY = "local-smoothing"
Curve = list[Row]  # results of one model and metric in order of alpha


def part(view: RunView, name: str) -> RunView | None:
    """A part of this study, if it has been done."""
    return view.sub(name) if view.identity.get("study") == STUDY else None


def curve(view: RunView, model: str, metric: str) -> Curve:
    """Results of a model at every strength."""
    return sorted((row for row in view.results if row["model"] == model and row["metric"] == metric and "alpha" in row),
                  key=lambda row: row["alpha"])


def names(view: RunView) -> list[str]:
    """Models that were measured at several strengths, in the order of the summary."""
    return list(dict.fromkeys(row["model"] for row in view.results if "alpha" in row))


def alone(view: RunView, model: str, metric: str) -> Row | None:
    """The result of a model without a strength."""
    return next((row for row in view.results if (row["model"], row["metric"]) == (model, metric)
                 and "alpha" not in row), None)


def gamma_of(alpha: float) -> float:
    """The strength γ whose weight γ/(1 + γ) a row carries."""
    return math.inf if alpha >= 1 else alpha / (1 - alpha)


def place(gammas: Sequence[float]) -> dict[float, float]:
    """γ → where it stands on an axis of log₁₀ γ; 0 and ∞ stand one step beyond their neighbours."""
    logs = {gamma: math.log10(gamma) for gamma in gammas if 0 < gamma < math.inf}
    ends = {0.0: min(logs.values()) - 1, math.inf: max(logs.values()) + 1}
    return {gamma: logs[gamma] if gamma in logs else ends[gamma] for gamma in gammas}


def strength_axis(axes: Axes, gammas: Sequence[float], label: str = "strength γ", most: int = 5) -> None:
    """Ticks at some `most` whole powers of ten, and at 0 and ∞ where they occur."""
    where = place(gammas)
    inner = [x for gamma, x in where.items() if 0 < gamma < math.inf]
    step = max(1, math.ceil((max(inner) - min(inner)) / most))
    first, last = math.ceil(min(inner) - 0.01), math.floor(max(inner) + 0.01)
    ticks = {float(x): f"{10.0**x:g}" for x in range(first, last + 1, step)}
    ticks |= {where[gamma]: text for gamma, text in ((0.0, "0"), (math.inf, "∞")) if gamma in where}
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.set_xlabel(label)


def plot(axes: Axes, rows: Curve, **look: Any) -> None:
    """Accuracy in percent with its interval against the strength."""
    gammas = [gamma_of(row["alpha"]) for row in rows]
    where = place(gammas)
    x = [where[gamma] for gamma in gammas]
    axes.plot(x, [100 * row["value"] for row in rows], marker="o", **look)
    axes.fill_between(x, [100 * row["low"] for row in rows], [100 * row["high"] for row in rows],
                      color=look.get("color"), alpha=0.10, linewidth=0)


def with_ends(found: RunView, model: str, metric: str) -> Curve:
    """The curve from one base to the other, where what was measured of a base by itself is a point of it."""
    inner = curve(found, model, metric)
    own = {"clean": ("clean", "clean"), "pgd": ("pgd", "pgd"), "pgd-std": ("pgd", ""), "pgd-rob": ("", "pgd")}
    first, last = own.get(metric, ("", ""))
    ends = ((alone(found, "accurate", first), 0.0), (alone(found, "robust", last), 1.0))
    return sorted([*inner, *({**row, "alpha": alpha} for row, alpha in ends if row is not None and inner)],
                  key=lambda row: row["alpha"])
