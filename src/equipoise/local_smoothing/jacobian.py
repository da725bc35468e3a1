"""How steep a classifier is: the size of every class's gradient, without a loop over classes.

All sizes are in the norm dual to that of the perturbation, so that |δᵀ∇f| ≤ ‖δ‖_p ‖∇f‖_p*. They are ordinary
tensors of an autograd graph: an attack that passes through them takes second derivatives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from equipoise.core import checks

Function = Callable[[Tensor], tuple[Tensor, Any]]  # images → values (B, K), and other tensors, or ()
Norm = str | float  # linf, l2, or any p ≥ 1

SHARPNESS = 20.0
NAMED = {"linf": math.inf, "l2": 2.0}


def dual(norm: Norm) -> float:
    """The order p* with 1/p + 1/p* = 1.

    >>> dual("linf"), dual(2), dual(1.5)
    (1.0, 2.0, 3.0)
    """
    if isinstance(norm, str):
        p = NAMED[checks.one_of("norm", norm, NAMED)]
    else:
        number = isinstance(norm, int | float) and not isinstance(norm, bool)
        checks.require(number and norm >= 1, "norm", "be linf, l2 or a number of at least 1", norm)
        p = float(norm)
    if p == 1:
        return math.inf
    return 1.0 if p == math.inf else round(p / (p - 1), 12)


def each(function: Function, x: Tensor, norm: Norm, *, chunk: int | None = None,
         attached: bool = True) -> tuple[Tensor, Tensor, Any]:
    """Values (B, K) with ‖∇f_i(x)‖_p* (B, K) of every class: one forward pass, K backward passes at once.

    Args:
        function: images → values (B, K) and anything else; an image must not influence another's values.
        x: (B, C, H, W).
        norm: of the perturbation; the gradients are measured in its dual.
        chunk: classes at a time, K if not given. Memory grows with it, the result does not change.
        attached: whether the sizes can be differentiated in their turn.

    Returns:
        values, sizes, what else the function gave.
    """
    with _exactly(x):
        values, pull, more = _vjp(function, x)
        classes, order = values.shape[1], dual(norm)
        # One cotangent per class, the same for every image: gradients of different images do not meet.
        basis = torch.eye(classes, dtype=values.dtype, device=x.device).unsqueeze(1).expand(-1, len(x), -1)
        with torch.set_grad_enabled(attached and torch.is_grad_enabled()):
            sizes = torch.func.vmap(lambda one: size(pull(one)[0], order), chunk_size=chunk)(basis)
    return values, sizes.T, more


def top(function: Function, x: Tensor, norm: Norm, *, attached: bool = True) -> tuple[Tensor, Tensor, Any]:
    """Values (B, K) with ‖∇max_j f_j(x)‖_p* (B, 1): one forward and one backward pass, however many classes."""
    with _exactly(x):
        values, pull, more = _vjp(function, x)
        one = F.one_hot(values.argmax(dim=1), values.shape[1]).to(values.dtype)
        with torch.set_grad_enabled(attached and torch.is_grad_enabled()):
            sizes = size(pull(one)[0], dual(norm))
    return values, sizes.unsqueeze(1), more


def _exactly(x: Tensor) -> torch.autocast:
    """Casts on the fly do not pass through a gradient of gradients; a model in fewer bits casts for itself."""
    return torch.autocast(x.device.type, enabled=False)


def measurable(model: nn.Module) -> None:
    """A batch norm in training mode makes images influence each other, and changes with every look."""
    learning = next((name for name, sub in model.named_modules()
                     if isinstance(sub, nn.modules.batchnorm._BatchNorm) and sub.training), None)
    checks.require(learning is None, type(model).__name__, "be in evaluation mode, model.eval(), where gradients of "
                   "its classes are measured", f"the batch norm {learning!r} in training mode")


def _vjp(function: Function, x: Tensor) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor]], Any]:
    found: Any = torch.func.vjp(function, x, has_aux=True)
    values, pull, more = found
    return values, pull, more


def size(gradient: Tensor, order: float) -> Tensor:
    """(B,) ‖gradient‖ of this order, which need not be that of a threat."""
    sizes: Tensor = torch.linalg.vector_norm(gradient.flatten(1), ord=order, dim=1)
    return sizes


@contextmanager
def softened(sharpness: float = SHARPNESS) -> Iterator[None]:
    """Inside, every ReLU has its own values and the derivatives of softplus(s·z)/s.

    The gradient of a ReLU network is constant in pieces, so ‖∇f_i‖ has no slope almost everywhere, and an
    attack that follows a trust term sees nothing of it. With softplus in the backward pass it does.
    """
    with _Softened(checks.positive("sharpness", sharpness)):
        yield


class _Softened(TorchFunctionMode):
    def __init__(self, sharpness: float) -> None:
        super().__init__()
        self.sharpness = sharpness

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_):
            z = args[0] if args else kwargs["input"]
            smooth = F.softplus(z, beta=self.sharpness)
            return smooth + (z.clamp_min(0) - smooth).detach()
        return function(*args, **(kwargs or {}))


class Softened(nn.Module):
    """A model whose ReLUs have soft derivatives: the surrogate for attacks on trust terms.

    Values that contain no gradient are the model's own; trust terms are those of the soft network.
    """

    def __init__(self, model: nn.Module, sharpness: float = SHARPNESS) -> None:
        super().__init__()
        self.model, self.sharpness = model, sharpness

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, K)."""
        with softened(self.sharpness):
            logits: Tensor = self.model(x)
        return logits
