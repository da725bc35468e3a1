"""`equipoise fit` as a user types it, and what `equipoise evaluate` makes of the mixture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_pair import write_pair

from equipoise import mixing, models
from equipoise.cli.main import run
from equipoise.core import records
from equipoise.fitting import run as fit_run
from equipoise.mixing import MixedClassifier
from equipoise.models import checkpoint


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pair with 120 images, and a model with more classes."""
    monkeypatch.chdir(tmp_path)
    write_pair(tmp_path, 120)
    other = models.build("cnn_small", num_classes=5, image_shape=(3, 8, 8))
    checkpoint.save("other.safetensors", other, {})
    return tmp_path


def fit(*arguments: str, out: str = "M") -> int:
    base = ["fit", "--accurate", "accurate.safetensors", "--robust", "robust.safetensors", "--data", "npz:images.npz",
            "--eps", "0.002", "--steps", "3", "--targets", "2", "--pool", "1", "--out", out]
    return run([*base, *arguments])


def test_a_mixture_for_a_target(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit("--lose-at-most", "20", "--frontier") == 0
    out = capsys.readouterr().out
    assert "loses at most 20 points of robust accuracy in expectation" in out and out.endswith("mixture:M\n")
    mixture = mixing.load("mixture:M")
    assert isinstance(mixture, MixedClassifier) and mixture.hard and mixture.frontier and mixture.fitted is not None
    assert mixture.fitted.images == ("0-119",)
    told = records.summary("M")
    assert told["verb"] == "fit" and told["helped"] and told["fitted"]["clean"] >= told["fitted"]["robust_clean"]
    assert [row["model"] for row in told["cost"]] == ["accurate", "robust", "mixed", "mixed, gated"]
    before = {path: path.read_bytes() for path in (place / "M").rglob("*") if path.is_file()}
    assert fit("--lose-at-most", "20", "--frontier") == 0 and capsys.readouterr().out == out
    assert before == {path: path.read_bytes() for path in (place / "M").rglob("*") if path.is_file()
                      and path.name != "run.toml"} | {place / "M" / "run.toml": before[place / "M" / "run.toml"]}
    assert run(["report", "M"]) == 0 and "What was fitted" in (place / "M" / "report.html").read_text()
    assert fit("--lose-at-most", "10") == 2
    assert "has target = '20 points of robust accuracy'" in capsys.readouterr().err


def test_too_few_images_leave_no_folder(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit("--count", "30") == 2 and not (place / "M").exists()
    assert capsys.readouterr().err == "equipoise: `count` must give at least 50 images to fit on, got 30\n"


def test_a_stopped_fit_goes_on_after_its_attack(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def stopped(*arguments: object, **settings: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fit_run, "_write", stopped)
        assert fit("--lose-at-most", "20") == 130
    assert (place / "M" / "logits.npz").exists() and not (place / "M" / "mixture.toml").exists()
    assert fit("--lose-at-most", "20") == 0 and fit("--lose-at-most", "20", out="N") == 0
    assert (place / "M" / "mixture.toml").read_text() == (place / "N" / "mixture.toml").read_text()


def test_plain_mixing_needs_no_images(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fit", "--accurate", "accurate.safetensors", "--robust", "robust.safetensors", "--alpha", "0.8",
                "--out", "P"]) == 0
    assert "nothing was fitted" in capsys.readouterr().out
    mixture = mixing.load("mixture:P")
    assert isinstance(mixture, MixedClassifier) and mixture.differentiable and mixture.alpha == pytest.approx(0.8)
    assert fit("--alpha", "0.8", out="P") == 0  # the same again
    assert fit("--alpha", "0.7", out="P") == 2 and "hold this very mixture" in capsys.readouterr().err


def test_plain_mixing_overwrites_no_fit(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit("--lose-at-most", "20") == 0
    before = (place / "M" / "mixture.toml").read_bytes()
    assert fit("--alpha", "0.8") == 2 and "hold this very mixture" in capsys.readouterr().err
    assert (place / "M" / "mixture.toml").read_bytes() == before
    assert fit("--alpha", "0.8", out="accurate.safetensors") == 2
    assert "`out` must be a folder" in capsys.readouterr().err


def test_a_mixture_that_cannot_be_promised(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit("--lose-at-most", "0.1", "--frontier") == 0
    told = capsys.readouterr().out
    assert "no mixture helps: 60 images are too few to promise 0.1 points" in told
    mixture = mixing.load("mixture:M")
    assert isinstance(mixture, MixedClassifier) and mixture.alpha == 1.0
    robust = records.summary("M")["fitted"]["robust_clean"]
    assert mixture.frontier and all(point.clean > robust for point in mixture.frontier)
    assert f"a mixture that may lose {100 * mixture.frontier[0].lose_at_most:.3g} points helps" in told
    assert fit("--lose-at-most", "0", out="Z") == 0
    assert "that nothing is lost cannot be promised" in capsys.readouterr().out
    assert fit("--beta", "0", out="A") == 0
    assert "images go that the robust model keeps, which the accurate model alone does" in capsys.readouterr().out


def test_the_map_of_another(place: Path) -> None:
    assert fit("--lose-at-most", "20", "--rule", "nuts") == 0
    assert fit("--lose-at-most", "30", "--like", "mixture:M", out="L") == 0
    first, second = mixing.load("mixture:M"), mixing.load("mixture:L")
    assert isinstance(first, MixedClassifier) and isinstance(second, MixedClassifier)
    assert first.logit_map is not None and second.logit_map is not None
    assert first.logit_map.facts() == second.logit_map.facts() and second.q >= first.q


def test_against_both_models_at_once(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit("--lose-at-most", "20", "--against", "pair") == 0
    assert "against an attack on both models at once" in capsys.readouterr().out


def test_evaluated_plainly_and_adaptively(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit("--lose-at-most", "20", "--count", "80") == 0
    capsys.readouterr()
    arguments = ["evaluate", "mixture:M", "--data", "npz:images.npz", "--eps", "0.002", "--steps", "2"]
    assert run([*arguments, "--start", "80", "--out", "E"]) == 0
    assert "warning" not in capsys.readouterr().err
    told = records.summary("E")
    metrics = {row["metric"] for row in told["results"] if row["model"] == "mixed"}
    assert metrics == {"clean", "pgd", "adaptive", "worst"}
    value = {row["metric"]: row["value"] for row in told["results"] if row["model"] == "mixed"}
    assert value["worst"] <= min(value["pgd"], value["adaptive"])
    assert {row["metric"] for row in told["results"] if row["model"] == "robust"} == {"clean", "pgd", "worst"}
    assert told["cost"][-1]["asked"] <= 1 and "overlap" not in told
    assert run([*arguments, "--start", "70", "--out", "F", "--adaptive", "through"]) == 0
    assert "warning: mixed was fitted on images 70-79 of these" in capsys.readouterr().err
    assert records.summary("F")["overlap"] == {"mixed": ["70-79"]}
    listed = [value for value in arguments if value not in ("--steps", "2")]
    assert run([*listed, "--start", "100", "--count", "4", "--attack", "fast", "--out", "H"]) == 0
    assert {row["model"] for row in records.summary("H")["symptoms"]} == {"accurate", "robust", "mixed"}
    assert run([*arguments, "--out", "G", "--adaptive", "surrogat"]) == 2
    assert "did you mean 'surrogate'?" in capsys.readouterr().err


def test_an_accurate_base_that_only_names_classes(place: Path) -> None:
    (place / "service.py").write_text(
        "import torch\nfrom equipoise import load\nfrom equipoise.mixing import HardLabels\n\n"
        "def make():\n    model = load('accurate.safetensors')\n"
        "    return HardLabels(lambda x: model(x).argmax(1))\n")
    assert fit("--accurate", "python:service:make", "--lose-at-most", "20", "--count", "80") == 0
    arguments = ["evaluate", "mixture:M", "--data", "npz:images.npz", "--eps", "0.002", "--start", "80", "--steps", "2"]
    assert run([*arguments, "--out", "E"]) == 0
    assert run([*arguments, "--out", "F", "--stand-in", "accurate.safetensors"]) == 0
    for folder in ("E", "F"):
        told = {(row["model"], row["metric"]) for row in records.summary(folder)["results"]}
        assert {("accurate", "pgd"), ("mixed", "adaptive"), ("mixed", "worst")} <= told
        alarms = {row["name"] for row in records.summary(folder)["symptoms"] if row["model"] == "accurate"
                  and row["alarm"]}
        assert not alarms & {"train mode", "probabilities for logits"}


def test_a_robust_base_that_only_names_classes(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "named.py").write_text(
        "from equipoise import load\nfrom equipoise.mixing import HardLabels\n\n"
        "def make():\n    model = load('robust.safetensors')\n    return HardLabels(lambda x: model(x).argmax(1))\n")
    assert fit("--robust", "python:named:make") == 2
    assert "`robust` must answer with logits (B, K)" in capsys.readouterr().err and not (place / "M").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--lose-at-most", "1", "--beta", "0.9"], "must be at most one of --lose-at-most, --beta and --alpha"),
        (["--lose-at-most", "-1"], "`lose_at_most` must lie in [0, 100]"),
        (["--beta", "1.5"], "`beta` must lie in [0, 1]"),
        (["--alpha", "2"], "`alpha` must lie in [0, 1]"),
        (["--count", "49"], "at least 50 images to fit on, got 49"),
        (["--robust", "accurate.safetensors"], "`accurate and robust` must be different models"),
        (["--accurate", "other.safetensors"], "num_classes"),
        (["--clamp", "gelo"], "did you mean 'gelu'?"),
        (["--rule", "swich"], "did you mean 'switch'?"),
        (["--against", "both"], "`against` must be one of any, pair"),
        (["--objective", "mix"], "did you mean 'mixture'?"),
        (["--rounds", "-1"], "`rounds` must be a whole number of at least 0"),
        (["--steps", "0"], "`steps` must be a whole number of at least 1"),
        (["--like", "robust.safetensors"], "`like` must name a mixture with a map"),
        (["--eps", "0.5"], "right on at least one attacked image"),
        (["--robust", "none.safetensors"], "none.safetensors"),
    ],
)
def test_one_sentence_and_exit_code_two(
    place: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert fit(*arguments) == 2
    out, err = capsys.readouterr()
    assert sentence in err and out == ""
    assert err.startswith("equipoise: ") and err.count("\n") == 1 and "Traceback" not in err


def test_logits_that_are_not_numbers(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for side in ("accurate", "robust"):
        model = models.load(f"{side}.safetensors")
        torch.nn.init.constant_(model.fc.bias, torch.nan)  # type: ignore[arg-type, union-attr]
        checkpoint.save(f"nan-{side}.safetensors", model, {})
        assert fit(f"--{side}", f"nan-{side}.safetensors", out=side) == 2
        assert f"the {side} model must answer with finite logits" in capsys.readouterr().err


def test_a_base_that_changed(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit("--lose-at-most", "20") == 0
    model = models.load("robust.safetensors")
    torch.nn.init.constant_(model.fc.bias, 1.0)  # type: ignore[arg-type, union-attr]
    checkpoint.save("robust.safetensors", model, {})
    assert run(["evaluate", "mixture:M", "--data", "npz:images.npz", "--eps", "0.002", "--out", "E"]) == 2
    assert "its weights have changed" in capsys.readouterr().err
