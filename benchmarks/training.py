"""Training: recipes from start to end, and the time of an epoch against the official SmoothMix code.

    python benchmarks/training.py                       a minute on a CPU: images a second of every objective
    python benchmarks/training.py modes    --device cuda --data-dir D --compile off,graph,model,both configs/NAME.toml …
    python benchmarks/training.py recipe   --device cuda --data-dir D --out O configs/NAME.toml …
    python benchmarks/training.py mnist    --device cuda --data-dir D --out O [--parallel 4] [configs/NAME.toml …]
    python benchmarks/training.py official --device cuda --data-dir D --code FOLDER_OF_SMOOTHMIX/code

Times are of training alone, after the data is loaded; what compiling and capturing took is told apart.
Everything is told as JSON lines on standard output.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import torch
from torch import nn

from equipoise import attacks, data, models
from equipoise.core import config, records, rng
from equipoise.core.modes import inference
from equipoise.core.threat import Threat
from equipoise.data import Dataset
from equipoise.data.batches import batches
from equipoise.models import checkpoint
from equipoise.training import OBJECTIVES, Objective, TrainingPlan, train

ROOT = Path(__file__).parents[1]
MNIST = ("gaussian_sigma050", "stability_sigma050", "consistency_sigma050", "macer_sigma050", "smoothmix_sigma025",
         "smoothmix_sigma050", "smoothmix_sigma100", "smoothadv_sigma050")


def tell(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def read(path: Path) -> tuple[Objective, TrainingPlan, dict[str, Any]]:
    """A recipe as the command line reads it: the objective is the third word of its name."""
    table = config.read(path)
    kind = OBJECTIVES[path.stem.split("_")[2]]
    parts = [{f.name: table.pop(f.name) for f in dataclasses.fields(cls) if f.name in table} for cls in (kind, TrainingPlan)]
    config.known(table, ("arch", "data", "mean", "std"), str(path))
    return kind(**parts[0]), TrainingPlan(**parts[1]), table


def build(table: dict[str, Any], images: Dataset, seed: int) -> nn.Module:
    channels = images.image_shape[0]
    mean, std = ([float(part) for part in table[name].split(",")] for name in ("mean", "std"))
    return models.build(table["arch"], num_classes=images.num_classes, image_shape=images.image_shape, seed=seed,
                        mean=mean * (channels if len(mean) == 1 else 1), std=std * (channels if len(std) == 1 else 1))


@torch.no_grad()
def tested(model: nn.Module, images: Dataset, device: str) -> float:
    right = 0
    with inference(model):
        for batch in batches(images, 1000, device=device):
            right += int((model(batch.images).argmax(dim=1) == batch.labels).sum())
    return right / len(images)


def attacked(model: nn.Module, images: Dataset, device: str, threat: Threat) -> float:
    right = 0
    for batch in batches(images, 500, device=device):
        chance = rng.stream(0, "pgd", batch.index)
        x_adv = attacks.pgd(model, batch.images, batch.labels, threat=threat, stream=chance)
        with inference(model), torch.no_grad():
            right += int((model(x_adv).argmax(dim=1) == batch.labels).sum())
    return right / len(images)


def recipe(path: Path, args: argparse.Namespace) -> None:
    """Train by a recipe, test on the whole test set, and leave the checkpoint in half precision."""
    objective, plan, table = read(path)
    if args.epochs:
        plan = dataclasses.replace(plan, epochs=args.epochs)
    plan = dataclasses.replace(plan, compile=args.compile, precision=args.precision or plan.precision)
    images = data.load(table["data"], split="train", data_dir=args.data_dir)
    held = data.load(table["data"], split="test", data_dir=args.data_dir)
    model = build(table, images, plan.seed)
    folder = Path(args.out) / path.stem
    train(model, objective, images, plan, device=args.device, out=folder, facts={"arch": table["arch"]})
    told = records.summary(folder)
    found: dict[str, object] = {"last": tested(model, held, args.device)}
    best = models.load(str(folder / "best.safetensors")).to(args.device)
    found["best"] = tested(best, held, args.device)
    eps = getattr(objective, "eps", None)
    if hasattr(objective, "norm"):
        threat = Threat(objective.norm, eps)  # type: ignore[arg-type]
        first = held.slice(0, min(2000, len(held)))
        for name, module in (("last", model), ("best", best)):
            found[f"pgd20_first_2000_{name}"] = attacked(module, first, args.device, threat)
    facts = models.facts(folder / "last.safetensors")
    checkpoint.save(Path(args.out) / f"{path.stem}.safetensors", model, facts, half=True)
    rows = records.read(folder)
    tell(recipe=path.stem, epochs=plan.epochs, seconds=told["seconds"], compile_seconds=told["compile_seconds"],
         epoch_seconds=round(sorted(row["seconds"] for row in rows)[len(rows) // 2], 3), loss=rows[-1]["loss"], **found)
    if not args.keep:
        shutil.rmtree(folder)


def mnist(args: argparse.Namespace) -> None:
    """All MNIST recipes, several processes at a time on one device (with MPS where it can be started)."""
    served = shutil.which("nvidia-cuda-mps-control") is not None and args.device == "cuda" and subprocess.run(
        ["nvidia-cuda-mps-control", "-d"], capture_output=True).returncode == 0
    tell(mps=served, parallel=args.parallel)
    wanted = args.paths or [ROOT / "configs" / f"mnist_lenet_{name}.toml" for name in reversed(MNIST)]
    started, waiting = time.monotonic(), list(wanted)
    running: list[subprocess.Popen[bytes]] = []
    while waiting or running:
        while waiting and len(running) < args.parallel:
            path = waiting.pop(0)
            command = [sys.executable, __file__, "recipe", "--device", args.device, "--data-dir", str(args.data_dir),
                       "--out", str(args.out), "--compile", args.compile, str(path)]
            command += ["--epochs", str(args.epochs)] if args.epochs else []
            command += ["--precision", args.precision] if args.precision else []
            running.append(subprocess.Popen(command))
        running = [process for process in running if process.poll() is None]
        time.sleep(0.2)
    tell(mnist_seconds=round(time.monotonic() - started, 1))
    if served:
        subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", capture_output=True)


def modes(args: argparse.Namespace) -> None:
    """The last of three epochs of a recipe, by several ways of making a step."""
    for path in args.paths:
        objective, plan, table = read(path)
        objective, name = objective.at(60, 90), path.stem
        plan = dataclasses.replace(plan, precision=args.precision or plan.precision)
        images = data.load(table["data"], split="train", data_dir=args.data_dir, count=args.count or 16384)
        for how in ("off", "graph") if args.compile == "auto" else args.compile.split(","):
            plan = dataclasses.replace(plan, epochs=3, compile=how, held_out=0, validate_every=3)
            out = Path(args.out) / f"modes_{name}_{how}"
            train(build(table, images, 0), objective, images, plan, device=args.device, out=out,
                  facts={"arch": table["arch"]})
            rows = records.read(out)
            tell(recipe=name, step=how, precision=plan.precision, loss=rows[-1]["loss"],
                 images_per_second=rows[-1]["images_per_second"],
                 compile_seconds=records.summary(out)["compile_seconds"])
            shutil.rmtree(out)


def official(args: argparse.Namespace) -> None:
    """An epoch of the official SmoothMix and MACER code, its data already on the device, against ours."""
    images = data.load("mnist", split="train", data_dir=args.data_dir, count=args.count)
    device = torch.device(args.device)
    x, y = data.pixels(images.images).to(device), images.labels.to(device)
    loader = list(zip(x.split(256), y.split(256), strict=True))
    _import_official(args.code)
    theirs = {"smoothmix": _official_smoothmix(loader, device), "macer": _official_macer(loader, device)}
    for name, seconds in theirs.items():
        objective, plan, table = read(ROOT / "configs" / f"mnist_lenet_{name}_sigma050.toml")
        plan = dataclasses.replace(plan, epochs=3, held_out=0, validate_every=3, compile=args.compile)
        out = Path(args.out) / f"official_{name}"
        train(build(table, images, 0), objective.at(60, 90), images, plan, device=device, out=out,
              facts={"arch": "lenet"})
        ours = records.read(out)[-1]["seconds"]
        tell(objective=name, official_epoch_seconds=round(seconds, 3), our_epoch_seconds=ours,
             ratio=round(seconds / ours, 2))
        shutil.rmtree(out)


class Quiet:
    """Stands in for modules and writers the official code wants and the figure does not."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return Quiet

    def __call__(self, *_: Any, **__: Any) -> None:
        return None


