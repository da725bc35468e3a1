"""Certified mixtures of an accurate and a randomly smoothed model [Bai2024mixing; Bai2024].

    certify     certified accuracy against radius, by every theorem and at every alpha, from one
                run of votes per smoothed model [Bai2024mixing, Figure 3; Bai2024, Figures 6 and 7]
    lipschitz   local Lipschitz constants of all networks without noise [Bai2024, appendix C.3]

At full size `--robust` names the networks that are smoothed, each with the `--sigma` in its place.
Bounds do not depend on alpha, so that kept rows serve every alpha.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import equipoise as eq
from equipoise.certification import estimate_local
from equipoise.certification.mixture import SmoothedBase
from equipoise.core import rng, stats
from equipoise.core.device import resolve
from equipoise.core.rows import CertificateRow
from equipoise.data import pixels
from experiments import attacked, common

HERE = Path(__file__).parent
ROWS = HERE / "rows"
PARTS = ("certify", "lipschitz")
COLUMNS = ("part", "sigma", "index", "label", "top", "lower", "upper", "accurate", "gap")
CONSTANT_COLUMNS = ("network", "index", "constant")
ALPHA = 0.76  # of the figure and the table, as in the paper
RADII = (0.2, 0.5, 0.75)  # of the table
STYLES = {"3.5": ":", "lipschitz": "-.", "A.2": "--", "ours": "-"}  # of theorems
TITLES = {
    "3.5": "Theorem 3.5",
    "lipschitz": "Theorem 3.5, smallest constant",
    "A.2": "Theorem A.2",
    "ours": "ours",
}
Rows = list[dict[str, str]]


def main(args: argparse.Namespace) -> None:
    """Run parts and keep their rows, or print the page of rows that were kept."""
    if args.page:
        rows, official = common.read_kept(ROWS / "cifar10.csv.gz"), read_official()
        print(page(rows, official))
        print(differences(rows, official))
        print(constants(common.read_kept(ROWS / "lipschitz.csv.gz")))
        draw(rows, HERE / "certified.svg")
        return
    attacked.start(args)
    accurate, smoothed, networks = references(args)
    if "certify" in args.parts:
        rows = certified_rows(args, accurate, smoothed)
        common.keep(args.out / "rows.csv.gz", COLUMNS, [tuple(row.values()) for row in rows])
        print(page(rows, []))
    if "lipschitz" in args.parts:
        rows = constant_rows(args, networks)
        path = args.out / "lipschitz.csv.gz"
        common.keep(path, CONSTANT_COLUMNS, [tuple(row.values()) for row in rows])
        print(constants(rows))


def references(args: argparse.Namespace) -> tuple[str, dict[float, str], dict[str, str]]:
    """The accurate model, the networks to be smoothed by their sigma, and all networks by name."""
    accurate, robust = common.pair(args)
    if args.size == "smoke":
        smoothed = {}
        for sigma in args.settings["sigmas"]:
            smoothed[sigma] = common.train_small(
                args, f"gaussian-{sigma:g}", "gaussian", epochs=20, lr=5e-3, sigma=sigma
            )
        empirical: str | None = robust
    else:
        sigmas = [float(sigma) for sigma in (args.sigma or "").split(",") if sigma]
        if len(sigmas) != len(args.robust):
            raise eq.InputError(f"`--sigma` must name one for each --robust, got {args.sigma}")
        smoothed = dict(sorted(zip(sigmas, args.robust, strict=True)))
        empirical = args.empirical
    networks = {"accurate": accurate}
    for sigma, reference in smoothed.items():
        networks[f"gaussian {sigma:g}"] = reference
    if empirical is not None:
        networks["adversarial"] = empirical
    return accurate, smoothed, networks


# Parts


def certified_rows(args: argparse.Namespace, accurate: str, smoothed: dict[float, str]) -> Rows:
    """Bounds of every smoothed model on the test images, and votes on held-out ones to select
    alpha."""
    rows: Rows = []
    for part, images, samples in (
        ("select", common.held_out_images(args), args.settings["selection_samples"]),
        ("certify", common.test_images(args), args.samples or args.settings["samples"]),
    ):
        result = common.certify(
            args,
            part,
            {f"{sigma:g}": reference for sigma, reference in smoothed.items()},
            images,
            sigma=list(smoothed),
            accurate=accurate,
            alphas=(1.0,),
            two_sided=True,
            samples=samples,
        )
        for row in result.rows:
            assert isinstance(row, CertificateRow)
            values = (part, row.sigma, row.index, row.label, row.top)
            bounds = (row.lower, row.upper, row.accurate, row.gap)
            rows.append(dict(zip(COLUMNS, map(str, (*values, *bounds)), strict=True)))
    return rows


def constant_rows(args: argparse.Namespace, networks: dict[str, str]) -> Rows:
    """The mean local Lipschitz constant of the probabilities of every network around each image."""
    count = args.settings["lipschitz_images"]
    images = common.test_images(args)
    images = images.slice(0, min(count, len(images)))
    device = resolve(args.device)
    rows: Rows = []
    for name, reference in networks.items():
        model = attacked.load(args, reference)
        for start in range(0, len(images), args.settings["lipschitz_batch"]):
            batch = images.slice(start, min(args.settings["lipschitz_batch"], len(images) - start))
            estimate = estimate_local(
                model,
                pixels(batch.images).to(device),
                threat=common.threat(args),
                stream=rng.stream(args.seed, "lipschitz", batch.index.to(device)),
            )
            for index, constant in zip(batch.index.tolist(), estimate.averaged, strict=True):
                values = (name, str(index), f"{float(constant):.4f}")
                rows.append(dict(zip(CONSTANT_COLUMNS, values, strict=True)))
    return rows


# The page


def bases(rows: Rows, part: str) -> dict[float, SmoothedBase]:
    """The smoothed models of a part by their sigma."""
    by_sigma: dict[float, Rows] = {}
    for row in rows:
        if row["part"] == part:
            by_sigma.setdefault(float(row["sigma"]), []).append(row)
    return {sigma: base_of(sigma, by_sigma[sigma]) for sigma in sorted(by_sigma)}


def base_of(sigma: float, rows: Rows) -> SmoothedBase:
    """A smoothed model from its rows."""

    def column(name: str, kind: type) -> NDArray[Any]:
        return np.array([kind(row[name]) for row in rows])

    return SmoothedBase(
        sigma,
        top=column("top", int),
        lower=column("lower", float),
        accurate=column("accurate", int),
        gap=column("gap", float),
        labels=column("label", int),
        upper=column("upper", float),
    )


def page(rows: Rows, official: Rows) -> str:
    """Certified accuracy of two smoothed models alone, of the noisier one in a mixture by every
    theorem, and in a mixture with the clean accuracy of the other one alone."""
    test = bases(rows, "certify")
    small, middle = list(test)[:2]
    alpha = equal_clean_alpha(bases(rows, "select"), small, middle)
    table = [
        line(test[small], 1.0, "A.2", f"σ = {small:g} alone", official),
        line(test[middle], 1.0, "A.2", f"σ = {middle:g} alone", official),
    ]
    for theorem in STYLES:
        title = f"σ = {middle:g}, α = {ALPHA:g}, {TITLES[theorem]}"
        table.append(line(test[middle], ALPHA, theorem, title, official))
    for theorem in ("A.2", "ours"):
        title = f"σ = {middle:g}, α = {alpha:.3f}, {TITLES[theorem]}"
        table.append(line(test[middle], alpha, theorem, title, official))
    columns = ["certified accuracy, %", "clean, estimate"]
    columns += [f"at {radius:g}" for radius in RADII]
    return common.markdown([*columns, f"paper at {RADII[0]:g}"], table)


def equal_clean_alpha(held_out: dict[float, SmoothedBase], small: float, noisier: float) -> float:
    """The largest alpha with which the noisier model's mixture is as accurate on clean held-out
    images as the less noisy model alone."""
    return held_out[noisier].largest_alpha(held_out[small].clean_accuracy(1.0))


def line(base: SmoothedBase, alpha: float, theorem: str, title: str, official: Rows) -> list[str]:
    """A line of the table, with the paper's value at the first radius where it has one."""
    radii = base.radius(alpha, theorem)
    certified = [common.cell(stats.share(radii >= radius)) for radius in RADII]
    key = {"theorem": theorem, "sigma": f"{base.sigma:g}", "alpha": f"{alpha:g}"}
    key["radius"] = f"{RADII[0]:g}"
    paper = [row["percent"] for row in official if key.items() <= row.items()]
    clean = f"{100 * base.clean_accuracy(alpha):.1f}"
    return [title, clean, *certified, *(paper or [""])]


