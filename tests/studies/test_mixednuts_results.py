"""The figures on the page of MixedNUTS are those of the kept rows."""

from __future__ import annotations

import csv
import gzip
import re
from collections import defaultdict
from pathlib import Path

import pytest

from equipoise.core import stats

PAGE = Path(__file__).parents[2] / "docs" / "results" / "mixednuts.md"
KEPT = PAGE.with_suffix("") / "smoke"
NAMES = {  # on the page → in rows, where they differ
    "robust with the map": "mapped robust", "plain mixing, as accurate as MixedNUTS on held-out images": "plain mixing",
    "MixedNUTS on images that the fit has seen": "MixedNUTS", "temperature 1 of g": "temperature 1",
    "temperature 0 (its class alone)": "temperature 0", "margins by random search": "random search",
    "only errors that g corrects": "conditional"}


def accuracies() -> dict[tuple[str, str], list[str]]:
    """Part and model → clean and attacked accuracy as the page writes them."""
    correct: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    with gzip.open(KEPT / "rows.csv.gz", "rt") as file:
        for row in csv.DictReader(file):
            correct[row["part"], row["model"], row["attack"]].append(int(row["correct"]))
    cells: dict[tuple[str, str], list[str]] = {}
    for part, model, _ in correct:
        estimates = [stats.clopper_pearson(sum(own), len(own)) for attack in ("clean", "adaptive")
                     for own in [correct[part, model, attack]]]
        cells[part, model] = [f"{100 * own.value:.1f} [{100 * own.low:.1f}, {100 * own.high:.1f}]" for own in estimates]
    return cells


def model_in_rows(name: str) -> str:
    """The name of a model in rows; a mixture of the table of robust models starts with its robust model there."""
    name = NAMES.get(name, name).replace("β = ", "beta ").replace("α = ", "alpha ")
    name = re.sub(r"^fitted on (\d+ images)$", r"\1", name)
    if name.endswith(" alone"):
        name = name.removesuffix(" alone")
    elif mixed := re.match(r"(PGD training|TRADES, weight \d|IAAT), (plain mixing|MixedNUTS), (.*)", name):
        name = f"{mixed[2]} with {mixed[1]}, {mixed[3]}"
    return name.replace("PGD training", "robust")


@pytest.mark.parametrize(("heading", "parts", "rows"), [
    ("Figure 5, Tables 1", ("main",), 6), ("Figure 8", ("curves",), 10),
    ("Several robust models", ("robust-models",), 16),
    ("Tables 8, 9 and 10", ("counts", "seen", "temperature", "black-box", "objective"), 10)])
def test_tables_of_accuracies(heading: str, parts: tuple[str, ...], rows: int) -> None:
    section = PAGE.read_text().split(f"### {heading}")[1].split("###")[0]
    lines = re.findall(r"^\| (?:[^|]* \| )?([^|]+) \| ([^|]+\]) \| ([^|]+\]) \|$", section, re.MULTILINE)
    assert len(lines) == rows
    kept = accuracies()
    for name, *cells in lines:
        (own,) = [kept[part, model_in_rows(name)] for part in parts if (part, model_in_rows(name)) in kept]
        assert cells == own, name


def test_table_of_fits() -> None:
    with gzip.open(KEPT / "fits.csv.gz", "rt") as file:
        fits = {row["fit"]: row for row in csv.DictReader(file)}
    section = PAGE.read_text().split("### Tables 7 and 9")[1].split("###")[0]
    names = ("mixednuts", "clamp-relu", "clamp-linear", "count-100", "count-50", "objective-conditional",
             "random-search", "transferred-from-trades-weight-1")
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(lines) == len(names)
    for line, name in zip(lines, names, strict=True):
        fit = fits[name]
        assert line[1:3] == [f"{float(fit[key]):.2f}" for key in ("s", "p")]
        assert line[-3] == f"{float(fit['alpha']):.3f}"
        assert line[-2:] == [f"{100 * float(fit[key]):.1f} %" for key in ("objective", "recomputed")]
