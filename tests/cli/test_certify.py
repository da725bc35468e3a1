"""`equipoise certify` as a user types it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from equipoise import models
from equipoise.cli.main import run
from equipoise.core import records
from equipoise.models import checkpoint


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with six images and two checkpoints."""
    monkeypatch.chdir(tmp_path)
    chance = np.random.default_rng(0)
    np.savez("images.npz", images=chance.integers(0, 256, (6, 3, 8, 8), dtype=np.uint8), labels=np.arange(6) % 4)
    for seed, name in enumerate(("accurate", "robust")):
        base = models.build("cnn_small", num_classes=4, image_shape=(3, 8, 8), seed=seed)
        checkpoint.save(f"{name}.safetensors", base, {})
    return tmp_path


def certify(*arguments: str) -> int:
    return run(["certify", "robust.safetensors", "--data", "npz:images.npz", "--out", "run", "--samples", "150",
                "--n0", "20", *arguments])


def metrics() -> set[str]:
    return {row["metric"] for row in records.summary("run")["results"]}


def test_certify_a_checkpoint(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert certify("--sigma", "0.1") == 0
    assert {"acr", "certified@0.00", "certified@0.25", "abstained", "clean", "samples"} <= metrics()
    assert "run/summary.json" in capsys.readouterr().out
    told = records.summary("run")
    assert certify("--sigma", "0.1") == 0 and records.summary("run") == told
    assert certify("--sigma", "0.1", "--attack", "--attack-name", "pgd") == 0, "a cross-check may come later"
    assert "broken-pgd" in metrics() or not any(row["radius"] for row in records.read("run"))


@pytest.mark.parametrize("plan", [["--tolerance", "0.02"], ["--decide-radius", "0.1"], ["--soft"], ["--sound"],
                                  ["--two-sided"], ["--accurate", "accurate.safetensors", "--alpha", "0.8"]])
def test_plans(place: Path, plan: list[str]) -> None:
    assert certify("--sigma", "0.1", *plan) == 0
    assert len(records.read("run")) == 6


def test_alpha_for_a_clean_accuracy(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two sigmas of one model; alpha comes from the three images that are not certified."""
    wish = ["--sigma", "0.05,0.2", "--accurate", "accurate.safetensors", "--clean", "0", "--count", "3"]
    assert certify(*wish) == 0
    said = capsys.readouterr().out
    assert "Frontier" in said and "3 other images" in said
    told = records.summary("run")
    assert [row["sigma"] for row in told["chosen"]] == [0.05, 0.2]
    assert {row["index"] for row in records.read("run") if row["attack"] == "choose"} == {3, 4, 5}
    assert run(["report", "run"]) == 0 and Path("run/figures/frontier.svg").exists()


def test_several_models_in_one_page(place: Path) -> None:
    assert run(["certify", "robust.safetensors", "accurate.safetensors", "--data", "npz:images.npz", "--out", "run",
                "--samples", "150", "--n0", "20", "--sigma", "0.05,0.1", "--diagnose"]) == 0
    assert {row["sigma"] for row in records.read("run") if row["attack"] == "certify"} == {0.05, 0.1}
    assert run(["report", "run"]) == 0
    assert Path("run/figures/certified.svg").exists()


@pytest.mark.parametrize(("arguments", "sentence"), [
    (["--sigma", "0.1,0"], "`sigma` must be positive"),
    (["--sigma", "much"], "`sigma` must be a number"),
    (["--sigma", "0.1", "--clean", "0.5"], "`alpha` must be given together with `accurate`"),
    (["--sigma", "0.1", "--accurate", "accurate.safetensors", "--clean", "0.5"], "`count` must leave images"),
    (["--sigma", "0.1", "--accurate", "accurate.safetensors", "--clean", "2", "--count", "3"], "`clean` must lie in"),
    (["--sigma", "0.1", "--accurate", "accurate.safetensors", "--clean", "0.5", "--alpha", "0.8"],
     "`clean` must be left out beside `alpha`"),
    (["--sigma", "0"], "`sigma` must be positive"),
    (["--sigma", "0.1", "--failure", "1"], "`failure` must lie in (0, 1)"),
    (["--sigma", "0.1", "--n0", "200"], "`samples` must be at least n0"),
    (["--sigma", "0.1", "--alpha", "0.8"], "`alpha` must be given together with `accurate`"),
    (["--sigma", "0.1", "--alpha", "0.4", "--accurate", "accurate.safetensors"], "`alpha` must lie in [0.5, 1]"),
    (["--sigma", "0.1", "--norm", "linf"], "`norm` must be l2"),
    (["--sigma", "0.1", "--tolerance", "0.1", "--decide-radius", "0.1"], "`decide_radius` must be left out"),
])
def test_mistakes_are_one_sentence(place: Path, capsys: pytest.CaptureFixture[str], arguments: list[str],
                                   sentence: str) -> None:
    assert certify(*arguments) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and sentence in said[0]


def test_help_names_the_units(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["certify", "--help"]) == 0
    assert "[0, 1] pixels" in " ".join(capsys.readouterr().out.split())
