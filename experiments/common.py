"""What the experiments share: the command line, models and images, runs in part folders, kept rows.

Every experiment is a folder `experiments/NAME/`:

    __main__.py     one script that reads from top to bottom: load, compute the parts, write the rows
    settings.toml   its settings, a table for each size (smoke, full) with a table for each part
    README.md       the results page: the answer, a figure, a table, the command, the limits
    rows/           the rows that the page follows from, one compressed table for each run

    python -m experiments.NAME --size smoke                          trains two small networks first
    python -m experiments.NAME --size full --accurate G --robust H   any two classifiers
    python -m experiments.NAME --page                                table and figure from the kept rows

A run folder that is finished is read and not computed again; an interrupted one is resumed. So the
functions below may be called again with the same arguments at no cost.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import equipoise as eq
from equipoise.core import aggregation, format, stats
from equipoise.core.stats import Estimate
from equipoise.data.sources import default_sample
from equipoise.evaluation import Certification, Evaluation
from equipoise.fitting import Fit

FOLDER = Path(__file__).parent
DIGITS_EPS = 0.12  # radius in ℓ∞ at smoke size
DIGITS_HELD_OUT = 200  # training images of the digits that no model is trained on
ACCURACY_COLUMNS = ("model", "index", "clean", "attacked")  # of kept rows; 1 is correct
ACCURACY_TABLE = ("images", "model", "clean, %", "attacked, %", "points gained", "points lost")


# The command line


def new_parser(name: str, parts: Sequence[str], description: str | None) -> argparse.ArgumentParser:
    """The command line of an experiment, which may add options of its own."""
    parser = argparse.ArgumentParser(
        prog=f"python -m experiments.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--part", action="append", choices=parts, help="may be repeated; all if not given")
    add("--size", choices=("smoke", "full"), default="smoke")
    add("--page", action="store_true", help="only the table and figure of the kept rows")
    add("--out", type=Path, help=f"runs/{name}-SIZE if not given")
    add("--accurate", help="reference of the accurate model (full)")
    add("--robust", action="append", help="of the robust model (full); may be repeated")
    add("--data", default="cifar10", help="data set of both models (full)")
    add("--data-dir", type=Path)
    add("--count", type=int, help="test images, and as many held-out ones (full)")
    add("--norm", choices=("linf", "l2"), default="linf", help="of the perturbation (full)")
    add("--eps", help="radius (full); 8/255 in linf if not given")
    add("--device", default="auto")
    add("--seed", type=int, default=0)
    parser.set_defaults(name=name, parts=parts)
    return parser


def run(
    main: Callable[[argparse.Namespace], None],
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None = None,
) -> None:
    """Run an experiment; a user's mistake is one sentence and exit code 2.

    `main` gets the parsed arguments, with `parts` to be run in their order and `settings`, the
    table of this size in `settings.toml`.
    """
    args = parser.parse_args(arguments)
    args.parts = [part for part in args.parts if args.part is None or part in args.part]
    args.out = args.out or Path("runs") / f"{args.name}-{args.size}"
    tables = tomllib.loads((FOLDER / args.name / "settings.toml").read_text(encoding="utf-8"))
    args.settings = tables[args.size]
    if args.size == "smoke":
        torch.set_num_threads(1)  # several are slower on networks as small as these
    try:
        main(args)
    except eq.InputError as error:
        print(f"experiments.{args.name}: {error}", file=sys.stderr)
        sys.exit(2)


# Models and images


def threat(args: argparse.Namespace) -> eq.Threat:
    """The perturbations that attacks may use."""
    if args.size == "smoke":
        return eq.Threat("linf", DIGITS_EPS)
    if args.norm == "l2" and args.eps is None:
        raise eq.InputError("`--eps` must be given for the norm l2, got none")
    return eq.Threat(args.norm, args.eps or "8/255")


def pair(args: argparse.Namespace) -> tuple[str, str]:
    """References of the accurate and of the (first) robust model; at smoke size trained here."""
    if args.size == "full":
        if args.accurate is None or args.robust is None:
            raise eq.InputError("`--accurate` and `--robust` must be given for the full size")
        return args.accurate, args.robust[0]
    if args.accurate is not None or args.robust is not None:
        raise eq.InputError("`--accurate` and `--robust` must be left out for the smoke size")
    own = threat(args)
    accurate = train_small(args, "accurate", "standard", epochs=30, lr=3e-3, label_smoothing=0.1)
    # Few epochs: with more, on so few digits, the robust network is also the more accurate one.
    robust = train_small(
        args, "robust", "adversarial", epochs=4, lr=5e-3, norm=own.norm, eps=own.eps, steps=4
    )
    return accurate, robust


def train_small(
    args: argparse.Namespace, name: str, objective: str, *, epochs: int, lr: float, **settings: Any
) -> str:
    """Train a small network on the digits in `OUT/models/NAME`, and return its reference."""
    return train(
        args,
        name,
        objective,
        training_images(args),
        arch="cnn_small",
        mean=0.3,
        std=0.37,
        epochs=epochs,
        optimizer="adamw",
        lr=lr,
        weight_decay=1e-4,
        schedule="one-cycle",
        warmup=epochs / 5,
        held_out=0,
        **settings,
    )


def train(
    args: argparse.Namespace, name: str, objective: Any, images: eq.Dataset, **settings: Any
) -> str:
    """Train a classifier in `OUT/models/NAME`, and return its reference."""
    out = args.out / "models" / name
    settings.setdefault("seed", args.seed)
    eq.train(objective, data=images, out=out, device=args.device, **settings)
    return str(out / "best.safetensors")


def test_images(args: argparse.Namespace) -> eq.Dataset:
    """The images of the evaluation: the first ones of the test split."""
    count = args.count or args.settings["count"]
    if args.size == "smoke":
        return eq.load_data("digits", split="test", count=count)
    return eq.load_data(args.data, split="test", count=count, data_dir=args.data_dir)


def held_out_images(args: argparse.Namespace) -> eq.Dataset:
    """As many images (or as the settings say) for fitting and selection.

    No model was trained on them, and none is evaluated on them. They are the last of the test split,
    at smoke size of the training split.
    """
    if args.size == "smoke":
        images = eq.load_data("digits", split="train")
        return images.slice(len(images) - DIGITS_HELD_OUT, DIGITS_HELD_OUT)
    tested = args.count or args.settings["count"]
    count = args.settings.get("held_out", tested)
    size = len(eq.load_data(args.data, split="test", data_dir=args.data_dir))
    if tested + count > size:
        raise eq.InputError(
            f"`--count` must leave {count} of the {size} images for the fits, got {tested}"
        )
    return eq.load_data(
        args.data,
        split="test",
        start=size - count,
        count=count,
        data_dir=args.data_dir,
        sample=default_sample(args.data),
    )


def training_images(args: argparse.Namespace) -> eq.Dataset:
    """All training images that are not held out."""
    if args.size == "smoke":
        images = eq.load_data("digits", split="train")
        return images.slice(0, len(images) - DIGITS_HELD_OUT)
    return eq.load_data(args.data, split="train", data_dir=args.data_dir)


# Runs in part folders


def fit(
    args: argparse.Namespace,
    name: str,
    accurate: str,
    robust: str,
    images: eq.Dataset,
    **settings: Any,
) -> Fit:
    """Fit a mixture in `OUT/fits/NAME`; its reference is `mixture:OUT/fits/NAME`."""
    out = args.out / "fits" / name
    own = {"threat": threat(args), "device": args.device, "seed": args.seed}
    return eq.fit(accurate, robust, images, out=out, **{**own, **settings})


def evaluate(
    args: argparse.Namespace,
    part: str,
    models: Mapping[str, str | nn.Module],
    images: eq.Dataset,
    **settings: Any,
) -> Evaluation:
    """Evaluate models by their names in rows, in `OUT/PART`."""
    own = {"threat": threat(args), "device": args.device, "seed": args.seed}
    return eq.evaluate(models, images, out=args.out / part, **{**own, **settings})


def certify(
    args: argparse.Namespace,
    part: str,
    models: Mapping[str, str | nn.Module],
    images: eq.Dataset,
    **settings: Any,
) -> Certification:
    """Certify models by their names in rows, in `OUT/PART`."""
    own = {"device": args.device, "seed": args.seed}
    return eq.certify(models, images, out=args.out / part, **{**own, **settings})


# Kept rows and tables


def accuracy_rows(evaluation: Evaluation, models: Iterable[str]) -> list[tuple[str, int, int, int]]:
    """Of every model and image whether it is correct, clean and in the worst case over the run.

    The accurate and the robust model come first. `models` are the names that were evaluated: an
    evaluation calls a mixture "mixed" where it is the only model.
    """
    alone = next(iter(models))
    rows = []
    by_model = aggregation.correct_by_attack(evaluation.rows)
    for (model, _), correct in sorted(
        by_model.items(), key=lambda item: aggregation.base_models_first(item[0][0])
    ):
        for index, survives in sorted(correct["worst"].items()):
            name = alone if model == "mixed" else model
            rows.append((name, index, int(correct["clean"][index]), int(survives)))
    return rows


def keep(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a compressed table; the same rows give the same bytes."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))


def read_kept(path: Path) -> list[dict[str, str]]:
    """The rows of a table that was written by :func:`keep`."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def read_folder(folder: Path) -> dict[str, list[dict[str, str]]]:
    """The rows of all tables of a folder, by their names."""
    paths = folder.glob("*.csv.gz")
    names = sorted(path.name.removesuffix(".csv.gz") for path in paths)
    return {name: read_kept(folder / f"{name}.csv.gz") for name in names}


