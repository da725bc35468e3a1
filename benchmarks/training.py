"""Training: recipes from start to end, and the time of an epoch against the official SmoothMix
code.

    python benchmarks/training.py
        a minute on a CPU: images per second of every objective
    python benchmarks/training.py modes --device cuda --data-dir D --compile off,graph,model,both NAME
        images per second of recipes by the way their steps are compiled or captured
    python benchmarks/training.py recipe --device cuda --data-dir D --out O NAME
        recipes from start to end, and their accuracies on the test set
    python benchmarks/training.py official --device cuda --data-dir D --code FOLDER_OF_SMOOTHMIX/code
        an epoch of SmoothMix and of MACER

NAME are names of recipes. Times are those of training alone, after the data is loaded; compilation
and graph capture are timed separately. Every measurement is a JSON line.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import torch
from common import accuracy, new_parser, print_json, timed
from torch import nn

from equipoise import models
from equipoise.attacks import Pgd
from equipoise.core.records import read_rows
from equipoise.core.results import read_summary
from equipoise.core.rows import EpochRow
from equipoise.core.settings import split
from equipoise.core.threat import Threat
from equipoise.data import Dataset, load_data, pixels
from equipoise.models import checkpoint
from equipoise.training import OBJECTIVES, TrainingPlan, read_recipe, train

# A LeNet on MNIST at sigma 0.5, as in experiments/smoothmix.
MNIST = {
    "data": "mnist",
    "arch": "lenet",
    "mean": "0",
    "std": "1",
    "sigma": 0.5,
    "momentum": 0.9,
    "weight_decay": 1e-4,
}
OFFICIAL = {
    "smoothmix": {
        **MNIST,
        "objective": "smoothmix",
        "precision": "bf16",
        "batch_size": 64,
        "lr": 0.015,
        "noises": 4,
        "steps": 4,
        "step_size": 1.0,
        "eta": 5.0,
    },
    "macer": {
        **MNIST,
        "objective": "macer",
        "batch_size": 256,
        "lr": 0.01,
        "noises": 16,
        "weight": 16.0,
        "beta": 16.0,
        "gamma": 8.0,
        "defer": 31,
    },
}
EPOCH, EPOCHS = 60, 90  # where a single epoch is timed: after every warm-up of an objective


def changed(name: str, **changes: Any) -> dict[str, Any]:
    """A recipe; settings that are not None replace its own."""
    recipe = read_recipe(name)
    for key, value in changes.items():
        if value is not None:
            recipe[key] = value
    return recipe


def load_images(
    recipe: dict[str, Any],
    args: argparse.Namespace,
    split: str = "train",
    count: int | None = None,
) -> Dataset:
    return load_data(recipe["data"], split=split, data_dir=args.data_dir, count=count)


def epoch_rows(folder: Path) -> list[EpochRow]:
    return [row for row in read_rows(folder) if isinstance(row, EpochRow)]


def run_recipe(name: str, args: argparse.Namespace) -> None:
    """Train by a recipe, test on the whole test set, and keep the checkpoint, in half precision
    with `--half`."""
    recipe = changed(name, epochs=args.epochs, compile=args.compile, precision=args.precision)
    folder, test = Path(args.out) / name, load_images(recipe, args, "test")
    images = load_images(recipe, args)
    last = train(**{**recipe, "data": images}, device=args.device, out=folder).model
    best = models.load(f"file:{folder}/best.safetensors").to(args.device).eval()
    results: dict[str, object] = {}
    for which, model in (("last", last), ("best", best)):
        results[which] = accuracy(model, test, args.device)
        if "norm" in recipe:  # trained against attacks
            threat = Threat(recipe["norm"], recipe["eps"])
            first = test.slice(0, min(2000, len(test)))
            attacked = accuracy(model, first, args.device, Pgd(), threat)
            results[f"pgd20_first_2000_{which}"] = attacked
    metadata = models.read_metadata(folder / "last.safetensors")
    checkpoint.save(Path(args.out) / f"{name}.safetensors", last, metadata, half=args.half)
    rows, summary = epoch_rows(folder), read_summary(folder)
    print_json(
        recipe=name,
        epochs=len(rows),
        seconds=summary.seconds,
        compile_seconds=summary.compile_seconds,
        loss=rows[-1].loss,
        epoch_seconds=sorted(row.seconds for row in rows)[len(rows) // 2],
        **results,
    )
    if not args.keep:
        shutil.rmtree(folder)


def time_epoch(
    recipe: dict[str, Any], data: Dataset, args: argparse.Namespace, compile_mode: str
) -> tuple[EpochRow, float | None]:
    """The last of three epochs, and the seconds of compilation."""
    settings = {**recipe, "epochs": 3, "compile": compile_mode, "held_out": 0, "validate_every": 3}
    own = {name: settings.pop(name) for name in ("arch", "mean", "std")}
    del settings["data"]
    cls = OBJECTIVES[settings.pop("objective")]
    objective, plan = split(settings, cls, TrainingPlan)
    objective = objective.at_epoch(EPOCH, EPOCHS)
    with tempfile.TemporaryDirectory() as folder:
        train(objective, data=data, out=folder, device=args.device, **own, **plan.to_dict())
        return epoch_rows(Path(folder))[-1], read_summary(folder).compile_seconds


def run_modes(args: argparse.Namespace) -> None:
    """Images per second of a recipe by the way its steps are compiled or captured."""
    for name in args.names:
        recipe = changed(name, precision=args.precision)
        data = load_images(recipe, args, count=args.count or 16384)
        for mode in ("off", "graph") if args.compile == "auto" else args.compile.split(","):
            row, compile_seconds = time_epoch(recipe, data, args, mode)
            print_json(
                recipe=name,
                compile=mode,
                precision=recipe.get("precision", "auto"),
                loss=row.loss,
                images_per_second=row.images_per_second,
                compile_seconds=compile_seconds,
            )


def run_objectives(args: argparse.Namespace) -> None:
    """Images per second of every objective on a LeNet and random images."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (128, 1, 28, 28), generator=generator, dtype=torch.uint8)
    data = Dataset(
        "random", "train", images, torch.arange(128) % 10, torch.arange(128), tuple("0123456789")
    )
    for name in OBJECTIVES.builtin:
        with tempfile.TemporaryDirectory() as folder:
            train(
                OBJECTIVES[name]().at_epoch(EPOCH, EPOCHS),
                arch="lenet",
                data=data,
                out=folder,
                device=args.device,
                epochs=2,
                batch_size=64,
                lr=0.001,
                held_out=0,
            )
            print_json(
                objective=name, images_per_second=epoch_rows(Path(folder))[-1].images_per_second
            )


