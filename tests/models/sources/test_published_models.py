"""`timm:`, `torchvision:` and `hf:` with stand-ins for their packages and the file layouts of their
caches."""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from stand_in_packages import SOURCES, installed, logits, weights, write, write_cache
from torch import Tensor

import equipoise as eq
from equipoise.core.checks import InputError
from equipoise.mixing import MixedClassifier, load_model, save_mixture
from equipoise.models import build, checkpoint, info_of, load

X = torch.rand(3, 3, 40, 30, generator=torch.Generator().manual_seed(8))
STATE = weights()
TIMM_CONFIG = {
    "architecture": "tiny_net",
    "num_classes": 12,
    "label_names": [f"n{number}" for number in range(12)],
    "pretrained_cfg": {
        "input_size": [3, 24, 24],
        "interpolation": "bilinear",
        "crop_pct": 1.0,
        "crop_mode": "squash",
        "mean": [0.1, 0.2, 0.3],
        "std": [0.5, 0.5, 0.5],
    },
}
VIT = {
    "architectures": ["ViTForImageClassification"],
    "model_type": "vit",
    "id2label": {str(number): f"label {number}" for number in range(12)},
}
PROCESSOR = {
    "do_resize": True,
    "size": {"height": 18, "width": 18},
    "resample": 2,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def expected(
    x: Tensor,
    size: tuple[int, int],
    crop: int,
    mode: str,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    state: dict[str, Tensor] = STATE,
) -> Tensor:
    """The logits by torch's own interpolation, normalisation and network."""
    x = F.interpolate(x, size=size, mode=mode, antialias=True, align_corners=False).clamp(0, 1)
    top, left = round((size[0] - crop) / 2), round((size[1] - crop) / 2)
    x = x[:, :, top : top + crop, left : left + crop]
    return logits(state, (x - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1))


TIMM_LOGITS = expected(X, (42, 32), 24, "bicubic", (0.5, 0.4, 0.3), (0.2, 0.25, 0.5))


def test_crop_mode_border_of_timm(tmp_path: Path, home: Path) -> None:
    """The longer side becomes 28 pixels, of which 24 are kept; the border of the shorter one has
    the mean colour."""
    config = {**TIMM_CONFIG["pretrained_cfg"], "crop_mode": "border", "crop_pct": 24 / 28}  # type: ignore[dict-item]
    (tmp_path / "net").mkdir()
    for name, content in (
        ("config.json", {**TIMM_CONFIG, "pretrained_cfg": config}),
        ("model.safetensors", STATE),
    ):
        write(tmp_path / "net" / name, name, content)
    model = load("hf:./net")
    small = F.interpolate(X, size=(28, 21), mode="bilinear", antialias=True, align_corners=False)[
        ..., 2:26, :
    ]
    mean = torch.tensor([0.1, 0.2, 0.3]).view(1, 3, 1, 1)
    x = ((mean * 255).round() / 255).repeat(3, 1, 24, 24)
    x[..., 1:22] = small
    torch.testing.assert_close(model(X), logits(STATE, (x - mean) / 0.5), rtol=1e-4, atol=1e-4)
    assert "after Fit28Crop24 (config.json)" in str(info_of(model))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Empty caches, no network, and all stand-ins installed."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    for name, folder in (("HF_HOME", "hf"), ("TORCH_HOME", "torch"), ("REMOTE", "remote")):
        monkeypatch.setenv(name, str(tmp_path / folder))

    def refuse(*arguments: Any, **more: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr(torch.hub, "download_url_to_file", refuse)
    monkeypatch.chdir(tmp_path)
    with installed(tmp_path / "packages", *SOURCES):
        yield tmp_path


def write_torchvision(
    home: Path, state: dict[str, Tensor] = STATE, digest: str | None = None
) -> Path:
    folder = home / "torch" / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    torch.save(state, folder / "new")
    digest = digest or hashlib.sha256((folder / "new").read_bytes()).hexdigest()[:8]
    path = (folder / "new").rename(folder / f"small_net-{digest}.pth")
    importlib.import_module("torchvision").models.URLS.update(
        two=f"https://download.pytorch.org/models/{path.name}"
    )
    return path


def test_timm_from_the_cache(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    write_cache(home / "hf", "timm/tiny_net.a1", {"model.safetensors": STATE})
    write_cache(
        home / "hf", "timm/vit_net", {"model.safetensors": STATE}
    )  # also has a file for timm alone
    torch.testing.assert_close(load("timm:vit_net")(X), TIMM_LOGITS)
    model = load("timm:tiny_net.a1")
    torch.testing.assert_close(model(X), TIMM_LOGITS)
    info = info_of(model)
    assert info is not None and info.num_classes == 12 and info.input_shape == (3, 24, 24)
    line = str(info)
    assert line.startswith(
        "tiny_net.a1; 12 classes; input 3×24×24; normalisation: mean 0.5,0.4,0.3, std 0.2,0.25,0.5 "
        "(pretrained_cfg of timm), after BicubicRes32Crop24 (pretrained_cfg of timm); weights: "
    )
    assert line.endswith("(SHA-256 checked)") and "\n" not in line
    assert "state_dict" not in model.get_submodule("1").pretrained_cfg  # type: ignore[operator]


def test_timm_downloads_unless_offline(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "remote" / "timm" / "tiny_net.a1").mkdir(parents=True)
    old = {f"old.{key}": value for key, value in STATE.items()}
    torch.save(old, home / "remote/timm/tiny_net.a1/pytorch_model.bin")
    torch.testing.assert_close(
        load("timm:tiny_net")(X), TIMM_LOGITS
    )  # timm converts the names of the file
    calls = importlib.import_module("huggingface_hub").calls
    assert calls[-1] == ("timm/tiny_net.a1", "pytorch_model.bin", None)
    count = len(calls)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InputError, match="HF_HUB_OFFLINE is set"):
        load("timm:tiny_net")
    assert len(calls) == count


@pytest.mark.parametrize("base", ["timm:tiny_net", "torchvision:small_net"])
def test_nothing_is_downloaded_for_a_folder(base: str, home: Path) -> None:
    """Who gives it away could name any file; with `allow_code` its author is trusted."""
    (home / "remote" / "timm" / "tiny_net.a1").mkdir(parents=True)
    torch.save(
        {f"old.{key}": value for key, value in STATE.items()},
        home / "remote/timm/tiny_net.a1/pytorch_model.bin",
    )
    write_torchvision(home)
    robust = build("cnn_small", num_classes=12, image_shape=(3, 40, 30)).eval()
    save_mixture(home / "m", MixedClassifier(load(base), robust, 0.5))
    shutil.rmtree(home / "torch")
    calls = importlib.import_module("huggingface_hub").calls
    count = len(calls)
    with pytest.raises(
        InputError, match="nothing is downloaded for the folder m without --allow-code"
    ):
        load_model("mixture:m")
    assert len(calls) == count
    if base.startswith("timm"):
        assert load_model("mixture:m", allow_code=True)(X).shape == (3, 12) and len(calls) > count
    else:
        with pytest.raises(InputError, match="its download failed: OSError: no network"):
            load_model("mixture:m", allow_code=True)


def test_settings_of_a_timm_reference(home: Path) -> None:
    own = weights(num_classes=5, seed=3)
    save_file(own, home / "own.safetensors")
    model = load(
        "timm:tiny_net?weights=own.safetensors&num_classes=5&preset=Res24x24&mean=0,0,0&std=1,1,1&labels=4,2"
    )
    torch.testing.assert_close(
        model(X), expected(X, (24, 24), 24, "bilinear", (0, 0, 0), (1, 1, 1), own)[:, [4, 2]]
    )
    with pytest.raises(
        InputError, match="exactly the weights of wide_net, got another shape or type of conv1"
    ):
        load("timm:wide_net?weights=own.safetensors&num_classes=5")
    with pytest.raises(InputError, match="`num_classes` must come with weights=FILE"):
        load("timm:tiny_net?num_classes=5")


def test_torchvision_from_the_cache(home: Path) -> None:
    path = write_torchvision(home)
    model = load("torchvision:small_net")
    torch.testing.assert_close(
        model(X),
        expected(X, (34, 26), 20, "bilinear", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    )
    info = info_of(model)
    assert (
        info is not None
        and info.class_names[3] == "class 3"
        and f"{path} (SHA-256 checked)" in str(info)
    )
    assert "(Net_Weights.IMAGENET1K_V2), after Res26Crop20" in str(info)
    torch.save(weights(num_classes=3, seed=2), "own-20261116.pth")  # a date, not a hash
    own = load(
        "torchvision:small_net?weights=own-20261116.pth&num_classes=3&preset=Res20x20&mean=0,0,0&std=1,1,1"
    )
    torch.testing.assert_close(
        own(X),
        expected(X, (20, 20), 20, "bilinear", (0, 0, 0), (1, 1, 1), weights(num_classes=3, seed=2)),
    )
    subset = load("torchvision:small_net?labels=7,3&weights=IMAGENET1K_V2")
    found = info_of(subset)
    assert (
        found is not None and found.class_names == ("class 7", "class 3") and found.num_classes == 2
    )
    assert torch.equal(subset(X), model(X)[:, [7, 3]])


class Harmful:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("harm"),)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("code", "of which nothing was executed"),
        ("page", "got a web page"),
        ("hash", "published SHA-256 00000000"),
        ("none", "download failed: OSError: no network"),
        ("offline", "must be there, because HF_HUB_OFFLINE is set"),
    ],
)
def test_torchvision_refuses_other_files(
    home: Path, kind: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1"
    )  # of the user, who trusts other files
    monkeypatch.setenv("HF_HUB_OFFLINE", "1" if kind == "offline" else "0")
    path = write_torchvision(
        home,
        {"x": Harmful()} if kind == "code" else STATE,  # type: ignore[dict-item]
        "00000000" if kind == "hash" else None,
    )
    if kind == "page":
        path.write_text("<!DOCTYPE html>")
    elif kind in ("none", "offline"):
        path.unlink()
    with pytest.raises(InputError, match=message) as caught:
        load("torchvision:small_net")
    assert "\n" not in str(caught.value) and not Path("harm").exists()
    assert (
        os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] == "1"
        and "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
    )


