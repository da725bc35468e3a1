"""The threat model: the perturbations that an adversary may use."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from equipoise.core import checks
from equipoise.core.settings import Settings, setting

NORMS = ("linf", "l2", "l1")
SIGNS = {"linf": "ℓ∞", "l2": "ℓ2", "l1": "ℓ1"}
DEFAULT_EPS = 8 / 255
MAX_EPS = {"linf": 1.0, "l2": 1e4, "l1": 1e6}  # images lie in [0, 1]


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
        checks.require(
            self.eps <= MAX_EPS[norm],
            "eps",
            f"be at most {MAX_EPS[norm]:g} for {norm}{' (8/255, not 8)' if norm == 'linf' else ''}",
            eps,
        )

    def eps_in(self, dtype: torch.dtype) -> float:
        """`eps` rounded down to `dtype`, so that a bound kept there also holds for the real
        number."""
        value = torch.tensor(self.eps, dtype=dtype)
        if value.item() > self.eps:
            value = torch.nextafter(value, torch.tensor(-math.inf, dtype=dtype))
        return value.item()

    def to_dict(self) -> dict[str, str | float]:
        """As it stands in `run.toml`."""
        return {"norm": self.norm, "eps": self.eps}

    def __str__(self) -> str:
        parts = self.eps * 255
        in_bytes = self.norm != "l1" and abs(parts - round(parts)) < 1e-9
        return f"{SIGNS[self.norm]} ≤ {f'{round(parts)}/255' if in_bytes else f'{self.eps:g}'}"


def require_threat(value: object) -> Threat:
    """A :class:`Threat`; anything else is refused, with an example."""
    return checks.instance("threat", value, Threat, 'be a Threat, such as Threat("linf", "8/255")')


def require_eps(norm: str, eps: float) -> None:
    """Refuse the default radius, which is one for ℓ∞, in ℓ1: nothing of interest happens in so
    small a ball."""
    checks.require(
        norm != "l1" or eps != DEFAULT_EPS, "eps", "be given for l1, such as 12", "8/255"
    )


@dataclass(frozen=True, kw_only=True)
class ThreatSettings(Settings):
    """A threat as options of a command."""

    norm: str = setting("linf", "Norm of the perturbation: linf, l2 or l1.", among=NORMS)
    eps: float = setting(
        DEFAULT_EPS,
        "Radius in [0, 1] pixels, such as 8/255 for linf and 12 for l1.",
        fraction=True,
        positive=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_eps(self.norm, self.eps)

    def threat(self) -> Threat:
        """The threat with these settings."""
        return Threat(self.norm, self.eps)
