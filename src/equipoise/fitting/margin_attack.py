"""The attack of a fit: on the margin of the robust model, or of both models, over the fitting
images."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from equipoise import models
from equipoise.attacks import Attack, Square, margin_suite, minimum_margin
from equipoise.core import checks, memory, progress, rng
from equipoise.core.checks import InputError
from equipoise.core.device import attack_batch_size, full_precision
from equipoise.core.modes import inference
from equipoise.core.threat import Threat
from equipoise.data import Dataset, pixels
from equipoise.fitting.cached_logits import CachedLogits, Outputs
from equipoise.fitting.settings import FitSettings
from equipoise.mixing import LogitMap, MixedClassifier
from equipoise.mixing.surrogates import Surrogate
from equipoise.models.layers.tta import TTAClassifier

MIN_IMAGES = 50
# Batches attacked together on CUDA: they stay full when only few images of each survive.
BATCHES = 4
PAIR_ALPHA = 0.9  # weight of the robust model in the gradients of an attack on both


@dataclass(frozen=True, eq=False)
class MarginAttack:
    """Attack on the margin of the robust model (or of both models) over the fitting images."""

    accurate: nn.Module
    robust: nn.Module
    data: Dataset
    threat: Threat
    device: torch.device
    settings: FitSettings

    @property
    def batch_size(self) -> int:
        """Images attacked at a time."""
        return attack_batch_size(self.settings.batch_size, self.device)

    @cached_property
    def identities(self) -> list[dict[str, Any]]:
        """What the accurate and the robust model are; the digests of their weights take long."""
        return [models.identity(self.accurate), models.identity(self.robust)]

    def describe(self) -> dict[str, Any]:
        """Identity of the attack, for `run.toml`."""
        settings = {
            name: getattr(self.settings, name)
            for name in ("steps", "targets", "pool", "gradient_free")
        }
        return {"attack": "minimum-margin", "version": 1, **settings}

    def check_inputs(self) -> None:
        """Count the images and probe both models with one: h must output logits, g logits or
        classes."""
        count = len(self.data)
        checks.require(
            count >= MIN_IMAGES, "count", f"give at least {MIN_IMAGES} images to fit on", count
        )
        image = pixels(self.data.images[:1].to(self.device))
        for name, model, dims, expected in (
            ("robust", self.robust, (2,), "logits (B, K)"),
            ("accurate", self.accurate, (1, 2), "logits (B, K) or classes (B,)"),
        ):
            output = models.check_forward(name, model.to(self.device), image)
            checks.require(
                output.dim() in dims, name, f"output {expected}", f"shape {tuple(output.shape)}"
            )

    def has_gradients(self) -> bool:
        """Whether the logits of h depend differentiably on the image."""
        x = pixels(self.data.images[:1].to(self.device)).requires_grad_()
        with inference(self.robust), torch.enable_grad():
            return bool(self.robust(x).requires_grad)

    def clean_logits(self) -> CachedLogits:
        """Both models on the clean images; no attacked points yet."""
        with inference(self.accurate, self.robust), torch.no_grad():
            outputs = [
                output
                for _, output in memory.in_batches(
                    lambda rows: self._outputs(pixels(self.data.images[rows].to(self.device))),
                    len(self.data),
                    self.batch_size,
                )
            ]
        h, g, first = _join(outputs, dim=0)
        assert g is not None
        return CachedLogits(
            h,
            h.new_empty(0, *h.shape),
            self.data.labels,
            self.data.index,
            _classes(g),
            torch.empty(0, len(h), dtype=torch.int64),
            g if g.dim() == 2 else None,
            first,
            None if first is None else h.new_empty(0, *h.shape),
        )

    def _outputs(self, x: Tensor) -> Outputs:
        """Logits of h, and logits or classes of g."""
        first = None
        with full_precision(x.device):
            if self.settings.rule == "cascade":
                assert isinstance(self.robust, TTAClassifier)
                first = self.robust.first_view(x)
                h = self.robust.complete(x, first)
            else:
                h = self.robust(x)
            g = self.accurate(x)
        h, g = _finite(h, "robust").float(), _finite(g, "accurate")
        if g.dim() == 2:
            checks.require(
                g.shape == h.shape,
                "accurate and robust",
                "have equal numbers of classes",
                (g.shape[1], h.shape[1]),
            )
        else:
            g = checks.labels(g, h.shape[1], len(x), "classes of the accurate model").long()
        return Outputs(h.cpu(), g.cpu(), None if first is None else first.float().cpu())

    def run_on(self, model: nn.Module, attack: Attack, *, skip_broken: bool) -> Outputs:
        """Outputs at the points of smallest margin of another model than M(h).

        With `skip_broken` an image on which the model is wrong is not attacked further.
        """
        return self._attack(model, attack, "attacking the cascade", skip_broken=skip_broken)

    def run(self, logit_map: LogitMap, *, both: bool = False) -> Outputs:
        """(P, N, K) logits of h and (P, N) classes of g at the points of smallest margin of the
        mapped model M(h).

        With `both` the accurate model is attacked too, for the smallest margin of M(h) against the
        class that g predicts. A mixture with α = 1/2 is wrong wherever g is, so its margin orders
        such points by that of M(h) alone, for every threshold.
        """
        logit_map = copy.deepcopy(logit_map).to(
            self.device
        )  # the caller's stays where its cached logits are
        model: nn.Module = nn.Sequential(self.robust, logit_map)
        surrogate = None
        if both:
            model = MixedClassifier(
                self.accurate, self.robust, 0.5, logit_map=logit_map, hard=True
            ).to(self.device)
            surrogate = Surrogate(self.accurate, self.robust, logit_map, PAIR_ALPHA)
        settings = self.settings
        # To a confidence switch, all classes but the first are the same target.
        suite = margin_suite(settings.steps, 1 if logit_map.flattens_rivals else settings.targets)
        title = "attacking both models" if both else "attacking the robust model"
        return self._attack(model, replace(suite, surrogate=surrogate), title, skip_broken=not both)

    def _attack(self, model: nn.Module, suite: Attack, title: str, *, skip_broken: bool) -> Outputs:
        """Outputs at the points of smallest margin of a model; without gradients by random
        search."""
        settings = self.settings
        square = Square(50 * settings.steps, restarts=settings.pool, surrogate=suite.surrogate)
        attack = square if settings.gradient_free else suite
        # On CUDA networks are prepared and passes recorded once for several batches.
        is_cuda = self.device.type == "cuda"
        # What g predicts at the points matters only with `against="pair"`.
        only_robust = settings.against == "any" and settings.rule != "cascade"

        def run(rows: slice) -> Outputs:
            part = self.data.take(torch.arange(rows.start, rows.stop))
            x, y = pixels(part.images.to(self.device)), part.labels.to(self.device)
            points = minimum_margin(
                model,
                x,
                y,
                threat=self.threat,
                stream=rng.stream(settings.seed, "fit", part.index.to(self.device)),
                attack=attack,
                pool=settings.pool,
                skip_broken=skip_broken,
                batch_size=self.batch_size if is_cuda else None,
                observe=self.robust if only_robust else None,
            )
            if points.observed is not None:
                return Outputs(_finite(points.observed, "robust").float().cpu(), None)
            with inference(self.accurate, self.robust), torch.no_grad():
                h, g, first = _join(
                    [
                        _join(
                            [self._outputs(images) for images in point.split(self.batch_size)],
                            dim=0,
                        )
                        for point in points.images
                    ]
                )
            assert g is not None
            return Outputs(h, _classes(g), first)

        parts: list[Outputs] = []
        with progress.stage(title, total=len(self.data)) as stage:
            for rows, part in memory.in_batches(
                run, len(self.data), self.batch_size * (BATCHES if is_cuda else 1)
            ):
                parts.append(part)
                stage.advance(rows.stop - rows.start)
        return _join(parts, dim=1)


def _join(parts: Sequence[Outputs], dim: int | None = None) -> Outputs:
    """The outputs of several batches along a dimension, or of several points (batches) stacked."""

    def join(tensors: Sequence[Tensor | None]) -> Tensor | None:
        known = [tensor for tensor in tensors if tensor is not None]
        return (
            None if not known else torch.stack(known) if dim is None else torch.cat(known, dim=dim)
        )

    h, g, first = (join(side) for side in zip(*parts, strict=True))
    assert h is not None
    return Outputs(h, g, first)


def _finite(output: Tensor, name: str) -> Tensor:
    """The output of a model, which must be finite."""
    if not bool(output.isfinite().all()):
        raise InputError(f"the {name} model must output finite logits, got NaN or inf")
    return output


def _classes(g: Tensor) -> Tensor:
    """(…, K) logits or (…) classes of g → classes; at points, logits have one dimension more than
    points."""
    return g.argmax(dim=-1) if g.is_floating_point() else g
