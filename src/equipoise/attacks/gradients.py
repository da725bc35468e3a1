"""The gradient source of an attack: which networks it queries, how precisely they compute, and what
is recorded.

The many passes of a search run on faster copies (:mod:`equipoise.attacks.fused`), in reduced
precision where the device gains by it, and as CUDA graphs (:mod:`equipoise.attacks.cuda_graphs`).
Only :meth:`GradientSource.judge`, the model itself in full precision, decides whether an image is
broken.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.attacks.cuda_graphs import CudaGraphFunction, TensorFunction
from equipoise.attacks.prepared import PreparedNetworks
from equipoise.attacks.randomized import MAX_PASSES, average_passes, judge_repeatedly
from equipoise.attacks.shared_bases import shared_bases
from equipoise.core import checks, device, losses
from equipoise.models.feature_hooks import forward_with_output

Extra = Callable[[Tensor], Tensor]  # images (B, C, H, W) → (B,), added to the objective
Objective = Callable[
    [Tensor, Tensor, Tensor], Tensor
]  # logits (B, K), labels and targets (B,) → (B,)
VERDICT_BLOCK = 128  # images per pass in full precision, at most
# The same for images that claim to be broken while others search on, which are often only a few.
CLAIM_BLOCK = 16
# A logit of −inf, as a hard decision gives it, would make ratios of margins meaningless
_SMALLEST_LOGIT = -1e4


@dataclass(frozen=True)
class Verdict:
    """What the model itself predicts for B images, in full precision."""

    predicted: Tensor  # (B,) classes
    margin: Tensor  # (B,) signed probability margins of the true class
    logit_margin: Tensor  # (B,) the same of logits, which neither tie nor saturate
    # (B, …) what the observed part of the model returned in these passes
    observed: Tensor | None = None


@dataclass(frozen=True)
class GradientSettings:
    """Where an attack gets its gradients; the fields are those of
    :class:`~equipoise.attacks.Attack`.

    With a surrogate, the loss that decides which iterate is best and when steps shrink is that of
    the "model", as in the official code of MixedNUTS, or that of the "surrogate", as in its paper.
    """

    surrogate: nn.Module | None = None
    extra: Extra | None = None
    follow: str = "model"
    eot: int | None = None
    repeats: int | None = None

    def __post_init__(self) -> None:
        checks.one_of("follow", self.follow, ("model", "surrogate"))
        for name in ("eot", "repeats"):
            if getattr(self, name) is not None:
                checks.whole(name, getattr(self, name), least=1, most=MAX_PASSES)

    @property
    def is_randomized(self) -> bool:
        """Whether the model is treated as one that draws random numbers in every pass."""
        return self.eot is not None or self.repeats is not None


class GradientSource:
    """A model under attack with the source of its gradients.

    Args:
        model: in inference mode; it decides success.
        settings: where gradients come from.
        precision: fp32, bf16 (for gradients), or auto: bf16 on CUDA.
        example: some of the images, on which faster copies and precisions are tried.
        pool: memory that recorded passes share, if any.
        networks: copies that other sources with this precision and these examples have made, if
            any.
        observe: a part of the model, images → (B, …), whose outputs come with every verdict.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: GradientSettings,
        precision: str,
        example: Tensor,
        *,
        pool: Any = None,
        networks: PreparedNetworks | None = None,
        observe: nn.Module | None = None,
    ) -> None:
        self.model, self.settings, self.precision = model, settings, precision
        self.observe = observe
        # Passes saved would change the random numbers of an attack
        if networks is None or settings.is_randomized:
            networks = PreparedNetworks(precision, example)
        self.networks, self.example = networks, networks.example
        self.block: int | None = None
        self._pool = pool
        self._recorded: dict[object, TensorFunction] = {}
        self._per_image: dict[tuple[str, int], bytes] = {}
        others = [part for part in (settings.surrogate, settings.extra) if part is not None]
        with torch.no_grad(), device.full_precision(example.device):
            bases = shared_bases(model, others, self.example)
        self.bases = None if bases is None else networks.once(model, "bases", lambda: bases)
        source = settings.surrogate if self.bases is None else self.bases
        queried = [model] if source is None else [model, source]
        logits = [
            networks.logits(*pair) for pair in zip(queried, ("model", "surrogate"), strict=False)
        ]
        self.classes = logits[0].shape[1]
        copies = [networks.fused(network, self.classes) for network in queried]
        # Shared bases also give the logits of the model
        needed = queried if self.bases is None else queried[-1:]
        reduced = [networks.reduced(network, self.classes, torch.bfloat16) for network in needed]
        self.bf16_gradients = None not in reduced
        fastest = [fast for fast in reduced if fast is not None] if self.bf16_gradients else copies
        self.fast_model, self.fast_source = fastest[0], fastest[-1]
        # What the model draws here belongs to the random stream of its attack
        if settings.is_randomized:
            _ = self._half_precision_model

    def in_blocks(self, block: int | None, pool: Any = None) -> GradientSource:
        """The same source with every network pass on exactly `block` images, if batches are
        multiples of it.

        None is the whole batch. Passes are recorded anew, so the memory of earlier graphs is freed
        with this object.
        """
        other = copy.copy(self)
        other.block, other._recorded, other._pool = block, {}, pool
        return other

    @cached_property
    def forward_model(self) -> nn.Module:
        """The network for passes without gradients."""
        half = self._half_precision_model
        return self.networks.fused(self.model, self.classes) if half is None else half

    @property
    def _half_precision_model(self) -> nn.Module | None:
        return self.networks.reduced(self.model, self.classes, torch.float16)

    @torch.no_grad()
    def judge(self, x: Tensor, y: Tensor, block: int = VERDICT_BLOCK) -> Verdict:
        """The verdict of the model itself in full precision: only this counts. Passes have at most
        `block` images.

        An image that a randomised model classifies correctly in any of its passes is not broken
        yet.
        """

        def logits() -> Tensor:
            return self._checked(self.logits(x, block), len(x))

        if self.settings.repeats is not None:
            verdict = judge_repeatedly(logits, y, self.settings.repeats)
            return Verdict(
                torch.where(verdict.share_correct > 0, y, verdict.predicted),
                verdict.margin,
                verdict.logit_margin,
            )
        outputs = self._full_precision_outputs(self._logits_and_observed, x, block)
        z = self._checked(outputs[0], len(x))
        return Verdict(
            z.argmax(dim=1),
            losses.probability_margin(z, y),
            losses.signed_margin(z, y),
            *outputs[1:],
        )

    def logits(self, x: Tensor, block: int = VERDICT_BLOCK) -> Tensor:
        """(B, K) logits of the model itself in full precision."""
        return self._full_precision_outputs(lambda part: (self.model(part),), x, block)[0]

    def source_outputs(self, x: Tensor) -> Tensor:
        """(B, …) outputs of the network that gives the gradients, in full precision."""
        network = self.settings.surrogate or self.model
        return self._full_precision_outputs(lambda part: (network(part),), x, VERDICT_BLOCK)[0]

    def _checked(self, logits: Tensor, count: int) -> Tensor:
        return checks.logits(logits, count, f"logits of the model {type(self.model).__name__}")

    def _logits_and_observed(self, x: Tensor) -> tuple[Tensor, ...]:
        """(B, K) logits of the model, and what its observed part returned meanwhile, if there is
        one."""
        return (
            (self.model(x),)
            if self.observe is None
            else forward_with_output(self.model, self.observe, x)
        )

    @torch.no_grad()
    def _full_precision_outputs(
        self, function: TensorFunction, x: Tensor, block: int
    ) -> tuple[Tensor, ...]:
        with device.full_precision(x.device):
            return _blockwise(
                lambda part: function(part.contiguous()),
                self.block and min(self.block, block),
                x,
            )

    def value_and_gradient(
        self, name: object, objective: Objective, *, with_extra: bool = True
    ) -> TensorFunction:
        """A function x, y, target → value (B,), gradient (B, C, H, W), and the two :meth:`margins`
        of the model.

        Equal names are equal objectives: a pass that was recorded once serves every stage. The
        extra term is left out where the value is the distance to a decision.
        """
        extra = self.settings.extra if with_extra else None
        return self._recording(name, partial(self._value_and_gradient, objective, extra))

    def margins(self) -> TensorFunction:
        """A function x, y → logit margin (B,), probability margin (B,) of the model, without
        gradients."""
        # Prepared here, because a pass that is recorded must do nothing else
        _ = self.forward_model
        return self._recording("margins", self._margins)

    def once_per_image(self, purpose: str, index: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        """(B, R) integers about the images `index`, computed once and kept on the CPU, four bytes
        each."""
        keys = [(purpose, number) for number in index.tolist()]
        if any(key not in self._per_image for key in keys):
            for key, row in zip(keys, compute().to("cpu", torch.int32).numpy(), strict=True):
                self._per_image[key] = row.tobytes()
        kept = torch.frombuffer(
            bytearray(b"".join(self._per_image[key] for key in keys)), dtype=torch.int32
        )
        return kept.view(len(keys), -1).to(index.device, torch.int64)

    def _recording(self, name: object, function: TensorFunction) -> TensorFunction:
        # A recorded pass would repeat the random numbers that Python drew
        if self.settings.eot is not None:
            return average_passes(partial(_blockwise, function, self.block), self.settings.eot)
        # One graph serves all blocks of a batch, however many there are
        if name not in self._recorded:
            self._recorded[name] = partial(
                _blockwise, CudaGraphFunction(function, self._pool), self.block
            )
        return self._recorded[name]

    def _value_and_gradient(
        self, objective: Objective, extra: Extra | None, x: Tensor, y: Tensor, target: Tensor
    ) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            point = x.detach().requires_grad_()
            with self._precision("gradients"):
                outputs = self.fast_source(point)
            z, term, logits = self._read(outputs.to(x.dtype), point, extra)
            value = objective(z, y, target)
            if term is not None:
                value = value + term
            # A hard decision has no gradient: the search does not move, and the sanity checks
            # report it.
            gradient = (
                torch.autograd.grad(value.sum(), point)[0]
                if value.requires_grad
                else torch.zeros_like(x)
            )
        value = value.detach()
        if self.settings.surrogate is not None and self.settings.follow == "model":
            value = objective(logits.clamp(min=_SMALLEST_LOGIT), y, target)
            if term is not None:
                value = value + term.detach()
        return (
            value,
            # Contiguous, so that the points that follow are too: a copy's gradient may not be.
            torch.nan_to_num(gradient).contiguous(),
            losses.signed_margin(logits, y),
            losses.probability_margin(logits, y),
        )

    def _read(
        self, outputs: Tensor, point: Tensor, extra: Extra | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """The scores that give the gradient, the extra term (B,), and the logits of the model,
        without a gradient."""
        model, surrogate = self.model, self.settings.surrogate
        if self.bases is not None:
            parts = self.bases.split(outputs)
            own = model.from_base_outputs(*parts)  # type: ignore[operator]
            z = own if surrogate is None else surrogate.from_base_outputs(*parts)  # type: ignore[operator]
            return z, None if extra is None else extra.from_base_outputs(*parts), own.detach()  # type: ignore[attr-defined]
        logits = outputs.detach()
        if surrogate is not None:
            with torch.no_grad(), self._precision("gradients"):
                logits = self.fast_model(point.detach()).to(point.dtype)
        return outputs, None if extra is None else extra(point), logits

    @torch.no_grad()
    def _margins(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        with self._precision("queries"):
            z = self.forward_model(x).to(x.dtype)
        return losses.signed_margin(z, y), losses.probability_margin(z, y)

    def _precision(self, passes: str) -> AbstractContextManager[object]:
        """For passes with "gradients" bf16, or for "queries" without them half precision, where the
        network allows it.

        Random search needs differences that bfloat16 cannot resolve. Half precision on CUDA has the
        ten bits of TF32, which torch allows in convolutions by default, and moves half the bytes.
        """
        reduced = (
            self.bf16_gradients if passes == "gradients" else self._half_precision_model is not None
        )
        if not reduced:
            return (
                device.full_precision(self.example.device)
                if self.precision == "fp32"
                else nullcontext()
            )
        # Casts are not cached: a recorded graph must not point at a cache that is emptied.
        dtype = torch.bfloat16 if passes == "gradients" else torch.float16
        return torch.autocast(self.example.device.type, dtype=dtype, cache_enabled=False)


def _blockwise(function: TensorFunction, block: int | None, *inputs: Tensor) -> tuple[Tensor, ...]:
    """`function` on consecutive blocks of the batch; copies of the first row fill up the last
    block."""
    count = len(inputs[0])
    if block is None or count == block:
        return function(*inputs)
    copies = [0] * (-count % block)
    filled = [torch.cat([value, value[copies]]) for value in inputs] if copies else inputs
    parts = [
        function(*(value[start : start + block] for value in filled))
        for start in range(0, count, block)
    ]
    return tuple(torch.cat(columns)[:count] for columns in zip(*parts, strict=True))
