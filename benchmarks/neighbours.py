"""K nearest training images as the oracle of local smoothing [Bai2022, Figures 5 and 9], such as
those of CIFAR-10.

    PYTHONPATH=src python benchmarks/neighbours.py --accurate MODEL [--count 100] [--neighbours 1 10
    100]

Clean accuracy of Eq. (2), and that under PGD on the accurate model alone, against γ. Logits,
gradients and votes do not depend on γ, so that each is computed once per image: minutes on one
core.
"""

from __future__ import annotations

import math

import torch
from common import new_parser

from equipoise import load_model
from equipoise.attacks import TransferPgd
from equipoise.core import rng, stats
from equipoise.core.threat import Threat
from equipoise.data import load_data, pixels
from equipoise.local_smoothing import Neighbours, SmoothedClassifier
from equipoise.local_smoothing.smoothing import averaged, log_strength

GAMMAS = (0.0, 1e-4, 1e-3, 1e-2, 0.1, 10.0, math.inf)


def main() -> None:
    parser = new_parser(__doc__)
    parser.set_defaults(threads=1)
    parser.add_argument("--accurate", required=True)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--neighbours", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--eps", type=float, default=8 / 255)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    g = load_model(args.accurate).to(args.device).requires_grad_(False)
    data, training = (
        load_data(args.data, split="test", count=args.count),
        load_data(args.data, split="train"),
    )
    x, y = pixels(data.images).to(args.device), data.labels.to(args.device)
    attack = TransferPgd(source=g, steps=args.steps)
    attacked = attack(
        g,
        x,
        y,
        threat=Threat("linf", args.eps),
        stream=rng.stream(0, "pgd", data.index.to(args.device)),
    )
    rule = SmoothedClassifier(g, g, 1.0, trust="gradient", chunk=2)  # its oracle is not used
    with torch.no_grad():
        sides = {
            name: [
                torch.cat(parts)
                for parts in zip(
                    *(rule.sides_and_trust(part)[:3] for part in at.split(25)), strict=True
                )
            ]
            for name, at in (("clean", x), ("attacked", attacked))
        }
        print(
            f"{args.count} images, oracle of {len(training)} images; γ = {', '.join(map(str, GAMMAS))}"
        )
        for k in args.neighbours:
            for weights in ("plain", "distance"):
                oracle = Neighbours(
                    training.images, training.labels, training.num_classes, k=k, weights=weights
                )
                for name, at in (("clean", x), ("attacked", attacked)):
                    logits, _, trust = sides[name]
                    votes = oracle.to(args.device)(at)
                    shares = [
                        stats.share(
                            (
                                averaged(logits, votes, trust, log_strength(gamma).float()).argmax(
                                    1
                                )
                                == y
                            ).tolist()
                        )
                        for gamma in GAMMAS
                    ]
                    print(
                        f"K = {k}, {weights}, {name}: "
                        + ", ".join(f"{100 * share.value:.1f}" for share in shares)
                    )


if __name__ == "__main__":
    main()
