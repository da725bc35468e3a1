"""`equipoise evaluate`: clean and attacked accuracy, with intervals."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

from equipoise import attacks, mixing
from equipoise.cli import options, table
from equipoise.core import checks, parallel, records
from equipoise.core.device import pick
from equipoise.core.threat import Threat
from equipoise.data import Dataset
from equipoise.evaluation import Attack, Conditions, Job, begin, judge, untouched
from equipoise.evaluation.adaptive import KINDS, aimed, with_logits
from equipoise.evaluation.adaptive import adaptive as adaptively
from equipoise.evaluation.cost import costs
from equipoise.evaluation.lipschitz_estimates import estimated
from equipoise.mixing import MixedClassifier

SOURCES = {"std": "accurate", "rob": "robust", "mix": None}


def evaluate(
    model: options.Models,
    out: options.Out,
    data: options.Data = "cifar10",
    norm: options.Norm = "linf",
    eps: options.Eps = "8/255",
    attack: Annotated[str, typer.Option(help=", ".join(attacks.ATTACKS))] = "pgd",
    steps: Annotated[int | None, typer.Option(help="Gradient steps of the attack.", show_default=False)] = None,
    restarts: Annotated[int | None, typer.Option(help="Starts per image.", show_default=False)] = None,
    source: Annotated[str, typer.Option(help="Gradients of a mixture's attack: std (accurate base), "
                                        "rob (robust base) or mix.")] = "mix",
    adaptive: Annotated[str, typer.Option(help="Further attacks on a mixture that hides its gradients: surrogate, "
                                          "through, both as surrogate,through, or none.")] = "surrogate",
    stand_in: Annotated[str | None, typer.Option(help="Model with gradients in place of an accurate base without.",
                                                 show_default=False)] = None,
    estimate: Annotated[bool, typer.Option("--estimate", help="Also estimate local Lipschitz constants of the robust "
                                           "models in the ball, and the margins they leave to a mixture: never a "
                                           "certificate.")] = False,
    split: options.Split = "test",
    start: options.Start = 0,
    count: options.Count = None,
    every: options.Every = 1,
    data_dir: options.DataDir = None,
    arch: options.Arch = None,
    mean: options.Mean = None,
    std: options.Std = None,
    batch_size: options.BatchSize = 128,
    device: options.Device = "auto",
    precision: options.Precision = "auto",
    seed: options.Seed = 0,
    config: options.Config = None,
) -> None:
    """Clean and attacked accuracy of models on the same images; resumes where it stopped."""
    conditions = Conditions(Threat(norm, eps), pick(device), seed, batch_size, precision)
    checks.one_of("source", source, SOURCES)
    for name, value in (("steps", steps), ("restarts", restarts)):
        checks.require(value is None or value >= 1, name, "be a whole number of at least 1", value)
    chosen = attacks.named(attack, steps=steps, restarts=restarts)
    images = options.images(data, data_dir, split, start, count, every)
    kinds = [] if adaptive == "none" else adaptive.split(",")
    for kind in kinds:
        checks.one_of("adaptive", kind, (*KINDS, "none"))
    wishes: dict[str, Any] = {"arch": arch, "mean": options.channels("mean", mean),
                              "std": options.channels("std", std), "num_classes": images.num_classes,
                              "image_shape": images.image_shape, "seed": seed}
    helper = None if stand_in is None else mixing.load(stand_in, **wishes).to(conditions.device)
    subjects, pairs, mixtures = [], [], {}
    robust: dict[str, nn.Module] = {}
    for reference in model:
        loaded = mixing.load(reference, **wishes)
        names, compared = parts(reference, loaded, alone=len(model) == 1)
        pairs += compared
        robust |= {name: module for name, module in names.items() if not compared or name.endswith("robust")}
        for name, module in names.items():
            voice = with_logits(module, images.num_classes, images.image_shape) if compared else module
            # An answer without logits has no gradients: they come from a stand-in or from the robust side.
            own = surrogate(module, source) if voice is module else helper or getattr(loaded, "robust", None)
            listed: dict[str, Attack] = {"clean": untouched, attack: aimed(chosen, own)}
            if isinstance(module, MixedClassifier):
                mixtures[name] = module
                listed |= adaptively(module, chosen, kinds, helper, precision)
            subjects += [Job(name, voice, key, function) for key, function in listed.items()]
    checks.require(source == "mix" or bool(pairs), "source", "be mix where no model is a mixture", source)
    settings = {"command": options.command(), "references": list(model)}
    with parallel.started(conditions.device) as world:
        run = begin(out, subjects, images, conditions, settings)
        told = _told(mixtures, images, conditions) if world.leads else {}
        results = judge(subjects, images, conditions, run, pairs, told)
        seen = estimated(robust, images, conditions, out, records.read(out)) if estimate else []
        if world.leads:
            table.show(results, conditions.threat)
            if seen:
                table.show_estimates(seen, conditions.threat)
            typer.echo(str(Path(out) / "summary.json"))


def _told(mixtures: Mapping[str, MixedClassifier], images: Dataset, conditions: Conditions) -> dict[str, Any]:
    """A warning for mixtures fitted on some of these images, and what a prediction of the mixture costs."""
    told: dict[str, Any] = {}
    overlap = {name: both for name, mixture in mixtures.items()
               if mixture.fitted is not None and (both := list(mixture.fitted.overlap(images)))}
    for name, both in overlap.items():
        typer.echo(f"warning: {name} was fitted on images {', '.join(both[:5])}{' …' * (len(both) > 5)} of these, so "
                   "its accuracy on them flatters it", err=True)
    if overlap:
        told["overlap"] = overlap
    if len(mixtures) == 1:
        mixture = next(iter(mixtures.values())).to(conditions.device)
        told["cost"] = [cost.facts() for cost in costs(mixture, images, conditions.device, conditions.batch_size)]
    return told


def parts(reference: str, module: nn.Module, *, alone: bool) -> tuple[dict[str, nn.Module], list[tuple[str, str]]]:
    """A mixture is evaluated beside its two bases, on the same images; the pairs are compared."""
    if not isinstance(module, MixedClassifier):
        return {reference: module}, []
    prefix = "" if alone else f"{reference} "
    names = {f"{prefix}accurate": module.accurate, f"{prefix}robust": module.robust, f"{prefix}mixed": module}
    return names, [(f"{prefix}mixed", f"{prefix}robust"), (f"{prefix}mixed", f"{prefix}accurate")]


def surrogate(module: nn.Module, source: str) -> nn.Module | None:
    """Where the gradients come from; a model that is no mixture has only its own."""
    side = SOURCES[source]
    return getattr(module, side) if side is not None and isinstance(module, MixedClassifier) else None
