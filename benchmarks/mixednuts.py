"""The figures of the ResNet-18 pair: fitted on test images that are never evaluated on, attacked adaptively.

    PYTHONPATH=src python3 benchmarks/mixednuts.py --device cuda --data DIR --weights DIR --out FILE.json [--part …]

figure: fit on 9000–9999 (two points), clean on 0–8999, adaptively attacked (standard) on 0–999.
push:   fit on 8000–9999; among the fitted mixtures the most accurate whose measured adaptive loss there (fast
        version) is at most one, and at most two points; then once on 0–999 (standard).
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equipoise import data, models
from equipoise.attacks import Fold, worst_case
from equipoise.attacks.auto import VERSIONS
from equipoise.data import Dataset, batches
from equipoise.evaluate.adaptive import adaptive
from equipoise.evaluate.cost import asked as share_asked
from equipoise.fit import Settings, Strength, fit, lose_at_most
from equipoise.mixing import MixedClassifier
from equipoise.threat import Threat

THREAT = Threat("linf", "8/255")
TRIED = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Study:
    def __init__(self, asked: argparse.Namespace) -> None:
        self.device, self.batch, self.steps = asked.device, asked.batch_size, asked.steps
        kind = asked.pair
        self.accurate, self.robust = (
            models.load(f"{asked.weights}/cifar10_{kind}_{how}.safetensors").to(asked.device).requires_grad_(False)
            for how in ("standard", "pgd_at_linf8"))
        self.test = data.load("cifar10", split="test", data_dir=Path(asked.data))
        self.told: list[dict[str, Any]] = []
        self.began = time.perf_counter()

    def say(self, **facts: Any) -> None:
        facts["at"] = round(time.perf_counter() - self.began, 1)
        self.told.append(facts)
        print(json.dumps(facts), flush=True)

    def fitted(self, start: int, count: int, points: float, rule: str, **settings: Any) -> MixedClassifier:
        chosen = Settings(rule=rule, strength=Strength(self.steps, 9, 3), **settings)
        made = fit(self.accurate, self.robust, self.test.slice(start, count), threat=THREAT,
                   target=lose_at_most(points), device=self.device, batch_size=self.batch, settings=chosen)
        facts = made.mixture.logit_map.facts() if made.mixture.logit_map is not None else {}
        self.say(what="fit", rule=rule, images=f"{start}-{start + count - 1}", points=points, promise=made.promise,
                 map=facts, notes=made.notes, numbers=made.numbers)
        return made.mixture.to(self.device)

    @torch.no_grad()
    def clean(self, mixture: MixedClassifier, start: int, count: int) -> tuple[float, float]:
        part = self.test.slice(start, count)
        told = torch.cat([mixture.predict(batch.images).cpu() for batch in batches(part, 1000, device=self.device)])
        return float((told == part.labels).float().mean()), share_asked(mixture, part, self.device, 1000)

    def standing(self, model: nn.Module, images: Dataset, version: str) -> tuple[Tensor, dict[str, float]]:
        """Images that no attack breaks; of a mixture plain, adaptive and two-sided, each on what the others left."""
        stages = tuple(VERSIONS[version]())
        folds: dict[str, Any] = {"plain": Fold(stages)}
        if isinstance(model, MixedClassifier):
            folds = {**adaptive(model, Fold(stages)), "plain": Fold(stages)}
        alive, after = torch.ones(len(images), dtype=torch.bool), {}
        for name, fold in folds.items():
            rows = alive.nonzero().squeeze(1)
            outcome = worst_case(fold.stages, model, images.take(rows), threat=THREAT, seed=0,
                                 surrogate=fold.surrogate, follow=fold.follow, batch_size=self.batch,
                                 device=self.device)
            alive[rows] = outcome.standing
            after[name] = float(alive.float().mean())
        return alive, after

    def figure(self, points: float, rule: str) -> None:
        mixture = self.fitted(9000, 1000, points, rule)
        clean, share = self.clean(mixture, 0, 9000)
        self.say(what="clean 0-8999", rule=rule, points=points, clean=clean, asked=share)
        for other in TRIED:
            try:
                slid = mixture.with_target(other)
            except ValueError:
                continue
            self.say(what="frontier, clean 0-8999", rule=rule, points=other, clean=self.clean(slid, 0, 9000)[0])
        alive, after = self.standing(mixture, self.test.slice(0, 1000), "standard")
        self.say(what="adaptive standard 0-999", rule=rule, points=points, worst=float(alive.float().mean()),
                 after=after)

    def push(self) -> None:
        mixture = self.fitted(8000, 2000, 2.0, "auto")
        held, test = self.test.slice(8000, 2000), self.test.slice(0, 1000)
        robust, _ = self.standing(self.robust, held, "fast")
        base = float(robust.float().mean())
        self.say(what="robust, fast 8000-9999", worst=base)
        found: dict[float, MixedClassifier] = {}
        for points in TRIED:
            try:
                slid = mixture.with_target(points)
            except ValueError:
                continue
            alive, after = self.standing(slid, held, "fast")
            lost = 100 * (base - float(alive.float().mean()))
            self.say(what="mixture, fast 8000-9999", points=points, lost=lost, after=after,
                     clean=self.clean(slid, 8000, 2000)[0])
            for limit in (1.0, 2.0):
                if lost <= limit:
                    found[limit] = slid
            if lost > 2.5:
                break
        for limit, chosen in found.items():
            alive, after = self.standing(chosen, test, "standard")
            self.say(what=f"best at {limit:g} points lost, standard 0-999", worst=float(alive.float().mean()),
                     after=after, clean=self.clean(chosen, 0, 8000)[0], alpha=chosen.alpha)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--data", default=os.environ.get("EQUIPOISE_DATA"))
    parser.add_argument("--weights", default=os.environ.get("EQUIPOISE_WEIGHTS"))
    parser.add_argument("--pair", default="resnet18")
    parser.add_argument("--part", default="figure,push")
    parser.add_argument("--points", type=float, default=2.0)
    parser.add_argument("--rule", default="auto")
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
            study.figure(asked.points, asked.rule)
        if "push" in asked.part:
            study.push()
    finally:
        if asked.out is not None:
            asked.out.write_text(json.dumps(study.told, indent=1))


if __name__ == "__main__":
    main()
