"""The public functions `train` and `train_gate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_training import dataset, network, same, weights

from equipoise import models
from equipoise.core import config
from equipoise.core.checks import InputError
from equipoise.core.results import read_summary
from equipoise.mixing import GatedClassifier, MixedClassifier, load_gate, save_mixture
from equipoise.mixing.logit_maps import confidence_switch
from equipoise.models import checkpoint
from equipoise.models.layers.tta import TTAClassifier
from equipoise.training import OBJECTIVES, TrainingPlan, fit_model, train, train_gate
from equipoise.training.objectives import Standard
from equipoise.training.trainer import measure_channels

SMALL: dict[str, Any] = {
    "arch": "cnn_small",
    "epochs": 1,
    "batch_size": 16,
    "lr": 0.02,
    "device": "cpu",
}


@pytest.mark.parametrize("name", sorted(OBJECTIVES.builtin))
def test_every_objective_trains_and_saves_a_checkpoint(name: str, tmp_path: Path) -> None:
    result = train(name, data=dataset(), out=tmp_path / "run", **SMALL)
    assert (
        result.out == tmp_path / "run" and result.results == read_summary(tmp_path / "run").results
    )
    last = models.load(str(tmp_path / "run" / "last.safetensors"))
    assert not result.model.training and same(weights(last), weights(result.model))


def test_the_result_is_printed_as_a_table() -> None:
    text = str(train("adversarial", data=dataset(), **SMALL))
    assert "Accuracy on 9 images" in text and "held out from training" in " ".join(text.split())
    assert all(word in text for word in ("clean", "attacked", "best", "last", "%"))
    assert (
        str(train("standard", data=dataset(), held_out=0, **SMALL))
        == "No images were held out for validation."
    )


def test_settings_go_to_the_objective_and_to_the_plan(tmp_path: Path) -> None:
    train("trades", data=dataset(), out=tmp_path / "run", eps="4/255", beta=2.0, **SMALL)
    identity = config.read(tmp_path / "run" / "run.toml")["identity"]
    assert identity["objective"]["eps"] == 4 / 255 and identity["objective"]["beta"] == 2
    assert identity["plan"]["epochs"] == 1 and identity["arch"] == "cnn_small"


def test_objectives_by_name_class_and_instance_are_the_same() -> None:
    by_name = train("standard", data=dataset(), label_smoothing=0.1, **SMALL)
    by_class = train(Standard, data=dataset(), label_smoothing=0.1, **SMALL)
    instance = train(Standard(label_smoothing=0.1), data=dataset(), **SMALL)
    assert same(weights(by_name.model), weights(by_class.model))
    assert same(weights(by_name.model), weights(instance.model))


def test_a_module_is_trained_as_by_fit_model() -> None:
    settings: dict[str, Any] = {"epochs": 1, "batch_size": 16, "lr": 0.02}
    result = train("standard", data=dataset(), model=network(), device="cpu", **settings)
    expected = fit_model(network(), Standard(), dataset(), TrainingPlan(**settings))
    assert same(weights(result.model), weights(expected))


def test_tensors_are_trained_on_as_a_dataset() -> None:
    data = dataset()
    result = train("standard", data=(data.images, data.labels), **SMALL)
    assert [r.n for r in result.results] == [9, 9]


def test_float_images_are_trained_on() -> None:
    data = dataset()
    x = torch.rand(90, 1, 6, 5, generator=torch.Generator().manual_seed(0))
    result = train("standard", data=(x, data.labels), pad=1, flip=True, cutout=2, **SMALL)
    assert float(result.model.get_buffer("mean")) == pytest.approx(float(x.mean()), abs=1e-4)


def test_data_by_name_is_the_train_split(tmp_path: Path) -> None:
    train("standard", data="digits", held_out=1000, out=tmp_path / "run", **SMALL)
    identity = config.read(tmp_path / "run" / "run.toml")["identity"]
    assert (identity["data"]["name"], identity["data"]["split"]) == ("digits", "train")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"label_smooth": 0.1}, "did you mean 'label_smoothing'"),
        ({"arch": None}, "`arch` must be given, unless `model` or `init` is"),
        ({"arch": "cnn_smal"}, "did you mean 'cnn_small'"),
        ({"model": network()}, "`arch` must be left out with `model`, got 'cnn_small'"),
        ({"objective": "standart"}, "`objective` must be one of .*did you mean 'standard'"),
        ({"seed": 2**63}, r"`seed` must be less than 2\*\*63"),
    ],
    ids=["setting", "no arch", "arch", "arch and model", "objective", "seed"],
)
def test_wrong_arguments_are_refused_before_anything_is_written(
    arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        train(
            **{
                "objective": "standard",
                "data": dataset(),
                "out": tmp_path / "run",
                **SMALL,
                **arguments,
            }
        )
    assert not (tmp_path / "run").exists()


def test_channels_are_measured() -> None:
    means, stds = measure_channels(dataset())
    x = dataset().images.double() / 255
    assert means == [round(float(x.mean()), 4)] and stds == [round(float(x.std(correction=0)), 4)]
    model = train("standard", data=dataset(), **SMALL).model
    assert float(model.get_buffer("mean")) == pytest.approx(means[0])


def test_one_mean_is_for_all_channels() -> None:
    model = train("standard", data=dataset(), mean=0.25, std=[0.5], **SMALL).model
    assert (float(model.get_buffer("mean")), float(model.get_buffer("std"))) == (0.25, 0.5)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a mean of 0.25."""
    out = tmp_path_factory.mktemp("first") / "run"
    train("standard", data=dataset(), mean=0.25, out=out, **SMALL)
    return out / "last.safetensors"