def _import_official(code: str) -> None:
    """Make the official code importable; what it imports and does not need here may be missing."""
    sys.path.insert(0, code)
    wanted: dict[str, dict[str, Any]] = {
        "tensorboardX": {"SummaryWriter": Quiet},
        "torchvision": {"transforms": Quiet(), "datasets": types.SimpleNamespace(MNIST=object)},
        "torchvision.models": {}, "torchvision.models.resnet": {"resnet50": None}}
    for name, held in wanted.items():
        try:
            importlib.import_module(name)
        except ImportError:
            stand_in = types.ModuleType(name)
            stand_in.__dict__.update(held)
            sys.modules[name] = stand_in


def _lenet(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    model: nn.Module = importlib.import_module("archs.lenet").LeNet().to(device)
    return model, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=1e-4)


def _second(run: Any, device: torch.device) -> float:
    for _ in range(2):
        started = time.monotonic()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.monotonic() - started
    return seconds


def _official_smoothmix(loader: Any, device: torch.device) -> float:
    sys.argv = ["train.py", "mnist", "lenet", "--num-noise-vec", "4", "--num-steps", "4", "--eta", "5",
                "--noise_sd", "0.5", "--print-freq", "100000"]
    code = importlib.import_module("train")
    code.args.n_classes, code.args.warmup_v = 10, 1.0
    model, optimizer = _lenet(device)
    attacker = code.SmoothMix_PGD(steps=4, mix_step=0, alpha=1.0, maxnorm_s=0.0)
    return _second(lambda: code.train(loader, model, optimizer, 60, 0.5, attacker, device, Quiet()), device)


