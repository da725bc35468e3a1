from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from equipoise.core.checks import InputError
from equipoise.models import SCHEMES, Reference, build, checkpoint, digest, load, parse, placed, weights_digest

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
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the current directory and nowhere on the import path; its name is new each time."""
    name = f"factories_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(FACTORIES.format(name=name))
    (tmp_path / f"{name}_part.py").write_text("")
    (tmp_path / f"{name}_broken.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    return name


@pytest.mark.parametrize(("text", "scheme", "rest"), [
    ("zoo:resnet8", "zoo", "resnet8"),
    ("file:a/b.safetensors", "file", "a/b.safetensors"),
    ("file:C:/odd name.pt", "file", "C:/odd name.pt"),
    ("a/b.safetensors", "file", "a/b.safetensors"),
    ("b.pt", "file", "b.pt"),
    ("b.pth", "file", "b.pth"),
    ("python:pack.module:make", "python", "pack.module:make"),
])
def test_parse(text: str, scheme: str, rest: str) -> None:
    assert parse(text) == Reference(scheme, rest, text)


def test_a_path_that_exists_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "odd:name"
    path.write_bytes(b"")
    assert parse(str(path)) == Reference("file", str(path), str(path))


@pytest.mark.parametrize("text", ["tims:resnet18", "nowhere", "", "zoo:", "resnet18"])
def test_unknown_references_list_the_schemes(text: str) -> None:
    with pytest.raises(InputError, match="file:, looks:, python:, zoo:") as caught:
        parse(text)
    assert ("did you mean 'zoo:resnet18'" in str(caught.value)) == (text == "resnet18")


def test_a_new_scheme_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEMES, "flat", lambda reference, wishes: nn.Flatten())
    assert isinstance(load("flat:any"), nn.Flatten)


def test_file(file: Path) -> None:
    model = load(f"file:{file}")
    assert not model.training
    assert weights_digest(model) == weights_digest(load(str(file)))
    assert digest(str(file), model) == checkpoint.digest(file) != weights_digest(model)
    with pytest.raises(InputError, match="`num_classes` must be 6"):
        load(str(file), num_classes=10)


def test_state_dict(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "net.pt"
    model = build("cnn_small", num_classes=6, image_shape=SHAPE)
    torch.save({key: value for key, value in model.state_dict().items() if key not in ("mean", "std")}, path)
    loaded = load(str(path), arch="cnn_small", mean=[0.0], std=[1.0], image_shape=SHAPE)
    assert weights_digest(loaded) == weights_digest(model)


def test_zoo() -> None:
    model = load("zoo:cnn_small", num_classes=6, image_shape=SHAPE, mean=[0.5], std=[0.5], seed=4)
    expected = build("cnn_small", num_classes=6, image_shape=SHAPE, mean=[0.5], std=[0.5], seed=4)
    assert not model.training
    assert digest("zoo:cnn_small", model) == weights_digest(expected)


def test_zoo_needs_classes_and_shape() -> None:
    with pytest.raises(InputError, match="`num_classes` must be given"):
        load("zoo:cnn_small", image_shape=SHAPE)
    with pytest.raises(InputError, match="`image_shape` must be given"):
        load("zoo:cnn_small", num_classes=6)
    with pytest.raises(InputError, match="did you mean 'cnn_small'"):
        load("zoo:cnn_smal", num_classes=6, image_shape=SHAPE)
    with pytest.raises(InputError, match="`arch` must be left out"):
        load("zoo:cnn_small", arch="cnn", num_classes=6, image_shape=SHAPE)


def test_python_finds_the_current_directory_and_leaves_the_path_alone(here: str) -> None:
    before = list(sys.path)
    model = load(f"python:{here}:make")
    assert sys.path == before
    assert not model.training
    assert model(torch.zeros(4, *SHAPE)).shape == (4, 6)
    assert digest(f"python:{here}:make", model) == weights_digest(model)


@pytest.mark.parametrize(("ending", "message"), [
    (":make_it", "'make_it', which is not one"),
    (":number", "'number', which is not one"),
    (":needs", "without arguments.*TypeError"),
    (":raises", "RuntimeError: two lines"),
    (":text", "returned str"),
    ("", "read python:MODULE:FACTORY"),
    ("_none:make", "ModuleNotFoundError"),
    ("_broken:make", "ZeroDivisionError"),
])
def test_python_mistakes_are_one_sentence(here: str, ending: str, message: str) -> None:
    before = list(sys.path)
    with pytest.raises(InputError, match=message):
        load(f"python:{here}{ending}")
    assert sys.path == before


def test_python_refuses_what_it_cannot_honour(here: str) -> None:
    with pytest.raises(InputError, match="`mean` must be left out"):
        load(f"python:{here}:make", mean=[0.5])


def test_looks_of_a_file(file: Path) -> None:
    x = torch.rand(4, *SHAPE, generator=torch.Generator().manual_seed(1))
    plain, twice = load(f"file:{file}"), load(f"looks:2:{file}")
    with torch.no_grad():
        torch.testing.assert_close(twice(x), (plain(x) + plain(x.flip(3))) / 2)


@pytest.mark.parametrize(("count", "message"), [("3", "N among 2, 6, 10"), ("2:looks:2", "looks: once")])
def test_looks_that_are_none(file: Path, count: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load(f"looks:{count}:{file}")


def test_a_reference_can_be_moved(file: Path) -> None:
    assert placed(f"looks:6:{file}", lambda path: Path(path).name) == f"looks:6:file:{file.name}"
    assert placed(str(file), lambda path: Path(path).name) == f"file:{file.name}"
    assert placed("zoo:resnet8", lambda path: "elsewhere") == "zoo:resnet8"
