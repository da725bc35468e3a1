"""Clean and adaptively attacked accuracy of mixtures of the ResNet-18 pair on CIFAR-10.

    python benchmarks/mixednuts.py                           two minutes of one core: a small pair
    on synthetic shapes PYTHONPATH=src python3 benchmarks/mixednuts.py --device cuda --data DATA
    --weights WEIGHTS [--part …]

Mixtures are fitted on test images 9000–9999, which are never evaluated on.
figure: one target; clean accuracy on 0–8999, adaptive attacks (standard) on 0–999. With --tta and
--from-one the target
        is relative to the robust model without test-time augmentation, measured on the fitting
        images.
gated:  the mixture that keeps 90 % of the robust images: gated prediction against running both
models. push:   several rules and targets; the most accurate of those that lose at most one, and at
most two points on 8000–8999
        (fast); then evaluated once on 0–999 (standard) and clean on 0–7999.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
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
    train_on_shapes,
)
from torch import Tensor, nn

from equipoise.attacks import Attack, Suite, attack_dataset, fast, standard
from equipoise.core.results import read_summary
from equipoise.data import Dataset, batches, load_data, pixels
from equipoise.evaluation.adaptive import adaptive_attacks
from equipoise.evaluation.cost import accurate_share
from equipoise.fitting import Fit, fit
from equipoise.mixing import MixedClassifier

LIMITS = (1.0, 2.0)  # points of robust accuracy that a mixture of `push` may lose


@dataclass(frozen=True)
class Slices:
    """Starts and counts of the images to fit on, to select on and to report."""

    fitting: tuple[int, int]
    selection: tuple[int, int]
    reported: tuple[int, int]


CIFAR10 = Slices((9000, 1000), (8000, 1000), (0, 1000))
SHAPES = Slices((300, 200), (200, 100), (0, 16))


class Study:
    """A pair of models, their images, and the measurements so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device, self.start, self.measurements = (
            args,
            args.device,
            time.perf_counter(),
            [],
        )
        if has_files(args):
            self.slices, self.data = CIFAR10, load_data("cifar10", data_dir=args.data)
            self.accurate = load_cifar_model(args, f"{args.pair}_standard")
            self.without_tta = load_cifar_model(args, f"{args.pair}_pgd_at_linf8")
            self.robust = load_cifar_model(args, f"{args.pair}_pgd_at_linf8", args.tta)
        else:
            print(NO_FILES, flush=True)
            self.slices, self.data = SHAPES, load_data("shapes", count=500)
            self.accurate = train_on_shapes("standard", self.device)
            self.robust = self.without_tta = robust_on_shapes(self.device)

    def report(self, **values: object) -> None:
        """Print one measurement as a JSON line, and keep it."""
        values["at"] = round(time.perf_counter() - self.start, 1)
        self.measurements.append(values)
        print(json.dumps(values), flush=True)

    def fit(
        self, rule: str, robust: nn.Module | None = None, out: str | None = None, **target: float
    ) -> Fit:
        """A mixture fitted on the fitting images."""
        result = fit(
            self.accurate,
            self.robust if robust is None else robust,
            self.data.slice(*self.slices.fitting),
            threat=THREAT,
            rule=rule,
            steps=self.args.steps,
            device=self.device,
            batch_size=self.args.batch_size,
            out=out,
            **target,
        )
        self.report(
            what="fit", rule=rule, promise=result.promise, map=str(result.mixture.logit_map)
        )
        return result

    def points_with_tta(self, points: float, rule: str) -> float:
        """What the model with test-time augmentation may lose, to be `points` below the one
        without."""
        survived = []
        for robust in (self.without_tta, self.robust):
            with tempfile.TemporaryDirectory() as folder:
                self.fit(rule, robust, folder, lose_at_most=points)
                survived.append(read_summary(folder).result("robust", "minimum-margin").value)
        self.report(what="robust model without and with TTA, fitting images", survived=survived)
        return points + 100 * (survived[1] - survived[0])

    @torch.no_grad()
    def clean(self, mixture: MixedClassifier, start: int, count: int) -> dict[str, float]:
        """Clean accuracy, and the share of images on which the accurate model runs."""
        part = self.data.slice(start, count)
        parts = batches(part, 1000, device=self.device)
        predicted = torch.cat([mixture.predict(batch.images).cpu() for batch in parts])
        return {
            "clean": float((predicted == part.labels).float().mean()),
            "accurate_share": accurate_share(mixture, part, self.device, 1000),
        }

    def survived(
        self, model: nn.Module, data: Dataset, suite: Suite
    ) -> tuple[Tensor, dict[str, int]]:
        """(N,) images that survive, and how many after each attack.

        A mixture is attacked adaptively by the suite, then by the fast suite on its own gradients.
        """
        attacks: dict[str, Attack] = {"plain": suite}
        if isinstance(model, MixedClassifier):
            attacks = {**adaptive_attacks(model, suite), "plain": fast()}
        alive, counts = torch.ones(len(data), dtype=torch.bool), {}
        for name, attack in attacks.items():
            rows = alive.nonzero().squeeze(1)
            if len(rows):
                alive[rows] = attack_dataset(
                    attack,
                    model,
                    data.take(rows),
                    threat=THREAT,
                    seed=0,
                    device=self.device,
                    batch_size=self.args.batch_size,
                ).survived
            counts[name] = int(alive.sum())
        return alive, counts

    def evaluate(self, mixture: MixedClassifier, **values: object) -> None:
        """The reported result: standard suite, adaptive."""
        alive, counts = self.survived(mixture, self.data.slice(*self.slices.reported), standard())
        self.report(
            what="adaptive standard",
            images=self.slices.reported,
            worst=float(alive.float().mean()),
            survivors=counts,
            **values,
        )

    def figure(self, points: float, rule: str) -> None:
        """One target: clean accuracy of the mixture and of its frontier, then adaptive attacks."""
        mixture, count = (
            self.fit(rule, lose_at_most=points).mixture.to(self.device),
            self.slices.fitting[0],
        )
        self.report(
            what="clean",
            images=(0, count),
            rule=rule,
            points=points,
            **self.clean(mixture, 0, count),
        )
        for point in mixture.frontier:
            other = mixture.with_target(100 * point.lose_at_most)
            self.report(
                what="frontier, clean",
                images=(0, count),
                points=100 * point.lose_at_most,
                **self.clean(other, 0, count),
            )
        self.evaluate(mixture, rule=rule, points=points)

    def gated(self, rule: str) -> None:
        """Gated prediction against running both models."""
        mixture = self.fit(rule, beta=0.9).mixture.to(self.device)
        images = [pixels(part.to(self.device)) for part in self.data.images.split(500)]

        @torch.no_grad()
        def run(predict: Callable[[Tensor], Tensor]) -> tuple[float, Tensor]:
            for _ in range(2):  # the first run warms up
                seconds, predicted = timed(
                    lambda: torch.cat([predict(x) for x in images]).cpu(), self.device
                )
            return seconds, predicted

        both_seconds, both = run(lambda x: mixture(x).argmax(dim=1))
        gated_seconds, gated = run(mixture.predict)
        self.report(
            what="gated prediction, all test images",
            rule=rule,
            beta=0.9,
            both_seconds=both_seconds,
            gated_seconds=gated_seconds,
            ratio=gated_seconds / both_seconds,
            differ=int((both != gated).sum()),
            **self.clean(mixture, 0, len(self.data)),
        )

    def push(self, rules: list[str], targets: list[float]) -> None:
        """Select rule and target by the loss measured on the selection images, then evaluate the
        selected mixtures."""
        images = self.data.slice(*self.slices.selection)
        rows = self.survived(self.robust, images, fast())[0].nonzero().squeeze(1)
        self.report(what="robust, fast", images=self.slices.selection, survivors=len(rows))
        best: dict[float, tuple[float, MixedClassifier, dict[str, object]]] = {}
        for rule in rules:
            mixture = self.fit(rule, lose_at_most=max(targets)).mixture.to(self.device)
            tried = set()
            for points in targets:
                candidate = mixture.with_target(points)
                if candidate.extra_repr() in tried:
                    continue
                tried.add(candidate.extra_repr())
                # An image that the robust model loses is not counted for the mixture either.
                alive, counts = self.survived(candidate, images.take(rows), fast())
                lost = 100 * (len(rows) - int(alive.sum())) / len(images)
                clean = self.clean(candidate, *self.slices.selection)
                values: dict[str, object] = {
                    "rule": rule,
                    "points": points,
                    "selection_clean": clean["clean"],
                    "selection_lost": lost,
                }
                self.report(
                    what="mixture, fast", images=self.slices.selection, survivors=counts, **values
                )
                for limit in LIMITS:
                    if lost <= limit and clean["clean"] > best.get(limit, (0.0,))[0]:
                        best[limit] = (clean["clean"], candidate, values)
                if lost > max(LIMITS) + 0.5:
                    break
        for limit, (_, selected, values) in sorted(best.items(), reverse=True):
            count = self.slices.selection[0]
            self.report(
                what="clean",
                limit=limit,
                images=(0, count),
                map=str(selected.logit_map),
                alpha=selected.alpha,
                **self.clean(selected, 0, count),
                **values,
            )
            self.evaluate(selected, limit=limit, **values)


