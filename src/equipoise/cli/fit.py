"""`equipoise fit`: the most accurate mixture that loses at most so much robust accuracy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from equipoise import mixing, models
from equipoise.cli import options
from equipoise.core import checks, records
from equipoise.core.device import pick
from equipoise.core.threat import Threat
from equipoise.fitting import AttackStrength, FitSettings, beta, lose_at_most
from equipoise.fitting.gated import MAP, gate_into
from equipoise.fitting.run import fit_into
from equipoise.mixing import LogitMap, MixedClassifier
from equipoise.reporting import numbers


def fit_(
    accurate: options.Side,
    robust: options.Side,
    out: options.Out,
    data: options.Data = "cifar10",
    norm: options.Norm = "linf",
    eps: options.Eps = "8/255",
    lose: Annotated[float | None, typer.Option("--lose-at-most", help="Points (of 100) of robust accuracy that may be "
                                               "lost; 1 if no target is given.", show_default=False)] = None,
    beta_: Annotated[float | None, typer.Option("--beta", help="Share of the robust model's attacked accuracy to "
                                                "keep.", show_default=False)] = None,
    alpha: Annotated[float | None, typer.Option(help="Plain mixing with this weight; nothing is fitted.",
                                                show_default=False)] = None,
    frontier: Annotated[bool, typer.Option("--frontier", help="Also show the mixtures for other targets, those that "
                                               "no other beats.")] = False,
    objective: Annotated[str, typer.Option(help="mixture (needs the accurate model's answers) or surrogate (the "
                                           "paper's).")] = "mixture",
    clamp: Annotated[str, typer.Option(help="gelu-monotone, gelu, relu, elu, softplus or linear.")] = "gelu-monotone",
    rule: Annotated[str, typer.Option(help="nuts (the paper's maps), switch (maps that ask only how sure the robust "
                                      "model is) or auto (all).")] = "auto",
    against: Annotated[str, typer.Option(help="any (whatever the accurate model answers) or pair (an attack on both "
                                         "models at once).")] = "any",
    rounds: Annotated[int, typer.Option(help="Attacks on the mapped model, each followed by a new search.")] = 1,
    steps: Annotated[int, typer.Option(help="Steps of the margin attack.")] = 50,
    targets: Annotated[int, typer.Option(help="Classes the margin attack aims at.")] = 9,
    pool: Annotated[int, typer.Option(help="Attacked points kept per image.")] = 3,
    gradient_free: Annotated[bool, typer.Option("--gradient-free", help="Attack by random search.")] = False,
    like: Annotated[str | None, typer.Option(help="A mixture whose map is taken over; only the threshold is fitted.",
                                             show_default=False)] = None,
    gate: Annotated[Path | None, typer.Option(help="A gate from `equipoise train gate`, file or folder: every image "
                                              "has its own alpha over the fitted map.", show_default=False)] = None,
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
    seed: options.Seed = 0,
    config: options.Config = None,
) -> None:
    """Fit a mixture to a target on images that are never evaluated on, and write it as `mixture:DIR`."""
    given = [lose is not None, beta_ is not None, alpha is not None]
    checks.require(sum(given) <= 1, "target", "be at most one of --lose-at-most, --beta and --alpha", sum(given))
    target = beta(beta_) if beta_ is not None else lose_at_most(1.0 if lose is None else lose)
    wishes: dict[str, Any] = {"arch": arch, "mean": options.channels("mean", mean),
                              "std": options.channels("std", std)}
    checks.require(gate is None or gate.exists(), "gate", "be a file or folder that exists", str(gate))
    if alpha is not None:
        checks.require(gate is None, "gate", "be left out with --alpha, which fits nothing", str(gate))
        _plain(accurate, robust, alpha, out, wishes)
        return
    settings = FitSettings(objective, clamp, rule, against, rounds, seed, AttackStrength(steps, targets, pool, gradient_free),
                        _like(like))
    images = options.images(data, data_dir, split, start, count, every)
    shared: dict[str, Any] = {"threat": Threat(norm, eps), "target": target, "settings": settings,
                              "device": pick(device), "batch_size": batch_size, "command": options.command(), **wishes}
    if gate is None:
        _tell(out, fit_into(out, (accurate, robust), images, **shared), frontier)
        return
    mixture, over = gate_into(out, gate, (accurate, robust), images, **shared)
    _tell(out / MAP, mixture, frontier)
    told = records.summary(out)
    typer.echo(f"the gate, alpha in ({over.range[0]:.3g}, {over.range[1]:.3g}): clean "
               f"{numbers.percent(told['gate']['clean'])}; it {told['promise']}\nmixture:{out}")


def _plain(accurate: str, robust: str, alpha: float, out: Path, wishes: dict[str, Any]) -> None:
    bases = [models.load(text, **wishes) for text in (accurate, robust)]
    mixture = MixedClassifier(bases[0], bases[1], checks.within("alpha", alpha, 0, 1)).eval()
    checks.require(not out.exists() or out.is_dir(), "out", "be a folder", str(out))
    free = not out.exists() or not any(out.iterdir()) or _holds(out, mixture, wishes)
    checks.require(free, "out", "be a new folder or hold this very mixture", str(out))
    mixing.save(out, mixture, accurate=accurate, robust=robust)
    typer.echo(f"plain mixing with alpha {alpha:g}; nothing was fitted\nmixture:{out}")


def _holds(out: Path, mixture: MixedClassifier, wishes: dict[str, Any]) -> bool:
    if not (out / mixing.folder.NAME).exists():
        return False
    there = mixing.load(f"mixture:{out}", **wishes)
    both = [(models.weights_digest(each), each.extra_repr()) for each in (there, mixture)]
    return both[0] == both[1]


def _like(reference: str | None) -> LogitMap | None:
    if reference is None:
        return None
    other = mixing.load(reference)
    told = other.logit_map if isinstance(other, MixedClassifier) else None
    if told is None:
        raise checks.InputError(f"`like` must name a mixture with a map, got {reference!r}")
    return told


def _tell(out: Path, mixture: MixedClassifier, frontier: bool) -> None:
    told = records.summary(out)
    seen = told["fitted"]
    for note in told["notes"]:
        typer.echo(f"note: {note}")
    typer.echo(f"the mixture {told['promise']}" if told["helped"] else told["promise"])
    if told["helped"]:
        typer.echo(f"on images that did not choose it: clean {numbers.percent(seen['clean'])} (robust model "
                   f"{numbers.percent(seen['robust_clean'])}); {mixture.logit_map}, alpha {mixture.alpha:.6g}")
    elif mixture.frontier:
        first = mixture.frontier[0]
        typer.echo(f"a mixture that may lose {100 * first.lose_at_most:.3g} points helps: clean "
                   f"{numbers.percent(first.clean)} (robust model {numbers.percent(seen['robust_clean'])})")
    if frontier and not mixture.frontier:
        typer.echo("no target of the frontier gives a mixture that helps")
    elif frontier:
        shown = Table(title="mixtures to choose from with with_target(lose_at_most=…)")
        for name in ("lose at most", "clean", "alpha"):
            shown.add_column(name, justify="right")
        for point in mixture.frontier:
            shown.add_row(numbers.percent(point.lose_at_most), numbers.percent(point.clean), f"{point.alpha:.6g}")
        Console().print(shown)
    typer.echo(f"mixture:{out}")
