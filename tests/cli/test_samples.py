"""`--sample` as a user types it, on a folder of images that is sorted by class."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from equipoise import models
from equipoise.cli.main import run
from equipoise.core import records
from equipoise.core.config import read
from equipoise.core.results import read_summary
from equipoise.core.rows import ImageRow
from equipoise.models import checkpoint
from equipoise.reporting.run_view import read_run
from equipoise.reporting.verdict import alarms

DATA = ["--data", "folder:pictures", "--device", "cpu"]
EVALUATE = [
    "evaluate",
    "model.safetensors",
    *DATA,
    "--eps",
    "0.01",
    "--attack",
    "pgd",
    "--steps",
    "1",
    "--count",
    "16",
]
CERTIFY = [
    "certify",
    "model.safetensors",
    *DATA,
    "--sigma",
    "0.1",
    "--samples",
    "20",
    "--n0",
    "5",
    "--count",
    "16",
]
TRAIN = [
    "train",
    "standard",
    *DATA,
    "--arch",
    "cnn_small",
    "--epochs",
    "1",
    "--count",
    "16",
    "--held-out",
    "4",
    "--batch-size",
    "8",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four classes with 20 pictures each, and a model for them."""
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    for name in "abcd":
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for number in range(20):
            picture = Image.fromarray(generator.integers(0, 256, (8, 8, 3), np.uint8))
            picture.save(tmp_path / "pictures" / name / f"{number:02}.png")
    model = models.build("cnn_small", num_classes=4, image_shape=(3, 8, 8))
    checkpoint.save("model.safetensors", model, {})
    return tmp_path


def evaluated(run_folder: str) -> dict[int, int]:
    """Index → label of the images of a run."""
    return {
        row.index: row.label
        for row in records.read_rows(Path(run_folder))
        if isinstance(row, ImageRow)
    }


def test_count_takes_all_classes_of_a_sorted_folder(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*EVALUATE, "--out", "E"]) == 0
    assert "warning" not in capsys.readouterr().err and read_summary("E").notes == ()
    images = evaluated("E")
    assert sorted(images.values()) == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    assert all(index // 20 == label for index, label in images.items())  # positions in the folder
    assert read(folder / "E" / "run.toml")["identity"]["data"]["sample"] == "stratified, seed 0"
    assert run([*EVALUATE, "--out", "E"]) == 0  # resumed
    assert run([*EVALUATE, "--out", "E", "--sample-seed", "1"]) == 2
    assert "E has data.sample = 'stratified, seed 0'" in capsys.readouterr().err
    assert run([*EVALUATE, "--out", "D", "--start", "16"]) == 0
    assert not images.keys() & evaluated("D").keys()  # the next sixteen


@pytest.mark.parametrize(
    "command", [EVALUATE, CERTIFY, TRAIN], ids=["evaluate", "certify", "train"]
)
def test_other_class_shares_than_the_split(
    folder: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    assert run([*command, "--sample", "first", "--out", "F"]) == 0
    warning = (
        "the class shares of these 16 images differ significantly from those of folder:pictures t"
    )
    assert f"warning: {warning}" in capsys.readouterr().err
    assert read_summary("F").notes[0].startswith(warning)
    section = alarms(read_run("F"))
    assert section is not None and section.alarms[0][0].startswith(f"Note: {warning}")


def test_an_unknown_sample(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*EVALUATE, "--sample", "balanced", "--out", "E"]) == 2
    assert (
        "`sample` must be one of first, random, stratified, got 'balanced'"
        in capsys.readouterr().err
    )
    assert not (folder / "E").exists()
