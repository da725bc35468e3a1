r"""Local smoothing: how far a robust oracle is trusted, image by image and class by class.

The ancestors of :func:`equipoise.mixing.rules.mix`, all in one form: g the accurate side, h the robust side or
oracle, R_i a trust term, and γ in [0, ∞] the strength (α in [Bai2022]; the weight of this house is γ/(1 + γ)).
γ is carried as its logarithm, the *gate*: −inf is g, +inf is h, both exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.core import checks
from equipoise.local_smoothing import jacobian
from equipoise.local_smoothing.jacobian import Norm

SPACES = ("logits", "probabilities")
RULES = ("averaged", "added")
TRUSTS = ("constant", "gradient", "top-gradient", "ratio", "top-ratio")
FLOOR = 1e-5  # of the gradient in the denominator of a ratio


def biased(g: Tensor, h: Tensor, size: Tensor, gamma: float | Tensor) -> Tensor:
    """g + γ h ‖∇g‖_p* [Bai2024, Eq. (2.1)]: two classes by the sign of g; the oracle h is in {−1, 1}."""
    return g + gamma * h * size


def added(g: Tensor, h: Tensor, trust: Tensor, gate: Tensor, space: str = "logits") -> Tensor:
    """g_i + γ R_i h_i [Bai2024, Eq. (3.1)], (B, K); over probabilities its logarithm. γ must be finite."""
    if space == "logits":
        return g + gate.exp() * trust * h
    return torch.logaddexp(g, gate + _log(trust) + h)


def averaged(g: Tensor, h: Tensor, trust: Tensor, gate: Tensor, space: str = "logits") -> Tensor:
    r"""(g_i + γ R_i h_i) / (1 + γ R_i) [Bai2024, Eq. (3.2), (3.3)], [Bai2022, Eq. (2), (5), (10)].

    With w_i = sigmoid(gate + log R_i) it is (1 − w_i) g_i + w_i h_i, which neither over- nor underflows.

    Args:
        g, h: (B, K) logits, or log-probabilities where `space` says so.
        trust: R_i, (B, K), (B, 1) or (1, 1).
        gate: log γ, () or (B, 1).
        space: logits or probabilities; of the latter the logarithm of the average is returned.
    """
    own = gate + _log(trust)
    if space == "logits":
        return torch.sigmoid(-own) * g + torch.sigmoid(own) * h
    return torch.logaddexp(F.logsigmoid(-own) + g, F.logsigmoid(own) + h)


def _log(trust: Tensor) -> Tensor:
    # A gradient of exactly zero trusts g whatever γ is, except at γ = ∞, which is h by definition.
    return trust.clamp_min(torch.finfo(trust.dtype).tiny).log()


_FORMULAS: dict[str, Callable[..., Tensor]] = {"averaged": averaged, "added": added}


def gate_of(gamma: float | Tensor) -> Tensor:
    """log γ in float64; −inf at 0 and +inf at ∞."""
    checks.require(isinstance(gamma, int | float | Tensor), "gamma", "be a number in [0, ∞]", gamma)
    value = torch.as_tensor(gamma, dtype=torch.float64)
    # NaN fails the comparison too.
    checks.require(bool((value >= 0).all()), "gamma", "lie in [0, ∞]", gamma)
    return value.log()


class SmoothedClassifier(nn.Module):
    """Any rule of the family with a fixed strength, as a classifier: images in, logits out.

    Args:
        accurate: g, images (B, C, H, W) in [0, 1] → logits (B, K).
        oracle: h, images → (B, K): a robust classifier's logits, or the votes of
            :class:`~equipoise.local_smoothing.neighbours.Neighbours`, which are made for the space of logits (among
            probabilities they would pass through a softmax as logits do).
        gamma: γ in [0, ∞].
        trust: R_i: constant 1; gradient ‖∇g_i‖; top-gradient ‖∇max_j g_j‖; ratio ‖∇g_i‖ / (‖∇h_i‖ + floor);
            top-ratio, the fast variant ‖∇max_j g_j‖ / (‖∇max_j h_j‖ + floor) [Bai2022, Eq. (10)].
        space: what is mixed, and whose gradients are measured: logits or probabilities.
        rule: averaged (3.2), (3.3), or added (3.1).
        norm: of the perturbation: linf, l2 or a number p ≥ 1; gradients are measured in the dual norm.
        attached: whether gradients flow through R_i. Without, an attack needs no second derivatives; for
            ReLU networks over logits nothing is lost, because theirs are zero.
        chunk: classes per backward pass of the Jacobian; all if not given.
        floor: added to the denominator of a ratio.
    """

    gate: Tensor

    def __init__(
        self, accurate: nn.Module, oracle: nn.Module, gamma: float, *, trust: str = "constant", space: str = "logits",
        rule: str = "averaged", norm: Norm = "linf", attached: bool = True, chunk: int | None = None,
        floor: float = FLOOR,
    ) -> None:
        super().__init__()
        checks.one_of("trust", trust, TRUSTS)
        checks.one_of("space", space, SPACES)
        checks.one_of("rule", rule, RULES)
        jacobian.dual(norm)
        gate = gate_of(gamma)
        checks.require(rule == "averaged" or gamma < math.inf, "gamma", "be finite where nothing is averaged", gamma)
        checks.whole("chunk", 1 if chunk is None else chunk, least=1)
        self.accurate, self.oracle = accurate, oracle
        self.trust, self.space, self.rule, self.norm = trust, space, rule, norm
        self.attached, self.chunk, self.floor = attached, chunk, checks.positive("floor", floor)
        self.register_buffer("gate", gate)

    @property
    def gamma(self) -> float:
        """γ."""
        return float(self.gate.exp())

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, K); log-probabilities (unnormalised unless R is one for all classes) or logits."""
        return self.mixed(x, self.gate)

    def mixed(self, x: Tensor, gate: Tensor) -> Tensor:
        """The rule at another strength: `gate` is log γ, () for all or (B,) for each image."""
        g, h, trust, _ = self.parts(x)
        return self.combine(g, h, trust, gate)

    def combine(self, g: Tensor, h: Tensor, trust: Tensor, gate: Tensor) -> Tensor:
        """(B, K) from what :meth:`parts` gives, at strength exp(gate)."""
        return _FORMULAS[self.rule](g, h, trust, gate.to(g.dtype).reshape(-1, 1), self.space)

    def parts(self, x: Tensor, taps: Callable[[nn.Module, Tensor], tuple[Tensor, Any]] | None = None) -> tuple[
            Tensor, Tensor, Tensor, tuple[Any, Any]]:
        """g (B, K), h (B, K), R (B, K) or (B, 1), in the space of the rule, and what `taps` caught of either side.

        `taps` runs a side and returns its logits with anything else it saw, such as features.
        """
        run = taps or _plain
        steep = {"gradient": ("each", ""), "top-gradient": ("top", ""), "ratio": ("each", "each"),
                 "top-ratio": ("top", "top")}.get(self.trust, ("", ""))
        g, over, seen_g = self._side(self.accurate, x, steep[0], run)
        h, under, seen_h = self._side(self.oracle, x, steep[1], run)
        checks.require(g.shape == h.shape, "accurate and oracle", "have equal numbers of classes",
                       (tuple(g.shape), tuple(h.shape)))
        trust = torch.ones((), dtype=g.dtype, device=g.device) if over is None else over
        if under is not None:
            trust = trust / (under + self.floor)
        return g, h, trust if self.attached else trust.detach(), (seen_g, seen_h)

    def _side(self, model: nn.Module, x: Tensor, how: str, run: Callable[[nn.Module, Tensor], tuple[Tensor, Any]],
              ) -> tuple[Tensor, Tensor | None, Any]:
        """What is mixed of one side, its steepness if asked for, and what was caught."""
        def log_space(at: Tensor) -> tuple[Tensor, Any]:
            z, caught = run(model, at)
            return (z if self.space == "logits" else F.log_softmax(z, dim=1)), caught

        if not how:
            values, caught = log_space(x)
            return values, None, caught

        jacobian.measurable(model)

        def measured(at: Tensor) -> tuple[Tensor, Any]:
            # Probabilities are measured as such and mixed as logarithms; the latter ride along.
            values, caught = log_space(at)
            return (values if self.space == "logits" else values.exp()), (values, caught)

        if how == "each":
            _, size, (values, caught) = jacobian.each(measured, x, self.norm, chunk=self.chunk, attached=self.attached)
        else:
            _, size, (values, caught) = jacobian.top(measured, x, self.norm, attached=self.attached)
        return values, size, caught

    def extra_repr(self) -> str:
        """The settings of the rule."""
        return f"gamma={self.gamma:g}, trust={self.trust}, space={self.space}, rule={self.rule}, norm={self.norm}"


