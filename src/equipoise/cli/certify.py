"""`equipoise certify`: certified radii of smoothed classifiers and of mixtures with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from equipoise import attacks, mixing
from equipoise.certification import SmoothingPlan
from equipoise.cli import options
from equipoise.core import checks, parallel, records
from equipoise.core.device import pick
from equipoise.core.records import Row
from equipoise.evaluation.alpha_selection import CleanTarget, others
from equipoise.evaluation.certificate_check import CrossCheck
from equipoise.evaluation.certified import CertificateProbe, CertificationConditions, CertificationJob, certified
from equipoise.evaluation.diagnosis import Diagnosis
from equipoise.reporting import numbers, style
from equipoise.reporting.certified import named

_PAYS = 3_000_000  # samples from which on a compiled model has earned its compilation


def certify(
    model: options.Models,
    out: options.Out,
    sigma: Annotated[str, typer.Option(help="Deviation of the Gaussian noise, in [0, 1] pixels, as are all radii; "
                                       "several by commas: one per model, or all for the one model.")],
    data: options.Data = "cifar10",
    samples: Annotated[int, typer.Option(help="Noisy copies per image: the number, or with --tolerance or "
                                         "--decide-radius the most.")] = 100_000,
    n0: Annotated[int, typer.Option(help="Noisy copies that choose the class.")] = 100,
    failure: Annotated[float, typer.Option(help="Probability with which a certificate may be wrong.")] = 0.001,
    accurate: Annotated[str | None, typer.Option(help="Model mixed with the smoothed one by its hard prediction; "
                                                 "needs --alpha or --clean.", show_default=False)] = None,
    alpha: Annotated[float | None, typer.Option(help="Weight of the smoothed model in the mixture, in [0.5, 1].",
                                                show_default=False)] = None,
    clean: Annotated[float | None, typer.Option(help="Instead of --alpha: the largest alpha with this estimated clean "
                                                "accuracy, such as 0.9, chosen per model and sigma on other images of "
                                                "the split; shows the frontier over them.",
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
    checks.require((accurate is None) == (alpha is None and clean is None), "alpha",
                   "be given together with `accurate`, or `clean` in its place", alpha)
    checks.require(alpha is None or clean is None, "clean", "be left out beside `alpha`", clean)
    if batch_size is not None:
        checks.whole("batch_size", batch_size, least=1)
    sigmas = [checks.fraction("sigma", part) for part in sigma.split(",")]
    plans = [SmoothingPlan(each, samples, n0, failure, 1.0 if alpha is None else alpha, tolerance, decide_radius, two_sided,
                  soft, sound) for each in sigmas]
    chosen, images = pick(device), options.images(data, data_dir, split, start, count, every)
    compiled = chosen.type == "cuda" and len(images) * samples >= _PAYS
    terms = CertificationConditions(plans[0], chosen, seed, batch_size, precision, compiled)
    known = {"arch": arch, "mean": options.channels("mean", mean), "std": options.channels("std", std),
             "num_classes": images.num_classes, "image_shape": images.image_shape}
    other = None if accurate is None else mixing.load(accurate, **known)
    bases = {reference: mixing.load(reference, **known) for reference in model}
    subjects = [CertificationJob(name, bases[reference], other, plan) for name, reference, plan in _paired(model, plans)]
    wish = None if clean is None else CleanTarget(clean, others(options.images(data, data_dir, split, 0, None, 1), images))
    also: list[CertificateProbe] = [CrossCheck(attacks.named(attack_name), attack_name)] if attack else []
    also += [Diagnosis()] if diagnose else []
    settings = {"command": options.command(), "references": list(model)}
    with parallel.started(chosen) as world:
        results = certified(subjects, images, terms, out, also, wish, settings)
        if world.leads:
            show(results, terms.plan)
            if wish is not None:
                _explain(records.summary(out))
            typer.echo(str(Path(out) / "summary.json"))


def _paired(references: Sequence[str], plans: Sequence[SmoothingPlan]) -> list[tuple[str, str, SmoothingPlan | None]]:
    """Name, model and plan of every subject; with one sigma all share the plan of the run."""
    if len(plans) == 1:
        return [(reference, reference, None) for reference in references]
    fits = len(references) in (1, len(plans))
    checks.require(fits, "sigma", f"be one, or one for each of the {len(references)} models", len(plans))
    pairs = zip(list(references) * (len(plans) // len(references)), plans, strict=True)
    return [(f"{reference} (sigma {plan.sigma:g})", reference, plan) for reference, plan in pairs]


def _explain(told: dict[str, Any]) -> None:
    """What was chosen and where, and the frontier."""
    called = style.short(row["model"] for row in (*told["chosen"], *told["left-out"]))
    for row in told["chosen"]:
        typer.echo(f"{called[row['model']]}: alpha {row['alpha']:.4g} for {numbers.percent(row['wanted'])} clean; "
                   f"{numbers.percent(row['clean-estimate'])} {numbers.interval(row['low'], row['high'])} of the "
                   f"{row['n']} other images that chose it (estimate)")
    for row in told["left-out"]:
        typer.echo(f"{called[row['model']]}: left out, no alpha gives {numbers.percent(row['wanted'])} clean; "
                   f"at most {numbers.percent(row['most'])} of the {row['n']} other images (estimate)")
    table = Table(title="Frontier: the best of these mixtures at every radius")
    for name in ("radius", "certified", "model", "alpha"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for row in told["frontier"]:
        table.add_row(f"{row['radius']:.2f}", f"{numbers.percent(row['value'])} "
                      f"{numbers.interval(row['low'], row['high'])}", called[row["model"]], f"{row['alpha']:.4g}")
    Console().print(table)


def show(results: list[Row], plan: SmoothingPlan) -> None:
    """A line per metric: ACR first, then certified accuracy as the radius grows."""
    sizes = {row["n"] for row in results if row["metric"] == "acr"}
    sigmas = ", ".join(f"{sigma:g}" for sigma in dict.fromkeys(row["sigma"] for row in results if "sigma" in row))
    table = Table(title=f"Certified on {min(sizes)} images, σ = {sigmas}, failure {plan.failure:g}, "
                        "95 % intervals over images")
    called = style.short(named(row) for row in results)
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
        first = row["metric"] == "acr"
        if first:
            table.add_section()
        table.add_row(called[named(row)] if first or "sigma" not in row else "", row["metric"], text)
    Console().print(table)
