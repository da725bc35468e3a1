from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from equipoise.core.checks import InputError
from equipoise.models import (
    SCHEMES,
    LoadOptions,
    Reference,
    build,
    checkpoint,
    load,
    parse,
    reference_of,
    relocate,
    runs_code,
    weights_digest,
)

SHAPE = (1, 8, 8)

FACTORIES = """
from torch import nn
number = 3
class Pixels(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 6)
    def forward(self, x):
        return self.fc(x.flatten(1))
def make():
    import {name}_part
    return Pixels()
def needs(width):
    return Pixels()
def raises():
    raise RuntimeError("two\\nlines")
def text():
    return "a model"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "net.safetensors"
    checkpoint.save(path, build("cnn_small", num_classes=6, image_shape=SHAPE, seed=2), {})
    return path


@pytest.fixture
def module_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the current directory and nowhere on the import path, with a new name for each
    test."""
    name = f"factories_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(FACTORIES.format(name=name))
    (tmp_path / f"{name}_part.py").write_text("")
    (tmp_path / f"{name}_broken.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    return name


@pytest.mark.parametrize(
    ("text", "scheme", "body"),
    [
        ("zoo:resnet8", "zoo", "resnet8"),
        ("file:a/b.safetensors", "file", "a/b.safetensors"),
        ("file:C:/odd name.pt", "file", "C:/odd name.pt"),
        ("a/b.safetensors", "file", "a/b.safetensors"),
        ("b.pt", "file", "b.pt"),
        ("b.pth", "file", "b.pth"),
        ("python:pack.module:make", "python", "pack.module:make"),
        ("tta:6:b.pt", "tta", "6:b.pt"),
    ],
)
def test_parse(text: str, scheme: str, body: str) -> None:
    assert parse(text) == Reference(scheme, body, text)


def test_a_path_that_exists_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "odd:name"
    path.write_bytes(b"")
    assert parse(str(path)) == Reference("file", str(path), str(path))


@pytest.mark.parametrize("text", ["tims:resnet18", "nowhere", "", "resnet18"])
def test_unknown_references_list_the_schemes(text: str) -> None:
    with pytest.raises(
        InputError, match=", ".join(f"{name}:" for name in sorted(SCHEMES))
    ) as caught:
        parse(text)
    assert ("did you mean 'zoo:resnet18'" in str(caught.value)) == (text == "resnet18")


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_a_scheme_alone_names_no_model(scheme: str) -> None:
    with pytest.raises(
        InputError, match=f"`model` must name a model after {scheme}:, got '{scheme}:'$"
    ):
        parse(f"{scheme}:")


def test_an_installed_package_adds_a_scheme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "flat-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: flat\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[equipoise.model_schemes]\nflat = flat_scheme:load\n")
    (tmp_path / "flat_scheme.py").write_text(
        "from torch import nn\n\n\ndef load(reference, options):\n"
        "    return nn.Linear(64, int(reference.body))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    schemes = type(SCHEMES)(
        SCHEMES.group, SCHEMES.noun, SCHEMES.builtin
    )  # entry points are read once
    model = schemes["flat"](Reference("flat", "6", "flat:6"), LoadOptions())
    assert isinstance(model, torch.nn.Module)
    assert "flat" in schemes and model(torch.zeros(4, 64)).shape == (4, 6)


def test_file(file: Path) -> None:
    model = load(f"file:{file}")
    assert not model.training
    assert weights_digest(model) == weights_digest(load(str(file)))
    with pytest.raises(InputError, match="must have the 10 classes of the data, got 6"):
        load(str(file), num_classes=10)


