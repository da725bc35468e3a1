"""SmoothMix: training methods for smoothed classifiers, certified [SmoothMix].

    table-2     MNIST, LeNet, by method and sigma
    table-3     CIFAR-10, ResNet-18
    resnet110   CIFAR-10, ResNet-110 as in the paper
    table-1     confidence in the true and in the best other class under attack
    figure-3    mixing ratio at which both confidences are equal
    figure-6    SmoothMix with other weights of the mixed images
    figure-7    with other attacks and numbers of noises

Every classifier is trained and certified in folders of its own, so that any choice of them is a
run, and a later run reads what is there.
"""

from __future__ import annotations

import argparse
import math
import shutil
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

import equipoise as eq
from equipoise.core import format, stats
from equipoise.core.rows import certificates
from equipoise.core.stats import Estimate
from equipoise.evaluation import Certification
from equipoise.training import read_recipe
from experiments import common

HERE = Path(__file__).parent
TABLES = tomllib.loads((HERE / "settings.toml").read_text(encoding="utf-8"))
PARTS = ("table-2", "table-3", "resnet110", "table-1", "figure-3", "figure-6", "figure-7")
SIGMAS = (0.25, 0.5, 1.0)
COLUMNS = ("index", "label", "predicted", "radius", "samples", "logs")  # of kept rows


@dataclass(frozen=True)
class Classifier:
    """A base classifier: how it is trained, and what is published about it when it is smoothed."""

    name: str
    table: str  # whose images it is certified on
    method: str
    sigma: float
    training: dict[str, Any]  # arguments of equipoise.train
    paper: float  # average certified radius, nan if there is none
    logs: str  # where its released certificates lie; empty if there are none


def main(args: argparse.Namespace) -> None:
    """Train and certify the chosen classifiers, keep their rows, and print the table."""
    if args.page:
        print(table(HERE / "rows"))
        draw(HERE / "rows", HERE / "certified.svg")
        return
    if args.logs is not None and args.size == "smoke":
        raise eq.InputError("`--logs` must be left out for the smoke size")
    if args.logs is not None and not (args.logs / "mnist").is_dir():
        raise eq.InputError(f"`--logs` must be data/certify of a clone, got {str(args.logs)!r}")
    chosen = {part: choose(args, part) for part in args.parts}
    if not any(chosen.values()):
        raise eq.InputError("`--method` and `--sigma` must leave a classifier of these parts")
    for part, classifiers in chosen.items():
        for classifier in classifiers:
            model = train(args, classifier)
            certification = certify(args, part, classifier, model)
            keep(args, classifier, certification)
            print(certification, flush=True)
    print(table(args.out / "rows"))
    if args.size == "smoke":
        print("Two epochs on 200 digits: these radii only show that everything runs.")


# The classifiers


def choose(args: argparse.Namespace, part: str) -> list[Classifier]:
    """The classifiers of a part, of the methods and sigmas that were asked for."""
    return [
        classifier
        for classifier in classifiers_of(part)
        if (args.method is None or classifier.method in args.method)
        and (args.sigma is None or classifier.sigma in args.sigma)
    ]


def classifiers_of(part: str) -> list[Classifier]:
    """All classifiers of a part."""
    if "methods" in TABLES[part]:
        return by_method(part)
    if "variants" in TABLES[part]:
        return variants(part)
    return [own for own in by_method("table-3") if own.name in TABLES[part]["classifiers"]]


def by_method(part: str) -> list[Classifier]:
    """Every method at every sigma."""
    classifiers = []
    methods = TABLES[part]["methods"]
    for method in methods:
        for column, sigma in enumerate(SIGMAS):
            settings = at_column(with_base(methods, method), column)
            paper = settings.pop("paper")
            logs = settings.pop("logs", "")
            if "recipe" in settings:
                training = read_recipe(settings["recipe"])
            else:
                shared = TABLES[part]["training"]
                training = {"data": TABLES[part]["data"], **shared, **settings, "sigma": sigma}
            name = f"{part}_{method}_sigma{round(100 * sigma):03d}"
            classifiers.append(Classifier(name, part, method, sigma, training, paper, logs))
    return classifiers


def with_base(methods: Mapping[str, Any], method: str) -> dict[str, Any]:
    """The settings of a method, and those of its base that it does not have itself."""
    settings = dict(methods[method])
    if "base" in settings:
        base = with_base(methods, settings.pop("base"))
        settings = {**base, **settings}
    return settings


