"""The figures on the page of SmoothMix are those of the kept rows and of the logs."""

from __future__ import annotations

import csv
import gzip
import math
import re
import statistics
from collections import defaultdict
from pathlib import Path

import pytest

from equipoise.studies.smoothmix_models import METHODS, MNIST_ACR, SIGMAS

PAGE = Path(__file__).parents[2] / "docs" / "results" / "smoothmix.md"
KEPT = PAGE.with_suffix("")
CELLS = {"mnist": 0, "digits": 2}  # position of the ACR among the cells of a line


def kept_radii(folder: str) -> dict[str, dict[int, float]]:
    """Recipe → image → certified radius, 0 where misclassified or abstained."""
    radii: dict[str, dict[int, float]] = defaultdict(dict)
    with gzip.open(KEPT / folder / "certificates.csv.gz", "rt") as file:
        for row in csv.DictReader(file):
            correct = row["predicted"] == row["label"]
            radii[row["recipe"]][int(row["index"])] = float(row["radius"]) * correct
    return radii


def standard_error(values: list[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


@pytest.mark.parametrize("data", CELLS)
def test_smoke_table(data: str) -> None:
    radii, smoke = kept_radii(f"smoke_{data}"), PAGE.read_text().split("## Smoke size")[1]
    gaussian = radii[f"{data}_gaussian"]
    for method in (method for method, own in METHODS.items() if not own.optional):
        name = METHODS[method].label.replace(", one-step adversary", ", one-step")
        line = re.search(rf"^\| {re.escape(name)} \|(.*)\|$", smoke, re.MULTILINE)
        assert line is not None, name
        acr, difference = (
            cell.strip() for cell in line[1].split("|")[CELLS[data] : CELLS[data] + 2]
        )
        own = radii[f"{data}_{method}"]
        assert len(own) == 40 and acr == f"{statistics.fmean(own.values()):.3f}"
        if method != "gaussian":
            paired = [own[index] - gaussian[index] for index in own]
            assert (
                difference.replace("−", "-")
                == f"{statistics.fmean(paired):+.3f} ± {standard_error(paired):.3f}"
            )


@pytest.mark.parametrize(("seed", "images"), [(0, 9500), (1, 9800)])
def test_macer(seed: int, images: int) -> None:
    (radii,) = kept_radii(f"mnist_macer_seed{seed}").values()
    assert list(radii) == list(range(images))
    rounded = [float(f"{radius:.3}") for radius in radii.values()]  # as in the logs
    assert (
        f"| {seed} | 0–{images - 1} | {statistics.fmean(radii.values()):.4f} | {statistics.fmean(rounded):.4f} |"
        in PAGE.read_text()
    )


def test_onestep_on_cifar10() -> None:
    (radii,) = kept_radii("cifar10_onestep").values()
    assert list(radii) == list(range(0, 4000, 20))
    own = list(radii.values())
    assert (
        f"**{statistics.fmean(own):.3f}** (200 images, standard error {standard_error(own):.3f})"
        in PAGE.read_text()
    )


def test_published_figures_are_those_of_the_logs() -> None:
    with (KEPT / "official_logs.csv").open(newline="") as file:
        logs = {row["recipe"]: float(row["acr"]) for row in csv.DictReader(file)}
    for method, published in MNIST_ACR.items():
        for sigma, (paper, acr) in zip(SIGMAS, published, strict=True):
            if METHODS[method].changes:
                assert (paper, acr) == (None, None)
                continue
            recipe = METHODS[method].recipe.format(sigma=f"sigma{round(100 * sigma):03d}")
            assert acr == logs[recipe] and (paper is None) == (method == "consistency-smoothadv")
            assert paper is None or abs(paper - acr) < 0.006
