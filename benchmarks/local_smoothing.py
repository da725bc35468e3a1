"""Cost of the trust terms of local smoothing, relative to one forward pass of the accurate model.

    PYTHONPATH=src python benchmarks/local_smoothing.py [--arch resnet18] [--batch 16]
    [--neighbours] [--device cuda]

Medians of several repeats. All rules are measured in turn in every repeat, so that ratios also hold
on a busy machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from common import new_parser

from equipoise import models
from equipoise.local_smoothing import Neighbours, SmoothedClassifier

TRUST_TERMS = ("constant", "top-gradient", "top-ratio", "gradient", "ratio")
SHAPE = (3, 32, 32)


def median_seconds(
    functions: dict[str, Callable[[], object]], repeats: int, device: str
) -> dict[str, float]:
    """Median seconds of each function; processor time on the CPU, which other work does not
    distort."""
    clock = time.perf_counter if device == "cuda" else time.process_time
    times: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(repeats + 1):
        for name, function in functions.items():
            if device == "cuda":
                torch.cuda.synchronize()
            start = clock()
            function()
            if device == "cuda":
                torch.cuda.synchronize()
            if repeat:  # the first repeat warms up
                times[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = new_parser(__doc__)
    parser.set_defaults(threads=1)
    parser.add_argument("--arch", default="resnet8")
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--neighbours", action="store_true", help="also 1000 queries among 50,000 images"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    g, h = (
        models.build(args.arch, num_classes=args.classes, image_shape=SHAPE, seed=seed)
        .eval()
        .requires_grad_(False)
        .to(args.device)
        for seed in (0, 1)
    )
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(args.batch, *SHAPE, generator=generator).to(args.device)
    rules = {
        trust: SmoothedClassifier(g, h, 1.0, trust=trust).to(args.device) for trust in TRUST_TERMS
    }
    with torch.no_grad():
        functions: dict[str, Callable[[], object]] = {"g": lambda: g(x)}
        functions |= {trust: (lambda rule=rule: rule(x)) for trust, rule in rules.items()}  # type: ignore[misc]
        seconds = median_seconds(functions, args.repeats, args.device)
    print(
        f"{args.arch}, {args.classes} classes, batch {args.batch}, {args.device}, {args.threads} threads, torch "
        f"{torch.__version__}"
    )
    for name, value in seconds.items():
        print(f"{name:14s} {1e3 * value:9.1f} ms {value / seconds['g']:7.2f} × g")
    print(
        f"full Jacobians cost {seconds['ratio'] / seconds['top-ratio']:.2f} times the fast variant"
    )
    if args.neighbours:
        images = torch.randint(0, 256, (50_000, *SHAPE), dtype=torch.uint8, generator=generator)
        oracle = Neighbours(images, torch.arange(50_000) % 10, 10, k=10).to(args.device)
        queries = torch.rand(1000, *SHAPE, generator=generator).to(args.device)
        value = median_seconds({"query": lambda: oracle(queries)}, 2, args.device)["query"]
        print(f"neighbours: 1000 queries among 50,000 × 3072 in {value:.2f} s")


if __name__ == "__main__":
    main()