def accuracies(rows: Sequence[Mapping[str, str]], column: str) -> dict[str, Estimate]:
    """The share of correct images of every model in a column of kept rows."""
    by_model: dict[str, list[bool]] = {}
    for row in rows:
        by_model.setdefault(row["model"], []).append(row[column] == "1")
    return {model: stats.share(correct) for model, correct in by_model.items()}


def points_lost(rows: Sequence[Mapping[str, str]], model: str, than: str, column: str) -> Estimate:
    """How much less accurate a model is than another one, image by image, where both have rows."""
    own = {row["index"]: row[column] == "1" for row in rows if row["model"] == model}
    other = {row["index"]: row[column] == "1" for row in rows if row["model"] == than}
    common = own.keys() & other.keys()
    lost = sum(other[index] and not own[index] for index in common)
    gained = sum(own[index] and not other[index] for index in common)
    return stats.paired_difference(lost, gained, len(common))


def cell(estimate: Estimate) -> str:
    """A share or a difference of shares in percent with its 95 % interval: `82.6 [80.1, 84.9]`."""
    interval = format.interval(estimate.low, estimate.high)
    return f"{format.number(100 * estimate.value, 1)} {interval}"


def accuracy_lines(
    name: str, rows: Sequence[Mapping[str, str]], robust: Sequence[Mapping[str, str]] = ()
) -> list[list[str]]:
    """Lines of a table with the columns `ACCURACY_TABLE`, one for each model of the kept rows.

    What a mixture gains and loses is compared with the robust model, image by image: that of the
    rows, or the given ones where they have none.
    """
    lines = []
    clean, attacked = accuracies(rows, "clean"), accuracies(rows, "attacked")
    for model in clean:
        gains = ["", ""]
        if model not in ("accurate", "robust") and ("robust" in clean or robust):
            both = [*robust, *rows]
            gained = points_lost(both, "robust", model, "clean")
            gains = [cell(gained), cell(points_lost(both, model, "robust", "attacked"))]
        lines.append([name, model, cell(clean[model]), cell(attacked[model]), *gains])
    return lines


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def draw_trade_offs(
    path: Path, panels: Mapping[str, Mapping[str, tuple[Estimate, Estimate]]]
) -> None:
    """Draw attacked against clean accuracy of models, a panel for each pair, with intervals."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "equipoise"  # the same rows give the same file
    mpl.rcParams["svg.fonttype"] = "none"
    figure = Figure(figsize=(3.4 * len(panels), 3.8), layout="constrained")
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    models = list(dict.fromkeys(model for points in panels.values() for model in points))
    for axes, (title, points) in zip(grid, panels.items(), strict=True):
        for model, (clean, attacked) in points.items():
            axes.errorbar(
                100 * clean.value,
                100 * attacked.value,
                xerr=[[100 * (clean.value - clean.low)], [100 * (clean.high - clean.value)]],
                yerr=[
                    [100 * (attacked.value - attacked.low)],
                    [100 * (attacked.high - attacked.value)],
                ],
                marker="os^Dv*"[models.index(model) % 6],
                color=f"C{models.index(model)}",
                elinewidth=0.5,
                linestyle="",
                label=model,
            )
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("clean accuracy, %")
        axes.grid(alpha=0.3)
    grid[0].set_ylabel("accuracy under attack, %")
    handles: dict[str, Any] = {}
    for axes in grid:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {})
