"""RobustBench's files: names, shapes and outputs are those of its public code, of which nothing is
needed here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from robustbench_names import (
    Shapes,
    bit,
    deepmind,
    deepmind_preact,
    digest,
    made_up_images,
    made_up_state,
    preact,
    published_shapes,
    resnet,
    trades,
    wide,
)
from torch import Tensor

import equipoise as eq
from equipoise import models
from equipoise.core.checks import InputError
from equipoise.mixing import MixedClassifier
from equipoise.models.architectures import zoo
from equipoise.models.architectures.bit_resnet import BiTResNet
from equipoise.models.architectures.deepmind_resnet import (
    SwishBlock,
    deepmind_preact_resnet18,
    swish_resnet,
)
from equipoise.models.architectures.resnet import (
    Bottleneck,
    PreActResNet,
    ResNet,
    raw_preact_resnet18,
    wide_resnet,
)
from equipoise.models.layers.normalization import Normalized
from equipoise.models.sources import robustbench
from equipoise.models.sources.robustbench_keys import rename

# SHA-256 (first 16 digits) of all names and shapes that RobustBench's code (commit 78fcc9e) has for
# these networks, by our architecture and number of classes; without `sub_block1` and the
# normalisation.
PUBLISHED = {
    ("bit_resnet152x2", 10): "33e9a9627d1fb4af",
    ("bit_resnet152x2", 100): "56dd07ddb5a94043",
    ("deepmind_preact_resnet18", 10): "bf5b5b28957ee0f6",
    ("deepmind_preact_resnet18", 100): "a7a0f45030a9830a",
    ("deepmind_wide_resnet106_16", 10): "11348523abd609dc",
    ("deepmind_wide_resnet28_10", 10): "5bb913cf035c3771",
    ("deepmind_wide_resnet28_10", 100): "127926aaf13565ff",
    ("deepmind_wide_resnet34_10", 10): "a9d106e58bcae43c",
    ("deepmind_wide_resnet34_20", 10): "39ca94602aedd152",
    ("deepmind_wide_resnet70_16", 10): "ea21180888f72a32",
    ("deepmind_wide_resnet70_16", 100): "50da0a998933bded",
    ("deepmind_wide_resnet82_8", 10): "c51af02b1f774aa3",
    ("deepmind_wide_resnet94_16", 10): "b50d99dc686996ae",
    ("preact_resnet18", 10): "2d57a9e732aa41be",
    ("preact_resnet18", 100): "a0023593cbf91923",
    ("preact_resnet18_raw", 10): "ab93bc9c944daa09",
    ("resnet18", 10): "b71e92a8591aa49c",
    ("resnet18", 100): "462680d0ea59706e",
    ("resnet50", 10): "664e9358d70c2240",
    ("robust_wide_resnet70_16", 10): "858f5918ba7c7a90",
    ("wide_resnet28_10", 10): "06c766acded7a70f",
    ("wide_resnet28_10", 100): "67657310a5b65827",
    ("wide_resnet34_10", 10): "0712dac5b6a65b7d",
    ("wide_resnet34_10", 100): "372ae792ebd9a2c1",
    ("wide_resnet34_15", 10): "b3f6dcee425e6ae0",
    ("wide_resnet34_20", 10): "37f152923989cb44",
    ("wide_resnet34_20", 100): "eaf46db36bcde44a",
    ("wide_resnet40_2", 10): "2546e66c38999428",
    ("wide_resnet40_2", 100): "f6a13026fd4b8bcb",
    ("wide_resnet70_16", 10): "ef18b153673f19fb",
}
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)
RESNET18 = ((64, 128, 256, 512), (2, 2, 2, 2), 10)
SMALL: dict[str, Any] = {"num_classes": 10, "image_shape": (3, 32, 32)}


@pytest.mark.parametrize(("arch", "classes"), sorted(PUBLISHED))
def test_names_and_shapes_are_the_published_ones(arch: str, classes: int) -> None:
    shapes = published_shapes(arch, classes)
    assert digest(shapes) == PUBLISHED[arch, classes]
    state = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    own = zoo.build_empty(arch, num_classes=classes, image_shape=(3, 32, 32)).state_dict()
    expected = {name: value.shape for name, value in own.items() if name not in ("mean", "std")}
    assert {name: value.shape for name, value in rename(state, arch).items()} == expected


def test_every_model_of_the_catalogue_has_checked_names() -> None:
    own = {
        entry.key
        for entry in robustbench.catalog().values()
        if entry.arch and ":" not in entry.arch and entry.arch != robustbench.MIXEDNUTS
    }
    assert len(own) > 120
    for key in own:
        entry = robustbench.catalog()[key]
        assert (entry.arch, robustbench.CLASSES[entry.dataset]) in PUBLISHED, key
        assert len(entry.mean) == len(entry.std) == 3 and all(entry.std), key


# The first four logits of RobustBench's own code (commit 78fcc9e) for the made-up weights and the
# first made-up image.
LOGITS: dict[str, tuple[Shapes, Callable[[], Normalized], tuple[float, ...]]] = {
    "deepmind_wide": (
        deepmind(*wide(16, 2), 10),
        partial(swish_resnet, 16, (32, 64, 128), 2, **SMALL),
        (4.48219, -3.92965, 1.01570, 2.72377),
    ),
    "robust_wide": (
        deepmind((24, 48, 96), (2, 3, 1), 10, stem=12, se=True),
        partial(
            swish_resnet,
            12,
            (24, 48, 96),
            (2, 3, 1),
            block=partial(SwishBlock, excitation=0.25),
            **SMALL,
        ),
        (4.00649, 4.32342, 4.12859, 3.48758),
    ),
    "deepmind_preact": (
        deepmind_preact(*RESNET18),
        partial(deepmind_preact_resnet18, **SMALL),
        (-1.08100, 0.37643, 0.64478, -1.38710),
    ),
    "wide_resnet": (
        trades(*wide(16, 2), 10),
        partial(wide_resnet(16, 2), **SMALL),
        (1.60755, -2.48205, 1.50453, 0.61531),
    ),
    "preact_resnet18": (
        preact(*RESNET18, final_norm=True),
        partial(PreActResNet, 64, RESNET18[0], 2, **SMALL),
        (-6.59115, 6.86817, -6.81248, 6.11607),
    ),
    "preact_resnet18_raw": (
        preact(*RESNET18, final_norm=False),
        partial(raw_preact_resnet18, **SMALL),
        (0.23099, 0.06500, -0.24529, -0.00568),
    ),
    "resnet18": (
        resnet(*RESNET18, bottleneck=False),
        partial(ResNet, RESNET18[0], 2, **SMALL),
        (1.30087, -2.37095, 3.47903, -4.89957),
    ),
    "resnet50": (
        resnet((256, 512, 1024, 2048), (3, 4, 6, 3), 10, bottleneck=True),
        partial(ResNet, (256, 512, 1024, 2048), (3, 4, 6, 3), block=Bottleneck, stem=64, **SMALL),
        (20.40194, 54.75471, 62.14605, 39.50728),
    ),
    "bit_resnet": (
        bit(1, (1, 2, 1, 1), 10),
        partial(BiTResNet, 1, (1, 2, 1, 1), **SMALL),
        (1.14403, 5.93453, 8.02434, 6.53943),
    ),
}


@pytest.mark.parametrize(
    "arch",
    [
        pytest.param(
            arch,
            marks=[pytest.mark.slow]
            if arch.startswith(("resnet", "preact", "deepmind_preact"))
            else [],
        )
        for arch in LOGITS
    ],
)
def test_logits_are_those_of_the_public_code(arch: str) -> None:
    shapes, build, expected = LOGITS[arch]
    model = build().eval()
    if arch.startswith(("deepmind", "robust")):
        model.set_normalization(MEAN, STD)
    if arch == "bit_resnet":
        model.set_normalization([0.5] * 3, [0.5] * 3)
    missing = model.load_state_dict(rename(made_up_state(shapes), arch), strict=False)
    assert missing.missing_keys == ["mean", "std"] and not missing.unexpected_keys
    with torch.no_grad():
        logits = model(made_up_images())[0, :4]
    torch.testing.assert_close(logits, torch.tensor(expected), rtol=1e-4, atol=1e-4)


def write(root: Path, entry: robustbench.Entry, content: object) -> Path:
    path = root / entry.files[0]
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)
    return path


@pytest.fixture(scope="module")
def small_state() -> dict[str, Tensor]:
    """WRN-40-2 of AugMix, the smallest network of the catalogue."""
    return made_up_state(published_shapes("wide_resnet40_2", 10))


AUGMIX = "cifar10/corruptions/Hendrycks2020AugMix_WRN"


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {
            "epoch": 3,
            "state_dict": {f"module.{key}": value for key, value in state.items()},
        },
        lambda state: {"last": {f"model.{key}": value for key, value in state.items()}, "best": {}},
        lambda state: {"state_dict": {**state, "sub_block1.layer.0.bn1.weight": torch.ones(32)}},
    ],
)
def test_wrappers_are_removed(
    wrap: Callable[[dict[str, Tensor]], object],
    small_state: dict[str, Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write(tmp_path / "models", robustbench.catalog()[AUGMIX], wrap(small_state))
    monkeypatch.chdir(tmp_path)
    model = models.load(f"robustbench:{AUGMIX}")
    assert isinstance(model, Normalized) and not model.training
    assert str(models.info_of(model)).startswith(
        "Hendrycks2020AugMix_WRN, wide_resnet40_2; 10 classes; input 3×32×32; normalisation: mean 0.5,0.5,0.5, "
        "std 0.5,0.5,0.5 (RobustBench's catalogue); weights: models/cifar10/corruptions/"
    )
    assert model.mean.flatten().tolist() == model.std.flatten().tolist() == [0.5, 0.5, 0.5]
    plain = wide_resnet(40, 2)(num_classes=10, image_shape=(3, 32, 32)).eval()
    plain.load_state_dict(
        {**rename(small_state, "wide_resnet"), "mean": model.mean, "std": model.std}
    )
    x = made_up_images()
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))


def test_normalisation_in_the_file_comes_first(
    small_state: dict[str, Tensor], tmp_path: Path
) -> None:
    mean, std = (
        torch.tensor([0.1, 0.2, 0.3]).view(1, 3, 1, 1),
        torch.tensor([0.4, 0.5, 0.6]).view(1, 3, 1, 1),
    )
    write(tmp_path, robustbench.catalog()[AUGMIX], {**small_state, "mu": mean, "sigma": std})
    model = models.load(f"robustbench:{AUGMIX}?weights={tmp_path}")
    assert isinstance(model, Normalized)
    assert torch.equal(model.mean, mean) and torch.equal(model.std, std)


def test_the_root_may_be_an_environment_variable_or_the_file_itself(
    small_state: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "zoo", robustbench.catalog()[AUGMIX], small_state)
    entry = robustbench.find_entry(AUGMIX)
    assert (
        robustbench.find_files(entry, str(path))
        == robustbench.find_files(entry, str(tmp_path / "zoo"))
        == (path,)
    )
    monkeypatch.setenv(robustbench.ROOT, str(tmp_path / "zoo"))
    assert robustbench.find_files(entry) == (path,)
    cached = tmp_path / "hub" / "checkpoints" / "debenedetti2022light-xcit-m-cifar10-linf.pth.tar"
    cached.parent.mkdir(parents=True)
    cached.touch()
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    assert robustbench.find_files(
        robustbench.find_entry("cifar10/Linf/Debenedetti2022Light_XCiT-M12")
    ) == (cached,)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("cifar10/Linf/Carmon2019Unlabelled", "did you mean 'cifar10/Linf/Carmon2019Unlabeled'"),
        ("cifar10/linf/Carmon2019Unlabeled", "did you mean 'cifar10/Linf'"),
        ("Carmon2019Unlabeled", "must read robustbench:DATASET/THREAT/ID"),
        ("cifar10/Linf/Kang2021Stable", "must have an architecture that Equipoise implements"),
        ("cifar10/Linf/Bai2024MixedNUTS", "must be a single network here"),
        (
            "cifar10/Linf/Carmon2019Unlabeled",
            r"download https://drive.google.com/uc\?id=15tUx-gkZMYx7BfEOw1GY5OKC-jECIsPQ",
        ),
    ],
)
def test_bad_references(body: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=sentence):
        models.load(f"robustbench:{body}?weights={tmp_path}")


def test_a_file_of_another_architecture_is_named(
    small_state: dict[str, Tensor], tmp_path: Path
) -> None:
    write(tmp_path, robustbench.find_entry("cifar10/Linf/Carmon2019Unlabeled"), small_state)
    with pytest.raises(
        InputError, match=r"must hold exactly the weights of wide_resnet28_10, got .* more"
    ):
        models.load(f"robustbench:cifar10/Linf/Carmon2019Unlabeled?weights={tmp_path}")


def test_a_page_instead_of_weights_is_refused(tmp_path: Path) -> None:
    path = tmp_path / robustbench.find_entry(AUGMIX).files[0]
    path.parent.mkdir(parents=True)
    path.write_text("<!DOCTYPE html><title>Google Drive - Quota exceeded</title>")
    with pytest.raises(InputError, match="got a web page"):
        models.load(f"robustbench:{AUGMIX}?weights={tmp_path}")


def test_both_bases_of_mixednuts_are_found(tmp_path: Path) -> None:
    entry = robustbench.find_entry("cifar100/Linf/Bai2024MixedNUTS")
    with pytest.raises(InputError, match=r"Bai2024MixedNUTS\.pt_m0\.pt .*download"):
        robustbench.find_files(entry, str(tmp_path))


@pytest.mark.parametrize("how", ["default", "environment", "folder", "file"])
def test_a_mixture_folder_finds_the_file_from_everywhere(
    how: str, small_state: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After both were moved together, and without the environment and the current folder of the
    fit."""
    here = tmp_path / "here"
    root = here / {"default": "models"}.get(how, "rb")
    path = write(root, robustbench.catalog()[AUGMIX], small_state)
    monkeypatch.chdir(here)
    if how == "environment":
        monkeypatch.setenv(robustbench.ROOT, "rb")
    settings = {"folder": "?weights=rb", "file": f"?weights={path.relative_to(here)}"}.get(how, "")
    accurate = models.load(f"tta:2:robustbench:{AUGMIX}{settings}")
    robust = models.build("cnn_small", **SMALL).eval()
    eq.save(here / "m", MixedClassifier(accurate, robust, 0.5))
    assert str(tmp_path) not in (here / "m" / "mixture.toml").read_text()
    monkeypatch.delenv(robustbench.ROOT, raising=False)
    monkeypatch.chdir("/")
    here.rename(tmp_path / "there")
    loaded = eq.load_model(f"mixture:{tmp_path}/there/m")
    assert models.weights_digest(loaded.get_submodule("accurate")) == models.weights_digest(
        accurate
    )
