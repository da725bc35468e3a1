"""`equipoise train` from the command line, and the recipes."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from equipoise import models
from equipoise.cli import fields, main, train
from equipoise.core import config, records
from equipoise.core.checks import InputError
from equipoise.training import OBJECTIVES, TrainingPlan

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))
SMALL = ["--arch", "cnn_small", "--data", "digits", "--count", "200", "--epochs", "1", "--device", "cpu"]


def call(*arguments: str) -> str:
    result = CliRunner().invoke(train.app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_trains_and_leaves_a_checkpoint(name: str, tmp_path: Path) -> None:
    told = call(name, *SMALL, "--lr", "0.02", "--out", str(tmp_path / "run"))
    assert told.splitlines()[-1] == str(tmp_path / "run" / "best.safetensors")
    assert "held out from training" in " ".join(told.split())
    model = models.load(str(tmp_path / "run" / "best.safetensors"), num_classes=10, image_shape=(1, 8, 8))
    assert not model.training
    assert records.summary(tmp_path / "run")["verb"] == "train"


def test_options_of_the_objective_reach_it(tmp_path: Path) -> None:
    call("trades", *SMALL, "--eps", "4/255", "--beta", "2", "--out", str(tmp_path / "run"))
    asked = config.read(tmp_path / "run" / "run.toml")["identity"]
    assert asked["trades"]["eps"] == 4 / 255 and asked["trades"]["beta"] == 2
    assert asked["plan"]["epochs"] == 1 and asked["arch"] == "cnn_small"


def test_a_recipe_gives_defaults_and_the_command_line_wins(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('arch = "cnn_small"\ndata = "digits"\ncount = 200\nepochs = 7\nsigma = 0.3\nheld-out = 0\n')
    call("gaussian", "--config", str(recipe), "--epochs", "1", "--out", str(tmp_path / "run"))
    asked = config.read(tmp_path / "run" / "run.toml")["identity"]
    assert asked["gaussian"]["sigma"] == 0.3 and asked["plan"]["epochs"] == 1 and asked["plan"]["held_out"] == 0


def test_begin_with_a_checkpoint(tmp_path: Path) -> None:
    call("standard", *SMALL, "--out", str(tmp_path / "first"))
    start = str(tmp_path / "first" / "last.safetensors")
    call("gaussian", *SMALL, "--init", start, "--out", str(tmp_path / "second"))
    with pytest.raises(InputError, match="`arch` must be 'cnn_small'"):
        call("gaussian", *[part.replace("cnn_small", "cnn") for part in SMALL], "--init", start, "--out",
             str(tmp_path / "third"))


def test_a_checkpoint_keeps_its_means(tmp_path: Path) -> None:
    call("standard", *SMALL, "--mean", "0.25", "--out", str(tmp_path / "first"))
    start = ["--init", str(tmp_path / "first" / "last.safetensors")]
    call("standard", *SMALL, *start, "--mean", "0.25", "--out", str(tmp_path / "second"))
    with pytest.raises(InputError, match=r"`mean` must be \[0.25\], as .*last.safetensors has it, got \[0.5\]"):
        call("standard", *SMALL, *start, "--mean", "0.5", "--out", str(tmp_path / "third"))


@pytest.mark.parametrize("able", [True, False], ids=["able", "unable"])
def test_bf16_of_a_recipe_is_fp32_on_a_cpu_and_an_order_is_an_order(
    able: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equipoise.core.device.has_bf16", lambda kind: able)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('precision = "bf16"\n')
    told = call("standard", *SMALL, "--config", str(recipe), "--out", str(tmp_path / "run"))
    assert "asks for bf16, which is for GPUs; on this CPU it is fp32" in told
    assert config.read(tmp_path / "run" / "run.toml")["identity"]["plan"]["precision"] == "fp32"
    if not able:
        with pytest.raises(InputError, match="`precision` must be auto or fp32 on this cpu"):
            call("standard", *SMALL, "--config", str(recipe), "--precision", "bf16", "--out", str(tmp_path / "other"))


@pytest.mark.parametrize(("arguments", "sentence"), [
    (["--momentum", "1", "--optimizer", "adamw"], "`momentum` must be less than 1 for adamw"),
    (["--momentum", "0", "--nesterov"], "`momentum` must be positive for nesterov"),
    (["--seed", "99999999999999999999"], r"`seed` must be less than 2\*\*63"),
])
def test_what_torch_would_refuse_is_one_sentence(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=sentence):
        call("standard", *SMALL, *arguments, "--out", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_the_list_of_objectives_is_not_cut_short(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["train"]) == 2
    told = capsys.readouterr().err
    assert "..." not in told.split("Commands:")[1] and len(told.splitlines()) > len(OBJECTIVES)


def test_unknown_objective_names_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean 'smoothmix'"):
        call("smoothmx", *SMALL, "--out", "nowhere")


def test_unknown_recipe_key_names_the_nearest(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("sigm = 0.3\n")
    with pytest.raises(InputError, match="did you mean 'sigma'"):
        call("gaussian", *SMALL, "--config", str(recipe), "--out", str(tmp_path / "run"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_recipes_say_only_what_is_read(path: Path) -> None:
    """The name is DATA_ARCH_OBJECTIVE…; every key is an option of that objective with a value it takes."""
    recipe = config.read(path)
    data, arch, name = path.stem.split("_")[:3]
    assert recipe["data"].replace("-", "") == data and recipe["arch"] == arch and name in OBJECTIVES
    own = {parameter.name: parameter for parameter in fields.options_of(OBJECTIVES[name])}
    plan = {parameter.name: parameter for parameter in fields.options_of(TrainingPlan)}
    rest = {"arch", "data", "mean", "std", "count"}
    assert set(recipe) <= own.keys() | plan.keys() | rest
    OBJECTIVES[name](**{key: value for key, value in recipe.items() if key in own})
    TrainingPlan(**{key: value for key, value in recipe.items() if key in plan})


def test_recipes_are_there() -> None:
    assert {"cifar10_resnet18_standard", "cifar10_resnet18_adversarial"} <= {path.stem for path in CONFIGS}
