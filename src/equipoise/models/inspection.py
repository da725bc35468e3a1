"""What a model is (weights and settings), and whether it accepts the images it will be given."""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar, ParamSpec, Self, TypeVar

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
            sha.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return sha.hexdigest()


class Described(nn.Module):
    """Base class of modules with settings that are not weights.

    A subclass names itself and the attributes that are its settings: `description = ("tta",
    "count")`. Buffers that hold settings move with the module, but `half()`, `float()` and the like
    do not round them.
    """

    description: tuple[str, ...]
    version = 1  # of the description
    settings_buffers: ClassVar[tuple[str, ...]] = ()

    def describe(self) -> dict[str, Any]:
        """The settings as plain values, for :func:`identity`."""
        name, *settings = self.description
        return {
            "type": name,
            "version": self.version,
            **{key: to_plain(getattr(self, key)) for key in settings},
        }

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        exact = {name: self.get_buffer(name) for name in self.settings_buffers}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, value in exact.items():
            changed = self.get_buffer(name)
            if changed.dtype != value.dtype:
                setattr(self, name, value.to(changed.device))
        return self

    def extra_repr(self) -> str:
        """The settings on one line."""
        return ", ".join(
            f"{key}={value:.15g}" if isinstance(value, float) else f"{key}={value}"
            for key, value in list(self.describe().items())[2:]
        )


def identity(model: nn.Module) -> dict[str, Any]:
    """What distinguishes a model from any other, for `run.toml`.

    Weights alone are not enough: test-time augmentation or a mixing rule has settings that are not
    weights. Modules with such settings have a method `describe()`, as those of this package do
    (:class:`Described`). The result is {"weights": digest, "settings": {path of the submodule: its
    description}}; the model itself is "(root)".
    """
    from equipoise.models.loaded import reference_of  # which loads models, and so imports this file

    described = {
        name or "(root)": module.describe()
        for name, module in model.named_modules()
        if callable(getattr(module, "describe", None))
    }
    # A model without weights computes outside of torch: where it was loaded from is all that is
    # known of it.
    reference = None if model.state_dict() else reference_of(model)
    return {
        "weights": weights_digest(model),
        **({"settings": described} if described else {}),
        **({"reference": reference} if reference else {}),
    }


def check_forward(name: str, model: nn.Module, x: Tensor) -> Tensor:
    """The output of a model for a few images; whatever is wrong with it becomes an
    :class:`InputError` that names it.

    The output is one dense tensor with a row per image, logits are floating point, and the images
    are not changed.
    """
    # A copy, because the images may be a view of the caller's data; two, because one row would fit
    # any batch.
    x = torch.cat([x, x]) if len(x) == 1 else x
    given, count = x.clone(), len(x)
    version = 0 if given.is_inference() else given._version
    try:
        with inference(model), torch.no_grad():
            output = model(given)
    except InputError:
        raise
    except (Exception, SystemExit) as error:  # the model is the user's own and may raise anything
        if isinstance(error, RuntimeError) and memory.is_out_of_memory(error):
            raise
        raise InputError(
            f"`{name}` must take images of shape {tuple(x.shape[1:])}, but raised {one_line(error)}"
        ) from error
    # The version also counts writes that happen to leave this image as it was; writes through numpy
    # have none.
    after = 0 if given.is_inference() else given._version
    if after != version or not torch.equal(given.nan_to_num(nan=-1.0), x.nan_to_num(nan=-1.0)):
        raise InputError(
            f"`{name}` must not change its images in place, got a model that does; work on a copy"
        )
    if not isinstance(output, Tensor):
        raise InputError(f"`{name}` must return one tensor, got {type(output).__name__!r}")
    if output.layout != torch.strided or output.is_meta:
        raise InputError(
            f"`{name}` must return a dense tensor with values, got {output.layout} on {output.device}"
        )
    if output.dim() == 0 or len(output) != count:
        raise InputError(
            f"`{name}` must return one row of logits per image, got shape {tuple(output.shape)} for "
            f"{count} images"
        )
    if output.dim() == 2 and not output.is_floating_point():
        raise InputError(f"`{name}` must return logits in floating point, got {output.dtype}")
    return output


def one_line(error: BaseException) -> str:
    """The type and the message of an exception on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")


P = ParamSpec("P")
T = TypeVar("T")


def name_failing_model(function: Callable[P, T]) -> Callable[P, T]:
    """A public function in which an exception of a user's model becomes an :class:`InputError` that
    names the model.

    An exception of our own code or of torch, called by our own models, is a bug and keeps its type.
    The original exception is the cause of the error.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except InputError:
            raise
        except (Exception, SystemExit) as error:
            sentence = _failing_model(error)
            if sentence is None or (
                isinstance(error, RuntimeError) and memory.is_out_of_memory(error)
            ):
                raise
            raise InputError(sentence) from error

    return run


def _failing_model(error: BaseException) -> str | None:
    """Which model of the user raised an exception, on which batch and where; None if none did."""
    from equipoise.models.loaded import reference_of

    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    lines = traceback.extract_tb(error.__traceback__)
    for start, frame in enumerate(frames):
        module = frame.f_locals.get("self")
        if (
            frame.f_code.co_name != "_call_impl"
            or not isinstance(module, nn.Module)
            or _is_known(type(module).__module__)
        ):
            continue
        own = [
            line
            for frame, line in zip(frames[start:], lines[start:], strict=True)
            if not _is_known(frame.f_globals.get("__name__", ""))
        ]
        if not own:  # raised before its `forward` was called
            return None
        x = next(
            (value for value in frame.f_locals.get("args", ()) if isinstance(value, Tensor)), None
        )
        batch = "" if x is None else f" for a batch of shape {tuple(x.shape)}"
        return (
            f"the model {reference_of(module) or type(module).__name__} must work for every batch, but raised "
            f"{one_line(error)}{batch} ({Path(own[-1].filename).name}, line {own[-1].lineno})"
        )
    return None


def _is_known(module: str) -> bool:
    return module.partition(".")[0] in ("equipoise", "torch")
