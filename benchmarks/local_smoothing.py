"""What trust costs: rules of the family and the neighbours against one plain forward pass of the accurate model.

    PYTHONPATH=src python benchmarks/local_smoothing.py [--arch resnet8] [--batch 32] [--threads 1] [--device cpu]

Medians of several repeats; the ratios are what matters, and hold on a busy machine too because all passes of a
round are measured in turn.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from equipoise import models
from equipoise.local_smoothing.neighbours import Neighbours
from equipoise.local_smoothing.smoothing import SmoothedClassifier


def clock(work: dict[str, Callable[[], object]], repeats: int, device: torch.device) -> dict[str, float]:
    """Median seconds of each; processor time on the CPU, where others may be at work."""
    now = time.perf_counter if device.type == "cuda" else time.process_time
    found: dict[str, list[float]] = {name: [] for name in work}
    for repeat in range(repeats + 1):
        for name, function in work.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
            start = now()
            function()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if repeat:  # the first round warms up
                found[name].append(now() - start)
    return {name: statistics.median(times) for name, times in found.items()}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--arch", default="resnet8")
    options.add_argument("--classes", type=int, default=10)
    options.add_argument("--batch", type=int, default=32)
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--device", default="cpu")
    options.add_argument("--neighbours", action="store_true", help="also 1000 queries of 50,000 images")
    asked = options.parse_args()
    torch.set_num_threads(asked.threads)
    device = torch.device(asked.device)
    shape = (3, 32, 32)
    g, h = (models.build(asked.arch, num_classes=asked.classes, image_shape=shape, seed=seed).eval()
            .requires_grad_(False).to(device) for seed in (0, 1))
    x = torch.rand(asked.batch, *shape, generator=torch.Generator().manual_seed(0)).to(device)
    rules = {name: SmoothedClassifier(g, h, 1.0, trust=name).to(device)
             for name in ("constant", "top-gradient", "top-ratio", "gradient", "ratio")}
    with torch.no_grad():
        work: dict[str, Callable[[], object]] = {"g": lambda: g(x)}
        work |= {name: (lambda rule=rule: rule(x)) for name, rule in rules.items()}  # type: ignore[misc]
        seconds = clock(work, asked.repeats, device)
    print(f"{asked.arch}, {asked.classes} classes, batch {asked.batch}, {device}, {asked.threads} threads, torch "
          f"{torch.__version__}")
    for name, value in seconds.items():
        print(f"{name:14s} {1e3 * value:9.1f} ms {value / seconds['g']:7.2f} × g")
    print(f"full Jacobians cost {seconds['ratio'] / seconds['top-ratio']:.2f} times the fast variant")
    if asked.neighbours:
        chance = torch.Generator().manual_seed(0)
        images = torch.randint(0, 256, (50_000, *shape), dtype=torch.uint8, generator=chance)
        oracle = Neighbours(images, torch.arange(50_000) % 10, 10, k=10).to(device)
        query = torch.rand(1000, *shape, generator=chance).to(device)
        value = clock({"query": lambda: oracle(query)}, 2, device)["query"]
        print(f"neighbours: 1000 queries of 50,000 × 3072 in {value:.2f} s")


if __name__ == "__main__":
    main()
