"""What a received folder may do: nothing runs unless the user allows it, and its modules are never
imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import equipoise as eq
from equipoise import models
from equipoise.core.checks import InputError
from equipoise.core.registry import Registry
from equipoise.mixing import MixedClassifier, save_mixture
from equipoise.models import SCHEMES, build, checkpoint, reference
from equipoise.models.sources import wrappers

SHAPE = (1, 4, 4)
CODE = """
from pathlib import Path
Path({mark!r}).touch()
def f():
    from equipoise.models import build
    return build("cnn_small", num_classes=3, image_shape=(1, 4, 4), seed=1)
"""
NESTED = ["python:{}:f", "tta:2:python:{}:f"]


@pytest.fixture
def received(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A mixture folder, a module in another folder that leaves a mark when it is imported, and its
    name."""
    folder, elsewhere = tmp_path / "received", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    bases = [build("cnn_small", num_classes=3, image_shape=SHAPE, seed=seed) for seed in (1, 2)]
    for side, base in zip(("accurate", "robust"), bases, strict=True):
        checkpoint.save(folder / f"{side}.safetensors", base)
    save_mixture(
        folder,
        MixedClassifier(bases[0], bases[1], 0.5),
        accurate=str(folder / "accurate.safetensors"),
        robust=str(folder / "robust.safetensors"),
    )
    monkeypatch.chdir(elsewhere)
    return SimpleNamespace(
        folder=folder,
        elsewhere=elsewhere,
        mark=tmp_path / "mark",
        name=f"module_{tmp_path.name}".replace("-", "_"),
    )


def write_code(received: SimpleNamespace, folder: Path) -> None:
    (folder / f"{received.name}.py").write_text(CODE.format(mark=str(received.mark)))


def name_in_folder(received: SimpleNamespace, text: str, side: str = "accurate") -> None:
    path = received.folder / "mixture.toml"
    old = f"file:{side}.safetensors"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, text))


@pytest.mark.parametrize("text", NESTED)
@pytest.mark.parametrize("side", ["accurate", "robust"])
def test_code_named_by_a_folder_is_refused_and_not_imported(
    received: SimpleNamespace, text: str, side: str
) -> None:
    text = text.format(received.name)
    write_code(received, received.elsewhere)
    name_in_folder(received, text, side)
    with pytest.raises(InputError, match="--allow-code") as caught:
        eq.load_model(f"mixture:{received.folder}")
    assert text in str(caught.value) and str(received.folder) in str(caught.value)
    assert not received.mark.exists()


def test_allowed_code_is_loaded_and_its_digest_checked(received: SimpleNamespace) -> None:
    write_code(received, received.elsewhere)
    name_in_folder(received, f"python:{received.name}:f")
    assert eq.load_model(str(received.folder), allow_code=True)(torch.zeros(2, *SHAPE)).shape == (
        2,
        3,
    )
    assert received.mark.exists()
    content = (received.folder / "mixture.toml").read_text()
    digest = models.weights_digest(build("cnn_small", num_classes=3, image_shape=SHAPE, seed=1))
    assert digest in content
    (received.folder / "mixture.toml").write_text(content.replace(digest, "0" * 64))
    with pytest.raises(InputError, match="weights have changed"):
        eq.load_model(str(received.folder), allow_code=True)


def test_weights_are_checked_before_code_runs(received: SimpleNamespace) -> None:
    """The accurate base comes first, but its code runs only after the digest of the robust one has
    been checked."""
    write_code(received, received.elsewhere)
    name_in_folder(received, f"python:{received.name}:f")
    other = build("cnn_small", num_classes=3, image_shape=SHAPE, seed=9)
    checkpoint.save(received.folder / "robust.safetensors", other)
    with pytest.raises(InputError, match=r"robust base .* weights have changed"):
        eq.load_model(str(received.folder), allow_code=True)
    assert not received.mark.exists()


