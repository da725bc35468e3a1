"""Networks whose output is an object with `.logits`, a tuple or a dictionary, as models that return
logits."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core.modes import inference
from equipoise.models.loaded import info_of


def select_logits(output: Any) -> Any:
    """The logits in the output of a network; the output itself if it holds none.

    >>> select_logits({"loss": None, "logits": torch.zeros(2, 10)}).shape
    torch.Size([2, 10])
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(getattr(output, "logits", None), Tensor):
        return output.logits
    if isinstance(output, Mapping):
        tensors = [value for value in output.values() if isinstance(value, Tensor)]
        logits = output.get(
            "logits", tensors[0] if len(tensors) == 1 else None
        )  # of several, none is guessed
    else:
        logits = output[0] if isinstance(output, tuple | list) and output else None
    return logits if isinstance(logits, Tensor) else output


def _logits_hook(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
    return select_logits(output)


def unwrap_outputs(model: nn.Module) -> nn.Module:
    """The same model, with the same weights, submodules and type, but with logits as its output.

    Only the returned module has the hook that selects them: code that uses `model` itself is not
    affected. A program of TorchScript takes no hooks: a layer follows it.
    """
    if isinstance(model, torch.jit.ScriptModule):
        return nn.Sequential(model, Logits()).train(model.training)
    changed = copy.copy(model)
    changed._forward_hooks = OrderedDict(model._forward_hooks)
    if _logits_hook not in changed._forward_hooks.values():
        changed.register_forward_hook(_logits_hook)
    return changed


def as_classifier(model: nn.Module, image_shape: tuple[int, int, int] | None) -> nn.Module:
    """A module of the user's own; if its output is not a tensor, one that returns its logits.

    A module that cannot take these images is returned as it is: whoever uses it next says why.
    """
    own = type(model).__module__.partition(".")[0] == "equipoise" or info_of(model) is not None
    if image_shape is None or own:  # a model of this package, or loaded by it, returns logits
        return model
    place = next(model.parameters(), torch.zeros(())).device
    try:
        with inference(model), torch.no_grad():
            output = model(torch.zeros(2, *image_shape, device=place))
    except (Exception, SystemExit):
        return model
    return model if isinstance(output, Tensor) else unwrap_outputs(model)


class Logits(nn.Module):
    """The last layer after a network whose output holds logits beside other things."""

    def forward(self, output: Any) -> Any:
        """The output of a network → its logits (B, K)."""
        return select_logits(output)