def differences(rows: Rows, official: Rows) -> str:
    """How far ours are above the official values, in points, by sigma and over all radii."""
    test = bases(rows, "certify")
    by_sigma: dict[str, list[float]] = {}
    for row in official:
        radii = test[float(row["sigma"])].radius(float(row["alpha"]), row["theorem"])
        own = 100 * float((radii >= float(row["radius"])).mean())
        if float(row["percent"]) > 0:  # zero is beyond what the theorem can certify
            by_sigma.setdefault(row["sigma"], []).append(own - float(row["percent"]))
    lines = []
    for sigma, points in by_sigma.items():
        low, high = min(points), max(points)
        lines.append(f"σ = {sigma}: {low:.1f} to {high:.1f} points above ({len(points)} values)\n")
    return "".join(lines)


def read_official() -> Rows:
    """Values of [Bai2024mixing, Figure 3] that were read from the notebook of the official code."""
    with (ROWS / "official.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def constants(rows: Rows) -> str:
    """The mean local Lipschitz constant of every network."""
    by_network: dict[str, list[float]] = {}
    for row in rows:
        by_network.setdefault(row["network"], []).append(float(row["constant"]))
    lines = []
    for network, values in by_network.items():
        mean = stats.mean(values)
        interval = f"[{mean.low:.2f}, {mean.high:.2f}]"
        lines.append(f"{network}: {mean.value:.2f} {interval}, n = {len(values)}\n")
    return "".join(lines)


def draw(rows: Rows, path: Path) -> None:
    """Certified accuracy against radius of the mixture by every theorem, and of its parts alone."""
    test = bases(rows, "certify")
    small, middle = list(test)[:2]
    curves = {
        f"σ = {small:g} alone": curve(test[small], 1.0, "A.2", "C0-"),
        f"σ = {middle:g} alone": curve(test[middle], 1.0, "A.2", "C1-"),
    }
    for theorem, style in STYLES.items():
        name = f"σ = {middle:g}, α = {ALPHA:g}, {TITLES[theorem]}"
        curves[name] = curve(test[middle], ALPHA, theorem, f"C2{style}")
    attacked.draw_curves(path, curves, "ℓ2 radius", "certified accuracy, %")


def curve(
    base: SmoothedBase, alpha: float, theorem: str, style: str
) -> tuple[list[float], list[float], str]:
    """Certified accuracy at radii from 0.01 on."""
    radii = base.radius(alpha, theorem)
    at = [step / 100 for step in range(1, 151)]
    return at, [100 * float((radii >= radius).mean()) for radius in at], style


def parser() -> argparse.ArgumentParser:
    """The command line."""
    own = common.new_parser("mixing_classifiers", PARTS, __doc__)
    own.add_argument("--sigma", help="noise of every --robust, by commas (full)")
    own.add_argument("--samples", type=int, help="votes per image (full)")
    own.add_argument("--empirical", help="adversarially trained network, for lipschitz (full)")
    return own


if __name__ == "__main__":
    common.run(main, parser())
