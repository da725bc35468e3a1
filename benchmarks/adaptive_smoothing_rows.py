"""Keep parts of a study of adaptive smoothing as one small file, and print their tables from it.

    python benchmarks/adaptive_smoothing_rows.py RUN OUT   writes OUT/rows.csv.gz: every attacked
    image with its alpha python benchmarks/adaptive_smoothing_rows.py OUT       prints accuracies
    and median alphas

The same rows give the same bytes.
"""

from __future__ import annotations

import argparse
import csv
import gzip
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from common import write_table

from equipoise.core.records import read_rows
from equipoise.core.rows import AttackRow
from equipoise.core.stats import clopper_pearson

PARTS = ("settings", "ablation")
MODELS = "models"  # the part of the two models alone
ROW = ("part", "model", "attack", "index", "label", "predicted", "correct", "image_alpha")


def rows(study: Path) -> Iterator[tuple[object, ...]]:
    """The rows of both models alone, and of the parts that are finished."""
    for part, folder in ((MODELS, study), *((part, study / part) for part in PARTS)):
        if (folder / "summary.json").is_file():
            for row in read_rows(folder):
                if isinstance(row, AttackRow) and (
                    part != MODELS or row.model in ("accurate", "robust")
                ):
                    yield (
                        part,
                        row.model,
                        row.attack,
                        row.index,
                        row.label,
                        row.predicted,
                        int(row.correct),
                        row.image_alpha,
                    )


def print_tables(folder: Path) -> None:
    """One line per part, model and attack: the accuracy with its interval, and the median alpha."""
    correct: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    alphas: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    with gzip.open(folder / "rows.csv.gz", "rt") as file:
        for row in csv.DictReader(file):
            key = row["part"], row["model"], row["attack"]
            correct[key].append(int(row["correct"]))
            if row["image_alpha"]:
                alphas[key].append(float(row["image_alpha"]))
    for key, own in correct.items():
        estimate = clopper_pearson(sum(own), len(own))
        alpha = f", median alpha {median(alphas[key]):.2f}" if alphas[key] else ""
        print(
            f"{', '.join(key)}: {100 * estimate.value:.1f} [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"
            f"{alpha}, n = {len(own)}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path, nargs="?")
    args = parser.parse_args()
    if args.out is None:
        print_tables(args.folder)
    else:
        write_table(args.out / "rows.csv.gz", ROW, rows(args.folder))


if __name__ == "__main__":
    main()
