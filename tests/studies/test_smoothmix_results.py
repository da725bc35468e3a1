"""The figures on the page of SmoothMix are those of the kept rows and of the logs."""

from __future__ import annotations

import csv
import gzip
import re
import statistics
from collections import defaultdict
from pathlib import Path

import pytest

from equipoise.studies.smoothmix_models import METHODS, MNIST_ACR, SIGMAS

PAGE = Path(__file__).parents[2] / "docs" / "results" / "smoothmix.md"
KEPT = PAGE.with_suffix("")
CELLS = {"mnist": 0, "digits": 2}  # position of the ACR among the cells of a line


def kept_radii(data: str) -> dict[str, dict[int, float]]:
    """Recipe → image → certified radius, 0 where misclassified or abstained."""
    radii: dict[str, dict[int, float]] = defaultdict(dict)
    with gzip.open(KEPT / f"smoke_{data}" / "certificates.csv.gz", "rt") as file:
        for row in csv.DictReader(file):
            correct = row["predicted"] == row["label"]
            radii[row["recipe"].removeprefix(f"{data}_")][int(row["index"])] = float(row["radius"]) * correct
    return radii


@pytest.mark.parametrize("data", CELLS)
def test_smoke_table(data: str) -> None:
    radii, smoke = kept_radii(data), PAGE.read_text().split("## Smoke size")[1]
    gaussian = radii["gaussian"]
    for method, (label, _) in METHODS.items():
        name = label.replace(", one-step adversary", ", one-step")
        line = re.search(rf"^\| {re.escape(name)} \|(.*)\|$", smoke, re.MULTILINE)
        assert line is not None, name
        acr, difference = (cell.strip() for cell in line[1].split("|")[CELLS[data] : CELLS[data] + 2])
        own = radii[method]
        assert len(own) == 40 and acr == f"{statistics.fmean(own.values()):.3f}"
        if method != "gaussian":
            paired = [own[index] - gaussian[index] for index in own]
            error = statistics.stdev(paired) / len(paired) ** 0.5
            assert difference.replace("−", "-") == f"{statistics.fmean(paired):+.3f} ± {error:.3f}"


def test_published_figures_are_those_of_the_logs() -> None:
    with (KEPT / "official_logs.csv").open(newline="") as file:
        logs = {row["recipe"]: float(row["acr"]) for row in csv.DictReader(file)}
    for method, published in MNIST_ACR.items():
        for sigma, (paper, acr) in zip(SIGMAS, published, strict=True):
            recipe = METHODS[method][1].format(sigma=f"sigma{round(100 * sigma):03d}")
            assert acr == logs[recipe] and paper is not None and abs(paper - acr) < 0.006