@pytest.mark.parametrize("place", ["folder", "cache"])
def test_a_timm_model_on_the_hub(home: Path, place: str) -> None:
    files = {"config.json": TIMM_CONFIG, "model.safetensors": STATE}
    if place == "cache":
        write_cache(home / "hf", "somebody/net", files)
    else:
        (home / "net").mkdir()
        for name, content in files.items():
            write(home / "net" / name, name, content)
    model = load("hf:somebody/net" if place == "cache" else "hf:./net")
    torch.testing.assert_close(
        model(X), expected(X, (24, 24), 24, "bilinear", (0.1, 0.2, 0.3), (0.5, 0.5, 0.5))
    )
    info = info_of(model)
    assert info is not None and info.class_names[2] == "n2" and "(config.json)" in str(info)


def test_a_transformers_model_on_the_hub(home: Path) -> None:
    write_cache(
        home / "hf",
        "google/vit",
        {"config.json": VIT, "model.safetensors": STATE, "preprocessor_config.json": PROCESSOR},
    )
    model = load("hf:google/vit@main")
    torch.testing.assert_close(
        model(X), expected(X, (18, 18), 18, "bilinear", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    )
    info = info_of(model)
    assert info is not None and info.class_names[11] == "label 11"
    assert str(info).startswith("ViTForImageClassification; 12 classes; input 3×18×18;")


def test_transformers_computes_in_fp32_without_kernels_and_without_a_network(home: Path) -> None:
    write_cache(
        home / "hf",
        "google/vit",
        {
            "config.json": {**VIT, "dtype": "float16"},
            "model.safetensors": STATE,
            "preprocessor_config.json": PROCESSOR,
        },
    )
    model = load("hf:google/vit")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert (
        importlib.import_module("transformers").calls == [("eager", "1")]
        and "HF_HUB_OFFLINE" not in os.environ
    )


@pytest.mark.parametrize(
    ("state", "config", "message"),
    [
        ({"fc.weight": None, "fc.bias": None}, {}, "got missing fc.bias, fc.weight"),
        ({"other": torch.ones(1)}, {}, "got unexpected other"),
        (
            {},
            {"attn_implementation": "kernels-community/x"},
            "be a plain model.*got 'attn_implementation'",
        ),
        ({}, {"_attn_implementation": "kernels-community/x"}, "got '_attn_implementation'"),
        ({}, {"quantization_config": {}}, "got 'quantization_config'"),
        ({}, {"auto_map": {}}, "got 'auto_map'"),
        ({}, {"vision_config": {"attn_implementation": "x"}}, "got 'attn_implementation'"),
    ],
)
def test_transformers_refuses_other_weights_and_code(
    home: Path, state: dict[str, Any], config: dict[str, Any], message: str
) -> None:
    kept = {key: value for key, value in {**STATE, **state}.items() if value is not None}
    write_cache(
        home / "hf",
        "google/vit",
        {
            "config.json": {**VIT, **config},
            "model.safetensors": kept,
            "preprocessor_config.json": PROCESSOR,
        },
    )
    with pytest.raises(InputError, match=message):
        load("hf:google/vit")


def test_a_folder_with_an_adapter_is_refused(home: Path) -> None:
    """Transformers would load the model that the adapter names."""
    (home / "net").mkdir()
    for name, content in (
        ("config.json", VIT),
        ("model.safetensors", STATE),
        ("preprocessor_config.json", PROCESSOR),
        ("adapter_config.json", {"base_model_name_or_path": "other/model"}),
    ):
        write(home / "net" / name, name, content)
    with pytest.raises(InputError, match="not an adapter of another"):
        load("hf:./net")


def test_the_name_of_a_folder_is_not_asked_for_on_the_hub(home: Path) -> None:
    (home / "net").mkdir()
    with pytest.raises(InputError, match=r"the folder is hf:\./net"):
        load("hf:net")
    assert importlib.import_module("huggingface_hub").calls == []


def test_weights_for_the_zoo_on_the_hub(home: Path) -> None:
    """As PyTorchModelHubMixin writes them: weights without metadata; and a checkpoint of this
    package."""
    model = build(
        "cnn_small", num_classes=4, image_shape=(3, 8, 8), seed=1, mean=[0.5] * 3, std=[0.5] * 3
    )
    state = {key: value for key, value in model.state_dict().items() if key not in ("mean", "std")}
    write_cache(home / "hf", "me/mixin", {"config.json": {"width": 3}, "model.safetensors": state})
    x = torch.rand(2, 3, 8, 8)
    settings = "arch=cnn_small&mean=0.5,0.5,0.5&std=0.5,0.5,0.5&image_shape=3,8,8"
    assert torch.equal(load(f"hf:me/mixin?{settings}")(x), model.eval()(x))
    with pytest.raises(InputError, match="arch=NAME"):
        load("hf:me/mixin")
    (home / "own").mkdir()
    checkpoint.save(home / "own" / "model.safetensors", model)
    assert torch.equal(load("hf:./own")(x), model(x))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("timm:tiny_nett", "did you mean 'tiny_net'"),
        ("timm:tiny_net.a2", "did you mean 'tiny_net.a1'"),
        ("timm:odd_net", "give .weights=FILE"),
        ("timm:hf-hub:x/y", "`timm model` must be one of"),
        ("timm:tiny_net?weights=none.pth", "must be a file that exists"),
        ("timm:tiny_net?arch=a", "`arch` must be left"),
        ("torchvision:smal_net", "did you mean 'small_net'"),
        ("torchvision:small_net?weights=V3", "must be one of"),
        ("hf:nobody/none", "has none in .*404 for nobody/none"),
        ("hf:../x/y", "be a folder that exists"),
        ("hf:a/b/c", "ORGANISATION/NAME"),
        ("hf:./empty", "must hold config.json"),
        ("hf:empty", "the folder is hf:./empty"),
        ("hf:some/text", "must hold a table in JSON"),
        ("hf:some/model?num_classes=3", "`num_classes` must be left out"),
        ("hf:some/bert", "image classifier of timm or transformers, got"),
        (
            "hf:some/arguments",
            "arguments of the architecture only in config.json, got 'pretrained_cfg_overlay'",
        ),
        ("hf:some/name", "`timm model` must be one of"),
        ("hf:some/tag", "`architecture` must be a name"),
    ],
)
def test_mistakes_are_one_sentence(home: Path, text: str, message: str) -> None:
    (home / "empty").mkdir()
    write_cache(home / "hf", "some/text", {"config.json": "text"})
    write_cache(home / "hf", "some/bert", {"config.json": {"architectures": ["BertForMaskedLM"]}})
    for name, change in (
        ("arguments", {"model_args": {"pretrained_cfg_overlay": {"file": "/other.pth"}}}),
        ("name", {"architecture": "hf-hub:other/model"}),
        ("tag", {"architecture": "tiny_net.x:y/z"}),
    ):
        write_cache(
            home / "hf",
            f"some/{name}",
            {"config.json": {**TIMM_CONFIG, **change}, "model.safetensors": STATE},
        )
    write_cache(home / "hf", "some/model", {"config.json": TIMM_CONFIG, "model.safetensors": STATE})
    with pytest.raises(InputError, match=message) as caught:
        load(text)
    assert "\n" not in str(caught.value)


