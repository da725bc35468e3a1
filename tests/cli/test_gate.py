"""A gate from the command line: trained, put over a fitted map, evaluated."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_files import write_pair

from equipoise.attacks import Apgd, Suite
from equipoise.cli.main import run
from equipoise.core import config, records
from equipoise.core.results import read_summary
from equipoise.fitting import gated
from equipoise.fitting.gated import candidate_attack, with_ranges
from equipoise.mixing import GatedClassifier, MixedClassifier, load_model
from equipoise.models import read_metadata

PAIR = [
    "--accurate",
    "accurate.safetensors",
    "--robust",
    "robust.safetensors",
    "--data",
    "npz:images.npz",
    "--eps",
    "0.002",
]
TRAIN = [
    "train",
    "gate",
    *PAIR,
    "--width",
    "2",
    "--epochs",
    "1",
    "--steps",
    "1",
    "--batch-size",
    "40",
    "--out",
    "G",
]
FIT = [
    "fit",
    *PAIR,
    "--gate",
    "G",
    "--steps",
    "2",
    "--targets",
    "1",
    "--pool",
    "1",
    "--range-attack",
    "short",
    "--out",
    "M",
]
LOSE_20 = ["--lose-at-most", "20"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair of models with 100 images, its gate G, and the fitted mixture M with the gate."""
    folder = tmp_path_factory.mktemp("gate")
    write_pair(folder, 100)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        shorten_attacks(patch)
        assert run(TRAIN) == 0 and run([*FIT, *LOSE_20]) == 0
    return folder


def shorten_attacks(patch: pytest.MonkeyPatch) -> None:
    """On the candidates of a range; tests/fitting/test_gate_range.py selects one under the real
    attack."""
    short = Suite(attacks=(Apgd(loss="margin", steps=2),))
    patch.setattr(
        gated,
        "candidate_attack",
        partial(candidate_attack, attack=short, both_sides=(Apgd(steps=2),)),
    )


