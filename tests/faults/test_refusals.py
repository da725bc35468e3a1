"""A refused command leaves nothing behind: neither its `--out` folder nor new parents; its sentence
is short."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from equipoise import models
from equipoise.cli.main import run
from equipoise.core import checks
from equipoise.core.checks import InputError
from equipoise.models import checkpoint

DATA = ["--data", "npz:images.npz", "--device", "cpu"]
PAIR = ["--accurate", "accurate.safetensors", "--robust", "robust.safetensors"]
MODULE = """
import torch
class Late(torch.nn.Module):
    def forward(self, x):
        return torch.full((len(x), 3), float("nan") if len(x) > 1 else 0.0)
"""
EVALUATE, CERTIFY = (
    ["evaluate", "robust.safetensors", *DATA],
    ["certify", "robust.safetensors", *DATA],
)
FIT, TRAIN = (
    ["fit", *PAIR, *DATA],
    ["train", "standard", *DATA, "--arch", "cnn_small", "--epochs", "1"],
)
GATE = ["train", "gate", *PAIR, *DATA, "--epochs", "1", "--width", "2"]
COMMANDS = [
    [*EVALUATE, "--attack", "unknown"],
    [*EVALUATE, "--eps", "-1"],
    [*EVALUATE, "--count", "999"],
    [*EVALUATE, "--device", "abacus"],
    [*EVALUATE, "--source", "rob"],
    [*EVALUATE, "--seed", "-1"],
    ["evaluate", "none.safetensors", *DATA],
    ["evaluate", "mixture:none", *DATA],
    ["evaluate", "wide.safetensors", *DATA],
    ["evaluate", "python:late:Late", *DATA, "--attack", "pgd", "--steps", "1"],
    ["evaluate", "broken.safetensors", *DATA],
    ["evaluate", "robust.safetensors", "--data", "npz:none.npz"],
    [*EVALUATE, "--data", "x" * 5000],
    [*CERTIFY, "--sigma", "-1"],
    [*CERTIFY, "--sigma", "0.1", "--samples", "5"],
    [*CERTIFY, "--sigma", "x"],
    [*CERTIFY, "--sigma", "0.1", "--alpha", "0.7"],
    ["certify", "wide.safetensors", *DATA, "--sigma", "0.1"],
    ["certify", "python:late:Late", *DATA, "--sigma", "0.1", "--samples", "200"],
    [*CERTIFY, "--sigma", "0.1", "--clean", "0.9"],
    [*FIT, "--lose-at-most", "-1"],
    [*FIT, "--count", "10"],
    [*FIT, "--alpha", "2"],
    [*FIT, "--gate", "none"],
    [*FIT, "--like", "mixture:none"],
    [*FIT, "--like", "robust.safetensors"],
    [*FIT, "--steps", "1", "--eps", "1"],
    ["fit", "--accurate", "robust.safetensors", "--robust", "robust.safetensors", *DATA],
    ["fit", *PAIR[:2], "--robust", "wide.safetensors", *DATA],
    ["fit", *PAIR[:2], "--robust", "broken.safetensors", "--alpha", "0.5"],
    [*TRAIN, "--lr", "-1"],
    [*TRAIN, "--lr", "1e38"],
    [*TRAIN, "--held-out", "999"],
    [*TRAIN, "--arch", "x" * 1000],
    [*TRAIN, "--init", "wide.safetensors"],
    [*TRAIN, "--mean", "1,2"],
    [*TRAIN, "--precision", "fp8"],
    ["train", "unknown", *DATA],
    [*GATE, "--layers", "a,b"],
    [*GATE, "--layers", "a,b;c,d"],
    [*GATE, "--width", "0"],
    ["train", "gate", *PAIR[:2], "--robust", "wide.safetensors", *DATA, "--epochs", "1"],
    ["demo", "--seed", "-1"],
    ["demo", "--device", "abacus"],
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("refused")
    np.savez(
        folder / "images.npz",
        images=np.random.default_rng(0).integers(0, 256, (60, 1, 8, 8), dtype=np.uint8),
        labels=np.arange(60) % 3,
    )
    for name, classes, seed in (("accurate", 3, 0), ("robust", 3, 1), ("wide", 5, 2)):
        model = models.build("cnn_small", num_classes=classes, image_shape=(1, 8, 8), seed=seed)
        checkpoint.save(folder / f"{name}.safetensors", model)
    (folder / "broken.safetensors").write_bytes((folder / "wide.safetensors").read_bytes()[:500])
    (folder / "late.py").write_text(MODULE)
    return folder


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command)[:80])
def test_nothing_is_left_behind(
    place: Path,
    command: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(place)
    before = {path for path in place.rglob("*") if "__pycache__" not in path.parts}
    assert run([*command, "--out", "new/parent/out"]) == 2
    assert {path for path in place.rglob("*") if "__pycache__" not in path.parts} == before
    *_, sentence = capsys.readouterr().err.strip().splitlines()
    assert sentence.startswith("equipoise: ") and len(sentence) <= checks.SENTENCE_LENGTH + len(
        "equipoise: "
    )


@pytest.mark.parametrize("content", [{}, {"run.toml": "schema = 1\n"}, {"notes.txt": ""}])
def test_folders_that_were_there_stay(
    place: Path, tmp_path: Path, content: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    for name, text in content.items():
        (tmp_path / name).write_text(text)
    assert (
        run(
            [
                "evaluate",
                "python:late:Late",
                *DATA,
                "--attack",
                "pgd",
                "--steps",
                "1",
                "--out",
                str(tmp_path),
            ]
        )
        == 2
    )
    assert tmp_path.is_dir() and content.keys() <= {path.name for path in tmp_path.iterdir()}


def test_report_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("none", "x" * 5000):
        assert run(["report", str(tmp_path / name)]) == 2
        assert len(capsys.readouterr().err) < 500
    assert not list(tmp_path.iterdir())


def test_saving_what_cannot_be_saved(tmp_path: Path) -> None:
    import equipoise as eq

    first, second = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    for model in (first, eq.MixedClassifier(first, second, 0.5), "text"):
        with pytest.raises(InputError):
            eq.save(tmp_path / "new" / "out", model)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