def _plain(model: nn.Module, x: Tensor) -> tuple[Tensor, tuple[()]]:
    return model(x), ()


class BinarySmoothing(nn.Module):
    """Locally biased smoothing of two classes [Anderson2022], [Bai2024, Eq. (2.1)], as a classifier.

    With g = z_1 − z_0 of the accurate logits, h = ±1 as the oracle says, it answers with logits
    (−s/2, s/2), s = g + γ h ‖∇g‖_p*.

    Args:
        accurate: images (B, C, H, W) → logits (B, 2).
        oracle: images → (B, 2); its greater column is the direction, a tie is no direction.
        gamma: γ in [0, ∞).
        norm: of the perturbation.
    """

    def __init__(self, accurate: nn.Module, oracle: nn.Module, gamma: float, *, norm: Norm = "linf") -> None:
        super().__init__()
        checks.require(bool(gate_of(gamma) < math.inf), "gamma", "lie in [0, ∞)", gamma)
        jacobian.dual(norm)
        self.accurate, self.oracle, self.gamma, self.norm = accurate, oracle, gamma, norm

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, 2)."""
        def score(at: Tensor) -> tuple[Tensor, tuple[()]]:
            z = self.accurate(at)
            checks.require(z.shape[1] == 2, "accurate", "have two classes", tuple(z.shape))
            return (z[:, 1] - z[:, 0]).unsqueeze(1), ()

        jacobian.measurable(self.accurate)
        g, size, _ = jacobian.each(score, x, self.norm)
        votes = self.oracle(x)
        direction = (votes[:, 1:] - votes[:, :1]).sign().to(g.dtype)
        s = biased(g, direction, size, self.gamma) / 2
        return torch.cat((-s, s), dim=1)
