"""Maps of logits that change a classifier's confidence; those that are monotone never rank another
class above its own.

The map of [Bai2024nuts, Eq. (4)] lowers the confidence of the robust classifier where classes
compete, which is where it errs, and keeps it high where one class stands out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.core import checks
from equipoise.models.inspection import Described

LOWEST = -0.751791524693564  # minimum of GELU: it falls before and rises after
TOP = 250  # with more classes than this, the largest so many logits give the mean and variance of the layer norm
BOUND = 1e3  # centred logits are clamped to ±BOUND, far beyond where softmax saturates

CLAMPS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda u: u,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu-monotone": lambda u: F.gelu(u.clamp_min(LOWEST)),
    "elu": F.elu,
    "softplus": F.softplus,
}


def one_hot(classes: Tensor, num_classes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """(B,) classes → (B, K) log-probabilities: 0 for the class, −inf for the others (temperature
    0)."""
    log_p = torch.full(
        (classes.shape[0], num_classes), -math.inf, dtype=dtype, device=classes.device
    )
    return log_p.scatter(1, classes.unsqueeze(1), 0.0)


def layer_norm(z: Tensor, top: int | None = TOP) -> Tensor:
    """(B, K) logits with mean 0 and (unbiased) variance 1 over the `top` largest of every row.

    With many classes the small logits carry little information but would dominate the mean and
    variance, so only the largest are used [Bai2024nuts, D.7]. Two logits, which would always become
    ±0.71, are only centred.

    Scaled by the largest entry first, so that squares neither overflow nor underflow; a variance of
    1e-8 is added, as in the published code, so that equal logits become 0. Logits of −inf are made
    finite (:func:`finite`).
    """
    z = finite(z)
    classes = z.shape[1]
    if classes == 2:
        return centred(z, 1.0)
    largest = z.detach().abs().amax(dim=1, keepdim=True).clamp_min(1e-12)
    z = z / largest
    largest_logits = z if top is None or top >= classes else z.topk(top, dim=1).values
    centre = largest_logits.mean(dim=1, keepdim=True)
    root = math.sqrt(largest_logits.shape[1] - 1)
    # A norm has a gradient at 0; the square root of a variance does not.
    deviations = torch.cat([largest_logits - centre, (1e-4 / largest) * root], dim=1)
    length = torch.linalg.vector_norm(deviations, dim=1, keepdim=True)
    normed: Tensor = (z - centre) * (root / length)
    return normed


def centred(z: Tensor, unit: Tensor | float) -> Tensor:
    """(B, K) logits with mean 0, divided by `unit` and clamped to ±:data:`BOUND`."""
    z = finite(z)
    return ((z - z.mean(dim=1, keepdim=True)) / unit).clamp(-BOUND, BOUND)


def power(u: Tensor, p: Tensor | float) -> Tensor:
    """sgn(u)·|u|^p, linear for |u| ≤ 1e-30, so that the gradient at 0 is finite also for p < 1."""
    tiny = torch.full((), 1e-30, dtype=u.dtype, device=u.device)
    size = u.abs()
    return torch.where(size > tiny, u.sign() * size.maximum(tiny) ** p, u * tiny ** (p - 1))


def flatten_rivals(log_p: Tensor, rivals: Tensor | float) -> Tensor:
    """Log-probabilities in which the classes other than the top one keep only a share `rivals` of
    their differences.

    r_i = rivals·p_i + (1 − rivals)·(1 − p_top)/(K − 1) for every class but the top one, which keeps
    its p. At 1 nothing changes; at 0 all rivals are equal, and only the confidence of the top class
    matters.
    """
    top, top_class = log_p.max(dim=1, keepdim=True)
    rest = torch.log1p(-top.exp().clamp(max=1 - torch.finfo(log_p.dtype).eps)) - math.log(
        log_p.shape[1] - 1
    )
    share = torch.as_tensor(rivals, dtype=log_p.dtype, device=log_p.device)
    flat = torch.logaddexp(log_p + share.log(), rest + torch.log1p(-share))
    return torch.where(
        torch.arange(log_p.shape[1], device=top_class.device) == top_class, log_p, flat
    )


@dataclass(frozen=True)
class LogitMapSettings:
    """The settings of a :class:`LogitMap`, as in `mixture.toml`."""

    clamp: str
    scale: float
    power: float
    shift: float
    rivals: float
    unit: float | None = None


class LogitMap(Described):
    r"""The family of maps of MixedNUTS, with two more parameters.

    .. math:: M(z) = s \cdot \mathrm{sgn}(u)\,|u|^p, \qquad u = \mathrm{clamp}(\mathrm{LN}(z) + c)

    [Bai2024nuts, Eq. (4)]. With `unit` the logits are centred and divided by this number instead of
    by their own standard deviation, so that their spread still matters. With `rivals` below 1 the
    differences between the other classes shrink (:func:`flatten_rivals`); at 0 a mixture becomes a
    switch: g decides wherever h is not confident.

    Computed in fp32 at least: of half-precision logits the result is fp32.

    Args:
        scale: s > 0.
        power: p > 0.
        shift: c.
        clamp: a key of :data:`CLAMPS`. `gelu` is the paper's; it is not monotone and can change the
            top class. `gelu-monotone` cannot; like `relu`, it makes classes tie that lie below its
            lowest point.
        rivals: in [0, 1]; 1 is the paper's.
        unit: None is the paper's layer norm.
    """

    description = ("logit-map", "settings")
    settings_buffers = ("numbers",)
    numbers: Tensor

    def __init__(
        self,
        scale: float,
        power: float,
        shift: float,
        clamp: str = "gelu-monotone",
        *,
        rivals: float = 1.0,
        unit: float | None = None,
    ) -> None:
        super().__init__()
        checks.positive("scale", scale)
        checks.positive("power", power)
        checks.require(math.isfinite(shift), "shift", "be finite", shift)
        checks.within("rivals", rivals, 0, 1)
        if unit is not None:
            checks.positive("unit", unit)
        self.clamp = checks.one_of("clamp", clamp, CLAMPS)
        self.uses_layer_norm, self.flattens_rivals = unit is None, rivals < 1
        # A buffer, so that it is part of a mixture's weights digest and moves with it.
        self.register_buffer(
            "numbers", torch.tensor([scale, power, shift, rivals, unit or 1.0], dtype=torch.float64)
        )

    def forward(self, z: Tensor) -> Tensor:
        """(B, K) logits → (B, K) mapped logits."""
        require_classes(z)
        mapped = self.transform(self.normalize(z))
        if not self.flattens_rivals:
            return mapped
        return flatten_rivals(F.log_softmax(mapped, dim=1), self.numbers.to(mapped.dtype)[3])

    def normalize(self, z: Tensor) -> Tensor:
        """(B, K) logits → what the formula is applied to, in fp32 at least."""
        return (
            layer_norm(z)
            if self.uses_layer_norm
            else centred(z, self.numbers.to(at_least_float32(z).dtype)[4])
        )

    def transform(self, u: Tensor) -> Tensor:
        """The formula on normalized logits, entry by entry."""
        s, p, c, *_ = self.numbers.to(u.dtype).unbind()
        mapped: Tensor = s * power(CLAMPS[self.clamp](u + c), p)
        return mapped

    @property
    def settings(self) -> LogitMapSettings:
        """The clamp and the numbers of the formula."""
        s, p, c, rivals, unit = self.numbers.tolist()
        return LogitMapSettings(self.clamp, s, p, c, rivals, None if self.uses_layer_norm else unit)

    def with_scale(self, scale: float) -> LogitMap:
        """The same map with another s."""
        return LogitMap(**{**vars(self.settings), "scale": scale}).to(self.numbers.device)

    def extra_repr(self) -> str:
        """The settings with the symbols of the paper, to four digits."""
        s, p, c, rivals, unit = self.numbers.tolist()
        more = f", rivals={rivals:g}" if self.flattens_rivals else ""
        more += "" if self.uses_layer_norm else f", unit={unit:.4g}"
        return f"s={s:.4g}, p={p:.4g}, c={c:.4g}, clamp={self.clamp}{more}"


def require_classes(z: Tensor, name: str = "logits") -> None:
    """Refuse logits that are not (B, K) with at least two classes, which leave nothing to
    decide."""
    checks.require(
        z.dim() == 2 and z.shape[1] >= 2, name, "have shape (B, K) with K ≥ 2", tuple(z.shape)
    )


def finite(z: Tensor) -> Tensor:
    """(B, K) logits, in fp32 at least, in which −inf is a finite number below all others.

    It is as far below the smallest finite logit as that is below the largest one, and one more:
    mean and variance then still say something about the other classes.
    """
    z = at_least_float32(z)
    impossible = z == -math.inf
    largest, smallest = (
        z.detach().amax(dim=1, keepdim=True),
        z.detach().masked_fill(impossible, math.inf),
    )
    smallest = smallest.amin(dim=1, keepdim=True)
    return torch.where(impossible, 2 * smallest - largest - 1, z)


def at_least_float32(z: Tensor) -> Tensor:
    """Half precision as fp32; wider logits unchanged."""
    return z.float() if z.dtype in (torch.float16, torch.bfloat16) else z


def layer_norm_map() -> LogitMap:
    """The layer norm alone, with which MixedNUTS begins: s = p = 1 and c = 0, nothing is
    clamped."""
    return LogitMap(1.0, 1.0, 0.0, "linear")


def confidence_switch(scale: float = 1.0, unit: float = 1.0) -> LogitMap:
    """The confidence switch: a mixture with hard labels of g then predicts h's class where h is
    confident, else g's.

    h is confident where the largest probability of softmax(scale·z/unit) exceeds
    :func:`switch_confidence`; nothing else about its logits z matters. See
    `docs/confidence-switch.md`.
    """
    return LogitMap(scale, 1.0, 0.0, "linear", rivals=0.0, unit=unit)


def switch_confidence(q: float, num_classes: int) -> float:
    """The probability of h's class above which it decides in a confidence switch with q = (1 −
    α)/α.

    The other classes share the rest equally, so that p − (1 − p)/(K − 1) > q exactly where p > (1 +
    q·(K − 1))/K.

    >>> round(switch_confidence(0.4, 10), 3)
    0.46
    """
    return (1 + q * (num_classes - 1)) / num_classes
