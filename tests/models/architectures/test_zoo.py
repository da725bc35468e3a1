from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from equipoise.core.checks import InputError
from equipoise.models import ARCHITECTURES, build, weights_digest
from equipoise.models.architectures import zoo
from equipoise.models.architectures.cnn import CNN

LIGHT = [
    "cnn",
    "cnn_small",
    "deepmind_preact_resnet18",
    "lenet",
    "preact_resnet18",
    "preact_resnet18_raw",
    "resnet8",
    "resnet18",
    "resnet20",
    "wide_resnet40_2",
]
HEAVY = set(ARCHITECTURES) - set(LIGHT)


def images(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("arch", "image_shape", "count"),
    [
        ("lenet", (1, 28, 28), 431_080),
        ("preact_resnet18", (3, 32, 32), 11_172_170),
        ("resnet8", (3, 32, 32), 78_042),
        ("resnet18", (3, 32, 32), 11_173_962),
        ("resnet20", (3, 32, 32), 272_474),
        ("resnet110", (3, 32, 32), 1_730_714),
        ("deepmind_wide_resnet28_10", (3, 32, 32), 36_479_194),
        ("wide_resnet28_10", (3, 32, 32), 36_479_194),
        ("wide_resnet34_10", (3, 32, 32), 46_160_474),
        ("wide_resnet70_16", (3, 32, 32), 266_796_506),
    ],
)
def test_parameter_counts(arch: str, image_shape: tuple[int, int, int], count: int) -> None:
    model = zoo.build_empty(arch, num_classes=10, image_shape=image_shape)
    assert sum(value.numel() for value in model.parameters()) == count


@pytest.mark.parametrize("arch", sorted(ARCHITECTURES))
def test_every_architecture_fits_the_checkpoint_format(arch: str) -> None:
    model = zoo.build_empty(arch, num_classes=6, image_shape=(2, 17, 19))
    keys = model.state_dict()
    assert keys["mean"].shape == keys["std"].shape == (1, 2, 1, 1)
    assert len(keys["fc.weight"]) == 6
    assert model.config == {"arch": arch, "num_classes": "6", "image_shape": "2,17,19"}
    # On the meta device a forward costs nothing, so the wide ones are checked too.
    assert model(torch.empty(4, 2, 17, 19, device="meta")).shape == (4, 6)


@pytest.mark.parametrize("arch", LIGHT)
@pytest.mark.parametrize("image_shape", [(3, 16, 23), (1, 28, 28), (2, 8, 8), (3, 5, 7)])
def test_forward_on_odd_shapes(arch: str, image_shape: tuple[int, int, int]) -> None:
    if arch == "lenet" and min(image_shape[1:]) < 16:
        pytest.skip("LeNet needs 16 by 16")
    model = build(arch, num_classes=6, image_shape=image_shape).eval()
    x = images(4, *image_shape)
    with torch.no_grad():
        logits = model(x)
        alone = model(x[2:3])
    assert logits.shape == (4, 6)
    assert logits.isfinite().all()
    assert logits.std(dim=0).min() > 0  # every logit depends on the image
    torch.testing.assert_close(alone, logits[2:3], atol=1e-4, rtol=1e-4)


def test_the_last_layer_of_the_cnn_is_linear() -> None:
    model = build("cnn_small", num_classes=6, image_shape=(3, 9, 13)).eval()
    assert isinstance(model, CNN)
    features: list[Tensor] = []
    x = images(5, 3, 9, 13)
    hook = model.conv3.register_forward_hook(lambda module, inputs, output: features.append(output))
    logits = model(x)
    hook.remove()
    torch.testing.assert_close(logits, model.fc(features[0].relu().flatten(1)))


@pytest.mark.parametrize("arch", LIGHT)
def test_normalises_first(arch: str) -> None:
    mean, std = [0.4, 0.5, 0.6], [0.5, 0.25, 0.2]
    plain = build(arch, num_classes=6, image_shape=(3, 16, 17)).eval()
    normalising = build(arch, num_classes=6, image_shape=(3, 16, 17), mean=mean, std=std).eval()
    x = images(4, 3, 16, 17)
    scaled = (x - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    with torch.no_grad():
        torch.testing.assert_close(normalising(x), plain(scaled), atol=1e-4, rtol=1e-4)
        assert not torch.allclose(normalising(x), plain(x), atol=1e-3)


def test_weights_depend_on_the_seed_only() -> None:
    def digest(seed: int) -> str:
        return weights_digest(build("cnn_small", num_classes=6, image_shape=(1, 8, 8), seed=seed))

    torch.rand(3)  # the global state does not matter
    assert digest(3) == digest(3)
    assert digest(3) != digest(4)


@pytest.mark.parametrize("arch", ["cnn_small", "resnet8"])
def test_building_leaves_the_global_random_state_alone(
    arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(_: int) -> None:
        raise AssertionError("CUDA generators were seeded")

    monkeypatch.setattr(torch.cuda, "manual_seed_all", forbidden)
    before = torch.get_rng_state()
    build(arch, num_classes=6, image_shape=(3, 8, 8), seed=5)
    zoo.build_empty(arch, num_classes=6, image_shape=(3, 8, 8))
    assert torch.equal(torch.get_rng_state(), before)


def test_default_device_does_not_matter() -> None:
    with torch.device("meta"):
        model = build("cnn_small", num_classes=6, image_shape=(1, 8, 8))
    assert {value.device.type for value in model.state_dict().values()} == {"cpu"}


def test_lenet_is_the_classic_one() -> None:
    model = build("lenet", num_classes=10, image_shape=(1, 28, 28))
    fc1 = model.get_submodule("fc1")
    assert isinstance(fc1, nn.Linear)
    assert (fc1.in_features, fc1.out_features) == (800, 500)


def test_resnet_keys_are_those_of_torchvision() -> None:
    keys = zoo.build_empty("resnet18", num_classes=10, image_shape=(3, 32, 32)).state_dict()
    for key in (
        "conv1.weight",
        "bn1.running_var",
        "layer1.0.conv1.weight",
        "layer4.1.bn2.bias",
        "layer2.0.downsample.0.weight",
        "layer2.0.downsample.1.running_mean",
        "fc.bias",
    ):
        assert key in keys
    assert "layer1.0.downsample.0.weight" not in keys
    assert keys["conv1.weight"].shape == (64, 3, 3, 3)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"arch": "resnet19"}, "did you mean 'resnet18'"),
        ({"num_classes": 1}, "`num_classes` must be a whole number of at least 2"),
        ({"image_shape": (3, 32)}, "`image_shape` must be"),
        ({"image_shape": (3, 0, 32)}, "`image_shape` must be"),
        ({"mean": [0.5]}, "`mean` must hold 3 numbers"),
        ({"seed": -1}, "`seed` must be"),
        ({"arch": "lenet", "image_shape": (1, 15, 28)}, "at least 16 by 16"),
    ],
)
def test_invalid_arguments_are_one_sentence(wrong: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "arch": "resnet8",
        "num_classes": 10,
        "image_shape": (3, 32, 32),
        **wrong,
    }
    with pytest.raises(InputError, match=message):
        build(**arguments)  # type: ignore[arg-type]
