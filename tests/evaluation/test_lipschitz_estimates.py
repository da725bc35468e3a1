"""Local Lipschitz estimates as rows, results and a section of the page."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from equipoise import models
from equipoise.attacks import pgd
from equipoise.core import records, summary
from equipoise.core.checks import InputError
from equipoise.core.threat import Threat
from equipoise.data import Dataset
from equipoise.evaluation import Conditions, evaluate
from equipoise.evaluation import lipschitz_estimates as room
from equipoise.reporting import render
from equipoise.reporting.estimates import collect


def data(count: int = 7) -> Dataset:
    images = torch.randint(0, 256, (count, 3, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return Dataset("made", "test", images, torch.arange(count) % 4, torch.arange(count) + 30, tuple("abcd"))


def conditions(eps: float = 0.01) -> Conditions:
    return Conditions(Threat("linf", eps), torch.device("cpu"), batch_size=4)


def base() -> torch.nn.Module:
    return models.build("cnn_small", num_classes=4, image_shape=(3, 8, 8), seed=1).eval()


def test_rows_results_and_page(tmp_path: Path) -> None:
    evaluate({"m": base()}, data(), attacks={"pgd": pgd}, conditions=conditions(), out=tmp_path / "run")
    attacked = records.read(tmp_path / "run")
    results = room.estimated({"m": base()}, data(), conditions(), tmp_path / "run", attacked)
    rows = records.read(tmp_path / "run" / "estimate")
    assert [row["index"] for row in rows] == list(range(30, 37)) and all(row["lipschitz"] > 0 for row in rows)
    # The estimate lets every class do its worst, so it leaves no more than a single attacked image shows.
    worst = {row["index"]: row["margin"] for row in attacked if row["attack"] == "pgd"}
    assert all(row["margin"] <= worst[row["index"]] + 0.01 for row in rows if row["correct"])
    kept = [summary.value(results, "m", f"kept@{alpha:g}") for alpha in room.ALPHAS]
    assert kept == sorted(kept)
    assert all(row["estimate"] and row["low"] <= row["value"] <= row["high"] for row in results)
    told = render.write(tmp_path / "run").read_text(encoding="utf-8")
    assert "Estimated margins" in told and "no certificates" in told
    assert set(collect(results)) == {("m", "kept@"), ("m", "attacked-kept@")}


def test_resumes_and_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = room.estimated({"m": base()}, data(), conditions(), tmp_path / "run")
    monkeypatch.setattr(room, "estimate_local", None)
    assert room.estimated({"m": base()}, data(), conditions(), tmp_path / "run") == results
    with pytest.raises(InputError, match="`out` must be a new folder"):
        room.estimated({"m": base()}, data(), conditions(0.02), tmp_path / "run")
