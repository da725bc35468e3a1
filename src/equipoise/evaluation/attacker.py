"""Adversarial images of a model: the public function `attack`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from equipoise.attacks import Attack, BatchAttack, Suite, attack_dataset, judge_with_new_passes
from equipoise.core import checks, format, geometry, memory, rng, stats
from equipoise.core.device import attack_batch_size, check_precision, full_precision, move, resolve
from equipoise.core.modes import inference, outside_inference_mode
from equipoise.core.threat import Threat, require_threat
from equipoise.data import Dataset, as_dataset, pixels
from equipoise.evaluation.job import MODULE, check_common
from equipoise.evaluation.plan import Attacks, select_attacks
from equipoise.models import as_classifier, check_forward, name_failing_model


@dataclass(frozen=True, eq=False)
class AttackedImages:
    """N attacked images, on the device of the clean ones, and what the model predicts for them."""

    images: Tensor  # (N, C, H, W) in [0, 1]
    labels: Tensor  # (N,)
    predicted: Tensor  # (N,)
    threat: Threat
    # (N,) of the passes of a randomised model; `predicted` is then most frequent
    share_correct: Tensor | None = None
    passes: int | None = None  # per image
    distance: Tensor | None = None  # (N,) norm of every perturbation, in double precision

    @property
    def robust(self) -> Tensor:
        """(N,) bool: which images are still classified correctly."""
        return self.predicted == self.labels

    @property
    def radii(self) -> Tensor:
        """(N,) norm of what breaks each image, infinite where nothing does; the smallest for
        `minimum-norm`."""
        checks.require(self.distance is not None, "distance", "be known", None)
        assert self.distance is not None
        return self.distance.masked_fill(self.robust.to(self.distance.device), torch.inf)

    def __str__(self) -> str:
        e = (
            stats.share(self.robust.tolist())
            if self.share_correct is None or self.passes is None
            else stats.mean_share(self.share_correct.tolist(), self.passes)
        )
        return (
            f"{format.percent(e.value)} {format.interval(e.low, e.high)} of {e.n} images classified correctly "
            f"under attack, {self.threat}"
        )


@overload
def attack(
    model: nn.Module,
    data: Tensor | NDArray[Any],
    labels: Tensor | NDArray[Any],
    *,
    threat: Threat,
    attack: Attacks = ...,
    device: str | torch.device = ...,
    batch_size: int | None = ...,
    precision: str = ...,
    seed: int = ...,
    **settings: Any,
) -> Tensor: ...


@overload
def attack(
    model: nn.Module,
    data: Any,
    labels: None = ...,
    *,
    threat: Threat,
    attack: Attacks = ...,
    device: str | torch.device = ...,
    batch_size: int | None = ...,
    precision: str = ...,
    seed: int = ...,
    **settings: Any,
) -> AttackedImages: ...


@name_failing_model
@outside_inference_mode
def attack(
    model: nn.Module,
    data: Any,
    labels: Any = None,
    *,
    threat: Threat,
    attack: Attacks = "fast",
    device: str | torch.device = "auto",
    batch_size: int | None = None,
    precision: str = "auto",
    seed: int = 0,
    **settings: Any,
) -> AttackedImages | Tensor:
    """Attack a model on images, as :func:`~equipoise.evaluation.evaluate` does, and return the
    attacked images.

        x_adv = attack(model, images, labels, threat=Threat("linf", "8/255"))     # tensors: a
        tensor (B, C, H, W) attacked = attack(model, data, threat=Threat("linf", "8/255"))
         # a data set: AttackedImages

    From torchattacks, `PGD(model, eps=8/255, steps=20)(images, labels)` becomes `attack(model,
    images, labels, threat=Threat("linf", 8/255), attack="pgd", steps=20)`. From foolbox,
    `LinfPGD(steps=20)(fmodel, images, labels, epsilons=8/255)` becomes the same: its three results
    are `attacked.images` (raw and clipped are the same here) and `~attacked.robust` of `attacked =
    attack(model, (images, labels), …)`. Attacks of both libraries run here by
    :func:`~equipoise.attacks.from_torchattacks` and :func:`~equipoise.attacks.from_foolbox`.

    `attack="minimum-norm"` finds the smallest perturbation of every image up to the radius of the
    threat, like the minimization attacks of foolbox: `attack(model, (images, labels), …,
    attack="minimum-norm").radii`.

    Only the given attack is run: against a mixture, `evaluate` runs adaptive attacks.

    Args:
        model: images (B, C, H, W) in [0, 1] → logits (B, K).
        data: tensor of images, with `labels`; or a `Dataset`, a pair (images, labels), a torch
            dataset or a loader.
        labels: (B,), if `data` is a tensor.
        threat: the perturbations that the attack may use.
        attack: the name of an attack, an :class:`~equipoise.attacks.Attack`, or several of them, as
            a list or as text such as "fast,square"; each is run on the images that the ones before
            left.
        device: where to compute; auto is the device of the model for tensors, and a GPU if there is
            one for data sets.
        batch_size: images per batch, 128 or on CUDA 512 if not given; halved when memory runs out.
        precision: that of the search, auto, fp32 or bf16; success is decided in full precision.
        seed: random seed.
        settings: those of an attack given by name, such as `steps=50`.

    Returns:
        For tensors the attacked images, on the device of the images: what fools the model, or else
            comes nearest to it.
        For data sets :class:`AttackedImages`, on the device of their images.
    """
    checks.instance("model", model, nn.Module, MODULE)
    check_common(require_threat(threat), device=device)
    if batch_size is not None:
        checks.whole("batch_size", batch_size, least=1)
    checks.seed(seed)
    checks.require(
        "norm" not in settings,
        "norm",
        "be left out: it is that of the threat",
        settings.get("norm"),
    )
    selected = select_attacks(attack, threat.norm, **settings)
    checks.require(
        len(selected) == 1
        or not any(one.measures_radius or one.repeats for one in selected.values()),
        "attack",
        "be alone if it measures radii or repeats its passes",
        list(selected),
    )
    name, chosen = (
        next(iter(selected.items()))
        if len(selected) == 1
        else (",".join(selected), Suite(tuple(selected.values())))
    )
    stages = [stage.name for stage in chosen.stages()]
    checks.require(
        len(set(stages)) == len(stages),
        "attack",
        "name every attack once, also those in a suite",
        name,
    )
    checks.require(
        labels is None or isinstance(data, Tensor | np.ndarray),
        "labels",
        "be left out beside a data set, which has its own",
        type(labels).__name__,
    )
    images = as_dataset(data if labels is None else (data, labels))
    where = (
        _device_of(model, images.images)
        if labels is not None and device == "auto"
        else resolve(device)
    )
    check_precision(precision, where)
    model = move(as_classifier(model, images.image_shape), where)
    check_forward("model", model, pixels(images.images[:1].to(where)))
    attacked = _attack(
        model,
        images,
        chosen,
        name,
        threat=threat,
        device=where,
        batch_size=attack_batch_size(batch_size, where),
        precision=precision,
        seed=seed,
    )
    return attacked if labels is None else attacked.images


def _attack(
    model: nn.Module,
    images: Dataset,
    attack: Attack,
    name: str,
    *,
    threat: Threat,
    device: torch.device,
    batch_size: int,
    precision: str,
    seed: int,
) -> AttackedImages:
    if not isinstance(attack, BatchAttack) and attack.repeats is None:
        state = attack_dataset(
            attack,
            model,
            images,
            threat=threat,
            seed=seed,
            precision=precision,
            batch_size=batch_size,
            device=device,
            keep_images=True,
            title=name,
        )
        assert state.images is not None
        return AttackedImages(
            state.images,
            images.labels,
            state.predicted.to(images.labels.device),
            threat,
            distance=_distance(state.images, images, threat),
        )

    def run(rows: slice) -> tuple[Tensor, ...]:
        x, y = pixels(images.images[rows].to(device)), images.labels[rows].to(device)
        stream = rng.stream(seed, name, images.index[rows].to(device))
        with inference(model):
            x_adv = attack(model, x, y, threat=threat, stream=stream, precision=precision)
            with torch.no_grad(), full_precision(device):
                verdict = judge_with_new_passes(lambda: model(x_adv), y, stream, attack.repeats)
        place = images.labels.device
        return (
            x_adv.to(images.images.device),
            verdict.predicted.to(place),
            verdict.share_correct.to(place),
        )

    parts = [part for _, part in memory.in_batches(run, len(images), batch_size)]
    attacked, predicted, share = (torch.cat(side) for side in zip(*parts, strict=True))
    return AttackedImages(
        attacked,
        images.labels,
        predicted,
        threat,
        None if attack.repeats is None else share,
        attack.repeats,
        _distance(attacked, images, threat),
    )


def _distance(attacked: Tensor, images: Dataset, threat: Threat) -> Tensor:
    return geometry.size(attacked.double() - pixels(images.images).double(), threat.norm)


def _device_of(model: nn.Module, images: Tensor) -> torch.device:
    """Where a model is: that of its first weight, or of the images if it has none."""
    return next(
        (tensor.device for tensor in (*model.parameters(), *model.buffers())), images.device
    )
