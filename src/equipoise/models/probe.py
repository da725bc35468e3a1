"""A first look at a model from outside, so that one of another kind is one sentence now and not a trace later."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from equipoise.core import memory
from equipoise.core.checks import InputError
from equipoise.core.modes import inference


def probe(name: str, model: nn.Module, x: Tensor) -> Tensor:
    """What the model answers to some images; whatever it raises becomes an :class:`InputError`.

    Args:
        name: what the sentence calls the model.
        model: the user's own, on the device of the images.
        x: (B, C, H, W) in [0, 1]; one image serves.
    """
    try:
        with inference(model), torch.no_grad():
            told = model(x)
    except InputError:
        raise
    except Exception as error:  # the model is the user's: whatever it raises is for the user to read
        if isinstance(error, RuntimeError) and memory.is_out_of_memory(error):
            raise
        raise InputError(f"`{name}` must take images of shape {tuple(x.shape[1:])}, but raised "
                         f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from error
    if not isinstance(told, Tensor):
        raise InputError(f"`{name}` must answer with one tensor, got {type(told).__name__!r}")
    return told
