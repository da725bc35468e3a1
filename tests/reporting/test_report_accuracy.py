"""Headline, accuracy against alpha, margins."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import synthetic_run
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from parsed_report import ParsedReport
from synthetic_run import result, write_run

from equipoise.core import aggregation, format, records, results
from equipoise.core.results import Difference, FitSummary, Summary
from equipoise.core.rows import AttackRow
from equipoise.reporting import accuracy, alphas, report
from equipoise.reporting.charts import DARK, LIGHT, Palette, styled
from equipoise.reporting.section import read_run

METRICS = ["clean", "worst", "apgd", "pgd"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic_run.make(
        tmp_path_factory.mktemp("accuracy") / "run", n=40, with_examples=False
    )


@pytest.fixture(scope="module")
def parsed(folder: Path) -> ParsedReport:
    return ParsedReport(report(folder))


def _correct(
    folder: Path, model: str, attacks: set[str], alpha: float | None = None
) -> dict[int, bool]:
    """By image: classified correctly under all of these attacks."""
    correct: dict[int, bool] = {}
    for row in records.read_rows(folder):
        if (
            isinstance(row, AttackRow)
            and (row.model, row.alpha) == (model, alpha)
            and row.attack in attacks
        ):
            correct[row.index] = correct.get(row.index, True) and row.correct
    return correct


def test_the_headline_table_has_the_results_of_the_rows(folder: Path, parsed: ParsedReport) -> None:
    expected = aggregation.accuracies(records.read_rows(folder), synthetic_run.THREAT)
    rows = [
        [
            model,
            *(
                f"{format.value(item)} {format.bounds(item)}"
                for item in (results.find(expected, model, metric) for metric in METRICS)
            ),
        ]
        for model in ("accurate", "robust", "mixed")
    ]
    assert parsed.tables[0] == [["model", *METRICS], *rows]
    assert "n = 40 images" in parsed.text


def test_the_worst_case_counts_images_correct_under_all_attacks(
    folder: Path, parsed: ParsedReport
) -> None:
    correct = _correct(folder, "robust", {"clean", "pgd", "apgd"})
    assert parsed.tables[0][2][2].startswith(
        f"{100 * sum(correct.values()) / len(correct):.1f} % ["
    )


def test_the_headline_sentence_states_the_results(folder: Path, parsed: ParsedReport) -> None:
    summary = results.read_summary(folder)
    clean, worst = (format.value(summary.result("mixed", metric)) for metric in ("clean", "worst"))
    assert (
        f"The mixture classifies {clean} of clean images and {worst} of attacked images correctly"
        in parsed.text
    )
    assert "every pixel by up to 8/255 of its range (ℓ∞)" in parsed.text


def test_the_headline_starts_with_the_model_that_is_compared(tmp_path: Path) -> None:
    difference = Difference(
        model="adaptive", versus="robust", metric="clean", value=0.1, low=0.05, high=0.2, n=50
    )
    values = tuple(
        result(model, "clean", value) for model, value in (("robust", 0.8), ("adaptive", 0.9))
    )
    run = write_run(
        tmp_path / "run",
        Summary(command="reproduce", seconds=1.0, results=values, differences=(difference,)),
    )
    assert accuracy.headline(run).prose[:2] == [
        "The adaptive classifier classifies 90.0 % of clean images correctly; the robust model 80.0 %.",
        "Compared with the robust model on the same images, the adaptive classifier gains 10.0 points on clean images.",
    ]


def test_the_difference_table_has_the_differences_of_the_summary(
    folder: Path, parsed: ParsedReport
) -> None:
    expected = [
        [
            f"{item.model} − {item.versus}",
            item.metric,
            f"{format.points(item.value)} {format.bounds(item)}",
            str(item.n),
        ]
        for item in results.read_summary(folder).differences
    ]
    assert parsed.tables[1][1:] == expected


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (-0.1, 0.2, "shows no clear difference under attack"),
        (0.01, 0.2, "gains 5.0 points under attack"),
    ],
)
def test_a_difference_is_claimed_only_if_its_interval_excludes_zero(
    low: float, high: float, expected: str
) -> None:
    difference = Difference(
        model="mixed", versus="robust", metric="worst", value=0.05, low=low, high=high, n=40
    )
    assert accuracy.comparison([difference]).endswith(f"the mixture {expected}.")


def test_unclear_differences_are_one_clause() -> None:
    differences = [
        Difference(
            model="mixed", versus="robust", metric=metric, value=0.0, low=-0.1, high=0.1, n=40
        )
        for metric in ("clean", "worst")
    ]
    assert accuracy.comparison(differences).endswith(
        "shows no clear difference on clean images or under attack."
    )


def test_the_alpha_table_has_the_sweep(folder: Path, parsed: ParsedReport) -> None:
    sweep = read_run(folder / "sweep")
    rows = [
        [
            f"{clean.alpha:g}",
            *(f"{format.value(item)} {format.bounds(item)}" for item in (clean, worst)),
        ]
        for clean, worst in zip(
            sweep.curve("mixed", "clean"), sweep.curve("mixed", "worst"), strict=True
        )
    ]
    assert parsed.tables[3] == [["alpha", "clean", "worst"], *rows]
    assert [row[0] for row in rows] == [f"{alpha:g}" for alpha in synthetic_run.ALPHAS]


def _alpha_axes(folder: Path, palette: Palette) -> Axes:
    section = alphas.alpha_sweep(read_run(folder))
    assert section is not None
    with styled(palette):
        return section.pictures[0].draw(palette).axes[0]


@pytest.mark.parametrize("palette", [LIGHT, DARK])
def test_the_alpha_figure_draws_the_rows(folder: Path, palette: Palette) -> None:
    lines = {line.get_label(): line for line in _alpha_axes(folder, palette).lines}
    for metric, attacks in {"clean": {"clean"}, "worst": {"clean", "pgd"}}.items():
        correct = [
            _correct(folder / "sweep", "mixed", attacks, alpha) for alpha in synthetic_run.ALPHAS
        ]
        np.testing.assert_array_equal(
            np.asarray(lines[metric].get_xdata(), dtype=float), synthetic_run.ALPHAS
        )
        np.testing.assert_allclose(
            np.asarray(lines[metric].get_ydata(), dtype=float),
            [100 * sum(own.values()) / len(own) for own in correct],
        )
        assert to_hex(lines[metric].get_color()) == palette["mixed"]


def test_the_bands_of_the_alpha_figure_are_the_intervals(folder: Path) -> None:
    sweep = read_run(folder / "sweep")
    bands = [
        np.asarray(band.get_paths()[0].vertices, dtype=float)[:, 1]
        for band in _alpha_axes(folder, LIGHT).collections
    ]
    assert [(band.min(), band.max()) for band in bands] == [
        (100 * min(item.low for item in curve), 100 * max(item.high for item in curve))
        for curve in (sweep.curve("mixed", "clean"), sweep.curve("mixed", "worst"))
    ]


def test_attacked_margins_are_the_smallest_over_the_attacks(folder: Path) -> None:
    margins = accuracy.collect_margins(read_run(folder))
    assert list(margins) == ["accurate", "robust", "mixed"]
    rows = [
        row
        for row in records.read_rows(folder)
        if isinstance(row, AttackRow) and row.model == "robust"
    ]
    smallest = [min(row.margin or 0.0 for row in rows if row.index == i) for i in range(40)]
    assert margins["robust"]["attacked"] == smallest
    assert margins["robust"]["clean"] == [row.margin for row in rows if row.attack == "clean"]


def test_margins_beyond_one_are_counted(tmp_path: Path) -> None:
    margins = {"clean": (-3.5, 0.5), "pgd": (-4.0, 4.0)}
    rows = [
        AttackRow(index=i, model="other", attack=attack, label=0, correct=margin > 0, margin=margin)
        for attack, values in margins.items()
        for i, margin in enumerate(values)
    ]
    section = accuracy.margins(
        write_run(tmp_path / "run", Summary(command="evaluate", seconds=1.0), rows)
    )
    assert section is not None and "n = 2 clean images" in section.prose[0]
    with styled(LIGHT):
        axes = section.pictures[0].draw(LIGHT).axes[0]
    assert sum(bar.get_height() for bar in axes.containers[0]) == 2


def test_differing_numbers_of_images_are_in_every_cell(folder: Path, tmp_path: Path) -> None:
    run = read_run(folder)
    first, *others = run.summary.results
    summary = dataclasses.replace(run.summary, results=(dataclasses.replace(first, n=39), *others))
    table = accuracy.headline(dataclasses.replace(run, summary=summary)).tables[0]
    notes = [cell.note for row in table.body for cell in row[1:]]
    assert sorted(note.rpartition("n = ")[2] for note in notes) == ["39"] + ["40"] * 11


@pytest.mark.parametrize(("command", "said"), [("fit", True), ("demo", False), ("evaluate", False)])
def test_only_a_fit_is_measured_on_fitting_images(tmp_path: Path, command: str, said: bool) -> None:
    """The demo and others may hold the summary of a fit beside results on other images."""
    fit = FitSummary(
        helped=True,
        promise="loses nothing",
        clean=0.9,
        robust_clean=0.8,
        robust_attacked=0.7,
        q=0.5,
        alpha=0.6,
    )
    run = read_run(
        synthetic_run.make(tmp_path / "run", n=20, with_sweep=False, with_examples=False, fit=fit)
    )
    shown = dataclasses.replace(run, summary=dataclasses.replace(run.summary, command=command))
    assert (
        any("These are the fitting images" in text for text in accuracy.headline(shown).prose)
        is said
    )


def test_long_names_are_short_where_they_stay_different(tmp_path: Path) -> None:
    long = f"file:/{'weights/' * 6}mixed.safetensors"
    for other, names in (("robust", ["mixed", "robust"]), ("mixed", [long, "mixed"])):
        results = tuple(synthetic_run.result(model, "clean", 0.5) for model in (long, other))
        run = synthetic_run.write_run(
            tmp_path / other, Summary(command="evaluate", seconds=1.0, results=results)
        )
        assert sorted(row[0].text for row in accuracy.headline(run).tables[0].body) == sorted(names)


def test_every_section_has_the_short_names_of_models(tmp_path: Path) -> None:
    names = {
        model: f"/somewhere/weights/{model}_resnet8.safetensors" for model in ("accurate", "robust")
    }
    rounded = results.Result(model=names["robust"], metric="pgd", value=1.0, low=0.5, high=1.0, n=4)
    checked = results.SanityCheck(
        name="c", model=names["robust"], attack="pgd", value=1.0, alarm=True, explanation="e"
    )
    folder = synthetic_run.make(
        tmp_path / "run",
        n=12,
        names=names,
        with_sweep=False,
        with_examples=False,
        as_bytes=(rounded,),
        sanity_checks=(checked,),
        methods={names["robust"]: "a rule"},
    )
    parsed = ParsedReport(report(folder))
    assert {"Margins", "Attacks in detail", "Sanity checks"} <= set(parsed.titles)
    assert "robust_resnet8" in parsed.text
    assert "/somewhere" not in (folder / "report.html").read_text("utf-8")
