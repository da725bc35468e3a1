"""`equipoise certify`: certified radii of smoothed classifiers and of mixtures with them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from equipoise import attacks, checks, mixing, parallel
from equipoise.certify import Plan
from equipoise.cli import options
from equipoise.device import pick
from equipoise.evaluate.certified import Look, Smoothed, Terms, certified
from equipoise.evaluate.crosscheck import CrossCheck
from equipoise.evaluate.diagnosed import Diagnosis
from equipoise.records import Row
from equipoise.report import numbers

_PAYS = 3_000_000  # samples from which on a compiled model has earned its compilation


def certify(
    model: options.Models,
    out: options.Out,
    sigma: Annotated[float, typer.Option(help="Deviation of the Gaussian noise, in [0, 1] pixels, as are all radii.")],
    data: options.Data = "cifar10",
    samples: Annotated[int, typer.Option(help="Noisy copies per image: the number, or with --tolerance or "
                                         "--decide-radius the most.")] = 100_000,
    n0: Annotated[int, typer.Option(help="Noisy copies that choose the class.")] = 100,
    failure: Annotated[float, typer.Option(help="Probability with which a certificate may be wrong.")] = 0.001,
    accurate: Annotated[str | None, typer.Option(help="Model mixed with the smoothed one by its hard prediction; "
                                                 "needs --alpha.", show_default=False)] = None,
    alpha: Annotated[float | None, typer.Option(help="Weight of the smoothed model in the mixture, in [0.5, 1].",
                                                show_default=False)] = None,
    tolerance: Annotated[float | None, typer.Option(help="Stop when the radius is this near to what all samples "
                                                    "would give.", show_default=False)] = None,
    decide_radius: Annotated[float | None, typer.Option(help="Stop when it is decided whether the radius reaches "
                                                        "this.", show_default=False)] = None,
    two_sided: Annotated[bool, typer.Option("--two-sided", help="Bound the other classes as well.")] = False,
    soft: Annotated[bool, typer.Option("--soft", help="Smooth probabilities instead of votes.")] = False,
    sound: Annotated[bool, typer.Option("--sound", help="Noise whose sum with the image is exact in floating "
                                        "point.")] = False,
    attack: Annotated[bool, typer.Option("--attack", help="Attack every certified image inside its radius.")] = False,
    attack_name: Annotated[str, typer.Option(help=f"For --attack: {', '.join(attacks.ATTACKS)}.")] = "fast",
    diagnose: Annotated[bool, typer.Option("--diagnose", help="Confidences as an attack grows, and mixing "
                                           "ratios.")] = False,
    norm: Annotated[str, typer.Option(help="Norm of the radii: Gaussian smoothing certifies l2.")] = "l2",
    split: options.Split = "test",
    start: options.Start = 0,
    count: options.Count = None,
    every: options.Every = 1,
    data_dir: options.DataDir = None,
    arch: options.Arch = None,
    mean: options.Mean = None,
    std: options.Std = None,
    batch_size: Annotated[int | None, typer.Option(help="Noisy images at a time; halved when memory runs out.",
                                                   show_default="64, or 4096 on CUDA")] = None,
    device: options.Device = "auto",
    precision: options.Precision = "auto",
    seed: options.Seed = 0,
    config: options.Config = None,
) -> None:
    """Certified ℓ2 radii (in [0, 1] pixels) by randomized smoothing; resumes where it stopped."""
    checks.require(norm == "l2", "norm", "be l2, the only norm that Gaussian smoothing certifies", norm)
    checks.require((accurate is None) == (alpha is None), "alpha", "be given together with `accurate`", alpha)
    if batch_size is not None:
        checks.whole("batch_size", batch_size, least=1)
    plan = Plan(sigma, samples, n0, failure, 1.0 if alpha is None else alpha, tolerance, decide_radius, two_sided, soft,
                sound)
    chosen, images = pick(device), options.images(data, data_dir, split, start, count, every)
    compiled = chosen.type == "cuda" and len(images) * samples >= _PAYS
    terms = Terms(plan, chosen, seed, batch_size, precision, compiled)
    known = {"arch": arch, "mean": options.channels("mean", mean), "std": options.channels("std", std),
             "num_classes": images.num_classes, "image_shape": images.image_shape}
    other = None if accurate is None else mixing.load(accurate, **known)
    subjects = [Smoothed(reference, mixing.load(reference, **known), other) for reference in model]
    also: list[Look] = [CrossCheck(attacks.named(attack_name), attack_name)] if attack else []
    also += [Diagnosis()] if diagnose else []
    with parallel.started(chosen) as world:
        results = certified(subjects, images, terms, out, also)
        if world.leads:
            show(results, plan)
            typer.echo(str(Path(out) / "summary.json"))


def show(results: list[Row], plan: Plan) -> None:
    """A line per metric: ACR first, then certified accuracy as the radius grows."""
    sizes = {row["n"] for row in results if row["metric"] == "acr"}
    table = Table(title=f"Certified on {min(sizes)} images, σ = {plan.sigma:g}, failure {plan.failure:g}, "
                        "95 % intervals over images")
    table.add_column("model")
    table.add_column("metric")
    table.add_column("value", justify="right")
    for row in results:
        if row["metric"] in ("acr", "samples"):
            digits = 3 if row["metric"] == "acr" else 0
            text = f"{row['value']:.{digits}f} [{row['low']:.{digits}f}, {row['high']:.{digits}f}]"
        elif "broken" in row:
            verdict = "as allowed" if row["sound"] else "MORE THAN ALLOWED"
            text = f"{row['broken']} of {row['n']} broken, {row['allowed']} allowed: {verdict}"
        else:
            text = f"{numbers.percent(row['value'])} {numbers.interval(row['low'], row['high'])}"
        table.add_row(row["model"], row["metric"], text)
    Console().print(table)
