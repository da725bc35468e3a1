"""Helpers of the benchmark scripts: options, timing, JSON lines, and models that need no files."""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from equipoise import models
from equipoise.attacks import Attack, Clean
from equipoise.core import rng
from equipoise.core.modes import inference
from equipoise.core.threat import Threat
from equipoise.data import Dataset, batches, load_data
from equipoise.training import train

THREAT = Threat("linf", "8/255")
NO_FILES = "no --weights and --data: small models are trained on synthetic shapes; their accuracy means nothing"
T = TypeVar("T")


def new_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that all scripts share."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of torch")
    return parser


def add_files(parser: argparse.ArgumentParser) -> None:
    """Options for real data and weights; without both a script uses synthetic ones."""
    parser.add_argument(
        "--data",
        type=Path,
        default=os.environ.get("EQUIPOISE_DATA"),
        help="folder with CIFAR-10; $EQUIPOISE_DATA if not given",
    )
    parser.add_argument(
        "--weights",
        type=Path,
        default=os.environ.get("EQUIPOISE_WEIGHTS"),
        help="folder with cifar10_*.safetensors; $EQUIPOISE_WEIGHTS if not given",
    )


def has_files(args: argparse.Namespace) -> bool:
    """Whether real data and weights were given."""
    return args.data is not None and args.weights is not None


def print_json(**values: object) -> None:
    """One measurement as a JSON line."""
    print(
        json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in values.items()}),
        flush=True,
    )


def write_table(path: Path, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    """Write rows as a compressed table; the same rows give the same bytes."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))


def timed(function: Callable[[], T], device: str) -> tuple[float, T]:
    """Seconds of a call, after all work of the device, and its result."""
    start = time.perf_counter()
    result = function()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def load_cifar_model(args: argparse.Namespace, name: str, tta: int | None = None) -> nn.Module:
    """A CIFAR-10 classifier from `--weights`, with test-time augmentation if `tta` is given."""
    prefix = "" if tta is None else f"tta:{tta}:"
    model = models.load(f"{prefix}file:{args.weights}/cifar10_{name}.safetensors")
    return model.eval().requires_grad_(False).to(args.device)


def train_on_shapes(objective: str, device: str, **settings: object) -> nn.Module:
    """A ResNet-8 trained on synthetic shapes for some seconds; its accuracy means nothing."""
    data = load_data("shapes", split="train", count=1024)
    result = train(
        objective,
        arch="resnet8",
        data=data,
        mean=0.35,
        std=0.2,
        device=device,
        epochs=3,
        optimizer="adamw",
        lr=5e-3,
        schedule="one-cycle",
        warmup=0.6,
        held_out=0,
        **settings,
    )
    return result.model.eval().requires_grad_(False)


def robust_on_shapes(device: str) -> nn.Module:
    """The same, trained against PGD."""
    return train_on_shapes("adversarial", device, norm=THREAT.norm, eps=THREAT.eps, steps=4)


@torch.no_grad()
def accuracy(
    model: nn.Module,
    data: Dataset,
    device: str,
    attack: Attack | None = None,
    threat: Threat = THREAT,
) -> float:
    """Share of images classified correctly, clean or under an attack."""
    correct = 0
    for batch in batches(data, 500, device=device):
        with torch.enable_grad():
            x = (attack or Clean())(
                model,
                batch.images,
                batch.labels,
                threat=threat,
                stream=rng.stream(0, "pgd", batch.index),
            )
        with inference(model):
            correct += int((model(x).argmax(dim=1) == batch.labels).sum())
    return correct / len(data)