@pytest.mark.parametrize("place", ["the folder", "inside it", "above it"])
def test_modules_never_come_from_the_received_folder(
    received: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
) -> None:
    write_code(received, received.folder)
    (received.folder / "inner").mkdir()
    write_code(received, received.folder / "inner")
    current = {
        "the folder": received.folder,
        "inside it": received.folder / "inner",
        "above it": received.folder.parent,
    }[place]
    monkeypatch.chdir(current)
    monkeypatch.syspath_prepend(current)  # as PYTHONPATH=. does
    name = f"received.{received.name}" if place == "above it" else received.name
    name_in_folder(received, f"python:{name}:f")
    before = list(sys.path)
    with pytest.raises(InputError, match="ModuleNotFoundError"):
        eq.load_model(f"mixture:{received.folder}", allow_code=True)
    assert not received.mark.exists() and sys.path == before and sys.meta_path[0] is not None
    # The user's own reference may name it.
    assert eq.load_model(f"python:{name}:f")(torch.zeros(2, *SHAPE)).shape == (2, 3)


@pytest.mark.parametrize("place", ["the folder", "inside it", "a link to it"])
def test_files_of_the_received_folder_are_never_run(received: SimpleNamespace, place: str) -> None:
    """`python:FILE.py:NAME`, also by a path that leads out of the folder and back."""
    where = received.folder / "inner" if place == "inside it" else received.folder
    where.mkdir(exist_ok=True)
    write_code(received, where)
    path = f"{where.relative_to(received.folder)}/{received.name}.py"
    if place == "a link to it":
        (received.elsewhere / "link").symlink_to(received.folder)
        path = f"../elsewhere/link/{received.name}.py"
    name_in_folder(received, f"python:{path}:f")
    with pytest.raises(InputError, match="--allow-code"):
        eq.load_model(f"mixture:{received.folder}")
    with pytest.raises(InputError, match="ModuleNotFoundError"):
        eq.load_model(f"mixture:{received.folder}", allow_code=True)
    assert not received.mark.exists()


def test_a_file_beside_the_folder_needs_allow_code(received: SimpleNamespace) -> None:
    write_code(received, received.elsewhere)
    name_in_folder(received, f"python:../elsewhere/{received.name}.py:f")
    with pytest.raises(InputError, match="--allow-code"):
        eq.load_model(f"mixture:{received.folder}")
    assert not received.mark.exists()
    assert eq.load_model(f"mixture:{received.folder}", allow_code=True)(
        torch.zeros(2, *SHAPE)
    ).shape == (2, 3)


def test_schemes_that_only_read_data() -> None:
    """Every other scheme of this package, and every one of another package, counts as code."""
    data = {
        name
        for name in SCHEMES.builtin
        if name not in wrappers.WRAPPERS and not models.runs_code(f"{name}:x")
    }
    assert {"file", "zoo", "timm", "torchvision", "hf"} <= data and not data & {
        "python",
        "exported",
    }


