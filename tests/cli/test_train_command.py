"""`equipoise train`: objectives as commands, recipes, and what is printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from equipoise.cli import main
from equipoise.core import config
from equipoise.training import OBJECTIVES

SMALL = [
    "--arch",
    "cnn_small",
    "--data",
    "digits",
    "--count",
    "200",
    "--epochs",
    "1",
    "--device",
    "cpu",
]


def test_prints_the_table_and_the_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main.run(["train", "trades", *SMALL, "--eps", "4/255", "--out", str(tmp_path / "run")]) == 0
    )
    printed = capsys.readouterr().out
    assert "held out from training" in " ".join(printed.split())
    run = tmp_path / "run"
    best = run / "best.safetensors"
    assert printed.splitlines()[-2:] == [
        f"checkpoint: {best}",
        f"next: equipoise evaluate {best} --data digits --count 100 --eps 4/255 --out {run}-evaluation",
    ]
    assert config.read(tmp_path / "run" / "run.toml")["identity"]["objective"]["eps"] == 4 / 255


def test_a_recipe_gives_defaults_and_the_command_line_wins(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'arch = "cnn_small"\ndata = "digits"\ncount = 200\nepochs = 7\nsigma = 0.3\nheld-out = 0\n'
    )
    arguments = [
        "train",
        "gaussian",
        "--config",
        str(recipe),
        "--epochs",
        "1",
        "--out",
        str(tmp_path / "run"),
    ]
    assert main.run(arguments) == 0
    identity = config.read(tmp_path / "run" / "run.toml")["identity"]
    assert identity["objective"]["sigma"] == 0.3
    assert identity["plan"]["epochs"] == 1 and identity["plan"]["held_out"] == 0


def test_a_named_recipe_gives_defaults_and_the_file_and_the_command_line_win(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'precision = "fp32"\nepochs = 9\nlr = 0.1\nmean = "0.3"\nstd = "0.4"\nheld_out = 50\nbatch_size = 50\n'
    )
    named = ["--recipe", "cifar10_resnet18_gaussian_sigma050", "--config", str(file)]
    assert main.run(["train", "gaussian", *named, *SMALL, "--out", str(tmp_path / "run")]) == 0
    identity = config.read(tmp_path / "run" / "run.toml")["identity"]
    assert identity["objective"]["sigma"] == 0.5 and identity["data"]["name"] == "digits"
    assert identity["plan"]["epochs"] == 1 and identity["plan"]["lr"] == 0.1
    assert identity["plan"]["schedule"] == "one-cycle" and identity["plan"]["held_out"] == 50
    capsys.readouterr()

    assert main.run(["train", "standard", *named, *SMALL, "--out", str(tmp_path / "other")]) == 2
    error = capsys.readouterr().err
    assert "`recipe` must be one for standard, got 'cifar10_resnet18_gaussian_sigma050" in error
    assert not (tmp_path / "other").exists()


def test_unknown_keys_of_a_recipe_name_the_nearest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("sigm = 0.3\n")
    assert (
        main.run(
            ["train", "gaussian", *SMALL, "--config", str(recipe), "--out", str(tmp_path / "run")]
        )
        == 2
    )
    assert "did you mean 'sigma'" in capsys.readouterr().err


def test_unknown_objectives_name_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["train", "smoothmx", *SMALL, "--out", "nowhere"]) == 2
    assert "did you mean 'smoothmix'" in capsys.readouterr().err


def test_the_list_of_objectives_is_not_cut_short(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["train"]) == 2
    printed = capsys.readouterr().err
    assert "..." not in printed.split("Commands:")[1] and len(printed.splitlines()) > len(
        OBJECTIVES
    )
