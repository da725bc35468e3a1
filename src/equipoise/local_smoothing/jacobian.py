"""The norm of every class's gradient, without a loop over classes.

All norms are dual to that of the perturbation, so that |δᵀ∇f| ≤ ‖δ‖_p ‖∇f‖_p*. They are ordinary
tensors of an autograd graph: an attack that differentiates them takes second derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from equipoise.core import checks
from equipoise.core.geometry import dual_norm
from equipoise.models.inspection import Described

Function = Callable[
    [Tensor], tuple[Tensor, Any]
]  # images → values (B, K), and other tensors, or ()
Norm = str | float  # linf, l2, or any p ≥ 1
SHARPNESS = 20.0


def class_gradient_norms(
    function: Function,
    x: Tensor,
    norm: Norm,
    *,
    top_only: bool = False,
    chunk: int | None = None,
    attached: bool = True,
) -> tuple[Tensor, Tensor, Any]:
    """Values (B, K) with ‖∇f_i(x)‖_p* (B, K) of every class: one forward pass, K backward passes at
    once.

    Autocast is off, because it does not work for gradients of gradients.

    Args:
        function: images → values (B, K) and anything else; an image must not influence another's
            values.
        x: (B, C, H, W).
        norm: of the perturbation; the gradients are measured in its dual.
        top_only: only ‖∇max_j f_j(x)‖_p* (B, 1), with one backward pass, however many classes.
        chunk: classes at a time, K if not given. Memory grows with it, the result does not change.
        attached: whether the norms can be differentiated again.

    Returns:
        values, norms, the second output of the function.
    """
    with torch.autocast(x.device.type, enabled=False):
        result: Any = torch.func.vjp(function, x, has_aux=True)
        values, vjp, other = result
        with torch.set_grad_enabled(attached and torch.is_grad_enabled()):
            if top_only:
                top = F.one_hot(values.argmax(dim=1), values.shape[1]).to(values.dtype)
                return values, dual_norm(vjp(top)[0], norm).unsqueeze(1), other
            # One cotangent per class, the same for every image, because images do not influence
            # each other.
            basis = (
                torch.eye(values.shape[1], dtype=values.dtype, device=x.device)
                .unsqueeze(1)
                .expand(-1, len(x), -1)
            )
            norms = torch.func.vmap(lambda one: dual_norm(vjp(one)[0], norm), chunk_size=chunk)(
                basis
            )
    return values, norms.T, other


def check_evaluation_mode(model: nn.Module) -> None:
    """Raise an error for batch norm in training mode, where images influence each other."""
    training = next(
        (
            name
            for name, sub in model.named_modules()
            if isinstance(sub, nn.modules.batchnorm._BatchNorm) and sub.training
        ),
        None,
    )
    checks.require(
        training is None,
        type(model).__name__,
        "be in evaluation mode, model.eval(), where gradients of its classes are measured",
        f"the batch norm {training!r} in training mode",
    )


class SoftplusDerivatives(TorchFunctionMode):
    """A context in which every ReLU has its own values and the derivatives of softplus(s·z)/s.

    The gradient of a ReLU network is piecewise constant, so ‖∇f_i‖ has derivative zero almost
    everywhere, and an attack gets no gradient from a trust term. With softplus in the backward pass
    it does.
    """

    def __init__(self, sharpness: float = SHARPNESS) -> None:
        super().__init__()
        self.sharpness = checks.positive("sharpness", sharpness)

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run any torch function, ReLUs with the derivatives of softplus."""
        if function in (F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_):
            z = args[0] if args else kwargs["input"]
            smooth = F.softplus(z, beta=self.sharpness)
            return smooth + (z.clamp_min(0) - smooth).detach()
        return function(*args, **(kwargs or {}))


class SoftplusSurrogate(Described):
    """A model whose ReLUs have the derivatives of softplus: the surrogate for attacks on trust
    terms.

    Values that contain no gradient are the model's own; trust terms are those of the softplus
    network.
    """

    description = ("softplus-surrogate", "sharpness")

    def __init__(self, model: nn.Module, sharpness: float = SHARPNESS) -> None:
        super().__init__()
        self.model, self.sharpness = model, sharpness

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, K)."""
        with SoftplusDerivatives(self.sharpness):
            logits: Tensor = self.model(x)
        return logits