def test_a_module_of_the_folder_does_not_hide_an_installed_one(
    received: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (received.folder / f"{received.name}.py").write_text("raise RuntimeError('of the folder')\n")
    write_code(received, received.elsewhere)
    monkeypatch.chdir(received.folder)
    monkeypatch.syspath_prepend(received.elsewhere)
    monkeypatch.syspath_prepend(received.folder)
    name_in_folder(received, f"python:{received.name}:f")
    eq.load_model(".", allow_code=True)


def test_a_scheme_of_another_package_counts_as_code(
    received: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called = []

    def load(parsed: models.Reference, options: models.LoadOptions) -> torch.nn.Module:
        called.append(parsed.body)
        return build("cnn_small", num_classes=3, image_shape=SHAPE, seed=1)

    schemes = Registry(SCHEMES.group, SCHEMES.noun, {**SCHEMES.builtin, "hub": load})
    monkeypatch.setattr(reference, "SCHEMES", schemes)
    name_in_folder(received, "tta:2:hub:somebody/model")
    with pytest.raises(InputError, match="--allow-code"):
        eq.load_model(str(received.folder))
    assert not called
    models.load("hub:mine")
    assert called == ["mine"], "typed by the user"


def test_references_typed_by_the_user_need_no_option(received: SimpleNamespace) -> None:
    write_code(received, received.elsewhere)
    assert eq.load_model(f"tta:2:python:{received.name}:f")(torch.zeros(2, *SHAPE)).shape == (2, 3)


@pytest.mark.parametrize("kind", ["absolute", "parent", "symlink"])
def test_weights_may_lie_outside_of_the_folder(received: SimpleNamespace, kind: str) -> None:
    target = received.elsewhere / "weights.safetensors"
    (received.folder / "accurate.safetensors").rename(target)
    if kind == "symlink":
        (received.folder / "accurate.safetensors").symlink_to(target)
    else:
        name_in_folder(
            received, f"file:{target if kind == 'absolute' else '../elsewhere/weights.safetensors'}"
        )
    assert isinstance(eq.load_model(str(received.folder)), MixedClassifier)


def equipoise(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "equipoise", *arguments],
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )


def write_images(folder: Path) -> None:
    import numpy as np

    images = np.random.default_rng(0).integers(0, 256, (6, *SHAPE), dtype=np.uint8)
    np.savez(folder / "images.npz", images=images, labels=np.arange(6) % 3)


COMMANDS = {
    "evaluate": [
        "evaluate",
        "{}",
        "--data",
        "npz:images.npz",
        "--eps",
        "0.1",
        "--attack",
        "pgd",
        "--steps",
        "1",
        "--out",
        "run",
    ],
    "certify": [
        "certify",
        "{}",
        "--data",
        "npz:images.npz",
        "--sigma",
        "0.5",
        "--samples",
        "100",
        "--out",
        "run",
    ],
    "fit": [
        "fit",
        "--accurate",
        "{weights}",
        "--robust",
        "{other}",
        "--like",
        "{}",
        "--data",
        "npz:images.npz",
        "--eps",
        "0.1",
        "--out",
        "run",
    ],
    "train gate": [
        "train",
        "gate",
        "--accurate",
        "{}",
        "--robust",
        "{weights}",
        "--data",
        "npz:images.npz",
        "--out",
        "run",
    ],
}


def command_line(received: SimpleNamespace, name: str) -> list[str]:
    return [
        word.format(
            f"mixture:{received.folder}",
            weights=received.folder / "robust.safetensors",
            other=received.folder / "accurate.safetensors",
        )
        for word in COMMANDS[name]
    ]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_refuses_in_one_sentence(
    received: SimpleNamespace,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    from equipoise.cli.main import run

    write_code(received, received.elsewhere)
    write_images(received.elsewhere)
    name_in_folder(received, f"python:{received.name}:f")
    assert run(command_line(received, name)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "--allow-code" in error and str(received.folder) in error
    assert not received.mark.exists() and not Path("run").exists()


def test_as_a_user_types_it_inside_the_received_folder(received: SimpleNamespace) -> None:
    """Modules of the folder with the names of packages that are imported late are not imported,
    either."""
    write_code(received, received.folder)
    write_images(received.folder)
    for package in ("typing", "pathlib", "rich", "jinja2", "altair", "scipy"):
        (received.folder / f"{package}.py").write_text(
            f"raise RuntimeError('{package} of the folder')\n"
        )
    plain = equipoise(received.folder, "evaluate", "mixture:.", *COMMANDS["evaluate"][2:])
    assert plain.returncode == 0, plain.stderr
    name_in_folder(received, f"python:{received.name}:f")
    refused = equipoise(
        received.folder, "evaluate", "mixture:.", *COMMANDS["evaluate"][2:-1], "other"
    )
    assert (
        refused.returncode == 2
        and "--allow-code" in refused.stderr
        and refused.stderr.count("\n") == 1
    )
    assert not received.mark.exists() and not (received.folder / "other").exists()


def test_allow_code_from_the_command_line(received: SimpleNamespace) -> None:
    from equipoise.cli.main import run

    write_code(received, received.elsewhere)
    write_images(received.elsewhere)
    name_in_folder(received, f"python:{received.name}:f")
    assert run([*command_line(received, "evaluate"), "--allow-code"]) == 0
    assert received.mark.exists()
    assert (
        json.loads((received.elsewhere / "run" / "summary.json").read_text())["command"]
        == "evaluate"
    )
