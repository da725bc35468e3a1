"""The figures on the page of MixedNUTS are those of the kept rows."""

from __future__ import annotations

import csv
import gzip
import re
from collections import defaultdict
from pathlib import Path
from statistics import median

import pytest

from equipoise.core import stats

PAGE = Path(__file__).parents[2] / "docs" / "results" / "mixednuts.md"
KEPT = PAGE.with_suffix("")
SMALL_PARTS = ("counts", "seen", "temperature", "black-box", "objective")
NAMES = {  # on the page → in rows, where they differ
    "robust with the map": "mapped robust",
    "plain mixing, as accurate as MixedNUTS on held-out images": "plain mixing",
    "MixedNUTS on images that the fit has seen": "MixedNUTS",
    "temperature 1 of g": "temperature 1",
    "temperature 0 (its class alone)": "temperature 0",
    "margins by random search": "random search",
    "only errors that g corrects": "conditional",
}


def accuracies(run: str) -> dict[tuple[str, str], list[str]]:
    """Part and model → clean and attacked accuracy as the page writes them."""
    correct: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    with gzip.open(KEPT / run / "rows.csv.gz", "rt") as file:
        for row in csv.DictReader(file):
            attack = row["attack"].removesuffix("-fast")
            correct[row["part"], row["model"], attack].append(int(row["correct"]))
    cells: dict[tuple[str, str], list[str]] = {}
    for part, model, _ in correct:
        estimates = [
            stats.clopper_pearson(sum(own), len(own))
            for attack in ("clean", "adaptive")
            for own in [correct[part, model, attack]]
        ]
        cells[part, model] = [
            f"{100 * own.value:.1f} [{100 * own.low:.1f}, {100 * own.high:.1f}]"
            for own in estimates
        ]
    return cells


def model_in_rows(name: str) -> str:
    """The name of a model in rows; a mixture of the table of robust models starts with its robust
    model there."""
    name = NAMES.get(name, name).replace("β = ", "beta ").replace("α = ", "alpha ")
    name = re.sub(r"^fitted on (\d+ images)$", r"\1", name)
    if name.endswith(" alone"):
        name = name.removesuffix(" alone")
    elif mixed := re.match(
        r"(PGD training|TRADES(?:, weight \d)?|IAAT), (plain mixing|MixedNUTS), (.*)", name
    ):
        name = f"{mixed[2]} with {mixed[1]}, {mixed[3]}"
    return name.replace("PGD training", "robust")


def section(heading: str) -> str:
    """The text below a heading, up to the next of the same level or of a higher one."""
    start, _, rest = PAGE.read_text().partition(f"# {heading}")
    level = len(start) - len(start.rstrip("#")) + 1
    return re.split(rf"^#{{1,{level}}} ", rest, flags=re.MULTILINE)[0]


@pytest.mark.parametrize(
    ("run", "heading", "parts", "rows"),
    [
        ("smoke", "Figure 5, Tables 1", ("main",), 6),
        ("smoke", "Figure 8: trade-off", ("curves",), 10),
        ("smoke", "Several robust models", ("robust-models",), 16),
        ("smoke", "Tables 8, 9 and 10", SMALL_PARTS, 10),
        ("cifar10", "Main comparison on CIFAR-10", ("main",), 6),
        ("cifar10", "Parts on CIFAR-10", SMALL_PARTS, 8),
        ("cifar10-robust-models", "Main comparison on CIFAR-10", ("main",), 6),
        ("cifar10-robust-models", "Every robust model", ("robust-models",), 18),
        ("cifar10-robust-models", "Figure 8 on CIFAR-10", ("curves",), 12),
        ("cifar10-robust-models", "Appendix D.5 on CIFAR-10", SMALL_PARTS, 2),
        ("cifar100", "Main comparison on CIFAR-100", ("main",), 6),
        ("l2", "Main comparison in ℓ2", ("main",), 6),
    ],
)
def test_tables_of_accuracies(run: str, heading: str, parts: tuple[str, ...], rows: int) -> None:
    lines = re.findall(
        r"^\| (?:[^|]* \| )?([^|]+) \| ([^|]+\]) \| ([^|]+\]) \|$", section(heading), re.MULTILINE
    )
    assert len(lines) == rows
    kept = accuracies(run)
    for name, *cells in lines:
        (own,) = [
            kept[part, model_in_rows(name)] for part in parts if (part, model_in_rows(name)) in kept
        ]
        assert cells == own, name


@pytest.mark.parametrize(
    ("run", "heading", "names"),
    [
        (
            "smoke",
            "Tables 7 and 9",
            (
                "mixednuts",
                "clamp-relu",
                "clamp-linear",
                "count-100",
                "count-50",
                "objective-conditional",
                "random-search",
                "transferred-from-trades-weight-1",
            ),
        ),
        (
            "cifar10",
            "Fits on CIFAR-10",
            (
                "mixednuts",
                "clamp-relu",
                "clamp-linear",
                "count-300",
                "count-100",
                "objective-conditional",
            ),
        ),
        ("cifar100", "Fits on CIFAR-100", ("mixednuts", "clamp-relu", "clamp-linear")),
        ("l2", "Fits in ℓ2", ("mixednuts", "clamp-relu", "clamp-linear")),
    ],
)
def test_table_of_fits(run: str, heading: str, names: tuple[str, ...]) -> None:
    with gzip.open(KEPT / run / "fits.csv.gz", "rt") as file:
        fits = {row["fit"]: row for row in csv.DictReader(file)}
    lines = [
        line.strip("| ").split(" | ")
        for line in section(heading).splitlines()
        if line.startswith("| ")
    ][1:]
    assert len(lines) == len(names)
    for line, name in zip(lines, names, strict=True):
        fit = fits[name]
        assert line[1:3] == [f"{float(fit[key]):.2f}" for key in ("s", "p")]
        digits = len(line[-3]) - 2
        assert line[-3] == f"{float(fit['alpha']):.{digits}f}" and digits >= 3
        assert line[-2:] == [
            f"{100 * float(fit[key]):.1f} %" for key in ("objective", "recomputed")
        ]


@pytest.mark.parametrize(
    ("run", "heading"),
    [("smoke", "Figure 7: median"), ("cifar10-robust-models", "Figure 7 on CIFAR-10")],
)
def test_table_of_margins(run: str, heading: str) -> None:
    margins: dict[tuple[str, bool, bool], list[float]] = defaultdict(list)
    with gzip.open(KEPT / run / "rows.csv.gz", "rt") as file:
        for row in csv.DictReader(file):
            if row["part"] == "margins":
                kind = row["model"], row["attack"] != "clean", row["correct"] == "0"
                margins[kind].append(abs(float(row["margin"])))
    lines = [
        line.strip("| ").split(" | ")
        for line in section(heading).splitlines()
        if line.startswith("| ")
    ][1:]
    assert {name for name, *_ in margins} == {
        model_in_rows(line[0].removesuffix(" (robust)")) for line in lines
    }
    for name, *cells in lines:
        own = [
            margins[model_in_rows(name.removesuffix(" (robust)")), attacked, wrong]
            for attacked in (False, True)
            for wrong in (False, True)
        ]
        assert [cell.replace("n = ", "") for cell in cells] == [
            f"{median(part):.3f} ({len(part)})" for part in own
        ]
