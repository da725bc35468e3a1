"""The study of local smoothing, told with two untrained networks and a handful of digits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from equipoise import data, models
from equipoise.core import records
from equipoise.core.checks import InputError
from equipoise.core.records import Run
from equipoise.core.threat import Threat
from equipoise.evaluation import Conditions
from equipoise.local_smoothing.policy import TARGETS
from equipoise.local_smoothing.smoothing import SmoothedClassifier
from equipoise.studies.local_figures import aimed_rows, strength
from equipoise.studies.local_pair import Pair
from equipoise.studies.local_size import LocalStudySize
from equipoise.studies.local_smoothing import PARTS, Study
from equipoise.training import TrainingPlan

TINY = LocalStudySize(neighbours=(1, 3), weighted=(3,), neighbour_gammas=(0.1, 10.0), weights=(0.5,), steps=2, long=(2,),
            policy=TrainingPlan(epochs=1, batch_size=8, optimizer="adamw", lr=1e-3, held_out=0), width=2,
            eps_factors=(0.5, 1.5), auto=2, version="fast", batch_size=8)


def _pair() -> Pair:
    train, test = data.load("digits", split="train", count=40), data.load("digits", split="test", count=6)
    g, h = (models.build("cnn_small", num_classes=10, image_shape=(1, 8, 8), seed=seed) for seed in (1, 2))
    return Pair(g, h, ("zoo:cnn_small", "zoo:cnn_small"), train.slice(30, 10), test, lambda: train.slice(0, 24), 16)


def _study(out: Path) -> Study:
    conditions = Conditions(Threat("linf", 0.1), torch.device("cpu"), 0, TINY.batch_size)
    run = Run(out, {"verb": "reproduce", "study": "local-smoothing", "seed": 0}, {"command": "test"})
    return Study(run, _pair(), TINY, conditions)


def test_every_part_leaves_its_rows_and_its_figure(tmp_path: Path) -> None:
    page = _study(tmp_path / "run").tell(PARTS)
    text = page.read_text()
    for title in ("Trust terms", "Neighbours as the oracle", "Where the bases change places",
                  "The policy under aimed attacks", "Other radii", "AutoAttack through the policy",
                  "Gradients of both sides"):
        assert f"<h2>{title}</h2>" in text
    rows = records.read(tmp_path / "run" / "trust")
    assert {row["model"] for row in rows} >= {"constant, probabilities", "ratio, logits", "accurate", "robust"}
    softened = {(row["model"], row["alpha"] < 1) for row in records.read(tmp_path / "run" / "neighbours")
                if row["attack"] == "pgd-soft"}
    assert softened == {(f"{k} neighbours, {weights}", True) for k, weights in ((1, "plain"), (3, "plain"),
                                                                                (3, "distance"))}
    aimed = records.read(tmp_path / "run" / "targets")
    assert len(aimed) == 6 * 3 * len(TARGETS) and {row["model"] for row in aimed} == {"accurate", "robust", "adaptive"}
    # DemoResult again, nothing is done anew and not a byte of the page changes.
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*.jsonl")}
    assert _study(tmp_path / "run").tell(PARTS).read_text() == text
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*.jsonl")} == kept


def test_a_part_that_was_cut_off_ends_with_the_same_rows(tmp_path: Path) -> None:
    _study(tmp_path / "run").tell(["trust"])
    path = tmp_path / "run" / "trust" / "rows.jsonl"
    whole = path.read_text().splitlines()
    # Without the rules that ask first for attacks that all share.
    left = [line for line in whole if "constant, logits" not in line and "pgd-soft" not in line]
    path.write_text("\n".join(left) + "\n")
    (path.parent / "summary.json").unlink()
    _study(tmp_path / "run").tell(["trust"])
    assert sorted(path.read_text().splitlines()) == sorted(whole)


def test_parts_can_be_told_one_by_one(tmp_path: Path) -> None:
    study = _study(tmp_path / "run")
    with pytest.raises(InputError, match="policy"):
        study.tell(["radii"])
    text = study.tell(["gradients"]).read_text()
    assert "Gradients of both sides" in text and "<h2>Trust terms" not in text


def test_aimed_attacks_are_judged_in_full_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, seen = _pair(), []

    class Watched(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.backends.cudnn.allow_tf32)
            return torch.zeros(len(x), 10)

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    conditions = Conditions(Threat("linf", 0.1), torch.device("cpu"), 0, 8)
    rule = SmoothedClassifier(pair.accurate.eval(), pair.robust.eval(), 1.0)
    rows = aimed_rows(tmp_path / "run", rule, {"watched": Watched()}, pair.test, conditions, 1)
    assert len(rows) == len(TARGETS) * len(pair.test) and seen and not any(seen)


def test_strengths_are_the_same_where_the_scale_rounds_differently() -> None:
    for scale in (0.0731, 1.0, 41.9):
        found = {strength(0.98, scale * (1 + jitter)) for jitter in (-1e-6, 0.0, 1e-6)}
        assert len(found) == 1 and found.pop() == pytest.approx(49 / scale, rel=5e-3)
