"""Recipes: the files of `configs/`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_training import dataset

from equipoise.core.checks import InputError
from equipoise.training import OBJECTIVES
from equipoise.training.objectives import SmoothMix
from equipoise.training.recipe import Recipe

CONFIGS = Path(__file__).parents[2] / "configs"
TEXT = 'data = "digits"\narch = "cnn_small"\nmean = "0.3"\nstd = "0.4"\nepochs = 1\nbatch_size = 16\nlr = 0.02\n'


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_a_recipe_is_what_its_name_says(path: Path) -> None:
    recipe = Recipe.read(path)
    data, arch, objective, *rest = path.stem.split("_")
    assert (recipe.data, recipe.arch) == (data, arch) and isinstance(
        recipe.objective, OBJECTIVES[objective]
    )
    for word in rest:
        if word.startswith("sigma"):
            assert recipe.objective.to_dict()["sigma"] == int(word[5:]) / 100
        if word.startswith("eta"):
            assert recipe.objective.to_dict()["eta"] == int(word[3:])
    assert recipe.objective.to_dict().get("one_step", False) == ("onestep" in rest)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*_sigma*.toml")), ids=lambda path: path.stem)
def test_recipes_of_the_official_code_use_all_images_and_its_late_drops(path: Path) -> None:
    plan = Recipe.read(path).plan
    if "resnet18" not in path.stem:
        assert plan.held_out == 0
    if plan.schedule == "step":
        assert plan.step_delay == 1


@pytest.mark.parametrize(("objective", "mode"), [("smoothmix", "both"), ("macer", "auto")])
def test_steps_on_mnist_are_compiled_and_captured_where_that_was_measured(
    objective: str, mode: str
) -> None:
    modes = {
        Recipe.read(path).plan.compile for path in CONFIGS.glob(f"mnist_lenet_{objective}_*.toml")
    }
    assert modes == {mode}


def test_changed_settings_go_to_the_objective_and_to_the_plan() -> None:
    recipe = Recipe.read(CONFIGS / "mnist_lenet_smoothmix_sigma100.toml")
    changed = recipe.changed("_short", eta=2.0, noises=8, epochs=3)
    assert isinstance(changed.objective, SmoothMix) and changed.name == recipe.name + "_short"
    assert (changed.objective.eta, changed.objective.noises, changed.plan.epochs) == (2.0, 8, 3)
    assert changed.plan.batch_size == recipe.plan.batch_size
    with pytest.raises(InputError, match="did you mean 'epochs'"):
        recipe.changed(epoch=3)


def test_training_by_a_recipe_is_repeatable(tmp_path: Path) -> None:
    path = tmp_path / "a_b_gaussian_small.toml"
    path.write_text(TEXT + "sigma = 0.25\n")
    models = [
        Recipe.read(path).train(dataset(), "cpu", tmp_path / name).model for name in ("x", "y", "x")
    ]
    first, *others = ([p.detach() for p in model.parameters()] for model in models)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("gaussian.toml", TEXT, "`recipe` must be named DATA_ARCH_OBJECTIVE.toml"),
        ("a_b_gausian.toml", TEXT, "did you mean 'gaussian'"),
        ("a_b_gaussian.toml", TEXT + "sigm = 1\n", "did you mean 'sigma'"),
        ("a_b_gaussian.toml", TEXT.replace("mean", "centre"), "`mean` must be text"),
    ],
)
def test_a_wrong_recipe_is_refused(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message):
        Recipe.read(tmp_path / name)
