"""Outputs of both models on the fitting images, clean and attacked, computed once: the search runs no model."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from equipoise import models
from equipoise.attacks import Attack, Square, margin_suite, minimum_margin
from equipoise.core import arrays, checks, files, memory, progress, rng
from equipoise.core.checks import InputError
from equipoise.core.device import attack_batch_size
from equipoise.core.modes import inference
from equipoise.core.threat import Threat
from equipoise.data import Dataset, pixels
from equipoise.fitting.settings import FitSettings
from equipoise.mixing import LogitMap, MixedClassifier
from equipoise.mixing.provenance import halves
from equipoise.mixing.surrogates import Surrogate

FILE = "logits.npz"
ANY_CLASS = -1  # in `accurate_attacked`: the class that suits the adversary best
MIN_IMAGES = 50
BATCHES = 4  # that are attacked together on CUDA: batches stay full when only few images of each survive
PAIR_ALPHA = 0.9  # weight of the robust model in the gradients of an attack on both: the strongest of 0.3 … 0.99


@dataclass(frozen=True, eq=False)
class CachedLogits:
    """Logits of the robust model h and predictions of the accurate model g on N fitting images."""

    clean: Tensor  # (N, K) logits of h
    attacked: Tensor  # (P, N, K) logits of h at P attacked points per image
    labels: Tensor  # (N,)
    index: Tensor  # (N,) positions in the split
    accurate: Tensor  # (N,) classes that g predicts on the clean images
    accurate_attacked: Tensor  # (P, N) classes that g predicts at the attacked points, or ANY_CLASS
    accurate_logits: Tensor | None = None  # (N, K) logits of g on the clean images, if it has logits

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def correct(self) -> Tensor:
        """(N,) clean images that h classifies correctly."""
        return self.clean.argmax(dim=1) == self.labels

    @property
    def survived(self) -> Tensor:
        """(N,) images that h classifies correctly, clean and at every attacked point."""
        return self.correct & (self.attacked.argmax(dim=2) == self.labels).all(dim=0)

    def tensors(self) -> dict[str, Any]:
        """All fields that are not None."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def take(self, rows: Tensor) -> CachedLogits:
        """Some of the images."""
        images_second = ("attacked", "accurate_attacked")
        return CachedLogits(**{name: value[:, rows] if name in images_second else value[rows]
                               for name, value in self.tensors().items()})

    def with_points(self, attacked: Tensor, accurate: Tensor | None = None) -> CachedLogits:
        """The same images with further attacked points, and the classes of g there (ANY_CLASS if None)."""
        classes = torch.full(attacked.shape[:2], ANY_CLASS) if accurate is None else accurate
        return replace(self, attacked=torch.cat([self.attacked, attacked]),
                                   accurate_attacked=torch.cat([self.accurate_attacked, classes]))

    def halves(self, seed: int) -> tuple[CachedLogits, CachedLogits]:
        """A random half to search on and one to calibrate on; depends only on the seed and the image indices."""
        first, second = halves(self.index, seed)
        return self.take(first), self.take(second)

    def check(self, data: Dataset) -> None:
        """Refuse logits of other images, or arrays of another shape or type."""
        (n, classes), points = (len(data), data.num_classes), len(self.attacked)
        shapes = {"clean": (n, classes), "attacked": (points, n, classes), "labels": (n,), "index": (n,),
                  "accurate": (n,), "accurate_attacked": (points, n), "accurate_logits": (n, classes)}
        for name, value in self.tensors().items():
            is_float = name in ("clean", "attacked", "accurate_logits")
            checks.require(value.shape == shapes[name], name, f"have shape {shapes[name]}", tuple(value.shape))
            right = value.is_floating_point() if is_float else value.dtype == torch.int64
            checks.require(right, name, f"be {'floating point' if is_float else 'int64'}", str(value.dtype))
            checks.require(not is_float or not bool(value.isnan().any()), name, "not contain NaN", "NaN")
        same = torch.equal(self.labels, data.labels) and torch.equal(self.index, data.index)
        checks.require(same, "labels and index", "be those of the images", "others")
        for name, least in (("accurate", 0), ("accurate_attacked", ANY_CLASS)):
            value = getattr(self, name)
            in_range = bool(((value >= least) & (value < classes)).all())
            checks.require(in_range, name, f"lie in {least}..{classes - 1}", "other classes")

    def checked(self) -> CachedLogits:
        """These logits, or an InputError if no mixture can be fitted on them."""
        checks.labels(self.labels, self.clean.shape[1], len(self))
        if not bool(self.survived.any()):
            raise InputError("the robust model must classify at least one attacked image correctly, got none of "
                             f"{len(self)}: there is no robustness to keep")
        if torch.equal(self.accurate, self.clean.argmax(dim=1)):
            raise InputError("the accurate and the robust model must differ, got the same predictions on all "
                             f"{len(self)} images: mixing them changes nothing")
        return self


