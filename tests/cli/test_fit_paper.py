"""`equipoise fit --rule paper` as a user types it, its report, and the evaluation of its
mixture."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_files import write_pair

from equipoise.cli.main import run
from equipoise.core import config
from equipoise.core.results import read_summary
from equipoise.mixing import MixedClassifier, load_model
from equipoise.reporting.run_view import read_run
from equipoise.reporting.verdict import verdict

PAIR = ["--accurate", "accurate.safetensors", "--robust", "robust.safetensors"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair with 120 images, and MixedNUTS M with a temperature, fitted on 80 of them."""
    folder = tmp_path_factory.mktemp("paper")
    write_pair(folder, 120)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert (
            fit(
                "--rule", "paper", "--beta", "0.9", "--accurate-temperature", "0.5", "--count", "80"
            )
            == 0
        )
    return folder


@pytest.fixture
def folder(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(prepared)
    return prepared


def fit(*arguments: str, out: str = "M") -> int:
    return run(
        [
            "fit",
            *PAIR,
            "--data",
            "npz:images.npz",
            "--eps",
            "0.002",
            "--steps",
            "3",
            "--targets",
            "2",
            "--pool",
            "1",
            "--out",
            out,
            *arguments,
        ]
    )


def test_output_names_the_rule(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        fit(
            "--rule",
            "paper",
            "--beta",
            "0.9",
            "--accurate-temperature",
            "0.5",
            "--count",
            "80",
            "--frontier",
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "note: Algorithm 1 on all 80 images with the grid published for cifar10, β = 0.9" in out
    assert (
        "the mixture was fitted to keep 90.0 % of the robust model's attacked accuracy on its own 80 images, and "
        "promises nothing beyond them" in out
    )
    assert "\nMixedNUTS, s=" in out and "recomputed under an attack on the mapped model" in out
    assert "fit it again with another --beta" in out and "\nmixture:M\n" in out
    assert out.endswith(
        "next: equipoise evaluate mixture:M --data npz:images.npz --start 80 --eps 0.002 --out "
        "M-evaluation\n"
    )


def test_folder_records_the_rule_and_the_temperature(folder: Path) -> None:
    table = config.read(folder / "M" / "mixture.toml")
    assert table["provenance"]["rule"] == "paper" and table["accurate_temperature"] == 0.5
    mixture, summary = load_model("mixture:M"), read_summary("M").fit
    assert (
        isinstance(mixture, MixedClassifier) and mixture.method == "MixedNUTS" and not mixture.hard
    )
    assert (
        mixture.accurate_temperature == 0.5
        and summary is not None
        and summary.method == "MixedNUTS"
    )


@pytest.mark.usefixtures("figures_once")
def test_report(folder: Path) -> None:
    assert run(["report", "M"]) == 0
    text = (folder / "M" / "report.html").read_text()
    assert "by this rule: MixedNUTS" in text and "promises nothing beyond them" in text
    assert "all of the fitting images" in text and "calibration half" not in text


def test_evaluation_names_the_rule(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(
            [
                "evaluate",
                "mixture:M",
                "--data",
                "npz:images.npz",
                "--eps",
                "0.002",
                "--attack",
                "pgd",
                "--steps",
                "1",
                "--start",
                "80",
                "--count",
                "6",
                "--out",
                "E",
            ]
        )
        == 0
    )
    assert "mixed: MixedNUTS" in capsys.readouterr().out and read_summary("E").methods == {
        "mixed": "MixedNUTS"
    }
    assert "The rule of the mixture: MixedNUTS." in verdict(read_run("E")).text


def test_published_numbers_need_no_images(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert run(["fit", *PAIR, "--published", "cifar10", "--out", "P"]) == 0
        assert capsys.readouterr().out == (
            "MixedNUTS with the published LogitMap(s=5, p=4, c=-1.1, clamp=gelu), alpha "
            "0.99875; nothing was fitted\nmixture:P\n"
            "next: equipoise evaluate mixture:P --out P-evaluation\n"
        )
    mixture = load_model("mixture:P")
    assert isinstance(mixture, MixedClassifier) and (mixture.method, mixture.hard) == (
        "MixedNUTS",
        True,
    )


def test_published_map_with_a_fitted_alpha(folder: Path) -> None:
    assert fit("--rule", "paper", "--like", "published:cifar100", "--rounds", "0", out="L") == 0
    mixture = load_model("mixture:L")
    assert isinstance(mixture, MixedClassifier) and mixture.logit_map is not None
    assert (
        mixture.logit_map.settings.power == pytest.approx(25 / 7) and mixture.method == "MixedNUTS"
    )


def test_plain_mixing_with_a_temperature(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fit", *PAIR, "--alpha", "0.8", "--accurate-temperature", "0.5", "--out", "T"]) == 0
    assert (
        capsys.readouterr().out == "plain mixing with alpha 0.8; nothing was fitted\nmixture:T\n"
        "next: equipoise evaluate mixture:T --out T-evaluation\n"
    )
    mixture = load_model("mixture:T")
    assert isinstance(mixture, MixedClassifier) and mixture.accurate_temperature == 0.5


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--rule", "paper", "--objective", "mixture"],
            "`objective` must be surrogate or conditional with rule paper",
        ),
        (["--rule", "paper", "--against", "pair"], "`against` must be any with rule paper"),
        (
            ["--rule", "nuts", "--accurate-temperature", "0.5"],
            "`accurate_temperature` must be 0 with this rule",
        ),
        (["--rule", "paper", "--like", "published:cifar11"], "did you mean 'cifar10'"),
        (["--published", "cifar10", "--beta", "0.9"], "`published` must come without a target"),
    ],
)
def test_one_sentence_and_exit_code_two(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert fit(*arguments, out="N") == 2
    err = capsys.readouterr().err
    assert sentence in err and err.count("\n") == 1 and not (folder / "N").exists()
