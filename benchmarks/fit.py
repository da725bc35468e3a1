"""What a fit and a fitted mixture cost: the search over cached logits, and gated prediction beside running both.

    python benchmarks/fit.py                                     the search, on logits drawn for the purpose
    python benchmarks/fit.py --data DIR --weights DIR            and prediction on the CIFAR-10 test set (ResNet-8)
    PYTHONPATH=src python3 benchmarks/fit.py --device cuda …     the same with the ResNet-18 pair
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise import data, models
from equipoise.core.rng import stream
from equipoise.data import Dataset, pixels
from equipoise.fitting import Cache, lose_at_most
from equipoise.fitting.search import MapSearch, families
from equipoise.mixing import LogitMap, MixedClassifier

TARGET = lose_at_most(2.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--data", default=os.environ.get("EQUIPOISE_DATA"))
    parser.add_argument("--weights", default=os.environ.get("EQUIPOISE_WEIGHTS"))
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    search()
    if asked.data is None or asked.weights is None:
        print("prediction: left out; --weights and --data say where the ResNets and CIFAR-10 are")
        return
    prediction(asked)


def drawn(n: int, classes: int = 10, points: int = 6) -> Cache:
    chance = stream(0, "benchmark", torch.arange(n))
    labels = chance.at("label").integers(classes)
    own = F.one_hot(labels, classes).float()
    clean = chance.at("noise").normal(classes) + (0.5 + 4 * chance.at("sure").uniform().unsqueeze(1)) * own
    attacked = torch.stack([clean - (1.0 + 0.1 * k) * own for k in range(points)])
    said = torch.where(chance.at("right").uniform() < 0.95, labels, (labels + 1) % classes)
    return Cache(clean, attacked, labels, torch.arange(n), said)


def search() -> None:
    cache = drawn(1000)
    for rule in ("nuts", "auto"):
        kinds = families(rule, cache, "gelu-monotone")
        began = time.perf_counter()
        found = MapSearch(cache, kinds)
        grid = time.perf_counter() - began
        found.widen(TARGET)
        found.refine(TARGET)
        found.choose(TARGET)
        whole = time.perf_counter() - began
        tried = sum(len(table) for table in found.tables.values())
        print(f"search, rule {rule}, 1000 images × 6 points: grid {grid:.3f} s, with refinement {whole:.2f} s, "
              f"{tried} candidates, {torch.get_num_threads()} threads", flush=True)


def prediction(asked: argparse.Namespace) -> None:
    kind = "resnet18" if asked.device == "cuda" else "resnet8"
    bases = [models.load(f"{asked.weights}/cifar10_{kind}_{how}.safetensors") for how in ("standard", "pgd_at_linf8")]
    images = data.load("cifar10", split="test", data_dir=Path(asked.data))
    mixture = MixedClassifier(bases[0], bases[1], 0.7, hard=True, logit_map=LogitMap(
        2.0, 1.0, 0.0, "linear", rivals=0.0, unit=1.0)).eval().to(asked.device)
    with torch.no_grad():
        logits = torch.cat([mixture.robust(batch.images).cpu() for batch in data.batches(images, 500,
                                                                                         device=asked.device)])
        p = mixture.cpu().mapped(logits).exp().topk(2, dim=1).values
        # The threshold that leaves a fifth of the images open, about that of a mixture that keeps 90 %.
        q = float((p[:, 0] - p[:, 1]).quantile(0.2))
    mixture = MixedClassifier(bases[0], bases[1], 1 / (1 + q), hard=True, logit_map=mixture.logit_map).eval()
    mixture.to(asked.device)
    both, first = timed(lambda x: mixture(x).argmax(dim=1), images, asked.device), timed(mixture.predict, images,
                                                                                        asked.device)
    # On a GPU the accurate side rounds otherwise in smaller batches, which can turn an answer on its own border.
    differ = int((both[1] != first[1]).sum())
    print(f"prediction, {kind} pair, {len(images)} images, {asked.device}: both sides {both[0]:.2f} s, gated "
          f"{first[0]:.2f} s ({first[0] / both[0]:.2f}), {differ} answers differ")


@torch.no_grad()
def timed(answer: Callable[[Tensor], Tensor], images: Dataset, device: str) -> tuple[float, Tensor]:
    found, seconds = [], []
    for _ in range(2):  # the first round warms up
        began = time.perf_counter()
        found = [answer(pixels(part.to(device))).cpu() for part in images.images.split(500)]
        seconds.append(time.perf_counter() - began)
    return seconds[-1], torch.cat(found)


if __name__ == "__main__":
    main()