def at_column(settings: Mapping[str, Any], column: int) -> dict[str, Any]:
    """Settings for one sigma: a list has a value for each."""
    values = {}
    for key, value in settings.items():
        values[key] = value[column] if isinstance(value, list) else value
    return values


def variants(part: str) -> list[Classifier]:
    """SmoothMix on MNIST at sigma 1 with one thing changed."""
    (base,) = (own for own in by_method("table-2") if own.name == "table-2_smoothmix-eta1_sigma100")
    classifiers = []
    for changed, variant in TABLES[part]["variants"].items():
        for changes in variant["changes"]:
            name = f"{part}_{changed}{changes[changed]:g}"
            training = {**base.training, **changes}
            classifiers.append(
                Classifier(
                    name, base.table, base.method, base.sigma, training, math.nan, variant["logs"]
                )
            )
    return classifiers


# Training and certification


def train(args: argparse.Namespace, classifier: Classifier) -> nn.Module:
    """The classifier with the weights of the last epoch, as in the released code."""
    training = dict(classifier.training)
    if args.size == "smoke":
        training |= args.settings["training"]
        training["data"] = args.settings["data"]
        for name in training.keys() & args.settings["attack"].keys():
            training[name] = min(training[name], args.settings["attack"][name])
    training["data"] = eq.load_data(
        training["data"],
        split="train",
        count=args.settings.get("training_images"),
        data_dir=args.data_dir,
    )
    out = args.out / "training" / classifier.name
    return eq.train(**training, out=out, device=args.device, seed=args.seed).model


def certify(
    args: argparse.Namespace, part: str, classifier: Classifier, model: nn.Module
) -> Certification:
    """Certify the smoothed classifier; some parts also measure its confidence under attack."""
    settings = {**TABLES[classifier.table], **args.settings}
    images = eq.load_data(
        settings["data"], split="test", every=settings["every"], data_dir=args.data_dir
    )
    diagnosis = {}
    if "diagnose_radii" in TABLES[part]:
        radii = args.settings.get("diagnose_radii", TABLES[part]["diagnose_radii"])
        diagnosis = {"diagnose": True, "diagnose_radii": radii}
    return eq.certify(
        {classifier.name: model},
        images,
        sigma=classifier.sigma,
        samples=settings["samples"],
        n0=settings["n0"],
        tolerance=settings.get("tolerance"),
        precision=settings["precision"],
        seed=args.seed,
        device=args.device,
        out=args.out / "certificates" / classifier.name,
        **diagnosis,
    )


# Kept rows, the table and the figure


def keep(args: argparse.Namespace, classifier: Classifier, certification: Certification) -> None:
    """Write the certificates of a classifier, with the released radii of the same images, and the
    settings they were made by."""
    logs = [] if args.logs is None else released(args.logs, classifier)
    rows = []
    for row in certificates(certification.rows):
        logged = " ".join(f"{log[row.index]:g}" for log in logs)
        rows.append((row.index, row.label, row.predicted, row.radius, row.samples, logged))
    name = f"{classifier.name}_seed{args.seed}"
    common.keep(args.out / "rows" / f"{name}.csv.gz", COLUMNS, rows)
    for part in ("training", "certificates"):
        settings = args.out / part / classifier.name / "run.toml"
        shutil.copyfile(settings, args.out / "rows" / f"{name}.{part}.toml")


def released(folder: Path, classifier: Classifier) -> list[list[float]]:
    """Of every released run of a classifier the radii of all test images, 0 where it is wrong."""
    if classifier.logs == "":
        return []
    pattern = classifier.logs.format(**{**classifier.training, "sigma": classifier.sigma})
    runs = []
    for path in sorted(folder.glob(pattern)):
        radii = []
        for line in path.read_text(encoding="utf-8").splitlines()[1:]:
            _, _, _, radius, correct, _ = line.split("\t")
            radii.append(float(radius) * int(correct))
        runs.append(radii)
    return runs


@dataclass(frozen=True)
class Kept:
    """The kept rows of a classifier: radii, 0 where it is wrong or abstained."""

    name: str
    seed: str
    ours: NDArray[np.float64]  # (images,)
    logs: NDArray[np.float64]  # (images, released runs)


