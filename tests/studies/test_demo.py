from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from equipoise import mixing, summary
from equipoise.mixing import MixedClassifier
from equipoise.studies import demo as story
from equipoise.studies.demo import Told, demo


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same story with few images and hardly any training."""
    for name, value in {"TRAINED": 4992, "TESTED": 40, "EPOCHS": (1, 1), "ALPHAS": (0.0, 0.5, 1.0)}.items():
        monkeypatch.setattr(story, name, value)


def _told(out: Path) -> Told:
    return demo(out, torch.device("cpu"))


def test_the_story_leaves_everything_it_promises(tmp_path: Path, small: None) -> None:
    told = _told(tmp_path / "demo")
    there = {str(path.relative_to(tmp_path / "demo")) for path in (tmp_path / "demo").rglob("*") if path.is_file()}
    assert {"run.toml", "rows.jsonl", "summary.json", "report.html", "mixture/mixture.toml", "sweep/summary.json",
            "figures/alpha.svg"} <= there
    kept = json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert {(row["model"], row["metric"]) for row in kept["results"]} >= {
        (model, metric) for model in ("accurate", "robust", "mixed") for metric in ("clean", "worst")}
    mixture = mixing.load(f"mixture:{tmp_path}/demo/mixture")
    assert isinstance(mixture, MixedClassifier) and mixture.alpha == told.alpha == kept["alpha"]
    assert str(tmp_path) not in told.page.read_text(), "the page says nothing of this machine's folders"


def test_the_same_numbers_every_time_also_when_resumed(tmp_path: Path, small: None) -> None:
    _told(tmp_path / "one")
    _told(tmp_path / "two")
    for name in ("rows.jsonl", "sweep/rows.jsonl", "mixture/robust.safetensors"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    before = (tmp_path / "one" / "rows.jsonl").read_bytes()
    (tmp_path / "one" / "summary.json").unlink()
    _told(tmp_path / "one")
    assert (tmp_path / "one" / "rows.jsonl").read_bytes() == before
    with np.load(tmp_path / "one" / "arrays.npz") as arrays:
        assert "example_clean" in arrays


@pytest.mark.slow
def test_the_trade_off_is_there_and_the_mixture_has_the_better_of_it(tmp_path: Path) -> None:
    results = _told(tmp_path / "demo").results
    clean, worst = ({model: summary.value(results, model, metric) for model in ("accurate", "robust", "mixed")}
                    for metric in ("clean", "worst"))
    gap = clean["accurate"] - clean["robust"]
    assert gap >= 0.05
    assert clean["mixed"] >= clean["robust"] + 0.4 * gap
    assert worst["mixed"] >= 0.85 * worst["robust"]
    assert worst["accurate"] <= 0.10
