"""The threat model: the perturbations that an adversary may use."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from equipoise.core import checks
from equipoise.core.settings import Settings, setting

NORMS = ("linf", "l2")
MOST_EPS = {"linf": 1.0, "l2": 1e4}  # images lie in [0, 1]


@dataclass(frozen=True, init=False)
class Threat:
    """All perturbations with ‖δ‖ ≤ eps that keep the image inside [0, 1].

    `eps` is in units of [0, 1] pixels; "8/255" may be given as text.

    >>> Threat("linf", "8/255")
    Threat(norm='linf', eps=0.03137254901960784)
    """

    norm: str
    eps: float

    def __init__(self, norm: str, eps: float | str) -> None:
        object.__setattr__(self, "norm", checks.one_of("norm", norm, NORMS))
        object.__setattr__(self, "eps", checks.positive("eps", checks.fraction("eps", eps)))
        # A larger radius is a forgotten "/255".
        checks.require(self.eps <= MOST_EPS[norm], "eps",
                       f"be at most {MOST_EPS[norm]:g} for {norm}{' (8/255, not 8)' if norm == 'linf' else ''}", eps)

    def eps_in(self, dtype: torch.dtype) -> float:
        """`eps` rounded down to `dtype`, so that a bound kept there also holds for the real number."""
        value = torch.tensor(self.eps, dtype=dtype)
        if value.item() > self.eps:
            value = torch.nextafter(value, torch.tensor(-math.inf, dtype=dtype))
        return value.item()

    def to_dict(self) -> dict[str, str | float]:
        """As it stands in `run.toml`."""
        return {"norm": self.norm, "eps": self.eps}

    def __str__(self) -> str:
        sign = "ℓ∞" if self.norm == "linf" else "ℓ2"
        parts = self.eps * 255
        text = f"{round(parts)}/255" if abs(parts - round(parts)) < 1e-9 else f"{self.eps:g}"
        return f"{sign} ≤ {text}"


@dataclass(frozen=True, kw_only=True)
class ThreatSettings(Settings):
    """A threat as options of a command."""

    norm: str = setting("linf", "Norm of the perturbation: linf or l2.", among=NORMS)
    eps: float = setting(8 / 255, "Radius in [0, 1] pixels, such as 8/255.", fraction=True, positive=True)

    def threat(self) -> Threat:
        """The threat with these settings."""
        return Threat(self.norm, self.eps)
