"""A gate from the command line: trained, put over a fitted map, evaluated; as a user types it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_pair import write_pair

from equipoise import mixing
from equipoise.cli.main import run
from equipoise.core import config, records
from equipoise.fitting import lose_at_most
from equipoise.fitting.gated import told
from equipoise.fitting.selection import Selected
from equipoise.mixing import GatedClassifier, MixedClassifier

PAIR = ["--accurate", "accurate.safetensors", "--robust", "robust.safetensors", "--data", "npz:images.npz",
        "--eps", "0.002"]
TRAIN = ["train", "gate", *PAIR, "--width", "2", "--epochs", "1", "--steps", "1", "--batch-size", "40", "--out", "G"]
FIT = ["fit", *PAIR, "--gate", "G", "--steps", "2", "--targets", "1", "--pool", "1", "--out", "M"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair with 100 images, and its gate."""
    place = tmp_path_factory.mktemp("gate")
    write_pair(place, 100)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert run(TRAIN) == 0
    return place


@pytest.fixture
def place(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(made)
    return made


def test_a_gate_is_trained_once(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (place / "G" / "gate.safetensors").read_bytes()
    assert run(TRAIN) == 0 and capsys.readouterr().out == "G/gate.safetensors\n"
    assert (place / "G" / "gate.safetensors").read_bytes() == before
    asked = config.read(Path("G/run.toml"))["identity"]
    assert asked["gateloss"]["eps"] == 0.002 and asked["plan"]["epochs"] == 1 and asked["plan"]["optimizer"] == "adamw"


def test_bf16_of_a_recipe_is_fp32_on_a_cpu(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "recipe.toml").write_text('precision = "bf16"\n')
    assert run([*TRAIN[:-1], "R", "--device", "cpu", "--config", "recipe.toml"]) == 0
    assert "note: recipe.toml asks for bf16, which is for GPUs" in capsys.readouterr().err
    assert config.read(Path("R/run.toml"))["identity"]["plan"]["precision"] == "fp32"


def test_another_gate_is_not_read_from_its_folder(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (place / "G" / "gate.safetensors").read_bytes()
    for more, said in (("--taps", "conv1,conv3;conv1,conv3"), ("--width", "3")):
        assert run([*TRAIN, more, said]) == 2
        assert f"G has {more[2:]} = " in capsys.readouterr().err
    assert (place / "G" / "gate.safetensors").read_bytes() == before


def test_it_takes_the_place_of_alpha_over_a_fitted_map(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*FIT, "--lose-at-most", "20"]) == 0
    out = capsys.readouterr().out
    assert out.endswith("mixture:M\n") and "the gate, alpha in (" in out and "mixture:M/map" in out
    over, plain = mixing.load("mixture:M"), mixing.load("mixture:M/map")
    assert isinstance(over, GatedClassifier) and over.hard
    assert over.logit_map is not None and over.logit_map.facts() == plain.logit_map.facts()  # type: ignore[union-attr, operator]
    assert over.fitted is not None and over.fitted.images == ("0-99",)
    found = records.summary("M")["gate"]
    assert {(row["model"], row["attack"]) for row in records.read("M")} == {
        (model, attack) for model in ("robust", "mixed") for attack in ("clean", "short")}
    assert found["met"] and found["attacked"] >= found["robust"] - 0.2 and found["clean"] > 0.5
    assert run([*FIT, "--lose-at-most", "20"]) == 0 and capsys.readouterr().out == out
    assert run(["report", "M"]) == 0
    page = (place / "M" / "report.html").read_text()
    assert "promises nothing" in page and "The mixture answers" in page
    assert run([*FIT, "--lose-at-most", "10"]) == 2
    assert "has target = '20 points of robust accuracy'" in capsys.readouterr().err
    assert run([*FIT, "--lose-at-most", "20", "--rounds", "3"]) == 2
    assert "M has search.rounds = " in capsys.readouterr().err
    assert "--rounds" not in config.read(Path("M/run.toml"))["settings"]["command"]  # what is refused leaves no trace
    # What chose it is not evaluated on unawares, and every adversary meets it.
    assert run(["evaluate", "mixture:M", "--data", "npz:images.npz", "--eps", "0.002", "--attack", "pgd", "--count",
                "8", "--out", "E"]) == 0
    assert "was fitted on images 0-7 of these" in capsys.readouterr().err
    attacks = {row["attack"] for row in records.read("E")}
    assert {"adaptive", "adaptive-lowered"} <= attacks


def test_a_missed_target_is_said() -> None:
    model = MixedClassifier(torch.nn.Identity(), torch.nn.Identity(), 0.5)
    right, count = torch.ones(60, dtype=torch.bool), torch.arange(60)
    alone = Selected(model, right, count < 30, True, 1)
    for met in (True, False):
        said = told(Selected(model, right, count < 24, met, 3), alone, lose_at_most(2.0))
        assert said.startswith("kept 40.0 % of the 60 images") and "the robust model 50.0 %" in said
        assert ("no range that was tried loses at most 2 points of robust accuracy" in said) is not met


@pytest.mark.parametrize(("arguments", "said"), [
    ([*FIT[:-1], "N", "--gate", "nowhere"], "`gate` must be a file or folder that exists, got 'nowhere'"),
    ([*FIT[:-1], "N", "--gate", "images.npz"], "images.npz"),
    ([*FIT[:-1], "N", "--alpha", "0.5"], "`gate` must be left out with --alpha"),
    (["fit", "--accurate", "robust.safetensors", "--robust", "accurate.safetensors", *FIT[5:-1], "N"],
     "`accurate` must be the base that G/gate.safetensors was trained for"),
    ([*TRAIN[:-1], "N", "--taps", "a,b"], "`taps` must be two names for each model"),
    ([*TRAIN[:-1], "N", "--taps", "stem,conv;conv,c"], "`taps` must name submodules of"),
    ([*TRAIN[:-1], "N", "--pad", "2"], "`pad` must be 0 where attacked images are told from clean ones"),
    ([*TRAIN[:-1], "N", "--width", "0"], "`width` must be a whole number of at least 1"),
])
def test_mistakes_are_one_sentence(place: Path, capsys: pytest.CaptureFixture[str], arguments: list[str],
                                   said: str) -> None:
    assert run(arguments) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1
    assert not (place / "N").exists()