def load_logits(folder: Path, data: Dataset) -> CachedLogits | None:
    """The logits of `data` that an interrupted fit in this run folder saved after its attack, if there are any."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        logits = CachedLogits(**{name: torch.from_numpy(array) for name, array in arrays.read_npz(path).items()})
        logits.check(data)
    except (ValueError, TypeError) as error:  # also an InputError
        reason = error if isinstance(error, InputError) else type(error).__name__
        raise InputError(f"{path} must hold the logits of this fit ({reason}); remove it to compute them again"
                         ) from None
    progress.note(f"resuming after the attack on {len(logits)} images")
    return logits


def save_logits(folder: Path, logits: CachedLogits) -> None:
    """Write the logits to a run folder."""
    with files.atomic_writer(folder / FILE) as file:
        np.savez_compressed(file, **{name: value.numpy() for name, value in logits.tensors().items()})


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

    def describe(self) -> dict[str, Any]:
        """Identity of the attack, for `run.toml`."""
        settings = {name: getattr(self.settings, name) for name in ("steps", "targets", "pool", "gradient_free")}
        return {"attack": "minimum-margin", "version": 1, **settings}

    def check_inputs(self) -> None:
        """Count the images and probe both models with one: h must output logits, g logits or classes."""
        count = len(self.data)
        checks.require(count >= MIN_IMAGES, "count", f"give at least {MIN_IMAGES} images to fit on", count)
        image = pixels(self.data.images[:1].to(self.device))
        for name, model, dims, expected in (("robust", self.robust, (2,), "logits (B, K)"),
                                            ("accurate", self.accurate, (1, 2), "logits (B, K) or classes (B,)")):
            output = models.check_forward(name, model.to(self.device), image)
            checks.require(output.dim() in dims, name, f"output {expected}", f"shape {tuple(output.shape)}")

    def has_gradients(self) -> bool:
        """Whether the logits of h depend differentiably on the image."""
        x = pixels(self.data.images[:1].to(self.device)).requires_grad_()
        with inference(self.robust), torch.enable_grad():
            return bool(self.robust(x).requires_grad)

    def clean_logits(self) -> CachedLogits:
        """Both models on the clean images; no attacked points yet."""
        with inference(self.accurate, self.robust), torch.no_grad():
            outputs = [output for _, output in memory.in_batches(
                lambda rows: self._outputs(pixels(self.data.images[rows].to(self.device))), len(self.data),
                self.batch_size)]
        h, g = (torch.cat(side) for side in zip(*outputs, strict=True))
        return CachedLogits(h, h.new_empty(0, *h.shape), self.data.labels, self.data.index, _classes(g),
                            torch.empty(0, len(h), dtype=torch.int64), g if g.dim() == 2 else None)

    def _outputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of h, and logits or classes of g."""
        h, g = self.robust(x).float(), self.accurate(x)
        for name, output in (("robust", h), ("accurate", g)):
            if not bool(output.isfinite().all()):
                raise InputError(f"the {name} model must output finite logits, got NaN or inf")
        if g.dim() == 2:
            checks.require(g.shape == h.shape, "accurate and robust", "have equal numbers of classes",
                           (g.shape[1], h.shape[1]))
        else:
            g = checks.labels(g, h.shape[1], len(x), "classes of the accurate model").long()
        return h.cpu(), g.cpu()

    def run(self, logit_map: LogitMap, *, both: bool = False) -> tuple[Tensor, Tensor]:
        """(P, N, K) logits of h and (P, N) classes of g at the points of smallest margin of the mapped model M(h).

        With a cache, an attack that any fit has already made is read from there.
        """
        if self.settings.cache is None:
            return self._run(logit_map, both=both)
        folder = Path(self.settings.cache)
        path = folder / f"{self._key(logit_map, both=both)}.npz"
        if not path.exists():
            h, g = self._run(logit_map, both=both)
            folder.mkdir(parents=True, exist_ok=True)
            with files.atomic_writer(path) as file:
                np.savez_compressed(file, h=h.numpy(), g=g.numpy())
        stored = arrays.read_npz(path)
        shapes = {name: array.shape for name, array in stored.items()}
        points = shapes.get("g", (0,))[0]
        checks.require(shapes == {"h": (points, len(self.data), self.data.num_classes), "g": (points, len(self.data))},
                       str(path), "hold the logits of this attack (remove it to compute them again)", shapes)
        h, g = (torch.from_numpy(stored[name]) for name in ("h", "g"))
        return h, g

    def _key(self, logit_map: LogitMap, *, both: bool) -> str:
        """Name of the attack in a cache: equal for equal models, images, threat, settings and map."""
        identity = {"models": [models.identity(self.accurate), models.identity(self.robust)], "both": both,
                    "data": self.data.describe(), "threat": self.threat.to_dict(), "seed": self.settings.seed,
                    "map": logit_map.describe(), **self.describe()}
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:24]

    def _run(self, logit_map: LogitMap, *, both: bool = False) -> tuple[Tensor, Tensor]:
        """Run the attack.

        With `both` the accurate model is attacked too, for the smallest margin of M(h) against the class that g
        predicts. A mixture with α = 1/2 is wrong wherever g is, so its margin orders such points by that of M(h) alone,
        for every threshold.
        """
        model: nn.Module = nn.Sequential(self.robust, logit_map.to(self.device))
        surrogate = None
        if both:
            model = MixedClassifier(self.accurate, self.robust, 0.5, logit_map=logit_map, hard=True).to(self.device)
            surrogate = Surrogate(self.accurate, self.robust, logit_map, PAIR_ALPHA)
        settings = self.settings
        # To a confidence switch, all classes but the first are the same target.
        suite = margin_suite(settings.steps, 1 if logit_map.flattens_rivals else settings.targets)
        attack: Attack = Square(50 * settings.steps, restarts=settings.pool) if settings.gradient_free else suite

        # On CUDA networks are prepared and passes recorded once for several batches.
        is_cuda = self.device.type == "cuda"

        def run(rows: slice) -> tuple[Tensor, Tensor]:
            part = self.data.take(torch.arange(rows.start, rows.stop))
            x, y = pixels(part.images.to(self.device)), part.labels.to(self.device)
            points = minimum_margin(
                model, x, y, threat=self.threat, stream=rng.stream(settings.seed, "fit", part.index.to(self.device)),
                attack=replace(attack, surrogate=surrogate), pool=settings.pool, skip_broken=not both,
                batch_size=self.batch_size if is_cuda else None)
            with inference(self.accurate, self.robust), torch.no_grad():
                outputs = [self._outputs(images) for point in points.images for images in point.split(self.batch_size)]
            h, g = torch.cat([h for h, _ in outputs]), torch.cat([_classes(g) for _, g in outputs])
            return h.view(-1, len(x), h.shape[1]), g.view(-1, len(x))

        parts: list[tuple[Tensor, Tensor]] = []
        title = "attacking both models" if both else "attacking the robust model"
        with progress.task(title, total=len(self.data)) as task:
            for rows, part in memory.in_batches(run, len(self.data), self.batch_size * (BATCHES if is_cuda else 1)):
                parts.append(part)
                task.advance(rows.stop - rows.start)
        return torch.cat([h for h, _ in parts], dim=1), torch.cat([g for _, g in parts], dim=1)


def _classes(g: Tensor) -> Tensor:
    return g.argmax(dim=1) if g.dim() == 2 else g
