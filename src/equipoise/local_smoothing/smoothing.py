r"""Local smoothing: mix an accurate classifier with a robust oracle, image by image and class by
class.

The predecessors of :func:`equipoise.mixing.formula.mix`, all in one form: g the accurate side, h
the robust side or oracle, R_i a trust term, and γ in [0, ∞] the strength (α in [Bai2022]; the alpha
of a mixture is γ/(1 + γ)). γ is represented by its logarithm, the *gate*: −inf is g, +inf is h,
both exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.core import checks
from equipoise.core.geometry import dual_order
from equipoise.local_smoothing import jacobian
from equipoise.local_smoothing.jacobian import Norm
from equipoise.models.inspection import Described

SPACES = ("logits", "probabilities")
# Which gradients a trust term needs, of g and of h: those of all classes, of the top class, or
# none.
TRUSTS = {
    "constant": (None, None),
    "gradient": ("all", None),
    "top-gradient": ("top", None),
    "ratio": ("all", "all"),
    "top-ratio": ("top", "top"),
}
Forward = Callable[
    [nn.Module, Tensor], tuple[Tensor, Any]
]  # runs a base: logits, and anything else such as features


def log_trust(trust: Tensor) -> Tensor:
    """log R; a gradient of exactly zero gives g for every γ, except for γ = ∞, which is h by
    definition."""
    return trust.clamp_min(torch.finfo(trust.dtype).tiny).log()


def added(g: Tensor, h: Tensor, trust: Tensor, gate: Tensor, space: str = "logits") -> Tensor:
    """g_i + γ R_i h_i [Bai2024, Eq. (3.1)], (B, K); over probabilities its logarithm. γ must be
    finite."""
    if space == "logits":
        return g + gate.exp() * trust * h
    return torch.logaddexp(g, gate + log_trust(trust) + h)


def averaged(g: Tensor, h: Tensor, trust: Tensor, gate: Tensor, space: str = "logits") -> Tensor:
    r"""(g_i + γ R_i h_i) / (1 + γ R_i) [Bai2024, Eq. (3.2), (3.3)], [Bai2022, Eq. (2), (5), (10)].

    With w_i = sigmoid(gate + log R_i) it is (1 − w_i) g_i + w_i h_i, which neither over- nor
    underflows.

    Args:
        g, h: (B, K) logits, or log-probabilities if `space` is probabilities, as is the result.
        trust: R_i, (B, K), (B, 1) or (1, 1).
        gate: log γ, () or (B, 1).
        space: logits or probabilities.
    """
    weight = gate + log_trust(trust)
    if space == "logits":
        return torch.sigmoid(-weight) * g + torch.sigmoid(weight) * h
    return torch.logaddexp(F.logsigmoid(-weight) + g, F.logsigmoid(weight) + h)


RULES: dict[str, Callable[..., Tensor]] = {"averaged": averaged, "added": added}


def log_strength(gamma: float | Tensor) -> Tensor:
    """log γ in float64; −inf at 0 and +inf at ∞."""
    checks.require(isinstance(gamma, int | float | Tensor), "gamma", "be a number in [0, ∞]", gamma)
    value = torch.as_tensor(gamma, dtype=torch.float64)
    checks.require(bool((value >= 0).all()), "gamma", "lie in [0, ∞]", gamma)  # refuses NaN too
    return value.log()


class SmoothedClassifier(Described):
    """Any rule of the family with a fixed strength, as a classifier: images in, logits out.

    Args:
        accurate: g, images (B, C, H, W) in [0, 1] → logits (B, K).
        oracle: h, images → (B, K): a robust classifier's logits, or, in the space of logits, the
            votes of :class:`~equipoise.local_smoothing.neighbours.Neighbours`.
        gamma: γ in [0, ∞].
        trust: R_i: constant 1; gradient ‖∇g_i‖; top-gradient ‖∇max_j g_j‖; ratio ‖∇g_i‖ / (‖∇h_i‖ +
            floor); top-ratio, the fast variant ‖∇max_j g_j‖ / (‖∇max_j h_j‖ + floor) [Bai2022, Eq.
            (10)].
        space: what is mixed, and whose gradients are measured: logits or probabilities.
        rule: averaged (3.2), (3.3), or added (3.1).
        norm: of the perturbation: linf, l2 or a number p ≥ 1; gradients are measured in the dual
            norm.
        attached: whether gradients flow through R_i. Without, an attack needs no second
            derivatives; for ReLU networks over logits nothing is lost, because theirs are zero.
        chunk: classes per backward pass of the Jacobian; all if not given.
        floor: added to the denominator of a ratio.
    """

    description = ("smoothed", "gamma", "trust", "space", "rule", "norm", "attached", "floor")
    gate: Tensor

    def __init__(
        self,
        accurate: nn.Module,
        oracle: nn.Module,
        gamma: float,
        *,
        trust: str = "constant",
        space: str = "logits",
        rule: str = "averaged",
        norm: Norm = "linf",
        attached: bool = True,
        chunk: int | None = None,
        floor: float = 1e-5,
    ) -> None:
        super().__init__()
        checks.one_of("trust", trust, TRUSTS)
        checks.one_of("space", space, SPACES)
        checks.one_of("rule", rule, RULES)
        dual_order(norm)
        gate = log_strength(gamma)
        checks.require(
            rule == "averaged" or gamma < math.inf, "gamma", "be finite for the rule `added`", gamma
        )
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
        """(B, C, H, W) → (B, K); log-probabilities (unnormalised unless R is one for all classes)
        or logits."""
        return self.forward_with_gate(x, self.gate)

    def forward_with_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """The rule at another strength: `gate` is log γ, () for all or (B,) for each image."""
        return self.combine(*self.sides_and_trust(x)[:3], gate)

    def combine(self, g: Tensor, h: Tensor, trust: Tensor, gate: Tensor) -> Tensor:
        """(B, K) from the outputs of :meth:`sides_and_trust`, at strength exp(gate)."""
        return RULES[self.rule](g, h, trust, gate.to(g.dtype).reshape(-1, 1), self.space)

    def sides_and_trust(
        self, x: Tensor, run: Forward | None = None
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Any, Any]]:
        """g (B, K), h (B, K), R (B, K) or (B, 1), in the space of the rule, and the second outputs
        of `run`."""
        run = run or (lambda model, at: (model(at), ()))
        gradients_g, gradients_h = TRUSTS[self.trust]
        g, norm_g, other_g = self._side(self.accurate, x, gradients_g, run)
        h, norm_h, other_h = self._side(self.oracle, x, gradients_h, run)
        checks.require(
            g.shape == h.shape,
            "accurate and oracle",
            "have equal numbers of classes",
            (tuple(g.shape), tuple(h.shape)),
        )
        trust = torch.ones((), dtype=g.dtype, device=g.device) if norm_g is None else norm_g
        if norm_h is not None:
            trust = trust / (norm_h + self.floor)
        return g, h, trust if self.attached else trust.detach(), (other_g, other_h)

    def _side(
        self, model: nn.Module, x: Tensor, gradients: str | None, run: Forward
    ) -> tuple[Tensor, Tensor | None, Any]:
        """What is mixed of one side, its gradient norms if needed, and the second output of
        `run`."""

        def differentiated(at: Tensor) -> tuple[Tensor, tuple[Tensor, Any]]:
            # Gradients are those of probabilities, but their logarithms are mixed and returned
            # beside.
            z, other = run(model, at)
            values = z if self.space == "logits" else F.log_softmax(z, dim=1)
            return (values if self.space == "logits" else values.exp()), (values, other)

        if gradients is None:
            values, other = differentiated(x)[1]
            return values, None, other
        jacobian.check_evaluation_mode(model)
        _, norms, (values, other) = jacobian.class_gradient_norms(
            differentiated,
            x,
            self.norm,
            top_only=gradients == "top",
            chunk=self.chunk,
            attached=self.attached,
        )
        return values, norms, other


class BinarySmoothing(Described):
    """Locally biased smoothing of two classes [Anderson2022], [Bai2024, Eq. (2.1)], as a
    classifier.

    It returns logits (−s/2, s/2) with s = g + γ h ‖∇g‖_p*, where g is the difference z_1 − z_0 of
    the accurate logits (B, 2), h the sign of the oracle's (0 for a tie), γ in [0, ∞), and `norm`
    that of the perturbation.
    """

    description = ("binary-smoothing", "gamma", "norm")

    def __init__(
        self, accurate: nn.Module, oracle: nn.Module, gamma: float, *, norm: Norm = "linf"
    ) -> None:
        super().__init__()
        checks.require(bool(log_strength(gamma) < math.inf), "gamma", "lie in [0, ∞)", gamma)
        dual_order(norm)
        self.accurate, self.oracle, self.gamma, self.norm = accurate, oracle, gamma, norm

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, 2)."""

        def score(at: Tensor) -> tuple[Tensor, tuple[()]]:
            z = self.accurate(at)
            checks.require(z.shape[1] == 2, "accurate", "have two classes", tuple(z.shape))
            return (z[:, 1] - z[:, 0]).unsqueeze(1), ()

        jacobian.check_evaluation_mode(self.accurate)
        g, gradient_norm, _ = jacobian.class_gradient_norms(score, x, self.norm)
        votes = self.oracle(x)
        s = (g + self.gamma * (votes[:, 1:] - votes[:, :1]).sign().to(g.dtype) * gradient_norm) / 2
        return torch.cat((-s, s), dim=1)
