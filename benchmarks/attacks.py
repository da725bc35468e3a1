"""AutoAttack's verdict and its price: ours beside pyautoattack, in one run.

Two CPU cores, robust ResNet-8, first 128 images of CIFAR-10 (about six minutes, most of them the peer's):
    python benchmarks/attacks.py --data DATA_DIR --weights WEIGHTS_DIR

One GPU, robust ResNet-18, first 1000 images; there the peer's figures are those measured on an H200 before:
    PYTHONPATH=src python3 benchmarks/attacks.py --device cuda --data DATA_DIR --weights WEIGHTS_DIR
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn

from equipoise import data, models, progress
from equipoise.attacks import Outcome, Stage, worst_case
from equipoise.attacks.auto import VERSIONS
from equipoise.data import Dataset, pixels
from equipoise.threat import Threat

THREAT = Threat("linf", "8/255")
KINDS = {"cpu": ("cifar10_resnet8_pgd_at_linf8.safetensors", 128, 128),
         "cuda": ("cifar10_resnet18_pgd_at_linf8.safetensors", 1000, 512)}
H200_REFERENCE = (117.5, 0.460, 0.0)  # seconds and accuracy of the original AutoAttack on this model and these images


def main() -> None:
    asked = arguments()
    kind = asked.device
    name, count, batch = KINDS[kind]
    count, batch = asked.count or count, asked.batch_size or batch
    if asked.weights is None or asked.data is None:
        print("attacks: left out; --weights and --data (or $EQUIPOISE_WEIGHTS and $EQUIPOISE_DATA) say where "
              "the robust ResNets and CIFAR-10 are")
        return
    if kind == "cpu":
        torch.set_num_threads(asked.threads)
    model = models.load(f"file:{Path(asked.weights) / name}").eval().requires_grad_(False).to(kind)
    images = data.load("cifar10", split="test", data_dir=Path(asked.data), start=0, count=count)
    where = torch.cuda.get_device_name() if kind == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"{name}, {count} images, {THREAT}, {where}, torch {torch.__version__}", flush=True)
    peer = None if kind == "cuda" or asked.no_peer else pyautoattack(model, images)
    if kind == "cuda" and count == 1000:
        peer = H200_REFERENCE
        print(f"AutoAttack, measured before on an H200: {peer[0]:.1f} s, {peer[1]:.2%}", flush=True)
    for version in asked.versions.split(","):
        ours(version, model, images, kind, batch, asked, peer)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=sorted(KINDS), default="cpu")
    parser.add_argument("--weights", default=os.environ.get("EQUIPOISE_WEIGHTS"))
    parser.add_argument("--data", default=os.environ.get("EQUIPOISE_DATA"))
    parser.add_argument("--versions", default="fast,standard")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--count", type=int)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--detail", action="store_true", help="time and verdict of every stage")
    return parser.parse_args()


def pyautoattack(model: nn.Module, images: Dataset) -> tuple[float, float, float]:
    """Seconds, accuracy and CPU seconds of the peer."""
    from pyautoattack import AutoAttack

    x, y = pixels(images.images), images.labels
    peer = AutoAttack(model, norm="Linf", eps=THREAT.eps, version="standard", device="cpu", seed=0)
    start, spent = time.perf_counter(), time.process_time()
    x_adv, _ = peer.run_standard_evaluation(x, y, batch_size=128)
    seconds, spent = time.perf_counter() - start, time.process_time() - spent
    with torch.no_grad():
        accuracy = float((model(x_adv).argmax(dim=1) == y).float().mean())
    print(f"pyautoattack standard: {seconds:.1f} s ({spent:.1f} CPU seconds), {accuracy:.2%}", flush=True)
    return seconds, accuracy, spent


def ours(version: str, model: nn.Module, images: Dataset, kind: str, batch: int, asked: argparse.Namespace,
         peer: tuple[float, float, float] | None) -> None:
    stages = VERSIONS[version]()

    def attack(part: Dataset, listed: Sequence[Stage]) -> Outcome:
        return worst_case(listed, model, part, threat=THREAT, seed=0, precision=asked.precision, batch_size=batch,
                          device=kind)

    # The first seconds of a process go into loading kernels; they are told apart.
    warm = timed(lambda: attack(images.slice(0, min(batch, len(images))), [VERSIONS["fast"]()[0]]), kind)[0]
    spent = time.process_time()
    with progress.shown() if asked.detail else nullcontext():
        seconds, outcome = timed(lambda: attack(images, stages), kind)
    spent = time.process_time() - spent
    accuracy = float(outcome.standing.float().mean())
    line = f"equipoise {version}: {seconds:.1f} s, {accuracy:.2%} (first touch of the device {warm:.1f} s apart)"
    if peer is not None:
        line += f"; {peer[0] / seconds:.2f} times as fast, verdict {accuracy - peer[1]:+.2%}"
        if peer[2]:  # on a busy machine the fairer ratio
            line += f"; {peer[2] / spent:.2f} times by CPU seconds ({spent:.1f})"
    print(line, flush=True)
    found = {name: int((outcome.broken == number).sum()) for number, name in enumerate(outcome.stages, start=1)}
    print("    broken by " + ", ".join(f"{name} {n}" for name, n in found.items() if n), flush=True)
    if kind == "cuda":
        print(f"    peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)


def timed(work: Callable[[], Outcome], kind: str) -> tuple[float, Outcome]:
    start = time.perf_counter()
    outcome = work()
    if kind == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, outcome


if __name__ == "__main__":
    sys.exit(main())
