"""Maps of logits that change how sure a classifier is, and, if they are monotone, never what it answers.

The map of MixedNUTS [Bai2024nuts, Eq. (4)] makes the robust classifier less sure where classes compete, which
is where it errs, and leaves it sure where one class stands out.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.core import checks

LOWEST = -0.751791524693564  # where GELU turns: it falls before and rises after
TOP = 250  # classes that give the mean and deviation of the layer norm, where there are more
BOUND = 1e3  # of centred logits: their softmax is 0 or 1 long before

Clamp = Callable[[Tensor], Tensor]
CLAMPS: dict[str, Clamp] = {
    "linear": lambda u: u,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu-monotone": lambda u: F.gelu(u.clamp_min(LOWEST)),
    "elu": F.elu,
    "softplus": F.softplus,
}
MONOTONE = frozenset(CLAMPS) - {"gelu"}


def temperature(z: Tensor, t: float) -> Tensor:
    """z / t for t > 0; temperature 0 is :func:`one_hot`."""
    return wide(z) / checks.positive("temperature", t)


def one_hot(classes: Tensor, num_classes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """(B,) classes → (B, K) log-probabilities: 0 for the class, −inf for the others (temperature 0)."""
    none = torch.full((len(classes), num_classes), -math.inf, dtype=dtype, device=classes.device)
    return none.scatter(1, classes.unsqueeze(1), 0.0)


def layer_norm(z: Tensor, top: int | None = TOP) -> Tensor:
    """(B, K) logits with mean 0 and (unbiased) variance 1 over the `top` largest of every row.

    The bulk of many classes says little and would rule the mean and variance, so only the largest count
    [Bai2024nuts, D.7]. Two classes would all become ±0.71 and their margin be lost: they are only centred.

    Scaled by the largest entry first, so that squares neither overflow nor vanish; a variance of 1e-8 is
    added, as in the published code, so that equal logits stay 0.
    """
    z = wide(z)
    classes = z.shape[1]
    if classes == 2:
        return centred(z, 1.0)
    largest = z.detach().abs().amax(dim=1, keepdim=True).clamp_min(1e-12)
    z = z / largest
    counted = z if top is None or top >= classes else z.topk(top, dim=1).values
    centre = counted.mean(dim=1, keepdim=True)
    floor = (1e-4 / largest) * math.sqrt(counted.shape[1] - 1)
    # A norm has a gradient at 0, which the root of a variance has not.
    length = torch.linalg.vector_norm(torch.cat([counted - centre, floor], dim=1), dim=1, keepdim=True)
    normed: Tensor = (z - centre) * (math.sqrt(counted.shape[1] - 1) / length)
    return normed


def centred(z: Tensor, unit: Tensor | float) -> Tensor:
    """(B, K) logits with mean 0, in a unit of their own; cut where no softmax would notice."""
    z = wide(z)
    return ((z - z.mean(dim=1, keepdim=True)) / unit).clamp(-BOUND, BOUND)


def power(u: Tensor, p: Tensor | float) -> Tensor:
    """sgn(u)·|u|^p, with a finite gradient at 0 also for p < 1 (a straight line through the last 1e-30)."""
    tiny = torch.full((), 1e-30, dtype=u.dtype, device=u.device)
    size = u.abs()
    return torch.where(size > tiny, u.sign() * size.maximum(tiny) ** p, u * tiny ** (p - 1))


def flatten(log_p: Tensor, rivals: Tensor | float) -> Tensor:
    """Log-probabilities in which the classes after the first keep only a share `rivals` of their differences.

    r_i = rivals·p_i + (1 − rivals)·(1 − p_top)/(K − 1) for every class but the first, which keeps its p. At 1
    nothing changes; at 0 all others are equal, and only how sure the first is counts.
    """
    top, place = log_p.max(dim=1, keepdim=True)
    rest = torch.log1p(-top.exp().clamp(max=1 - torch.finfo(log_p.dtype).eps)) - math.log(log_p.shape[1] - 1)
    share = torch.as_tensor(rivals, dtype=log_p.dtype, device=log_p.device)
    even = torch.logaddexp(log_p + share.log(), rest + torch.log1p(-share))
    return torch.where(torch.arange(log_p.shape[1], device=place.device) == place, log_p, even)


class LogitMap(nn.Module):
    r"""The map of MixedNUTS, with two more numbers.

    .. math:: M(z) = s \cdot \mathrm{sgn}(u)\,|u|^p, \qquad u = \mathrm{clamp}(\mathrm{LN}(z) + c)

    [Bai2024nuts, Eq. (4)]. With `unit` the logits are centred and divided by this number instead of by their
    own deviation, so that how far apart they lie still counts. With `rivals` below 1 the other classes are
    evened out (:func:`flatten`); at 0 a mixture becomes a switch: g answers wherever h is unsure.

    Computed in fp32 at least: of half-precision logits the result is fp32.

    Args:
        scale: s > 0.
        power: p > 0.
        shift: c.
        clamp: a key of :data:`CLAMPS`. `gelu` is the paper's; it dips below 0 and can rank another class
            first, which `gelu-monotone` never does.
        rivals: in [0, 1]; 1 is the paper's.
        unit: None is the paper's layer norm.
    """

    numbers: Tensor

    def __init__(self, scale: float, power: float, shift: float, clamp: str = "gelu-monotone", *, rivals: float = 1.0,
                 unit: float | None = None) -> None:
        super().__init__()
        checks.positive("scale", scale)
        checks.positive("power", power)
        checks.require(math.isfinite(shift), "shift", "be finite", shift)
        checks.within("rivals", rivals, 0, 1)
        if unit is not None:
            checks.positive("unit", unit)
        self.clamp = checks.one_of("clamp", clamp, CLAMPS)
        self.normed, self.flat = unit is None, rivals < 1
        # A buffer, so that they count in the digest of a mixture and move with it.
        numbers = torch.tensor([scale, power, shift, rivals, unit or 1.0], dtype=torch.float64)
        self.register_buffer("numbers", numbers)

    def forward(self, z: Tensor) -> Tensor:
        """(B, K) logits → (B, K) mapped logits."""
        s, p, c, rivals, unit = self.numbers.to(wide(z).dtype).unbind()
        u = layer_norm(z) if self.normed else centred(z, unit)
        mapped: Tensor = s * power(CLAMPS[self.clamp](u + c), p)
        return flatten(F.log_softmax(mapped, dim=1), rivals) if self.flat else mapped

    def facts(self) -> dict[str, str | float]:
        """As it stands in `mixture.toml`."""
        s, p, c, rivals, unit = self.numbers.tolist()
        told: dict[str, str | float] = {"clamp": self.clamp, "scale": s, "power": p, "shift": c, "rivals": rivals}
        return told if self.normed else {**told, "unit": unit}

    def extra_repr(self) -> str:
        """The numbers of the formula."""
        s, p, c, rivals, unit = self.numbers.tolist()
        more = (f", rivals={rivals:g}" if self.flat else "") + ("" if self.normed else f", unit={unit:.4g}")
        return f"s={s:.4g}, p={p:.4g}, c={c:.4g}, clamp={self.clamp}{more}"


def wide(z: Tensor) -> Tensor:
    """fp32 for half precision; wider logits as they are."""
    return z.float() if z.dtype in (torch.float16, torch.bfloat16) else z
