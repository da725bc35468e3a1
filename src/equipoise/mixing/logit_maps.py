"""Maps of logits that change how sure a classifier is, and, if they are monotone, never what it answers.

The map of MixedNUTS [Bai2024NUTS, Eq. (4)] makes the robust classifier less sure where classes compete, which
is where it errs, and leaves it sure where one class stands out.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise import checks

LOWEST = -0.751791524693564  # where GELU turns: it falls before and rises after
TOP = 250  # classes that give the mean and deviation of the layer norm, where there are more
BOUND = 1e3  # of two centred logits, whose softmax is 0 or 1 long before

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
    return _wide(z) / checks.positive("temperature", t)


def one_hot(classes: Tensor, num_classes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """(B,) classes → (B, K) log-probabilities: 0 for the class, −inf for the others (temperature 0)."""
    none = torch.full((len(classes), num_classes), -math.inf, dtype=dtype, device=classes.device)
    return none.scatter(1, classes.unsqueeze(1), 0.0)


def layer_norm(z: Tensor, top: int | None = TOP) -> Tensor:
    """(B, K) logits with mean 0 and (unbiased) variance 1 over the `top` largest of every row.

    The bulk of many classes says little and would rule the mean and variance, so only the largest count
    [Bai2024NUTS, D.7]. Two classes would all become ±0.71 and their margin be lost: they are only centred.

    Scaled by the largest entry first, so that squares neither overflow nor vanish; a variance of 1e-8 is
    added, as in the published code, so that equal logits stay 0.
    """
    z = _wide(z)
    classes = z.shape[1]
    if classes == 2:
        return (z - z.mean(dim=1, keepdim=True)).clamp(-BOUND, BOUND)
    largest = z.detach().abs().amax(dim=1, keepdim=True).clamp_min(1e-12)
    z = z / largest
    counted = z if top is None or top >= classes else z.topk(top, dim=1).values
    centre = counted.mean(dim=1, keepdim=True)
    floor = (1e-4 / largest) * math.sqrt(counted.shape[1] - 1)
    # A norm has a gradient at 0, which the root of a variance has not.
    length = torch.linalg.vector_norm(torch.cat([counted - centre, floor], dim=1), dim=1, keepdim=True)
    normed: Tensor = (z - centre) * (math.sqrt(counted.shape[1] - 1) / length)
    return normed


def power(u: Tensor, p: Tensor | float) -> Tensor:
    """sgn(u)·|u|^p, with a finite gradient at 0 also for p < 1 (a straight line through the last 1e-30)."""
    tiny = torch.full((), 1e-30, dtype=u.dtype, device=u.device)
    size = u.abs()
    return torch.where(size > tiny, u.sign() * size.maximum(tiny) ** p, u * tiny ** (p - 1))


class LogitMap(nn.Module):
    r"""The map of MixedNUTS.

    .. math:: M(z) = s \cdot \mathrm{sgn}(u)\,|u|^p, \qquad u = \mathrm{clamp}(\mathrm{LN}(z) + c)

    [Bai2024NUTS, Eq. (4)]. Computed in fp32 at least: of half-precision logits the result is fp32.

    Args:
        scale: s > 0.
        power: p > 0.
        shift: c.
        clamp: a key of :data:`CLAMPS`. `gelu` is the paper's; it dips below 0 and can rank another class
            first, which `gelu-monotone` never does.
    """

    spc: Tensor

    def __init__(self, scale: float, power: float, shift: float, clamp: str = "gelu-monotone") -> None:
        super().__init__()
        checks.positive("scale", scale)
        checks.positive("power", power)
        checks.require(math.isfinite(shift), "shift", "be finite", shift)
        self.clamp = checks.one_of("clamp", clamp, CLAMPS)
        # Buffers, so that they count in the digest of a mixture and move with it.
        self.register_buffer("spc", torch.tensor([scale, power, shift], dtype=torch.float64))

    def forward(self, z: Tensor) -> Tensor:
        """(B, K) logits → (B, K) mapped logits."""
        normed = layer_norm(z)
        s, p, c = self.spc.to(normed.dtype).unbind()
        return s * power(CLAMPS[self.clamp](normed + c), p)

    def facts(self) -> dict[str, str | float]:
        """As it stands in `mixture.toml`."""
        s, p, c = self.spc.tolist()
        return {"clamp": self.clamp, "scale": s, "power": p, "shift": c}

    def extra_repr(self) -> str:
        """The numbers of the formula."""
        s, p, c = self.spc.tolist()
        return f"s={s:.4g}, p={p:.4g}, c={c:.4g}, clamp={self.clamp}"


def _wide(z: Tensor) -> Tensor:
    return z.float() if z.dtype in (torch.float16, torch.bfloat16) else z