def test_state_dict(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "net.pt"
    model = build("cnn_small", num_classes=6, image_shape=SHAPE)
    torch.save(
        {key: value for key, value in model.state_dict().items() if key not in ("mean", "std")},
        path,
    )
    loaded = load(str(path), arch="cnn_small", mean=[0.0], std=[1.0], image_shape=SHAPE)
    assert weights_digest(loaded) == weights_digest(model)


def test_zoo() -> None:
    model = load("zoo:cnn_small", num_classes=6, image_shape=SHAPE, mean=[0.5], std=[0.5], seed=4)
    expected = build("cnn_small", num_classes=6, image_shape=SHAPE, mean=[0.5], std=[0.5], seed=4)
    assert not model.training
    assert weights_digest(model) == weights_digest(expected)


def test_zoo_needs_classes_and_shape() -> None:
    with pytest.raises(InputError, match="`num_classes` must be given"):
        load("zoo:cnn_small", image_shape=SHAPE)
    with pytest.raises(InputError, match="`image_shape` must be given"):
        load("zoo:cnn_small", num_classes=6)
    with pytest.raises(InputError, match="did you mean 'cnn_small'"):
        load("zoo:cnn_smal", num_classes=6, image_shape=SHAPE)
    with pytest.raises(InputError, match="`arch` must be left out"):
        load("zoo:cnn_small", arch="cnn", num_classes=6, image_shape=SHAPE)


def test_python_finds_the_current_directory_and_leaves_the_path_alone(module_name: str) -> None:
    before = list(sys.path)
    model = load(f"python:{module_name}:make")
    assert sys.path == before
    assert not model.training
    assert model(torch.zeros(4, *SHAPE)).shape == (4, 6)


@pytest.mark.parametrize(
    ("ending", "message"),
    [
        (":make_it", "'make_it', which is not one"),
        (":number", "'number', which is not one"),
        (":needs", "without arguments.*TypeError"),
        (":raises", "RuntimeError: two lines"),
        (":text", "returned str"),
        ("", "read python:FILE.py:NAME or python:MODULE:NAME"),
        ("_none:make", "ModuleNotFoundError"),
        ("_broken:make", "ZeroDivisionError"),
    ],
)
def test_python_mistakes_are_one_sentence(module_name: str, ending: str, message: str) -> None:
    before = list(sys.path)
    with pytest.raises(InputError, match=message):
        load(f"python:{module_name}{ending}")
    assert sys.path == before


def test_python_refuses_options_that_it_cannot_use(module_name: str) -> None:
    with pytest.raises(InputError, match="`mean` must be left out"):
        load(f"python:{module_name}:make", mean=[0.5])


def test_test_time_augmentation_of_a_file(file: Path) -> None:
    x = torch.rand(4, *SHAPE, generator=torch.Generator().manual_seed(1))
    plain, twice = load(f"file:{file}"), load(f"tta:2:{file}")
    with torch.no_grad():
        torch.testing.assert_close(twice(x), (plain(x) + plain(x.flip(3))) / 2)


@pytest.mark.parametrize(
    ("count", "message"),
    [("3", "N among 2, 6, 10"), ("2:tta:2", "tta: only once")],
)
def test_invalid_test_time_augmentation(file: Path, count: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load(f"tta:{count}:{file}")


@pytest.mark.parametrize("nested", ["tta:2:" * 2000, "tta:2:smoothed:1:" * 1000])
@pytest.mark.parametrize("use", [load, runs_code, lambda text: relocate(text, str)])
def test_many_wrappers_are_one_sentence(use: Callable[[str], object], nested: str) -> None:
    with pytest.raises(InputError, match="`model` must have tta: only once") as raised:
        use(f"{nested}zoo:resnet8")
    assert len(str(raised.value)) < 300


def test_relocate_changes_the_path_of_a_file(file: Path) -> None:
    assert relocate(f"tta:6:{file}", lambda path: Path(path).name) == f"tta:6:file:{file.name}"
    assert relocate(str(file), lambda path: Path(path).name) == f"file:{file.name}"
    assert relocate("zoo:resnet8", lambda path: "elsewhere") == "zoo:resnet8"


def test_a_loaded_model_remembers_its_reference(file: Path) -> None:
    assert reference_of(load(str(file))) == str(file)
    assert reference_of(build("cnn_small", num_classes=6, image_shape=SHAPE)) is None


def test_options_as_text_and_as_numbers() -> None:
    options = LoadOptions(arch="cnn", mean="0.49,0.48,0.45", std=[0.2, 0.3, 0.25])
    assert options.mean == (0.49, 0.48, 0.45) and options.std == [0.2, 0.3, 0.25]
    with pytest.raises(InputError, match="`mean` must be a number"):
        LoadOptions(mean="0.49,x")


def test_options_and_settings_are_merged() -> None:
    options = LoadOptions(num_classes=6, seed=4)
    model = load("zoo:cnn_small", options, image_shape=SHAPE)
    assert weights_digest(model) == weights_digest(
        build("cnn_small", num_classes=6, image_shape=SHAPE, seed=4)
    )
    with pytest.raises(InputError, match="did you mean 'num_classes'"):
        load("zoo:cnn_small", num_class=6)
