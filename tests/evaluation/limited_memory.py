"""Attack a network for 224 × 224 pixels in a process of its own, whose GPU memory may be limited;
prints JSON.

PYTHONPATH=src python tests/evaluation/limited_memory.py --attack apgd --batch-size 64 [--limit
BYTES]
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import equipoise as eq
from equipoise.core import memory
from equipoise.core.rows import AttackRow

THREAT = eq.Threat("linf", 0.002)


def example(count: int, place: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A network with fresh weights, smooth random images, and its own predictions as labels."""
    torch.manual_seed(0)
    head = nn.Linear(32 * 49, 10)
    model = (
        nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.ReLU(),
            nn.AvgPool2d(32),
            nn.Flatten(),
            head,
        )
        .eval()
        .requires_grad_(False)
        .to(place)
    )
    images = (F.interpolate(torch.rand(count, 3, 7, 7), size=224, mode="bilinear") * 255).to(
        torch.uint8
    )
    with torch.no_grad():
        logits = torch.cat([model(part.to(place) / 255) for part in images.split(4)])
        head.bias.sub_(logits.mean(dim=0))  # or all images would have one class
        return model, images, (logits - logits.mean(dim=0)).argmax(dim=1).cpu()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--attack", default="apgd")
    parser.add_argument("--out", help="evaluate into this run folder instead of calling eq.attack")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--limit", type=int, help="bytes of GPU memory")
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    halvings, is_out_of_memory = 0, memory.is_out_of_memory

    def count_halvings(error: RuntimeError) -> bool:
        nonlocal halvings
        halvings += is_out_of_memory(error)
        return is_out_of_memory(error)

    memory.is_out_of_memory = count_halvings
    model, images, labels = example(args.count, args.device)
    if args.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        if args.limit is not None:
            torch.cuda.set_per_process_memory_fraction(
                args.limit / torch.cuda.get_device_properties(0).total_memory
            )
    settings: dict[str, Any] = {
        "threat": THREAT,
        "attack": args.attack,
        "steps": 10,
        "batch_size": args.batch_size,
        "device": args.device,
    }
    if args.out is None:
        predicted = eq.attack(model, (images, labels), **settings).predicted.tolist()
    else:
        rows = eq.evaluate(model, (images, labels), out=args.out, **settings).rows
        predicted = [
            row.predicted
            for row in rows
            if isinstance(row, AttackRow) and row.attack == args.attack
        ]
    peak = torch.cuda.max_memory_allocated() if args.device == "cuda" else 0
    print(
        json.dumps(
            {"labels": labels.tolist(), "predicted": predicted, "halvings": halvings, "peak": peak}
        )
    )


if __name__ == "__main__":
    main()