def main() -> None:
    parser = new_parser(__doc__)
    add_files(parser)
    parser.add_argument("--pair", default="resnet18", help="architecture of the pair in --weights")
    parser.add_argument(
        "--part", default="figure", help="figure, gated and push, separated by commas"
    )
    parser.add_argument(
        "--points", type=float, default=2.0, help="target of `figure`: points that may be lost"
    )
    parser.add_argument(
        "--tta", type=int, help="test-time augmentation of the robust model: 2, 6 or 10 views"
    )
    parser.add_argument(
        "--from-one", action="store_true", help="points relative to the robust model without --tta"
    )
    parser.add_argument("--rule", default="auto", help="rule of `figure` and `gated`")
    parser.add_argument("--rules", default="auto,nuts,switch", help="rules of `push`")
    parser.add_argument("--tried", default="2,3,4,6,8,10", help="targets of `push`")
    parser.add_argument("--steps", type=int, default=100, help="steps of the margin attack")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--out", type=Path, help="also write all measurements to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    study = Study(args)
    try:
        if "figure" in args.part:
            study.figure(
                study.points_with_tta(args.points, args.rule) if args.from_one else args.points,
                args.rule,
            )
        if "gated" in args.part:
            study.gated(args.rule)
        if "push" in args.part:
            study.push(args.rules.split(","), [float(points) for points in args.tried.split(",")])
    finally:
        if args.out is not None:
            args.out.write_text(json.dumps(study.measurements, indent=1))


if __name__ == "__main__":
    main()