def run_official(args: argparse.Namespace) -> None:
    """Seconds of an epoch of the official SmoothMix and MACER code, its data already on the device,
    and of ours."""
    data = load_data("mnist", split="train", data_dir=args.data_dir, count=args.count)
    device = torch.device(args.device)
    loader = list(
        zip(
            pixels(data.images).to(device).split(256),
            data.labels.to(device).split(256),
            strict=True,
        )
    )
    import_official(args.code)
    official = {
        "smoothmix": official_smoothmix(loader, device),
        "macer": official_macer(loader, device),
    }
    for name, seconds in official.items():
        ours = time_epoch(OFFICIAL[name], data, args, args.compile)[0].seconds
        print_json(
            objective=name,
            official_epoch_seconds=seconds,
            our_epoch_seconds=ours,
            ratio=seconds / ours,
        )


class Stub:
    """Replaces modules and writers that the official code imports and this benchmark does not
    need."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return Stub

    def __call__(self, *_: Any, **__: Any) -> None:
        return None


def import_official(code: str) -> None:
    """Make the official code importable; missing modules that it does not need here are replaced by
    stubs."""
    sys.path.insert(0, code)
    contents: dict[str, dict[str, Any]] = {
        "tensorboardX": {"SummaryWriter": Stub},
        "torchvision": {"transforms": Stub(), "datasets": types.SimpleNamespace(MNIST=object)},
        "torchvision.models": {},
        "torchvision.models.resnet": {"resnet50": None},
    }
    for name, attributes in contents.items():
        try:
            importlib.import_module(name)
        except ImportError:
            module = types.ModuleType(name)
            module.__dict__.update(attributes)
            sys.modules[name] = module


def official_lenet(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    model: nn.Module = importlib.import_module("archs.lenet").LeNet().to(device)
    return model, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=1e-4)


def second_epoch(run: Any, device: torch.device) -> float:
    """Seconds of the second of two epochs; the first warms up."""
    timed(run, device.type)
    return timed(run, device.type)[0]


def official_smoothmix(loader: Any, device: torch.device) -> float:
    sys.argv = [
        "train.py",
        "mnist",
        "lenet",
        "--num-noise-vec",
        "4",
        "--num-steps",
        "4",
        "--eta",
        "5",
        "--noise_sd",
        "0.5",
        "--print-freq",
        "100000",
    ]
    code = importlib.import_module("train")
    code.args.n_classes, code.args.warmup_v = 10, 1.0
    model, optimizer = official_lenet(device)
    attacker = code.SmoothMix_PGD(steps=4, mix_step=0, alpha=1.0, maxnorm_s=0.0)
    return second_epoch(
        lambda: code.train(loader, model, optimizer, 60, 0.5, attacker, device, Stub()), device
    )


def official_macer(loader: Any, device: torch.device) -> float:
    code = importlib.import_module("third_party.macer")
    model, optimizer = official_lenet(device)
    return second_epoch(
        lambda: code.macer_train(0.5, 16.0, 16, 16.0, 8.0, 10, model, loader, optimizer, device),
        device,
    )


COMMANDS = {
    "objectives": run_objectives,
    "modes": run_modes,
    "official": run_official,
    "recipe": lambda args: [run_recipe(name, args) for name in args.names],
}


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("what", nargs="?", default="objectives", choices=COMMANDS)
    parser.add_argument("names", nargs="*", help="names of recipes")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/training"))
    parser.add_argument("--epochs", type=int, help="instead of the recipe's")
    parser.add_argument("--count", type=int, help="training images of `modes` and `official`")
    parser.add_argument(
        "--compile", default="auto", help="off, graph, model, both or auto; several for `modes`"
    )
    parser.add_argument("--precision", help="instead of the recipe's")
    parser.add_argument(
        "--tf32", action="store_true", help="TF32 matrix products, as convolutions have them anyway"
    )
    parser.add_argument(
        "--half", action="store_true", help="store weights in half precision, which is not exact"
    )
    parser.add_argument("--keep", action="store_true", help="keep the run folders")
    parser.add_argument("--code", help="the folder `code` of a clone of jh-jeong/smoothmix")
    args = parser.parse_intermixed_args()
    torch.set_num_threads(args.threads)
    if args.tf32:
        torch.set_float32_matmul_precision("high")
    COMMANDS[args.what](args)


if __name__ == "__main__":
    main()
