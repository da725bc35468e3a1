"""Identities and digests of models, and the check of a model's output."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from equipoise.core import config
from equipoise.core.checks import InputError
from equipoise.models import TTAClassifier, build, check_forward, identity, load, weights_digest

IMAGES = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def small_model() -> nn.Module:
    return build("cnn_small", num_classes=6, image_shape=(3, 8, 8), seed=1)


def test_weights_digest_covers_values_names_shapes_and_types() -> None:
    def one(name: str, value: Tensor) -> str:
        module = nn.Module()
        module.register_buffer(name, value)
        return weights_digest(module)

    first = one("a", torch.zeros(2, 3))
    assert first == one("a", torch.zeros(2, 3))
    others = [
        one("b", torch.zeros(2, 3)),
        one("a", torch.zeros(3, 2)),
        one("a", torch.zeros(2, 3).int()),
        one("a", torch.ones(2, 3)),
        one("a", torch.tensor(0.0)),
        one("a", torch.zeros(2, 3).bfloat16()),
    ]
    assert len({first, *others}) == 7


def test_the_identity_of_a_plain_model_is_its_weights() -> None:
    model = small_model()
    assert identity(model) == {"weights": weights_digest(model)}


def test_settings_that_are_not_weights_are_part_of_the_identity() -> None:
    """Test-time augmentation over 2 and over 6 copies has the same weights."""
    two, six = (TTAClassifier(small_model(), count) for count in (2, 6))
    assert weights_digest(two) == weights_digest(six) and identity(two) != identity(six)
    assert identity(six)["settings"] == {"(root)": {"type": "tta", "version": 1, "count": 6}}


def test_settings_of_submodules_are_found() -> None:
    model = nn.Sequential(nn.Identity(), TTAClassifier(small_model(), 2))
    assert identity(model)["settings"] == {"1": {"type": "tta", "version": 1, "count": 2}}


def test_an_identity_survives_toml(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("identity") / "run.toml"
    known = identity(TTAClassifier(nn.Sequential(TTAClassifier(small_model(), 2)), 6))
    path.write_text(config.dumps(known))
    assert config.read(path) == known


def test_check_forward_returns_the_output() -> None:
    model = small_model()
    assert torch.equal(check_forward("model", model, IMAGES), model.eval()(IMAGES))


class Raises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("no such layer")


class ReturnsTuple(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            Raises(),
            r"`base` must take images of shape \(3, 8, 8\), but raised KeyError: 'no such layer'",
        ),
        (ReturnsTuple(), "`base` must return one tensor, got 'tuple'"),
    ],
)
def test_check_forward_turns_errors_into_one_sentence(model: nn.Module, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_forward("base", model, IMAGES)


def test_without_weights_the_reference_is_the_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "services.py").write_text(
        "from torch import nn\n\ndef first():\n    return nn.Flatten()\n\ndef second():\n    return nn.Flatten()\n"
    )
    monkeypatch.chdir(tmp_path)
    identities = [
        identity(load(f"python:services:{name}")) for name in ("first", "second", "first")
    ]
    assert identities[0] == identities[2] != identities[1]
