"""AutoAttack's verdict and its price: ours beside pyautoattack, in one run.

Two CPU cores, a ResNet-8 trained on the spot on drawn shapes, 32 images (some 100 seconds of one core):
    python benchmarks/attacks.py

The same with a robust ResNet-8 and the first 128 images of CIFAR-10 (about six minutes, most of them the peer's):
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

from equipoise import data, models
from equipoise.attacks import AttackState, Stage, worst_case
from equipoise.attacks.auto import VERSIONS
from equipoise.core import progress
from equipoise.core.threat import Threat
from equipoise.data import Dataset, pixels
from equipoise.training import TrainingPlan, train
from equipoise.training.objectives import Adversarial

THREAT = Threat("linf", "8/255")
KINDS = {"cpu": ("cifar10_resnet8_pgd_at_linf8.safetensors", 128, 128),
         "cuda": ("cifar10_resnet18_pgd_at_linf8.safetensors", 1000, 512)}
H200_REFERENCE = (117.5, 0.460, 0.0)  # seconds and accuracy of the original AutoAttack on this model and these images


def main() -> None:
    asked = arguments()
    kind = asked.device
    if kind == "cpu":
        torch.set_num_threads(asked.threads)
    real = asked.weights is not None and asked.data is not None
    name, model, images, threat = stored(asked) if real else drawn(asked)
    batch = asked.batch_size or KINDS[kind][2]
    where = torch.cuda.get_device_name() if kind == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"{name}, {len(images)} images, {threat}, {where}, torch {torch.__version__}", flush=True)
    peer = None if kind == "cuda" or asked.no_peer else pyautoattack(model, images, threat)
    if kind == "cuda" and real and len(images) == 1000:
        peer = H200_REFERENCE
        print(f"AutoAttack, measured before on an H200: {peer[0]:.1f} s, {peer[1]:.2%}", flush=True)
    for version in asked.versions.split(","):
        ours(version, model, images, threat, kind, batch, asked, peer)


def stored(asked: argparse.Namespace) -> tuple[str, nn.Module, Dataset, Threat]:
    """A robust network from a file, and CIFAR-10."""
    name, count, _ = KINDS[asked.device]
    model = models.load(f"file:{Path(asked.weights) / name}").eval().requires_grad_(False).to(asked.device)
    images = data.load("cifar10", split="test", data_dir=Path(asked.data), start=0, count=asked.count or count)
    return name, model, images, THREAT


def drawn(asked: argparse.Namespace) -> tuple[str, nn.Module, Dataset, Threat]:
    """A stand-in that needs no files: a ResNet-8 made robust in some seconds, and images of drawn shapes."""
    print("no --weights and --data (nor $EQUIPOISE_WEIGHTS and $EQUIPOISE_DATA), so a stand-in is trained on drawn "
          "shapes; its accuracy means nothing", flush=True)
    learnt, threat = data.load("shapes", split="train", count=1024), THREAT
    model = models.build("resnet8", num_classes=learnt.num_classes, image_shape=learnt.image_shape, mean=(0.35,) * 3,
                         std=(0.2,) * 3)
    begun = time.perf_counter()
    plan = TrainingPlan(epochs=3, optimizer="adamw", lr=5e-3, schedule="one-cycle", warmup=0.6, held_out=0)
    train(model, Adversarial(norm=threat.norm, eps=threat.eps, steps=4), learnt, plan, device=asked.device)
    name = f"stand-in ResNet-8 on drawn 16 × 16 shapes (trained in {time.perf_counter() - begun:.0f} s)"
    images = data.load("shapes", split="test", count=asked.count or 32)
    return name, model.requires_grad_(False), images, threat


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


def pyautoattack(model: nn.Module, images: Dataset, threat: Threat) -> tuple[float, float, float]:
    """Seconds, accuracy and CPU seconds of the peer."""
    from pyautoattack import AutoAttack

    x, y = pixels(images.images), images.labels
    peer = AutoAttack(model, norm="Linf", eps=threat.eps, version="standard", device="cpu", seed=0)
    # It falls over where there are fewer classes than targets.
    peer.apgd_targeted.n_target_classes = peer.fab.n_target_classes = min(9, images.num_classes - 1)
    start, spent = time.perf_counter(), time.process_time()
    x_adv, _ = peer.run_standard_evaluation(x, y, batch_size=128)
    seconds, spent = time.perf_counter() - start, time.process_time() - spent
    with torch.no_grad():
        accuracy = float((model(x_adv).argmax(dim=1) == y).float().mean())
    print(f"pyautoattack standard: {seconds:.1f} s ({spent:.1f} CPU seconds), {accuracy:.2%}", flush=True)
    return seconds, accuracy, spent


def ours(version: str, model: nn.Module, images: Dataset, threat: Threat, kind: str, batch: int,
         asked: argparse.Namespace, peer: tuple[float, float, float] | None) -> None:
    stages = VERSIONS[version]()

    def attack(part: Dataset, listed: Sequence[Stage]) -> AttackState:
        return worst_case(listed, model, part, threat=threat, seed=0, precision=asked.precision, batch_size=batch,
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


def timed(work: Callable[[], AttackState], kind: str) -> tuple[float, AttackState]:
    start = time.perf_counter()
    outcome = work()
    if kind == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, outcome


if __name__ == "__main__":
    sys.exit(main())
