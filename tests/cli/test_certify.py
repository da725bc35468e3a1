"""`equipoise certify` as a user types it."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_files import write_files

from equipoise.cli.main import run
from equipoise.core.records import read_rows
from equipoise.core.results import read_summary
from equipoise.core.rows import SELECT_ALPHA, CertificateRow


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    return tmp_path


def certify(*arguments: str) -> int:
    return run(
        [
            "certify",
            "robust.safetensors",
            "--data",
            "npz:images.npz",
            "--out",
            "run",
            "--samples",
            "150",
            "--n0",
            "20",
            *arguments,
        ]
    )


def metrics() -> set[str]:
    return {result.metric for result in read_summary("run").results}


def test_results_of_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    assert certify("--sigma", "0.1", "--count", "6") == 0
    assert {"acr", "certified@0.00", "certified@0.25", "abstained", "clean", "samples"} <= metrics()
    assert "run/summary.json" in capsys.readouterr().out
    summary = read_summary("run")
    assert certify("--sigma", "0.1", "--count", "6") == 0 and read_summary("run") == summary


def test_an_attack_may_be_added_later() -> None:
    assert certify("--sigma", "0.1", "--count", "6") == 0
    assert certify("--sigma", "0.1", "--count", "6", "--attack", "pgd") == 0
    certified = [
        row for row in read_rows("run") if isinstance(row, CertificateRow) and row.radius > 0
    ]
    assert ("broken-pgd" in metrics()) == bool(certified)


@pytest.mark.parametrize(
    "options",
    [
        ["--tolerance", "0.02"],
        ["--decide-radius", "0.1"],
        ["--soft"],
        ["--certificate", "soft"],
        ["--sound"],
        ["--two-sided"],
        ["--randomized"],
        ["--randomized", "--tolerance", "0.02"],
        ["--accurate", "accurate.safetensors", "--alpha", "0.8"],
    ],
)
def test_options(options: list[str]) -> None:
    assert certify("--sigma", "0.1", "--count", "6", *options) == 0
    assert len(read_rows("run")) == 6


def test_several_alphas(capsys: pytest.CaptureFixture[str]) -> None:
    """Rows and results per alpha, the theorems side by side, and their section of the report."""
    options = [
        "--sigma",
        "0.1",
        "--count",
        "6",
        "--accurate",
        "accurate.safetensors",
        "--alphas",
        "0.6,0.9",
    ]
    assert certify(*options) == 0 and certify(*options) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert all(
        words in printed
        for words in ("radius by theorem, 6 images", "ours", "smallest", "constant")
    )
    assert sorted(row.alpha or 0 for row in read_rows("run")) == [0.6] * 6 + [0.9] * 6
    assert {(result.alpha, result.theorem) for result in read_summary("run").theorems} == {
        (alpha, theorem) for alpha in (0.6, 0.9) for theorem in ("ours", "A.2", "lipschitz", "3.5")
    }
    assert run(["report", "run"]) == 0 and Path("run/figures/certified-ours.svg").exists()
    assert "Mixtures by alpha and theorem" in Path("run/report.html").read_text()


def test_alpha_for_a_clean_accuracy(capsys: pytest.CaptureFixture[str]) -> None:
    """Two sigmas of one model; alpha is selected on the nine images that are not certified."""
    assert (
        certify(
            "--sigma",
            "0.05,0.2",
            "--accurate",
            "accurate.safetensors",
            "--clean",
            "0",
            "--count",
            "3",
            "--sample",
            "first",
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert "Frontier" in printed and "9 other images" in printed
    assert [selected.sigma for selected in read_summary("run").selected_alphas] == [0.05, 0.2]
    assert {row.index for row in read_rows("run") if row.attack == SELECT_ALPHA} == set(
        range(3, 12)
    )
    assert run(["report", "run"]) == 0 and Path("run/figures/equal-accuracy.svg").exists()


def test_several_models_in_one_report() -> None:
    assert (
        run(
            [
                "certify",
                "robust.safetensors",
                "accurate.safetensors",
                "--data",
                "npz:images.npz",
                "--out",
                "run",
                "--samples",
                "150",
                "--n0",
                "20",
                "--sigma",
                "0.05,0.1",
                "--diagnose",
                "--count",
                "6",
            ]
        )
        == 0
    )
    assert {row.sigma for row in read_rows("run") if isinstance(row, CertificateRow)} == {0.05, 0.1}
    assert run(["report", "run"]) == 0
    assert Path("run/figures/certified.svg").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sigma", "0.1,0"], "`sigma` must be positive"),
        (["--sigma", "much"], "`sigma` must be a number"),
        (["--sigma", "0.1", "--clean", "0.5"], "`accurate` must be given together with `clean`"),
        (
            ["--sigma", "0.1", "--accurate", "accurate.safetensors"],
            "`alpha` must be given together with `accurate`",
        ),
        (["--sigma", "0.1", "--diagnose-radii", "1e9"], "`diagnose_radii` must be at most 10000"),
        (
            ["--sigma", "0.1", "--accurate", "accurate.safetensors", "--clean", "0.5"],
            "`count` must leave images",
        ),
        (
            [
                "--sigma",
                "0.1",
                "--accurate",
                "accurate.safetensors",
                "--clean",
                "2",
                "--count",
                "3",
            ],
            "`clean` must lie in",
        ),
        (
            [
                "--sigma",
                "0.1",
                "--accurate",
                "accurate.safetensors",
                "--clean",
                "0.5",
                "--alpha",
                "0.8",
            ],
            "`clean` must be left out beside `alpha`",
        ),
        (["--sigma", "0"], "`sigma` must be positive"),
        (["--sigma", "0.1", "--failure", "1"], "`failure` must lie in (0, 1)"),
        (["--sigma", "0.1", "--n0", "200"], "`samples` must be at least n0"),
        (["--sigma", "0.1", "--alpha", "0.8"], "`accurate` must be given together with `alpha`"),
        (
            ["--sigma", "0.1", "--alpha", "0.4", "--accurate", "accurate.safetensors"],
            "`alpha` must lie in [0.5, 1]",
        ),
        (["--sigma", "0.1", "--norm", "linf"], "`norm` must be l2"),
        (
            ["--sigma", "0.1", "--tolerance", "0.1", "--decide-radius", "0.1"],
            "`decide_radius` must be left out",
        ),
        (["--sigma", "0.1", "--soft", "--two-sided"], "`two_sided` must be left out"),
        (["--sigma", "0.1", "--soft", "--randomized"], "`randomized` must be left out"),
        (
            ["--sigma", "0.1", "--alphas", "0.6,0.4", "--accurate", "accurate.safetensors"],
            "`alphas` must lie in [0.5, 1]",
        ),
    ],
)
def test_mistakes_are_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert certify(*arguments) == 2
    printed = capsys.readouterr().err.strip().splitlines()
    assert len(printed) == 1 and message in printed[0]
    assert not Path("run").exists()


def test_help_names_the_units(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["certify", "--help"]) == 0
    assert "[0, 1] pixels" in " ".join(capsys.readouterr().out.split())
