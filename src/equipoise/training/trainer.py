"""The public functions: train a classifier, or the gate of two classifiers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from equipoise import models
from equipoise.core import checks, parallel
from equipoise.core import device as devices
from equipoise.core.modes import outside_inference_mode
from equipoise.core.settings import split
from equipoise.data import Dataset, as_dataset, load_data, pixels, warn_of_class_shares
from equipoise.mixing import GatedClassifier, MixedClassifier, new_gate, save_gate
from equipoise.mixing.folder import GATE, load_mixture
from equipoise.mixing.gate import WIDTH, PairOfLayers
from equipoise.models import checkpoint
from equipoise.training.loop import TrainingResult, run_training
from equipoise.training.objective import Objective, TrainingPlan, downgrade_precision
from equipoise.training.objectives import OBJECTIVES
from equipoise.training.objectives.gate import GATE_PLAN, GateLoss

MOST_Q = 0.98  # of a gate over a mixture: with more, g alone would decide somewhere
PerChannel = float | str | Sequence[float] | None


@models.name_failing_model
@outside_inference_mode
def train(
    objective: str | Objective | type[Objective],
    *,
    data: Any,
    arch: str | None = None,
    model: nn.Module | None = None,
    init: Path | str | None = None,
    mean: PerChannel = None,
    std: PerChannel = None,
    out: Path | str | None = None,
    device: torch.device | str = "auto",
    **settings: Any,
) -> TrainingResult:
    """Train a classifier; the same call with the same `out` resumes it.

    Args:
        objective: a name of `OBJECTIVES` such as "smoothmix", a class of objectives, or one with
            its settings.
        data: training images (a `Dataset`, tensors (images, labels), a torch dataset or a loader),
            or the name of a data set, whose train split is used.
        arch: architecture with fresh weights, a name of `models.ARCHITECTURES`.
        model: a module to train instead; images (B, C, H, W) in [0, 1] → logits (B, K).
        init: checkpoint to start from instead of fresh weights; its means and standard deviations
            stay.
        mean, std: per channel, subtracted and divided by the model; measured on the images if not
            given.
        out: run folder. Without it nothing is written.
        device: auto, cpu or cuda.
        **settings: settings of the objective and of :class:`TrainingPlan`.
    """
    is_class = isinstance(objective, type) and issubclass(objective, Objective)
    checks.require(
        is_class or isinstance(objective, str | Objective),
        "objective",
        "be the name of an objective, an Objective or a class of them",
        type(objective).__name__,
    )
    checks.optional("model", model, nn.Module, "be a torch module")
    checks.optional("arch", arch, str, "be the name of an architecture")
    for name, path in (("init", init), ("out", out)):
        checks.path(name, path)
    if isinstance(objective, Objective):
        (plan,) = split(settings, TrainingPlan)
    else:
        cls = OBJECTIVES.get_entry(objective) if isinstance(objective, str) else objective
        objective, plan = split(settings, cls, TrainingPlan)
        assert isinstance(objective, Objective)
    images = _load_images(data)
    if model is None:
        model = _build_model(
            images, arch, init, _per_channel(mean, images), _per_channel(std, images), plan.seed
        )
        metadata = {"arch": model.config["arch"]}
    else:
        for name, value in (("arch", arch), ("init", init), ("mean", mean), ("std", std)):
            checks.require(value is None, name, "be left out with `model`", value)
        metadata = {}
    device = devices.resolve(device)
    with parallel.process_group(device):
        return run_training(
            model, objective, images, downgrade_precision(plan, device), device, out, metadata
        )


@models.name_failing_model
@outside_inference_mode
def train_gate(
    accurate: nn.Module,
    robust: nn.Module,
    *,
    data: Any,
    width: int = WIDTH,
    layers: PairOfLayers | None = None,
    over: Path | str | MixedClassifier | None = None,
    out: Path | str | None = None,
    device: torch.device | str = "auto",
    **settings: Any,
) -> TrainingResult:
    """Train the gate of a :class:`~equipoise.mixing.GatedClassifier`, which gives every image its
    own alpha [Bai2024].

    Args:
        accurate, robust: images (B, C, H, W) in [0, 1] → logits (B, K); they are not changed.
        data, device: as for :func:`train`.
        width: channels of the first stage of the gate.
        layers: names of a shallow and a deep layer of the accurate and of the robust model, whose
            features the gate reads; found automatically if not given.
        over: a mixture of the same two models, or its folder: the gate is attacked over its map and
            hard labels, as it will be used, instead of over plain mixing. Hinges have thresholds q
            of up to twice that of the mixture.
        out: run folder, which also gets the gate alone, for `fit`.
        **settings: settings of :class:`GateLoss` and of :class:`TrainingPlan`; the defaults are in
            `GATE_PLAN`.
    """
    objective, plan = split({**GATE_PLAN.to_dict(), **settings}, GateLoss, TrainingPlan)
    for name, base in (("accurate", accurate), ("robust", robust)):
        checks.instance(name, base, nn.Module, "be a torch module")
    checks.path("out", out)
    sides = layers if isinstance(layers, tuple | list) else ()
    pairs = [
        side
        for side in sides
        if isinstance(side, tuple | list) and [type(name) for name in side] == [str, str]
    ]
    checks.require(
        layers is None or len(pairs) == len(sides) == 2,
        "layers",
        "be two names for each model",
        layers,
    )
    images = _load_images(data)
    device = devices.resolve(device)
    accurate, robust = accurate.to(device), robust.to(device)
    gate = new_gate(
        accurate,
        robust,
        pixels(images.images[:2].to(device)),
        feature_layers=layers,
        width=width,
        seed=plan.seed,
    )
    model = GatedClassifier(accurate, robust, gate)
    if over is not None:
        model = _over(model, over).to(device)
    with parallel.process_group(device) as world:
        plan = downgrade_precision(plan, device)
        result = run_training(model, objective, images, plan, device, out, {"arch": "gated"})
        if result.out is not None and world.is_leader:
            save_gate(result.out / GATE, gate, accurate, robust, {"objective": repr(objective)})
    return result


def _over(model: GatedClassifier, over: Path | str | MixedClassifier) -> GatedClassifier:
    """The gate over the map of a mixture, in a range from the robust model alone to twice the
    mixture's threshold."""
    if not isinstance(over, MixedClassifier):
        checks.path("over", over)
        folder = Path(str(over).removeprefix("mixture:"))
        over = load_mixture(folder, bases=(model.accurate, model.robust))
    checks.require(
        over.logit_map is not None and over.stages == 1,
        "over",
        "be a mixture with a map and one stage",
        over.method,
    )
    return model.with_settings_of(over).with_range(1 / (1 + min(2 * over.q, MOST_Q)), 1.0)


