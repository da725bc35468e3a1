"""Attacked accuracy and time of the attack suites, beside pyautoattack in the same run.

Two CPU cores, a ResNet-8 trained on the spot on synthetic shapes, 32 images (about 100 seconds of
one core):
    python benchmarks/attacks.py

A robust ResNet-8 and the first 128 images of CIFAR-10 (about six minutes, most of them
pyautoattack's):
    python benchmarks/attacks.py --data DATA --weights WEIGHTS

One GPU, robust ResNet-18, first 1000 images. With the code of the original AutoAttack (a clone of
its repository) it runs first, on the same model and images; without it no ratio is printed, because
its time differs between machines:
    PYTHONPATH=src python3 benchmarks/attacks.py --device cuda --data DATA --weights WEIGHTS
    --reference CLONE
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from common import (
    NO_FILES,
    THREAT,
    add_files,
    has_files,
    load_cifar_model,
    new_parser,
    robust_on_shapes,
    timed,
)
from torch import nn

from equipoise.attacks import Attack, AttackState, attack_dataset, fast, standard
from equipoise.core import progress
from equipoise.data import Dataset, load_data, pixels

SUITES = {"fast": fast, "standard": standard}
NETWORKS = {
    "cpu": ("resnet8_pgd_at_linf8", 128, 128),
    "cuda": ("resnet18_pgd_at_linf8", 1000, 512),
}  # images, batch


@dataclass(frozen=True)
class Reference:
    """Another implementation of AutoAttack on the same model and images."""

    seconds: float
    accuracy: float
    cpu_seconds: float | None = None


def main() -> None:
    parser = new_parser(__doc__)
    add_files(parser)
    parser.add_argument(
        "--suites", default="fast,standard", help="attack suites, separated by commas"
    )
    parser.add_argument(
        "--precision", default="auto", help="precision of gradients: auto, fp32 or bf16"
    )
    parser.add_argument("--count", type=int, help="number of images")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument(
        "--reference", type=Path, help="folder that holds the package of the original AutoAttack"
    )
    parser.add_argument("--no-peer", action="store_true", help="do not run pyautoattack")
    parser.add_argument("--detail", action="store_true", help="show the progress of every stage")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    name, model, data = load(args)
    where = torch.cuda.get_device_name() if args.device == "cuda" else f"{args.threads} CPU threads"
    print(f"{name}, {len(data)} images, {THREAT}, {where}, torch {torch.__version__}", flush=True)
    reference = None
    if args.reference is not None:
        reference = run_original(args.reference, model, data, args)
    elif args.device == "cpu" and not args.no_peer:
        reference = run_pyautoattack(model, data)
    for suite in args.suites.split(","):
        run_suite(suite, model, data, args, reference)


def load(args: argparse.Namespace) -> tuple[str, nn.Module, Dataset]:
    """Name, model and images: CIFAR-10, or synthetic shapes where no files are given."""
    if has_files(args):
        name, count, _ = NETWORKS[args.device]
        data = load_data("cifar10", data_dir=args.data, count=args.count or count)
        return name, load_cifar_model(args, name), data
    print(NO_FILES, flush=True)
    seconds, model = timed(lambda: robust_on_shapes(args.device), args.device)
    return (
        f"ResNet-8 on shapes (trained in {seconds:.0f} s)",
        model,
        load_data("shapes", count=args.count or 32),
    )


def run_original(
    folder: Path, model: nn.Module, data: Dataset, args: argparse.Namespace
) -> Reference:
    """Time and attacked accuracy of the original AutoAttack, whose code lies in `folder`."""
    sys.path.insert(0, str(folder))
    from autoattack import AutoAttack

    x, y = pixels(data.images).to(args.device), data.labels.to(args.device)
    batch_size = args.batch_size or NETWORKS[args.device][2]
    with torch.no_grad():
        model(x[:batch_size])  # loading kernels is not timed here either
    peer = AutoAttack(
        model,
        norm="Linf",
        eps=THREAT.eps,
        version="standard",
        device=args.device,
        seed=0,
        verbose=False,
    )
    cpu = time.process_time()
    seconds, x_adv = timed(lambda: peer.run_standard_evaluation(x, y, bs=batch_size), args.device)
    cpu = time.process_time() - cpu
    with torch.no_grad():
        correct = torch.cat([model(part).argmax(dim=1) for part in x_adv.split(batch_size)]) == y
    accuracy = float(correct.float().mean())
    print(f"original AutoAttack: {seconds:.1f} s, {accuracy:.2%}", flush=True)
    return Reference(seconds, accuracy, cpu if args.device == "cpu" else None)


def run_pyautoattack(model: nn.Module, data: Dataset) -> Reference:
    """Time and attacked accuracy of pyautoattack."""
    from pyautoattack import AutoAttack

    x, y = pixels(data.images), data.labels
    peer = AutoAttack(model, norm="Linf", eps=THREAT.eps, version="standard", device="cpu", seed=0)
    # It fails where there are fewer classes than targets.
    peer.apgd_targeted.n_target_classes = peer.fab.n_target_classes = min(9, data.num_classes - 1)
    cpu = time.process_time()
    seconds, (x_adv, _) = timed(lambda: peer.run_standard_evaluation(x, y, batch_size=128), "cpu")
    cpu = time.process_time() - cpu
    with torch.no_grad():
        accuracy = float((model(x_adv).argmax(dim=1) == y).float().mean())
    print(
        f"pyautoattack standard: {seconds:.1f} s ({cpu:.1f} CPU seconds), {accuracy:.2%}",
        flush=True,
    )
    return Reference(seconds, accuracy, cpu)


def run_suite(
    name: str,
    model: nn.Module,
    data: Dataset,
    args: argparse.Namespace,
    reference: Reference | None,
) -> None:
    """Time and attacked accuracy of one of our suites."""
    suite, batch_size = SUITES[name](), args.batch_size or NETWORKS[args.device][2]

    def run(attack: Attack, part: Dataset) -> AttackState:
        return attack_dataset(
            attack,
            model,
            part,
            threat=THREAT,
            seed=0,
            precision=args.precision,
            batch_size=batch_size,
            device=args.device,
            title=name,
        )

    # Loading kernels takes the first seconds of a process; they are timed separately.
    warm_up, _ = timed(
        lambda: run(fast().attacks[0], data.slice(0, min(batch_size, len(data)))), args.device
    )
    cpu = time.process_time()
    with progress.shown() if args.detail else nullcontext():
        seconds, state = timed(lambda: run(suite, data), args.device)
    cpu = time.process_time() - cpu
    accuracy = float(state.survived.float().mean())
    line = f"equipoise {name}: {seconds:.1f} s, {accuracy:.2%} (warm-up {warm_up:.1f} s, timed separately)"
    if reference is not None:
        line += f"; {reference.seconds / seconds:.2f} times as fast, accuracy {accuracy - reference.accuracy:+.2%}"
        if reference.cpu_seconds is not None:  # the fairer ratio on a busy machine
            line += f"; {reference.cpu_seconds / cpu:.2f} times by CPU seconds ({cpu:.1f})"
    print(line, flush=True)
    broken = Counter(state.broken_by(row) for row in range(len(data)) if not state.survived[row])
    print(
        "    broken by " + ", ".join(f"{stage} {count}" for stage, count in broken.items()),
        flush=True,
    )
    if args.device == "cuda":
        print(f"    peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)


if __name__ == "__main__":
    main()