@pytest.fixture
def folder(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(prepared)
    shorten_attacks(monkeypatch)
    return prepared


def test_the_random_seed_of_a_gate_is_the_one_typed(folder: Path) -> None:
    assert run([*TRAIN[:-1], "seeded", "--seed", "3"]) == 0
    assert records.read_description(folder / "seeded" / "run.toml").identity["plan"]["seed"] == 3
    weights = [load_file(folder / name / "gate.safetensors") for name in ("G", "seeded")]
    assert any(not torch.equal(value, weights[1][key]) for key, value in weights[0].items())


def test_a_finished_gate_is_not_trained_again(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (folder / "G" / "gate.safetensors").read_bytes()
    assert run(TRAIN) == 0 and capsys.readouterr().out.endswith(
        "\ngate: G/gate.safetensors\nnext: equipoise open G\n"
    )
    assert (folder / "G" / "gate.safetensors").read_bytes() == before


def test_the_settings_of_the_gate_have_defaults_of_their_own(folder: Path) -> None:
    identity = config.read(Path("G/run.toml"))["identity"]
    assert identity["objective"]["eps"] == 0.002
    assert identity["plan"]["epochs"] == 1 and identity["plan"]["optimizer"] == "adamw"


def test_bf16_of_a_recipe_becomes_fp32_on_a_cpu(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "recipe.toml").write_text('precision = "bf16"\n')
    assert run([*TRAIN[:-1], "R", "--device", "cpu", "--config", "recipe.toml"]) == 0
    assert "warning: bf16 is for GPUs; training in fp32 on this CPU" in capsys.readouterr().err
    assert config.read(Path("R/run.toml"))["identity"]["plan"]["precision"] == "fp32"


@pytest.mark.parametrize("more", [["--layers", "conv1,conv3;conv1,conv3"], ["--width", "3"]])
def test_another_gate_is_refused_in_its_folder(
    folder: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    before = (folder / "G" / "gate.safetensors").read_bytes()
    assert run([*TRAIN, *more]) == 2
    assert "`out` must be a new folder or belong to this run" in capsys.readouterr().err
    assert (folder / "G" / "gate.safetensors").read_bytes() == before


def test_gate_trained_over_the_fitted_map(folder: Path) -> None:
    assert run([*TRAIN[:-1], "O", "--over", "mixture:M/map", "--hinge-share", "0.5"]) == 0
    identity = config.read(Path("O/run.toml"))["identity"]
    assert (
        identity["objective"]["hinge_share"] == 0.5
        and identity != config.read(Path("G/run.toml"))["identity"]
    )
    plain, over = (load_file(f"{out}/gate.safetensors") for out in ("G", "O"))
    assert plain.keys() == over.keys() and any(
        not torch.equal(plain[name], over[name]) for name in plain
    )


def test_the_gate_is_over_the_fitted_map(folder: Path) -> None:
    over, plain = load_model("mixture:M"), load_model("mixture:M/map")
    assert isinstance(over, GatedClassifier) and over.hard and isinstance(plain, MixedClassifier)
    assert over.logit_map is not None and plain.logit_map is not None
    assert over.logit_map.settings == plain.logit_map.settings
    assert over.provenance is not None and over.provenance.images == ("0-99",)


def test_the_summary_of_the_selected_range(folder: Path) -> None:
    gate = read_summary("M").gate
    assert gate is not None and gate.met and gate.clean > 0.5
    assert gate.robust_attacked is not None and gate.attacked >= gate.robust_attacked - 0.2
    assert {(row.model, row.attack) for row in records.read_rows("M")} == {
        ("accurate", "clean"),
        *((model, attack) for model in ("robust", "mixed") for attack in ("clean", "short")),
    }


def test_a_finished_fit_prints_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*FIT, *LOSE_20]) == 0
    first = capsys.readouterr().out
    assert first.endswith("\nmixture:M\nnext: equipoise open M\n")
    assert run([*FIT, *LOSE_20]) == 0 and capsys.readouterr().out == first


@pytest.mark.usefixtures("figures_once")
def test_the_report_says_that_nothing_is_promised(folder: Path) -> None:
    assert run(["report", "M"]) == 0
    assert "promises nothing" in (folder / "M" / "report.html").read_text()


@pytest.mark.parametrize("more", [["--lose-at-most", "10"], [*LOSE_20, "--rounds", "3"]])
def test_another_fit_is_refused_in_its_folder(
    folder: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    before = Path("M/run.toml").read_bytes()
    assert run([*FIT, *more]) == 2
    assert "`out` must be a new folder or belong to this run" in capsys.readouterr().err
    assert Path("M/run.toml").read_bytes() == before


def test_range_is_selected_under_the_attacks_of_an_evaluation_by_default(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another attack is another fit; the full one decides, and its name stands in rows and in what
    is printed."""
    default = [*FIT[: FIT.index("--range-attack")], *LOSE_20]
    assert run([*default, "--out", "M"]) == 2
    assert "`out` must be a new folder or belong to this run" in capsys.readouterr().err
    monkeypatch.setattr(gated, "full_attack", lambda model: Apgd(loss="margin", steps=2))
    monkeypatch.setattr(gated, "with_ranges", lambda model: with_ranges(model, (0.0, 0.5), (0.4,)))
    assert run([*default, "--out", "L"]) == 0
    assert "under the attacks of an evaluation" in " ".join(capsys.readouterr().out.split())
    assert {row.attack for row in records.read_rows("L")} == {"clean", "full"}


def test_evaluation_warns_about_fitting_images_and_attacks_adaptively(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
                "--count",
                "8",
                "--sample",
                "first",
                "--out",
                "E",
            ]
        )
        == 0
    )
    assert "was fitted on images 0-7 of these" in capsys.readouterr().err
    assert {"adaptive", "adaptive-lowered"} <= {row.attack for row in records.read_rows("E")}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([*FIT[:-1], "N", "--gate", "nowhere"], "nowhere"),
        ([*FIT[:-1], "N", "--gate", "images.npz"], "images.npz"),
        ([*FIT[:-1], "N", "--alpha", "0.5"], "`gate` must be left out"),
        (
            [
                "fit",
                "--accurate",
                "robust.safetensors",
                "--robust",
                "accurate.safetensors",
                *FIT[5:-1],
                "N",
            ],
            "`accurate` must be the base that G/gate.safetensors was trained for",
        ),
        ([*TRAIN[:-1], "N", "--layers", "a,b"], "`layers` must be two names for each model"),
        ([*TRAIN[:-1], "N", "--layers", "stem,conv;conv,c"], "must name submodules of"),
        ([*TRAIN[:-1], "N", "--pad", "2"], "`pad` must be 0"),
        (
            [*TRAIN[:-1], "N", "--over", "mixture:nowhere"],
            "`mixture` must be a folder that holds mixture.toml",
        ),
        ([*TRAIN[:-1], "N", "--hinge-share", "2"], "`hinge_share` must lie in [0, 1]"),
        ([*TRAIN[:-1], "N", "--width", "0"], "`width` must be a whole number of at least 1"),
    ],
)
def test_mistakes_are_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert run(arguments) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1
    assert not (folder / "N").exists()


def test_a_line_says_what_was_loaded_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_pair(tmp_path, 40)
    metadata, state = read_metadata("robust.safetensors"), load_file("robust.safetensors")
    torch.save(state, "robust.pt")
    robust = f"robust.pt?arch={metadata['arch']}&image_shape={metadata['image_shape']}"
    assert run([robust if part == "robust.safetensors" else part for part in TRAIN]) == 0
    err = capsys.readouterr().err
    assert f"{metadata['arch']}; " in err and "(in the file); weights: robust.pt" in err
    assert "accurate.safetensors: " not in err
