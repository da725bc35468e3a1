"""What a model is (weights and settings), and whether it accepts the images it will be given."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core import memory
from equipoise.core.checks import InputError
from equipoise.core.modes import inference
from equipoise.core.serialize import to_plain


def weights_digest(module: nn.Module) -> str:
    """SHA-256 over names, types, shapes and values of the state dict, in the order of the names."""
    sha = hashlib.sha256()
    for key, value in sorted(module.state_dict().items()):
        if isinstance(value, Tensor):
            sha.update(f"{key}:{value.dtype}:{tuple(value.shape)};".encode())
            sha.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


class Described(nn.Module):
    """Base class of modules with settings that are not weights.

    A subclass names itself and the attributes that are its settings: `description = ("tta", "count")`.
    """

    description: tuple[str, ...]
    version = 1  # of the description

    def describe(self) -> dict[str, Any]:
        """The settings as plain values, for :func:`identity`."""
        name, *settings = self.description
        return {"type": name, "version": self.version, **{key: to_plain(getattr(self, key)) for key in settings}}

    def extra_repr(self) -> str:
        """The settings on one line."""
        return ", ".join(f"{key}={value:.15g}" if isinstance(value, float) else f"{key}={value}"
                         for key, value in list(self.describe().items())[2:])


def identity(model: nn.Module) -> dict[str, Any]:
    """What distinguishes a model from any other, for `run.toml`.

    Weights alone are not enough: test-time augmentation or a mixing rule has settings that are not weights. Modules
    with such settings have a method `describe()`, as those of this package do (:class:`Described`). The result is
    {"weights": digest, "settings": {path of the submodule: its description}}; the model itself is "(root)".
    """
    from equipoise.models.reference import reference_of  # which loads models, and so imports this file

    described = {name or "(root)": module.describe() for name, module in model.named_modules()
                 if callable(getattr(module, "describe", None))}
    # A model without weights computes outside of torch: where it was loaded from is all that is known of it.
    reference = None if model.state_dict() else reference_of(model)
    return {"weights": weights_digest(model), **({"settings": described} if described else {}),
            **({"reference": reference} if reference else {})}


def check_forward(name: str, model: nn.Module, x: Tensor) -> Tensor:
    """The output of a model for a few images; whatever it raises becomes an :class:`InputError` that names it."""
    try:
        with inference(model), torch.no_grad():
            output = model(x)
    except InputError:
        raise
    except Exception as error:  # the model is the user's own and may raise anything
        if isinstance(error, RuntimeError) and memory.is_out_of_memory(error):
            raise
        raise InputError(f"`{name}` must take images of shape {tuple(x.shape[1:])}, but raised "
                         f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from error
    if not isinstance(output, Tensor):
        raise InputError(f"`{name}` must return one tensor, got {type(output).__name__!r}")
    return output