def _official_macer(loader: Any, device: torch.device) -> float:
    code = importlib.import_module("third_party.macer")
    model, optimizer = _lenet(device)
    return _second(lambda: code.macer_train(0.5, 16.0, 16, 16.0, 8.0, 10, model, loader, optimizer, device), device)


def quick(args: argparse.Namespace) -> None:
    """Images a second of every objective on a LeNet and made-up images."""
    chance = torch.Generator().manual_seed(0)
    images = Dataset("made up", "train", torch.randint(0, 256, (128, 1, 28, 28), generator=chance, dtype=torch.uint8),
                     torch.arange(128) % 10, torch.arange(128), tuple("0123456789"))
    for name, kind in OBJECTIVES.items():
        model = models.build("lenet", num_classes=10, image_shape=(1, 28, 28))
        out = Path(args.out) / f"quick_{name}"
        train(model, kind().at(60, 90), images, TrainingPlan(epochs=2, batch_size=64, lr=0.001, held_out=0), device=args.device,
              out=out, facts={"arch": "lenet"})
        tell(objective=name, images_per_second=records.read(out)[-1]["images_per_second"])
        shutil.rmtree(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="quick", choices=("quick", "modes", "recipe", "mnist", "official"))
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", default="runs/training")
    parser.add_argument("--epochs", type=int, help="instead of the recipe's")
    parser.add_argument("--count", type=int, help="training images of `modes` and `official`")
    parser.add_argument("--compile", default="auto")
    parser.add_argument("--precision", help="instead of the recipe's")
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument("--keep", action="store_true", help="keep the run folders")
    parser.add_argument("--code", help="the folder `code` of a clone of jh-jeong/smoothmix")
    args = parser.parse_intermixed_args()
    Path(args.out).mkdir(parents=True, exist_ok=True)
    if args.what == "recipe":
        for path in args.paths:
            recipe(path, args)
    else:
        {"quick": quick, "modes": modes, "mnist": mnist, "official": official}[args.what](args)


if __name__ == "__main__":
    main()
