"""The demo, with few images, hardly any training and short attacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import draw_figures_once
from equipoise.attacks import Apgd, Square, Suite
from equipoise.cli.demo import DemoResult, DemoSize, run_demo
from equipoise.core.arrays import FitArrays, FrontierArrays, PictureArrays
from equipoise.core.records import read_rows
from equipoise.core.results import FitSummary, Result, Summary
from equipoise.core.threat import Threat
from equipoise.data import load_data
from equipoise.mixing import MixedClassifier, load_model
from equipoise.reporting.provenance import title
from equipoise.reporting.run_view import read_run

SMALL = DemoSize(
    training_images=512,
    fit_images=128,
    test_images=16,
    epochs=(2, 3),
    lose_at_most=20.0,
    fit_steps=2,
    fit_targets=1,
    fit_pool=1,
    attack=Suite(attacks=(Apgd(loss="margin", steps=4), Square(queries=4))),
    plain_alphas=(0.0, 0.5, 1.0),
    plain_images=24,
)
REPRODUCED = (
    "rows.jsonl",
    "sweep/rows.jsonl",
    "mixture/rows.jsonl",
    "mixture/mixture.toml",
    "robust/best.safetensors",
)


def run_small(out: Path, **options: bool) -> DemoResult:
    return run_demo(out, "cpu", size=SMALL, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def result(folder: Path) -> DemoResult:
    with pytest.MonkeyPatch.context() as patch:
        draw_figures_once(patch)
        return run_small(folder / "demo")


def test_files(folder: Path, result: DemoResult) -> None:
    files = {str(path.relative_to(folder / "demo")) for path in (folder / "demo").rglob("*")}
    assert {
        "run.toml",
        "rows.jsonl",
        "summary.json",
        "report.html",
        "mixture/mixture.toml",
        "mixture/summary.json",
        "accurate/best.safetensors",
        "robust/best.safetensors",
        "sweep/summary.json",
    } <= files
    assert FitArrays.load(folder / "demo") is not None
    # What the report needs for pictures and for its slider.
    assert (
        PictureArrays.load(folder / "demo") is not None
        and FrontierArrays.load(folder / "demo") is not None
    )


def test_results_of_all_three_models(folder: Path, result: DemoResult) -> None:
    assert result.summary.command == "demo"
    for model in ("accurate", "robust", "mixed"):
        assert (
            result.summary.result(model, "clean").n == result.summary.result(model, "worst").n == 16
        )
    mixed = {row.attack for row in read_rows(folder / "demo") if row.model == "mixed"}
    assert mixed == {"clean", "fast", "adaptive"}


def test_no_image_has_two_uses(folder: Path, result: DemoResult) -> None:
    mixture = load_model(f"mixture:{folder}/demo/mixture")
    assert isinstance(mixture, MixedClassifier) and mixture.provenance is not None
    assert (
        result.summary.fit is not None and mixture.provenance.promise == result.summary.fit.promise
    )
    assert not mixture.provenance.overlap(load_data("shapes", split="test", count=16))
    assert list(mixture.provenance.overlap(load_data("shapes", split="train").slice(512, 128))) == [
        "512-639"
    ]


def test_the_report_does_not_name_folders_of_this_machine(folder: Path, result: DemoResult) -> None:
    assert result.report == folder / "demo" / "report.html"
    assert str(folder) not in result.report.read_text()


def test_the_title_says_what_it_is_of(folder: Path, result: DemoResult) -> None:
    assert "shapes test · n = 16 · ℓ∞ ≤" in title(read_run(folder / "demo"))[1]


def test_the_same_numbers_every_time_also_when_resumed(
    folder: Path, result: DemoResult, tmp_path: Path
) -> None:
    expected = {name: (folder / "demo" / name).read_bytes() for name in REPRODUCED}
    assert run_small(tmp_path / "demo", report=False).report is None
    assert {name: (tmp_path / "demo" / name).read_bytes() for name in REPRODUCED} == expected
    for part in (".", "mixture", "robust"):
        (tmp_path / "demo" / part / "summary.json").unlink()
    assert "report" not in str(run_small(tmp_path / "demo", report=False))
    assert not (tmp_path / "demo" / "report.html").exists()
    assert {name: (tmp_path / "demo" / name).read_bytes() for name in REPRODUCED} == expected


@pytest.mark.parametrize(
    ("helped", "ending"), [(True, ": the mixture loses nothing"), (False, ": loses nothing")]
)
def test_printed_as_a_table_with_the_promise_and_the_report(helped: bool, ending: str) -> None:
    fitted = FitSummary(
        helped=helped,
        promise="loses nothing",
        clean=0.9,
        robust_clean=0.8,
        robust_attacked=0.7,
        q=0.5,
        alpha=0.6,
    )
    results = (Result(model="mixed", metric="clean", value=0.5, low=0.4, high=0.6, n=9),)
    printed = str(
        DemoResult(
            Summary(command="demo", seconds=1.0, results=results, fit=fitted),
            Threat("linf", 0.1),
            Path("runs/demo/report.html"),
        )
    )
    assert (
        "50.0 %" in printed
        and f"{ending}\n" in printed
        and printed.endswith("report: runs/demo/report.html")
    )


@pytest.mark.slow
def test_the_mixture_is_nearly_as_accurate_as_one_base_and_as_robust_as_the_other(
    tmp_path: Path,
) -> None:
    summary = run_demo(tmp_path / "demo", "cpu").summary
    clean, worst = (
        {model: summary.result(model, metric).value for model in ("accurate", "robust", "mixed")}
        for metric in ("clean", "worst")
    )
    gap = clean["accurate"] - clean["robust"]
    assert gap >= 0.05
    assert clean["mixed"] >= clean["robust"] + 0.6 * gap
    assert worst["mixed"] >= worst["robust"] - 0.03
    assert worst["accurate"] <= 0.10