def read(folder: Path) -> list[Kept]:
    """All kept rows in a folder."""
    kept = []
    for path in sorted(folder.glob("*.csv.gz")):
        name, _, seed = path.name.removesuffix(".csv.gz").rpartition("_seed")
        ours, logs = [], []
        for row in common.read_kept(path):
            ours.append(float(row["radius"]) if row["predicted"] == row["label"] else 0.0)
            logs.append([float(radius) for radius in row["logs"].split()])
        kept.append(Kept(name, seed, np.array(ours), np.array(logs)))
    return kept


def table(folder: Path) -> str:
    """Average certified radii beside those of the paper and of the released logs."""
    papers = {own.name: own.paper for part in PARTS for own in classifiers_of(part)}
    columns = (
        "classifier",
        "images",
        "ours",
        "paper, all images",
        "released, same images",
        "difference",
    )
    rows = []
    for kept in read(folder):
        paper, released_cell, difference = papers[kept.name], "", ""
        if kept.logs.size > 0:
            runs = kept.logs.mean(axis=0)
            released_cell = format.number(runs.mean(), 3)
            if len(runs) > 1:
                released_cell += f" ± {format.number(runs.std(ddof=1), 3)}"
            per_image = as_logged(kept.ours) - kept.logs.mean(axis=1)
            difference = radius_cell(stats.mean(per_image.tolist()))
        rows.append(
            [
                f"{kept.name}, seed {kept.seed}",
                str(len(kept.ours)),
                radius_cell(stats.mean(kept.ours.tolist())),
                "" if math.isnan(paper) else format.number(paper, 3),
                released_cell,
                difference,
            ]
        )
    return common.markdown(columns, rows)


def radius_cell(estimate: Estimate) -> str:
    """An average radius or a difference of two, with its 95 % interval."""
    low, high = format.number(estimate.low, 3), format.number(estimate.high, 3)
    return f"{format.number(estimate.value, 3)} [{low}, {high}]"


def as_logged(radii: NDArray[np.float64]) -> NDArray[np.float64]:
    """Radii with three significant digits, as the released logs have them."""
    return np.array([float(f"{radius:.3}") for radius in radii])


def draw(folder: Path, path: Path) -> None:
    """Draw certified accuracy against the radius, with a panel for each classifier."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "equipoise"  # the same rows give the same file
    by_name: dict[str, list[Kept]] = {}
    for kept in read(folder):
        by_name.setdefault(kept.name, []).append(kept)
    figure = Figure(figsize=(4.0 * len(by_name), 3.6), layout="constrained")
    panels = figure.subplots(1, len(by_name), squeeze=False)[0]
    for axes, (name, seeds) in zip(panels, by_name.items(), strict=True):
        for kept in seeds:
            axes.plot(*curve(kept.ours), label=f"ours, seed {kept.seed} (n = {len(kept.ours)})")
        logs = seeds[0].logs
        if logs.size > 0:
            axes.plot(*curve(logs.ravel()), "k--", label=f"released (runs: {logs.shape[1]})")
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("ℓ2 radius")
        axes.set_ylabel("certified accuracy, %")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def curve(radii: NDArray[np.float64]) -> tuple[NDArray[np.float64], list[float]]:
    """Radii from 0 to the largest, and the percentage of images certified beyond each."""
    at = np.linspace(0, radii.max(), 101)
    return at, [100 * float((radii > radius).mean()) for radius in at]


def new_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.smoothmix",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    methods = list(TABLES["table-2"]["methods"])
    add("--part", action="append", choices=PARTS, help="may be repeated; all if not given")
    add("--size", choices=("smoke", "full"), default="smoke")
    add("--page", action="store_true", help="only the table and figure of the kept rows")
    add("--method", action="append", choices=methods, help="may be repeated; all if not given")
    add("--sigma", action="append", type=float, choices=SIGMAS, help="may be repeated")
    add("--logs", type=Path, help="data/certify of a clone of jh-jeong/smoothmix")
    add("--out", type=Path, help="runs/smoothmix-SIZE if not given")
    add("--data-dir", type=Path)
    add("--device", default="auto")
    add("--seed", type=int, default=0)
    parser.set_defaults(name="smoothmix", parts=PARTS)
    return parser


def run(arguments: Sequence[str] | None = None) -> None:
    """Run the experiment from the command line."""
    common.run(main, new_parser(), arguments)


if __name__ == "__main__":
    run()
