"""The figures of the ResNet-18 pair: fitted on test images that are never evaluated on, attacked adaptively.

    PYTHONPATH=src python3 benchmarks/mixednuts.py --device cuda --data DIR --weights DIR --out FILE.json [--part …]

All mixtures are fitted on test images 9000–9999.
figure: one promise; clean on 0–8999, adaptively attacked (standard) on 0–999. With --looks and --from-one the promise
        is what the robust model may lose against itself with one look, measured where the mixture is fitted.
gated:  the mixture that keeps 90 % of the robust images: gated prediction beside running both.
push:   several rules and promises; of those whose measured adaptive loss on 8000–8999 (fast) is at most one, and at
        most two points, the most accurate there; then once on 0–999 (standard), clean on 0–7999.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equipoise import data, models
from equipoise.attacks import Suite, worst_case
from equipoise.attacks.auto import VERSIONS
from equipoise.core.threat import Threat
from equipoise.data import Dataset, batches, pixels
from equipoise.evaluation.adaptive import adaptive
from equipoise.evaluation.cost import asked as share_asked
from equipoise.fitting import AttackStrength, Cache, Fit, FitSettings, Target, beta, fit, lose_at_most
from equipoise.mixing import MixedClassifier

THREAT = Threat("linf", "8/255")
PARTS = ((9000, 1000), (8000, 1000), (0, 1000))  # start and count: to fit, to choose, to report
LIMITS = (1.0, 2.0)  # points of robust accuracy that a pushed mixture may lose


class Study:
    def __init__(self, asked: argparse.Namespace) -> None:
        self.device, self.batch, self.steps = asked.device, asked.batch_size, asked.steps
        kind = asked.pair
        self.accurate, self.once, self.robust = (
            models.load(f"{looks}file:{asked.weights}/cifar10_{kind}_{how}.safetensors").to(asked.device)
            .requires_grad_(False) for looks, how in (
                ("", "standard"), ("", "pgd_at_linf8"), (asked.looks, "pgd_at_linf8")))
        self.test = data.load("cifar10", split="test", data_dir=Path(asked.data))
        self.fitting, self.choosing, self.reported = ((start, min(count, asked.count)) for start, count in PARTS)
        self.cache: Cache | None = None
        self.told: list[dict[str, Any]] = []
        self.began = time.perf_counter()

    def say(self, **facts: Any) -> None:
        facts["at"] = round(time.perf_counter() - self.began, 1)
        self.told.append(facts)
        print(json.dumps(facts), flush=True)

    def fitted(self, target: Target, rule: str) -> MixedClassifier:
        """A mixture from images 9000–9999; rules after the first reuse the attacked points."""
        made = self.fit(self.robust, target, rule, self.cache)
        self.cache = self.cache or made.cache
        facts = made.mixture.logit_map.facts() if made.mixture.logit_map is not None else {}
        self.say(what="fit", rule=rule, promise=made.promise, map=facts, notes=made.notes,
                 numbers=made.numbers)
        return made.mixture.to(self.device)

    def fit(self, robust: nn.Module, target: Target, rule: str, cache: Cache | None = None) -> Fit:
        chosen = FitSettings(rule=rule, strength=AttackStrength(self.steps, 9, 3))
        return fit(self.accurate, robust, self.test.slice(*self.fitting), threat=THREAT, target=target,
                   device=self.device, batch_size=self.batch, settings=chosen, cache=cache)

    def allowed(self, points: float, rule: str) -> float:
        """What the robust model with several looks may lose, so that it loses `points` against one look."""
        once, self.cache = (self.fit(robust, lose_at_most(points), rule).cache for robust in (self.once, self.robust))
        kept = [float(cache.standing.float().mean()) for cache in (once, self.cache)]
        self.say(what="robust with one look and with several, fitting images", standing=kept)
        return points + 100 * (kept[1] - kept[0])

    @torch.no_grad()
    def clean(self, mixture: MixedClassifier, start: int, count: int) -> tuple[float, float]:
        part = self.test.slice(start, count)
        told = torch.cat([mixture.predict(batch.images).cpu() for batch in batches(part, 1000, device=self.device)])
        return float((told == part.labels).float().mean()), share_asked(mixture, part, self.device, 1000)

    def standing(self, model: nn.Module, images: Dataset, version: str) -> tuple[Tensor, dict[str, int]]:
        """Images that no attack breaks: of a mixture first the adaptive list by `version`, then the plain one.

        The plain list is always the fast one: it follows the robust side alone.
        """
        folds: dict[str, Any] = {"plain": Suite(tuple(VERSIONS[version]()))}
        if isinstance(model, MixedClassifier):
            folds = {**adaptive(model, folds["plain"]), "plain": Suite(tuple(VERSIONS["fast"]()))}
        alive, after = torch.ones(len(images), dtype=torch.bool), {}
        for name, fold in folds.items():
            rows = alive.nonzero().squeeze(1)
            outcome = worst_case(fold.stages, model, images.take(rows), threat=THREAT, seed=0,
                                 surrogate=fold.surrogate, follow=fold.follow, batch_size=self.batch,
                                 device=self.device)
            alive[rows] = outcome.standing
            after[name] = int(alive.sum())
        return alive, after

    def figure(self, points: float, rule: str) -> None:
        mixture = self.fitted(lose_at_most(points), rule)
        clean, share = self.clean(mixture, 0, 9000)
        self.say(what="clean 0-8999", rule=rule, points=points, clean=clean, asked=share)
        for point in mixture.frontier:
            slid = mixture.with_target(100 * point.lose_at_most)
            self.say(what="frontier, clean 0-8999", rule=rule, points=100 * point.lose_at_most,
                     clean=self.clean(slid, 0, 9000)[0])
        self.judged(mixture, rule=rule, points=points)

    def judged(self, mixture: MixedClassifier, **facts: Any) -> None:
        """What is reported, once: images 0–999 under the standard list."""
        images = self.test.slice(*self.reported)
        alive, after = self.standing(mixture, images, "standard")
        worst = float(alive.float().mean())
        self.say(what="adaptive standard", images=self.reported, worst=worst, after=after, **facts)

    def gated(self, rule: str) -> None:
        """The mixture that keeps 90 % of the robust images: how often its accurate side runs, and what that saves."""
        mixture = self.fitted(beta(0.9), rule)
        images = [pixels(part.to(self.device)) for part in self.test.images.split(500)]
        clean, share = self.clean(mixture, 0, len(self.test))
        (both, slow), (first, fast) = (timed(answer, images) for answer in (
            lambda x: mixture(x).argmax(dim=1), mixture.predict))
        self.say(what="gated prediction, all test images", rule=rule, beta=0.9, clean=clean, asked=share,
                 both_seconds=slow, gated_seconds=fast, ratio=fast / slow, differ=int((both != first).sum()))

    def push(self, rules: list[str], points: list[float]) -> None:
        """Which rule and which promise: measured on 8000–8999 by the fast version, judged on 0–999 by the standard."""
        held = self.test.slice(*self.choosing)
        robust, _ = self.standing(self.robust, held, "fast")
        rows = robust.nonzero().squeeze(1)
        self.say(what="robust, fast", images=self.choosing, standing=len(rows))
        found: dict[float, tuple[float, MixedClassifier, dict[str, Any]]] = {}
        for rule in rules:
            mixture, seen = self.fitted(lose_at_most(max(points)), rule), set()
            for each in points:
                slid = mixture.with_target(each)
                if slid.extra_repr() in seen:
                    continue
                seen.add(slid.extra_repr())
                # An image that the robust model loses is not counted for the mixture either.
                alive, after = self.standing(slid, held.take(rows), "fast")
                lost = 100 * (len(rows) - int(alive.sum())) / len(held)
                clean, share = self.clean(slid, *self.choosing)
                facts = {"rule": rule, "points": each, "chosen_clean": clean, "chosen_lost": lost}
                self.say(what="mixture, fast", images=self.choosing, after=after, asked=share, **facts)
                for limit in LIMITS:
                    if lost <= limit and clean > found.get(limit, (0.0,))[0]:
                        found[limit] = (clean, slid, facts)
                if lost > max(LIMITS) + 0.5:
                    break
        for limit, (_, chosen, facts) in sorted(found.items(), reverse=True):
            clean, share = self.clean(chosen, 0, self.choosing[0])
            self.say(what="clean", limit=limit, images=(0, self.choosing[0]), clean=clean, asked=share,
                     map=str(chosen.logit_map), alpha=chosen.alpha, **facts)
            self.judged(chosen, limit=limit, **facts)


@torch.no_grad()
def timed(answer: Callable[[Tensor], Tensor], images: list[Tensor]) -> tuple[Tensor, float]:
    """Answers and seconds, warm."""
    for _ in range(2):
        began = time.perf_counter()
        found = torch.cat([answer(x) for x in images]).cpu()
        seconds = time.perf_counter() - began
    return found, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--data", default=os.environ.get("EQUIPOISE_DATA"))
    parser.add_argument("--weights", default=os.environ.get("EQUIPOISE_WEIGHTS"))
    parser.add_argument("--pair", default="resnet18")
    parser.add_argument("--part", default="figure,push")
    parser.add_argument("--points", type=float, default=2.0)
    parser.add_argument("--looks", default="", help="looks:2: for a robust model that looks twice, and so on")
    parser.add_argument("--from-one", action="store_true", help="points lost against the robust model with one look")
    parser.add_argument("--rule", default="auto", help="of `figure`")
    parser.add_argument("--rules", default="auto,nuts,switch", help="of `push`")
    parser.add_argument("--tried", default="2,3,4,6,8,10", help="promised points of `push`")
    parser.add_argument("--count", type=int, default=1000, help="images of each part")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.data is None or asked.weights is None or (asked.device == "cuda" and not torch.cuda.is_available()):
        print("mixednuts: left out; it needs a GPU, --weights and --data")
        return
    study = Study(asked)
    try:
        if "figure" in asked.part:
            points = study.allowed(asked.points, asked.rule) if asked.from_one else asked.points
            study.figure(points, asked.rule)
        if "gated" in asked.part:
            study.gated(asked.rule)
        if "push" in asked.part:
            study.push(asked.rules.split(","), [float(points) for points in asked.tried.split(",")])
    finally:
        if asked.out is not None:
            asked.out.write_text(json.dumps(study.told, indent=1))


if __name__ == "__main__":
    main()
