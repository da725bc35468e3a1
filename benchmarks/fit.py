"""Cost of a fit and of a fitted mixture: the search over cached logits, and gated prediction.

python benchmarks/fit.py                                     the search, on random logits
python benchmarks/fit.py --data DATA --weights WEIGHTS       and prediction on the CIFAR-10 test set
(ResNet-8) PYTHONPATH=src python3 benchmarks/fit.py --device cuda …     the same with the ResNet-18
pair
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from common import add_files, has_files, load_cifar_model, new_parser, timed
from torch import Tensor

from equipoise.core.rng import stream
from equipoise.data import Dataset, batches, load_data, pixels
from equipoise.fitting.cached_logits import ANY_CLASS, CachedLogits
from equipoise.fitting.conformal import lose_at_most
from equipoise.fitting.search import MapSearch, families
from equipoise.mixing import LogitMap, MixedClassifier

TARGET = lose_at_most(2.0)


def main() -> None:
    parser = new_parser(__doc__)
    add_files(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    search()
    if has_files(args):
        predict(args)
    else:
        print("prediction skipped: it needs --weights and --data")


def random_logits(n: int, classes: int = 10, points: int = 6) -> CachedLogits:
    """Logits of a robust model whose confidence varies, and classes of an accurate model that is
    correct on 95 %."""
    random = stream(0, "benchmark", torch.arange(n))
    labels = random.at("label").integers(classes)
    one_hot = F.one_hot(labels, classes).float()
    clean = (
        random.at("noise").normal(classes)
        + (0.5 + 4 * random.at("sure").uniform().unsqueeze(1)) * one_hot
    )
    attacked = torch.stack([clean - (1.0 + 0.1 * k) * one_hot for k in range(points)])
    accurate = torch.where(random.at("right").uniform() < 0.95, labels, (labels + 1) % classes)
    return CachedLogits(
        clean, attacked, labels, torch.arange(n), accurate, torch.full((points, n), ANY_CLASS)
    )


def search() -> None:
    """Seconds of the search for a map."""
    logits = random_logits(1000)
    for rule in ("nuts", "auto"):
        kinds = families(rule, logits, "gelu-monotone")
        grid_seconds, maps = timed(lambda kinds=kinds: MapSearch(logits, kinds), "cpu")  # type: ignore[misc]
        seconds, _ = timed(lambda maps=maps: maps.run(TARGET), "cpu")  # type: ignore[misc]
        candidates = sum(len(table.candidates) for table in maps.tables.values())
        print(
            f"search, rule {rule}, 1000 images × 6 points: grid {grid_seconds:.3f} s, with refinement "
            f"{grid_seconds + seconds:.2f} s, {candidates} candidates, {torch.get_num_threads()} threads",
            flush=True,
        )


def predict(args: argparse.Namespace) -> None:
    """Seconds of gated prediction against running both models on every image."""
    arch = "resnet18" if args.device == "cuda" else "resnet8"
    accurate, robust = (
        load_cifar_model(args, f"{arch}_{name}") for name in ("standard", "pgd_at_linf8")
    )
    data = load_data("cifar10", data_dir=args.data)
    logit_map = LogitMap(2.0, 1.0, 0.0, "linear", rivals=0.0, unit=1.0)
    # The threshold at which the accurate model runs on a fifth of the images, as in a mixture that
    # keeps 90 %.
    with torch.no_grad():
        logits = torch.cat(
            [robust(batch.images).cpu() for batch in batches(data, 500, device=args.device)]
        )
        top = F.softmax(logit_map(logits), dim=1).topk(2, dim=1).values
        q = float((top[:, 0] - top[:, 1]).quantile(0.2))
    mixture = (
        MixedClassifier(accurate, robust, 1 / (1 + q), hard=True, logit_map=logit_map)
        .eval()
        .to(args.device)
    )
    both_seconds, both = run_twice(lambda x: mixture(x).argmax(dim=1), data, args.device)
    gated_seconds, gated = run_twice(mixture.predict, data, args.device)
    # On a GPU the accurate model rounds differently in smaller batches, which can change its
    # prediction.
    print(
        f"prediction, {arch} pair, {len(data)} images, {args.device}: both models {both_seconds:.2f} s, gated "
        f"{gated_seconds:.2f} s ({gated_seconds / both_seconds:.2f}), {int((both != gated).sum())} differ"
    )


@torch.no_grad()
def run_twice(
    predict_batch: Callable[[Tensor], Tensor], data: Dataset, device: str
) -> tuple[float, Tensor]:
    """Seconds of the second run, and the predictions; the first run warms up."""

    def run() -> Tensor:
        return torch.cat(
            [predict_batch(pixels(part.to(device))).cpu() for part in data.images.split(500)]
        )

    run()
    return timed(run, device)


if __name__ == "__main__":
    main()
