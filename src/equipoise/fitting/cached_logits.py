"""Outputs of both models on the fitting images, clean and attacked, computed once: the search runs
no model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from equipoise.core import arrays, checks, files, progress
from equipoise.core.checks import InputError
from equipoise.data import Dataset
from equipoise.mixing.provenance import halves

FILE = "logits.npz"
ANY_CLASS = -1  # in `accurate_attacked`: the class that suits the adversary best


class Outputs(NamedTuple):
    """What both models return for images, or at P points of each of them."""

    h: Tensor  # (…, K) logits of h
    # (…) classes of g, or for images its logits (…, K); None if they are not needed
    g: Tensor | None
    first: Tensor | None = None  # (…, K) logits of the first view of h, for a cascade


@dataclass(frozen=True, eq=False)
class CachedLogits:
    """Logits of the robust model h and predictions of the accurate model g on N fitting images."""

    clean: Tensor  # (N, K) logits of h
    attacked: Tensor  # (P, N, K) logits of h at P attacked points per image
    labels: Tensor  # (N,)
    index: Tensor  # (N,) positions in the split
    accurate: Tensor  # (N,) classes that g predicts on the clean images
    accurate_attacked: Tensor  # (P, N) classes that g predicts at the attacked points, or ANY_CLASS
    # (N, K) logits of g on the clean images, if it has logits
    accurate_logits: Tensor | None = None
    first: Tensor | None = None  # (N, K) logits of the first view of h, for a cascade
    first_attacked: Tensor | None = None  # (P, N, K) the same at the attacked points

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

    @property
    def clean_outputs(self) -> tuple[Tensor, ...]:
        """What the robust side of a mixture is a function of: the logits of h, and those of its
        first view if known."""
        return (self.clean,) if self.first is None else (self.clean, self.first)

    @property
    def attacked_outputs(self) -> tuple[Tensor, ...]:
        """The same at the attacked points."""
        return (
            (self.attacked,)
            if self.first_attacked is None
            else (self.attacked, self.first_attacked)
        )

    def tensors(self) -> dict[str, Any]:
        """All fields that are not None."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def take(self, rows: Tensor) -> CachedLogits:
        """Some of the images."""
        images_second = ("attacked", "accurate_attacked", "first_attacked")
        return CachedLogits(
            **{
                name: value[:, rows] if name in images_second else value[rows]
                for name, value in self.tensors().items()
            }
        )

    def with_points(
        self, attacked: Tensor, accurate: Tensor | None = None, first: Tensor | None = None
    ) -> CachedLogits:
        """The same images with further attacked points, and the classes of g there (ANY_CLASS if
        None)."""
        classes = torch.full(attacked.shape[:2], ANY_CLASS) if accurate is None else accurate
        more = (
            {}
            if first is None or self.first_attacked is None
            else {"first_attacked": torch.cat([self.first_attacked, first])}
        )
        return replace(
            self,
            attacked=torch.cat([self.attacked, attacked]),
            accurate_attacked=torch.cat([self.accurate_attacked, classes]),
            **more,
        )

    def with_points_of(self, rows: Tensor, points: Outputs, *, use_accurate: bool) -> CachedLogits:
        """Further attacked points of some images; the other images repeat a point they have."""

        def spread(known: Tensor, own: Tensor) -> Tensor:
            repeated = known[:1].expand(len(own), *known.shape[1:]).clone()
            repeated[:, rows] = own
            return repeated

        classes = torch.full((len(points.h), len(self)), ANY_CLASS)
        if use_accurate:
            assert points.g is not None
            classes[:, rows] = points.g
        first = (
            None
            if points.first is None or self.first_attacked is None
            else spread(self.first_attacked, points.first)
        )
        return self.with_points(spread(self.attacked, points.h), classes, first)

    def halves(self, seed: int) -> tuple[CachedLogits, CachedLogits]:
        """A random half to search on and one to calibrate on; depends only on the seed and the
        image indices."""
        first, second = halves(self.index, seed)
        return self.take(first), self.take(second)

    def check(self, data: Dataset) -> None:
        """Refuse logits of other images, or arrays of another shape or type."""
        (n, classes), points = (len(data), data.num_classes), len(self.attacked)
        shapes = {
            "clean": (n, classes),
            "attacked": (points, n, classes),
            "labels": (n,),
            "index": (n,),
            "accurate": (n,),
            "accurate_attacked": (points, n),
            "accurate_logits": (n, classes),
            "first": (n, classes),
            "first_attacked": (points, n, classes),
        }
        for name, value in self.tensors().items():
            is_float = name in ("clean", "attacked", "accurate_logits", "first", "first_attacked")
            checks.require(
                value.shape == shapes[name], name, f"have shape {shapes[name]}", tuple(value.shape)
            )
            right = value.is_floating_point() if is_float else value.dtype == torch.int64
            checks.require(
                right, name, f"be {'floating point' if is_float else 'int64'}", str(value.dtype)
            )
            checks.require(
                not is_float or not bool(value.isnan().any()), name, "not contain NaN", "NaN"
            )
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
            raise InputError(
                "the robust model must classify at least one attacked image correctly, got none of "
                f"{len(self)}: there is no robustness to keep"
            )
        if torch.equal(self.accurate, self.clean.argmax(dim=1)):
            raise InputError(
                "the accurate and the robust model must differ, got the same predictions on all "
                f"{len(self)} images: mixing them changes nothing"
            )
        return self


def load_logits(folder: Path, data: Dataset) -> CachedLogits | None:
    """The logits of `data` that an interrupted fit in this run folder saved after its attack, if
    there are any."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        logits = CachedLogits(
            **{name: torch.from_numpy(array) for name, array in arrays.read_npz(path).items()}
        )
        logits.check(data)
    except (ValueError, TypeError) as error:  # also an InputError
        reason = error if isinstance(error, InputError) else type(error).__name__
        raise InputError(
            f"{path} must hold the logits of this fit ({reason}); remove it to compute them again"
        ) from None
    progress.note(f"resuming after the attack on {len(logits)} images")
    return logits


def save_logits(folder: Path, logits: CachedLogits) -> None:
    """Write the logits to a run folder."""
    with files.atomic_writer(folder / FILE) as file:
        np.savez_compressed(
            file, **{name: value.numpy() for name, value in logits.tensors().items()}
        )
