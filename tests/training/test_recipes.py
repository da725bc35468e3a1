"""The recipes that come with the package."""

from __future__ import annotations

from importlib import resources

import pytest

from equipoise.core.checks import InputError
from equipoise.core.settings import split
from equipoise.training import OBJECTIVES, TrainingPlan, list_recipes, read_recipe, train


@pytest.mark.parametrize("name", list_recipes())
def test_a_recipe_is_what_its_name_says(name: str) -> None:
    recipe = read_recipe(name)
    data, arch, objective, *rest = name.split("_")
    assert (recipe["data"], recipe["arch"], recipe["objective"]) == (data, arch, objective)
    assert recipe.get("one_step", False) == ("onestep" in rest)
    assert recipe.get("norm", "linf") == ("l2" if "l2" in rest else "linf")
    for word in rest:
        if word.startswith("sigma"):
            assert recipe["sigma"] == int(word[5:]) / 100


@pytest.mark.parametrize("name", list_recipes())
def test_every_setting_is_one_of_the_objective_or_of_the_plan(name: str) -> None:
    recipe = read_recipe(name)
    objective = OBJECTIVES[recipe.pop("objective")]
    for key in ("data", "arch", "mean", "std"):
        assert isinstance(recipe.pop(key), str)
    split(recipe, objective, TrainingPlan)


def test_a_recipe_has_the_settings_of_its_base_and_its_own() -> None:
    assert read_recipe("cifar100_resnet18_adversarial") == {
        "objective": "adversarial",
        "data": "cifar100",
        "arch": "resnet18",
        "mean": "0.5071,0.4865,0.4409",
        "std": "0.2673,0.2564,0.2762",
        "batch_size": 512,
        "optimizer": "sgd",
        "momentum": 0.9,
        "nesterov": True,
        "schedule": "one-cycle",
        "pad": 4,
        "flip": True,
        "precision": "bf16",
        "held_out": 848,
        "epochs": 36,
        "lr": 0.3,
        "warmup": 8,
        "weight_decay": 0.0005,
        "norm": "linf",
        "eps": "8/255",
        "steps": 7,
        "early_steps": 3,
        "early_share": 0.5,
        "ema": 0.998,
        "validate_every": 4,
        "save_seconds": 60,
    }
    onestep = read_recipe("cifar10_resnet18_smoothmix_sigma100_onestep")
    assert (onestep["sigma"], onestep["step_size"], onestep["batch_size"]) == (1.0, 2.0, 256)
    assert (onestep["one_step"], onestep["compile"], onestep["epochs"]) == (True, "both", 40)
    assert read_recipe("cifar10_resnet18_trades")["weight_decay"] == 0.0002


def test_the_file_is_a_part_of_the_package() -> None:
    text = resources.files("equipoise.training").joinpath("recipes.toml").read_text("utf-8")
    assert all(f"[{name}]" in text for name in list_recipes())


def test_a_recipe_is_given_to_train() -> None:
    small = {"data": "digits", "arch": "cnn_small", "mean": 0.3, "std": 0.4, "held_out": 10}
    quick = {"precision": "fp32", "epochs": 1}
    recipe = {**read_recipe("cifar10_resnet18_standard_fast"), **small, **quick}
    result = train(**recipe, device="cpu")
    assert {result.n for result in result.results} == {10}


@pytest.mark.parametrize("name", ["cifar10_resnet18_adversaril", "cifar10_resnet18"])
def test_an_unknown_recipe_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="did you mean 'cifar10_resnet18_"):
        read_recipe(name)