def test_a_changed_file_of_the_cache_is_refused(home: Path) -> None:
    root = write_cache(home / "hf", "timm/tiny_net.a1", {"model.safetensors": STATE})
    blob = next((root / "blobs").iterdir())
    save_file(weights(seed=9), blob)
    with pytest.raises(InputError, match="published SHA-256"):
        load("timm:tiny_net")


@pytest.mark.parametrize("text", ["timm:tiny_net", "torchvision:small_net", "hf:./net"])
def test_without_the_package(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "net").mkdir()
    write(tmp_path / "net" / "config.json", "config.json", TIMM_CONFIG)
    monkeypatch.chdir(tmp_path)
    with installed(tmp_path / "packages"), monkeypatch.context() as patch:
        for name in ("timm", "torchvision"):
            patch.setitem(importlib.import_module("sys").modules, name, None)
        with pytest.raises(
            InputError,
            match=r"models need the package (timm|torchvision), which cannot be imported: "
            r".*; pip install (timm|torchvision)$",
        ):
            load(text)


def test_published_models_in_a_command(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three packages side by side, of which each is described in one line; a mistake is one
    sentence."""
    from equipoise.cli.main import run

    write_cache(home / "hf", "timm/tiny_net.a1", {"model.safetensors": STATE})
    write_torchvision(home)
    write_cache(
        home / "hf",
        "some/model",
        {"config.json": VIT, "preprocessor_config.json": PROCESSOR, "model.safetensors": STATE},
    )
    np.savez(
        "images.npz", images=(torch.rand(12, 3, 40, 30) * 255).byte().numpy(), labels=np.arange(12)
    )
    command = [
        "evaluate",
        "--data",
        "npz:images.npz",
        "--eps",
        "0.05",
        "--attack",
        "pgd",
        "--steps",
        "2",
        "--count",
        "6",
        "--audit",
        "0",
        "--out",
        "run",
    ]
    references = ["timm:tiny_net", "torchvision:small_net", "hf:some/model"]
    assert run([command[0], *references, *command[1:]]) == 0
    lines = [
        line
        for line in capsys.readouterr().err.splitlines()
        if line.startswith(tuple(references)) and "SHA-256" in line
    ]
    assert [line.partition(": ")[0] for line in lines] == references
    assert all(
        "12 classes; input 3×" in line and line.endswith("(SHA-256 checked)") for line in lines
    )
    for reference, sentence in (
        ("timm:tiny_nett", "equipoise: `timm model` must be one of {} (did you mean 'tiny_net'?)"),
        (
            "torchvision:smal_net",
            "equipoise: `torchvision model` must be one of {} (did you mean 'small_net'?)",
        ),
        (
            "torchvision:small_net?weights=IMAGENET1K_V3",
            "equipoise: `weights of small_net` must be one of {}",
        ),
        (
            "hf:some/modle",
            "equipoise: `some/modle` must be a repository with config.json, but it has none in {}",
        ),
        (
            "timm:tiny_net?labels=0,1",
            "equipoise: `timm:tiny_net?labels=0,1` must have the 12 classes of the data, {}",
        ),
    ):
        assert run([command[0], reference, *command[1:]]) == 2
        line, *others = capsys.readouterr().err.splitlines()
        start, end = sentence.split("{}")
        assert not others and line.startswith(start) and line.endswith(end), line


def test_a_mixture_of_published_models_needs_no_code_and_no_options(home: Path) -> None:
    """An ImageNet-like classifier of twelve classes with one of two classes, in a folder that is
    then moved."""
    write_torchvision(home)
    (home / "net").mkdir()
    own = weights(num_classes=2, seed=4)
    for name, content in (
        ("config.json", {**TIMM_CONFIG, "num_classes": 2}),
        ("model.safetensors", own),
    ):
        write(home / "net" / name, name, content)
    accurate, robust = (
        load("torchvision:small_net?labels=7,3", num_classes=2),
        load("hf:./net", num_classes=2),
    )
    save_mixture(home / "made" / "m", MixedClassifier(accurate, robust, 0.5))
    assert 'reference = "hf:../../net"' in (home / "made" / "m" / "mixture.toml").read_text()
    mixture = load_model(home / "made" / "m")
    assert torch.equal(mixture(X), MixedClassifier(accurate, robust, 0.5)(X))
    x = torch.rand(2, 3, 40, 30)
    attacked = eq.attack(
        mixture, x, mixture(x).argmax(1), threat=eq.Threat("linf", 0.1), attack="pgd", steps=2
    )
    assert not torch.equal(attacked, x)
