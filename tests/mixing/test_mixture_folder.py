"""Mixtures and gates on disk."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from gate_pairs import gated, images
from torch import nn

from equipoise import __version__, mixing, models
from equipoise.core.checks import InputError
from equipoise.mixing import FrontierMixture, GatedClassifier, LogitMap, MixedClassifier, Provenance
from equipoise.mixing.folder import load_gate, save_gate
from equipoise.models import checkpoint

FRONTIER = (
    FrontierMixture(0.01, 0.85, 0.9, "relu", 1.0, 2.0, -0.5),
    FrontierMixture(0.03, 0.9, 0.8, "gelu", 2.0, 3.0, -1.0, 0.25, 1.5),
)
FITTED: dict[str, Any] = {
    "hard": True,
    "logit_map": LogitMap(0.1, 2.5, -1.1, "gelu", rivals=0.5, unit=1.25),
    "surrogate_alpha": 0.7,
    "frontier": FRONTIER,
    "provenance": Provenance("cifar10", "test", ("3-5", "9"), "promised"),
}
X = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def save_bases(folder: Path, *bases: nn.Module) -> dict[str, Any]:
    """Checkpoints of both bases in the folder, and their paths."""
    folder.mkdir(exist_ok=True)
    paths = {side: str(folder / f"{side}.safetensors") for side in ("accurate", "robust")}
    for path, base in zip(paths.values(), bases, strict=True):
        checkpoint.save(path, base)
    return paths


def save_mixture(folder: Path, alpha: float = 0.3, **settings: Any) -> MixedClassifier:
    bases = [
        models.build("cnn", num_classes=6, image_shape=(3, 8, 8), seed=seed) for seed in (1, 2)
    ]
    mixture = MixedClassifier(bases[0], bases[1], alpha, **settings).eval()
    mixing.save_mixture(folder, mixture, **save_bases(folder, *bases))
    return mixture


def replace_in_file(folder: Path, old: str, new: str) -> None:
    path = folder / "mixture.toml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def test_round_trip_also_after_a_move(tmp_path: Path) -> None:
    mixture = save_mixture(tmp_path / "m")
    (tmp_path / "m").rename(tmp_path / "moved")
    for reference in (f"mixture:{tmp_path}/moved", f"{tmp_path}/moved"):
        loaded = mixing.load_model(reference)
        assert isinstance(loaded, MixedClassifier) and loaded.alpha == 0.3
        assert torch.equal(loaded(X), mixture(X))
        assert models.reference_of(loaded) == reference


@pytest.mark.parametrize("alpha", [1 / 1.1, 1 / 1.7, 2 / 3, 1 - 1e-12, 1e-17])
def test_every_digit_of_alpha_is_stored(tmp_path: Path, alpha: float) -> None:
    """A run that is resumed loads the mixture that an earlier one held in memory."""
    mixture = save_mixture(tmp_path / "m", alpha)
    assert models.identity(mixing.load_model(str(tmp_path / "m"))) == models.identity(mixture)
    gate = gated(alpha_min=alpha)
    mixing.save_mixture(
        tmp_path / "g", gate, **save_bases(tmp_path / "g", gate.accurate, gate.robust)
    )
    assert models.identity(mixing.load_model(str(tmp_path / "g"))) == models.identity(gate)


def test_a_fitted_mixture_on_disk(tmp_path: Path) -> None:
    mixture = save_mixture(tmp_path / "m", 0.875, **FITTED)
    loaded = mixing.load_model(f"mixture:{tmp_path}/m")
    assert isinstance(loaded, MixedClassifier) and not loaded.training
    assert (loaded.frontier, loaded.provenance) == (FRONTIER, mixture.provenance)
    assert models.identity(loaded) == models.identity(mixture)
    assert torch.equal(loaded.predict(X), mixture.predict(X))


@pytest.mark.parametrize("alpha", [0.3, 0.9])
def test_the_temperature_of_the_accurate_side_is_stored(tmp_path: Path, alpha: float) -> None:
    mixture = save_mixture(
        tmp_path / "m", alpha, accurate_temperature=0.5, logit_map=LogitMap(1.0, 2.0, -0.5)
    )
    loaded = mixing.load_model(f"mixture:{tmp_path}/m")
    assert isinstance(loaded, MixedClassifier) and loaded.accurate_temperature == 0.5
    assert (
        models.identity(loaded)
        == models.identity(mixture)
        != models.identity(
            MixedClassifier(mixture.accurate, mixture.robust, alpha, logit_map=mixture.logit_map)
        )
    )
    p = (
        torch.softmax(mixture.accurate(X) / 0.5, 1) * (1 - alpha)
        + mixture.map_robust(mixture.robust(X)).exp() * alpha
    )
    assert torch.allclose(loaded(X).exp(), p, atol=1e-6) and torch.equal(
        loaded.predict(X), p.argmax(1)
    )
    assert torch.equal(loaded.sides(*loaded.base_outputs(X))[0], mixture.accurate(X) / 0.5)
    replace_in_file(tmp_path / "m", "accurate_temperature = 0.5", "accurate_temperature = 0.0")
    with pytest.raises(InputError, match="`accurate_temperature` must be positive"):
        mixing.load_model(f"mixture:{tmp_path}/m")


def test_hard_labels_have_no_temperature() -> None:
    base = models.build("cnn", num_classes=6, image_shape=(3, 8, 8))
    with pytest.raises(
        InputError, match="`accurate_temperature` must be left out with hard labels"
    ):
        MixedClassifier(base, base, 0.5, hard=True, accurate_temperature=0.5)


def test_a_base_that_changed_is_refused(tmp_path: Path) -> None:
    save_mixture(tmp_path / "m")
    other = models.build("cnn", num_classes=6, image_shape=(3, 8, 8), seed=9)
    checkpoint.save(tmp_path / "m" / "robust.safetensors", other)
    with pytest.raises(InputError, match=r"the robust base .* weights have changed"):
        mixing.load_model(f"mixture:{tmp_path}/m")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("alpha = 0.875", "alfa = 0.875", "unknown key 'alfa'"),
        (
            "alpha = 0.875",
            'alpha = "x"',
            "alpha of .* must be a finite number from 0 to 1, got 'x'",
        ),
        (
            "alpha = 0.875",
            "alpha = 1.75",
            "alpha of .* must be a finite number from 0 to 1, got 1.75",
        ),
        (
            "schema = 2",
            "schema = 9",
            r"newer version of Equipoise \(schema 9\).* reads schema 2",
        ),
        ("schema = 2", "schema = 1", r"old version .* run its command again in a new folder"),
        ("schema = 2", "schema = 0", "`schema` must be 2"),
        ("schema = 2", "schema = true", "`schema` must be 2"),
        ("power = 2.5", "powr = 2.5", "unknown key 'powr'"),
        ('clamp = "gelu"\nscale', 'clamp = "gelo"\nscale', "did you mean 'gelu'"),
        ("scale = 0.1", "scale = -0.1", "`scale` must be positive"),
        ("shift = -1.1\n", "", "a table with shift"),
        ('split = "test"\n', "", "a table with split"),
    ],
)
def test_an_invalid_file_is_one_sentence(tmp_path: Path, old: str, new: str, message: str) -> None:
    save_mixture(tmp_path / "m", 0.875, **FITTED)
    replace_in_file(tmp_path / "m", old, new)
    with pytest.raises(InputError, match=message):
        mixing.load_model(f"mixture:{tmp_path}/m")


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"`mixture` must be a folder that holds mixture\.toml"):
        mixing.load_model(f"mixture:{tmp_path}/none")


def test_an_unknown_scheme_is_an_error() -> None:
    with pytest.raises(
        InputError, match=r"`scheme of a model` must be one of .*mixture.*, got 'mixtur'"
    ):
        mixing.load_model("mixtur:folder")


def test_a_base_with_test_time_augmentation_moves_with_its_folder(tmp_path: Path) -> None:
    plain = save_mixture(tmp_path / "m")
    mixture = MixedClassifier(plain.accurate, models.TTAClassifier(plain.robust, 2), 0.3).eval()
    mixing.save_mixture(
        tmp_path / "m",
        mixture,
        accurate=f"file:{tmp_path}/m/accurate.safetensors",
        robust=f"tta:2:{tmp_path}/m/robust.safetensors",
    )
    (tmp_path / "m").rename(tmp_path / "moved")
    logits = mixing.load_model(f"mixture:{tmp_path}/moved")(X)
    assert torch.equal(logits, mixture(X)) and not torch.allclose(logits, plain(X))


def test_loaded_bases_need_no_references(tmp_path: Path) -> None:
    mixture = save_mixture(tmp_path / "m")
    bases = [
        models.load(str(tmp_path / "m" / f"{side}.safetensors")) for side in ("accurate", "robust")
    ]
    mixing.save(tmp_path / "again", MixedClassifier(bases[0], bases[1], 0.3))
    assert torch.equal(mixing.load_model(f"mixture:{tmp_path}/again")(X), mixture(X))
    mixing.save(tmp_path / "built", mixture)  # of bases that were not loaded
    assert torch.equal(mixing.load_model(f"mixture:{tmp_path}/built")(X), mixture(X))


def test_save_writes_a_checkpoint_of_a_zoo_model(tmp_path: Path) -> None:
    model = models.build("cnn", num_classes=6, image_shape=(3, 8, 8), seed=1)
    mixing.save(tmp_path / "model.safetensors", model)
    assert models.weights_digest(
        mixing.load_model(str(tmp_path / "model.safetensors"))
    ) == models.weights_digest(model)
    with pytest.raises(
        InputError, match="`model` must be a mixture or a model of the zoo, got 'Linear'"
    ):
        mixing.save(tmp_path / "linear.safetensors", nn.Linear(2, 3))


def test_a_gate_of_other_bases_is_refused(tmp_path: Path) -> None:
    model = gated()
    save_gate(tmp_path / "gate.safetensors", model.network, model.accurate, model.robust)
    again = load_gate(tmp_path / "gate.safetensors", model.accurate, model.robust)
    assert again.feature_layers == model.network.feature_layers and not again.training
    assert torch.equal(
        GatedClassifier(model.accurate, model.robust, again)(images()), model(images())
    )
    with pytest.raises(
        InputError,
        match=r"`accurate` must be the base that .* was trained for, with weights \w{12}",
    ):
        load_gate(tmp_path / "gate.safetensors", model.robust, model.accurate)


def test_a_gate_with_other_tensors_is_refused(tmp_path: Path) -> None:
    model = gated()
    save_gate(tmp_path / "gate.safetensors", model.network, model.accurate, model.robust)
    state, metadata = checkpoint.read_safetensors(tmp_path / "gate.safetensors")
    checkpoint.write_safetensors(
        tmp_path / "other.safetensors", {**state, "fc.weight": torch.zeros(1, 3)}, metadata
    )
    with pytest.raises(InputError, match=r"must hold the \d+ tensors of this gate"):
        load_gate(tmp_path / "other.safetensors", model.accurate, model.robust)


def save_gated(folder: Path) -> GatedClassifier:
    model = gated(alpha_min=0.55, alpha_max=0.95, scale=1.5, shift=0.1, logit_scales=(2.0, 0.5))
    mixing.save(folder, model, **save_bases(folder, model.accurate, model.robust))
    return model


def test_a_gated_mixture_on_disk(tmp_path: Path) -> None:
    model = save_gated(tmp_path / "m")
    loaded = mixing.load_model(f"mixture:{tmp_path}/m")
    assert isinstance(loaded, GatedClassifier) and models.identity(loaded) == models.identity(model)
    assert torch.equal(loaded(images()), model(images()))
    replace_in_file(tmp_path / "m", "alpha_max = 0.95", "alpha_max = 0.5")
    with pytest.raises(InputError, match="`alpha_min` must be below alpha_max"):
        mixing.load_model(f"mixture:{tmp_path}/m")


def test_the_surrogate_alpha_of_a_gated_mixture_is_stored(tmp_path: Path) -> None:
    model = save_gated(tmp_path / "m")
    over = model.with_settings_of(
        MixedClassifier(
            model.accurate,
            model.robust,
            0.9,
            logit_map=LogitMap(2.0, 1.5, 0.3),
            surrogate_alpha=0.7,
        )
    )
    shutil.copytree(tmp_path / "m", tmp_path / "over")
    mixing.save(
        tmp_path / "over",
        over,
        accurate=f"{tmp_path}/over/accurate.safetensors",
        robust=f"{tmp_path}/over/robust.safetensors",
    )
    again = mixing.load_model(f"mixture:{tmp_path}/over")
    assert isinstance(again, GatedClassifier) and again.surrogate_alpha == 0.7
    assert torch.equal(again.surrogate()(images()), over.surrogate()(images()))


def test_a_newer_schema_names_the_version_that_wrote_it(tmp_path: Path) -> None:
    save_mixture(tmp_path / "m", 0.875)
    replace_in_file(tmp_path / "m", "schema = 2", "schema = 3")
    replace_in_file(tmp_path / "m", f'version = "{__version__}"', 'version = "0.9.1"')
    with pytest.raises(
        InputError, match=r"was written by Equipoise 0\.9\.1 \(schema 3\) and needs that version"
    ):
        mixing.load_model(f"mixture:{tmp_path / 'm'}")