def test_start_from_a_checkpoint(start: Path) -> None:
    model = train(
        "gaussian", data=dataset(), init=start, **{**SMALL, "arch": None, "lr": 1e-12}
    ).model
    assert float(model.get_buffer("mean")) == 0.25
    expected = weights(models.load(str(start)))
    for key, value in weights(model).items():
        torch.testing.assert_close(value, expected[key])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"arch": "cnn"}, "`arch` must be 'cnn_small'"),
        ({"mean": 0.5}, r"`mean` must be \[0.25\], as in .*last.safetensors, got \[0.5\]"),
    ],
)
def test_a_checkpoint_keeps_its_architecture_and_means(
    arguments: dict[str, Any], message: str, start: Path
) -> None:
    with pytest.raises(InputError, match=message):
        train("standard", data=dataset(), init=start, **{**SMALL, **arguments})


def test_bf16_becomes_fp32_on_a_cpu(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="training in fp32 on this CPU"):
        train("standard", data=dataset(), precision="bf16", out=tmp_path / "run", **SMALL)
    assert config.read(tmp_path / "run" / "run.toml")["identity"]["plan"]["precision"] == "fp32"


def test_train_gate(tmp_path: Path) -> None:
    accurate, robust = network(1).eval(), network(2).eval()
    result = train_gate(
        accurate,
        robust,
        data=dataset(),
        width=4,
        out=tmp_path / "run",
        device="cpu",
        epochs=1,
        batch_size=30,
        eps=0.1,
        steps=2,
    )
    assert isinstance(result.model, GatedClassifier)
    gate = load_gate(tmp_path / "run" / "gate.safetensors", accurate, robust)
    assert same(weights(gate), weights(result.model.network))
    identity = config.read(tmp_path / "run" / "run.toml")["identity"]
    assert identity["objective"]["name"] == "gate" and identity["arch"] == "gated"
    assert (
        identity["plan"]["optimizer"] == "adamw" and identity["plan"]["held_out"] == 0
    )  # defaults of a gate


@pytest.mark.parametrize("given", ["folder", "mixture"])
def test_gate_is_attacked_over_a_mixture_with_views(given: str, tmp_path: Path) -> None:
    """The features of a model with views are those of every image, and the gate is trained over the
    map of a switch."""
    accurate, robust = network(1).eval(), TTAClassifier(network(2).eval(), 6).eval()
    switch = MixedClassifier(
        accurate, robust, 0.8, hard=True, logit_map=confidence_switch(4.0, 1.0)
    )
    over: Any = switch
    if given == "folder":
        for side, base in (("accurate", accurate), ("robust", robust.model)):
            checkpoint.save(tmp_path / f"{side}.safetensors", base)
        over = f"mixture:{tmp_path / 'switch'}"
        save_mixture(
            tmp_path / "switch",
            switch,
            accurate=str(tmp_path / "accurate.safetensors"),
            robust=f"tta:6:{tmp_path / 'robust.safetensors'}",
        )
    result = train_gate(
        accurate,
        robust,
        data=dataset(),
        width=4,
        device="cpu",
        epochs=1,
        batch_size=30,
        eps=0.1,
        steps=2,
        hinge_share=0.5,
        over=over,
    )
    model = result.model
    assert isinstance(model, GatedClassifier) and model.hard and model.logit_map is not None
    assert model.logit_map.describe() == switch.logit_map.describe()  # type: ignore[union-attr]
    assert model.alpha_range == pytest.approx((1 / 1.5, 1.0))  # q is 0.25
    x = torch.rand(5, *dataset().image_shape)
    assert torch.allclose(
        model.alphas(x), torch.cat([model.alphas(image) for image in x.split(1)]), atol=1e-5
    )


def test_gate_over_plain_mixing_needs_no_mixture() -> None:
    accurate, robust = network(1).eval(), network(2).eval()
    with pytest.raises(InputError, match="`over` must be a mixture with a map and one stage"):
        train_gate(
            accurate,
            robust,
            data=dataset(),
            width=4,
            device="cpu",
            epochs=1,
            over=MixedClassifier(accurate, robust, 0.8),
        )