def measure_channels(data: Dataset) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of every channel, to four digits."""
    means, stds = [], []
    for channel in data.images.unbind(dim=1):
        if channel.is_floating_point():
            std, mean = torch.std_mean(channel, correction=0)
        else:
            levels = torch.arange(256, dtype=torch.float64) / 255
            share = torch.bincount(channel.flatten(), minlength=256).double() / channel.numel()
            mean = (share * levels).sum()
            std = (share * (levels - mean) ** 2).sum().sqrt()
        means.append(round(float(mean), 4))
        stds.append(round(float(std.clamp_min(1e-3)), 4))
    return means, stds


def _load_images(data: Any) -> Dataset:
    images = (
        load_data(data, split="train") if isinstance(data, str) else as_dataset(data, split="train")
    )
    return warn_of_class_shares(images)


def _per_channel(values: PerChannel, data: Dataset) -> list[float] | None:
    """One number per channel; a single one is for all."""
    if values is None:
        return None
    numbers = checks.fractions("mean or std", values, most=data.image_shape[0])
    return numbers * data.image_shape[0] if len(numbers) == 1 else numbers


def _build_model(
    data: Dataset,
    arch: str | None,
    init: Path | str | None,
    mean: list[float] | None,
    std: list[float] | None,
    seed: int,
) -> models.Normalized:
    if init is not None:
        return checkpoint.load(
            init,
            arch,
            num_classes=data.num_classes,
            image_shape=data.image_shape,
            mean=mean,
            std=std,
        )
    if arch is None:
        raise checks.InputError("`arch` must be given, unless `model` or `init` is, got None")
    if mean is None or std is None:
        means, stds = measure_channels(data)
        mean, std = mean or means, std or stds
    return models.build(
        arch,
        num_classes=data.num_classes,
        image_shape=data.image_shape,
        mean=mean,
        std=std,
        seed=seed,
    )
