"""`equipoise fit` as a user types it, and the evaluation of its mixture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_files import write_pair

from equipoise import models
from equipoise.cli.main import run
from equipoise.core.results import read_summary
from equipoise.mixing import MixedClassifier, load_model
from equipoise.models import checkpoint

EVALUATE = [
    "evaluate",
    "mixture:M",
    "--data",
    "npz:images.npz",
    "--eps",
    "0.002",
    "--attack",
    "pgd",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pair with 120 images, and a model with more classes."""
    monkeypatch.chdir(tmp_path)
    write_pair(tmp_path, 120)
    checkpoint.save(
        "other.safetensors", models.build("cnn_small", num_classes=5, image_shape=(3, 8, 8)), {}
    )
    return tmp_path


def fit(*arguments: str, out: str = "M") -> int:
    return run(
        [
            "fit",
            "--accurate",
            "accurate.safetensors",
            "--robust",
            "robust.safetensors",
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


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write_factory(folder: Path, side: str) -> str:
    """A `python:` reference of a model that returns classes."""
    (folder / f"{side}_classes.py").write_text(
        "from equipoise import load_model\nfrom equipoise.mixing import HardLabels\n\n"
        f"def make():\n    model = load_model('{side}.safetensors')\n"
        "    return HardLabels(lambda x: model(x).argmax(1))\n"
    )
    return f"python:{side}_classes:make"


def test_promise_and_frontier_are_printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit("--lose-at-most", "20", "--frontier") == 0
    out = capsys.readouterr().out
    assert (
        "loses at most 20 points of robust accuracy in expectation" in out
        and "Mixtures for other targets" in out
    )
    assert out.splitlines()[-2:] == ["mixture:M", "next: equipoise open M"], (
        "all images were fitted on"
    )
    assert (
        isinstance(load_model("mixture:M"), MixedClassifier) and read_summary("M").command == "fit"
    )


def test_a_bundle_needs_nothing_else(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also of a fit that is already finished; then the files of both models can go."""
    assert fit("--lose-at-most", "20") == 0
    before, x = (
        load_model("mixture:M"),
        torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(0)),
    )
    assert fit("--lose-at-most", "20", "--bundle") == 0
    (folder / "M").rename(folder / "N")
    for side in ("accurate", "robust"):
        (folder / f"{side}.safetensors").unlink()
    capsys.readouterr()
    assert run([*EVALUATE, "--out", "E", "--steps", "2"]) == 2
    assert (
        run(
            [word.replace("mixture:M", "mixture:N") for word in EVALUATE]
            + ["--out", "E", "--steps", "2"]
        )
        == 0
    )
    with torch.no_grad():
        assert torch.equal(load_model("mixture:N")(x), before(x))


def test_repeating_the_command_changes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit("--lose-at-most", "20") == 0
    out, before = capsys.readouterr().out, files(folder / "M")
    assert fit("--lose-at-most", "20") == 0
    assert capsys.readouterr().out == out and files(folder / "M") == before


def test_another_target_needs_another_folder(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit("--lose-at-most", "20") == 0
    assert fit("--lose-at-most", "10") == 2
    assert "M has target.share = 0.2, this run has 0.1" in capsys.readouterr().err


@pytest.mark.usefixtures("figures_once")
def test_report(folder: Path) -> None:
    assert fit("--lose-at-most", "20") == 0 and run(["report", "M"]) == 0
    assert "by conformal risk control on 60 images" in (folder / "M" / "report.html").read_text()


def test_against_both_models_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit("--lose-at-most", "20", "--against", "pair") == 0
    assert "against an attack on both models at once" in capsys.readouterr().out


def test_plain_mixing_needs_no_images(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(
            [
                "fit",
                "--accurate",
                "accurate.safetensors",
                "--robust",
                "robust.safetensors",
                "--alpha",
                "0.8",
                "--out",
                "P",
            ]
        )
        == 0
    )
    assert (
        capsys.readouterr().out == "plain mixing with alpha 0.8; nothing was fitted\nmixture:P\n"
        "next: equipoise evaluate mixture:P --out P-evaluation\n"
    )


def test_evaluation_is_plain_and_adaptive(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit("--lose-at-most", "20", "--count", "80") == 0
    capsys.readouterr()
    assert run([*EVALUATE, "--steps", "2", "--start", "80", "--out", "E"]) == 0
    printed = capsys.readouterr()
    assert "warning" not in printed.err
    summary = read_summary("E")
    assert len(summary.promises) == 1 and f"mixed: {summary.promises[0].explanation}" in printed.out
    values = {result.metric: result.value for result in summary.results if result.model == "mixed"}
    assert values.keys() == {"clean", "pgd", "adaptive", "worst"}, (
        "only suites end with the mixture's own gradients"
    )
    assert values["worst"] <= min(values["pgd"], values["adaptive"]) and not summary.overlap
    share = summary.costs[-1].accurate_share
    assert share is not None and share <= 1


def test_evaluation_on_fitting_images_is_reported(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By their pixels: the name of the file is another one here."""
    assert fit("--lose-at-most", "20", "--count", "80", "--sample", "first") == 0
    assert (
        run(
            [
                *EVALUATE,
                "--steps",
                "2",
                "--start",
                "70",
                "--out",
                "F",
                "--adaptive",
                "through",
                "--sample",
                "first",
                "--data",
                f"npz:{folder / 'images.npz'}",
            ]
        )
        == 0
    )
    out, err = capsys.readouterr()
    assert "warning: mixed was fitted on images 70-79 of these" in err
    assert "note: mixed was fitted on images 70-79 of these" in out
    assert read_summary("F").overlap == {"mixed": ("70-79",)}


def test_evaluation_has_sanity_checks(folder: Path) -> None:
    assert fit("--lose-at-most", "20", "--count", "80") == 0
    # Within this radius every image is broken at once, so that no attack goes on to its long runs.
    assert (
        run(
            [
                *EVALUATE,
                "--start",
                "100",
                "--count",
                "4",
                "--attack",
                "fast",
                "--audit",
                "0",
                "--eps",
                "0.1",
                "--out",
                "H",
            ]
        )
        == 0
    )
    assert {check.model for check in read_summary("H").sanity_checks} == {
        "accurate",
        "robust",
        "mixed",
    }


@pytest.mark.parametrize("stand_in", [[], ["--stand-in", "accurate.safetensors"]])
def test_accurate_model_that_returns_classes(folder: Path, stand_in: list[str]) -> None:
    assert (
        fit(
            "--accurate", write_factory(folder, "accurate"), "--lose-at-most", "20", "--count", "80"
        )
        == 0
    )
    assert (
        run([*EVALUATE, "--start", "80", "--steps", "2", "--out", "E", "--allow-code", *stand_in])
        == 0
    )
    summary = read_summary("E")
    assert {("accurate", "pgd"), ("mixed", "adaptive"), ("mixed", "worst")} <= {
        (result.model, result.metric) for result in summary.results
    }
    alarms = {
        check.name for check in summary.sanity_checks if check.model == "accurate" and check.alarm
    }
    assert not alarms & {"train mode", "probabilities for logits"}


def test_robust_model_that_returns_classes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit("--robust", write_factory(folder, "robust")) == 2
    assert (
        "`robust` must output logits (B, K)" in capsys.readouterr().err
        and not (folder / "M").exists()
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--lose-at-most", "1", "--beta", "0.9"],
            "must be at most one of lose_at_most, beta and alpha",
        ),
        (["--lose-at-most", "-1"], "`lose_at_most` must lie in [0, 100]"),
        (["--count", "49"], "`count` must give at least 50 images to fit on, got 49"),
        (["--robust", "accurate.safetensors"], "`accurate and robust` must be different models"),
        (
            ["--accurate", "other.safetensors"],
            "`other.safetensors` must have the 4 classes of the data, got 5",
        ),
        (["--rule", "swich"], "did you mean 'switch'?"),
        (["--steps", "0"], "`steps` must be a whole number of at least 1"),
        (["--like", "robust.safetensors"], "`like` must name a mixture with a map"),
        (["--eps", "0.5"], "classify at least one attacked image correctly"),
        (["--robust", "none.safetensors"], "none.safetensors"),
    ],
)
def test_one_sentence_and_exit_code_two(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert fit(*arguments) == 2
    out, err = capsys.readouterr()
    assert sentence in err and out == ""
    assert err.splitlines()[-1].startswith("equipoise: ") and "Traceback" not in err


@pytest.mark.parametrize("side", ["accurate", "robust"])
def test_logits_that_are_not_finite(
    folder: Path, capsys: pytest.CaptureFixture[str], side: str
) -> None:
    model = models.load(f"{side}.safetensors")
    torch.nn.init.constant_(model.fc.bias, torch.nan)  # type: ignore[arg-type, union-attr]
    checkpoint.save("nan.safetensors", model, {})
    assert fit(f"--{side}", "nan.safetensors") == 2
    assert f"the {side} model must output finite logits" in capsys.readouterr().err


def test_base_whose_weights_have_changed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit("--lose-at-most", "20") == 0
    model = models.load("robust.safetensors")
    torch.nn.init.constant_(model.fc.bias, 1.0)  # type: ignore[arg-type, union-attr]
    checkpoint.save("robust.safetensors", model, {})
    assert run([*EVALUATE, "--out", "E"]) == 2
    assert "weights have changed" in capsys.readouterr().err
