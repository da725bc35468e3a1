"""The study of adaptive smoothing, told with two hardly trained networks and a handful of digits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from equipoise import data, mixing, models
from equipoise.attacks import Apgd, Square
from equipoise.core import records
from equipoise.core.checks import InputError
from equipoise.core.records import Run
from equipoise.core.threat import Threat
from equipoise.evaluation import Conditions
from equipoise.evaluation.gate_adversaries import leads
from equipoise.mixing import GatedClassifier, MixedClassifier
from equipoise.mixing.frontier import Point
from equipoise.models import checkpoint
from equipoise.studies.adaptive_choice import FIXED, GATED, KINDS
from equipoise.studies.adaptive_size import AdaptiveStudySize
from equipoise.studies.adaptive_smoothing import PARTS, Study
from equipoise.studies.local_pair import Pair
from equipoise.training import TrainingPlan
from equipoise.training import train as learn
from equipoise.training.objectives import Standard

PLAN = TrainingPlan(epochs=1, batch_size=16, optimizer="adamw", lr=1e-3, held_out=0, ema=0.8, clip=10.0)
THREAT = Threat("linf", 0.03)
TINY = AdaptiveStudySize(plan=PLAN, width=2, steps=2, keep=0.9, keeps=(0.8,), gate_keeps=(0.8,),
            version=lambda: [Apgd("margin", 3), Square(10)], light=lambda: [Apgd("margin", 2)],
            strike=lambda: [Apgd("margin", 2)], pgd=2, targets=(0.0, 1.0), plain=(0.5, 0.7, 0.9),
            thresholds=(0.2, 0.5), gaps=(0.0, 0.3, 0.8), shifts=(0.4,), nuts=(3, 2), rounds=2, ablation_steps=2,
            ablation=PLAN, weights=((0.0, 1.5, 0.2), (1.5, 0.0, 0.0)), scales=(1.0, 4.0), tested=6, batch_size=64)


def _study(folder: Path) -> Study:
    """Bases are trained once and read from then on, as the study itself does it."""
    train, test = data.load("digits", split="train", count=400), data.load("digits", split="test", count=6)
    names = []
    for seed, name in enumerate(("accurate", "robust")):
        path = folder / f"{name}.safetensors"
        if not path.exists():
            model = models.build("cnn_small", num_classes=10, image_shape=(1, 8, 8), seed=seed)
            plan = TrainingPlan(epochs=4, optimizer="adamw", lr=5e-3, held_out=0, seed=seed)
            checkpoint.save(path, learn(model, Standard(), train.slice(0, 300), plan), {})
        names.append(str(path))
    pair = Pair(models.load(names[0]), models.load(names[1]), (names[0], names[1]), train.slice(300, 100), test,
                lambda: train.slice(0, 32), 32)
    conditions = Conditions(THREAT, torch.device("cpu"), 0, TINY.batch_size)
    run = Run(folder / "run", {"verb": "reproduce", "study": "adaptive-smoothing", "seed": 0}, {"command": "test"})
    return Study(run, pair, TINY, conditions)


def test_every_part_leaves_its_rows_and_its_section(tmp_path: Path) -> None:
    page = _study(tmp_path).tell(PARTS)
    text = page.read_text()
    for title in ("What a perfect gate could do", "What the gate says", "The trade-off under C and D",
                  "Attacks that ignore the gate", "Which attacks to train against", "Loss weights and scale"):
        assert f"<h2>{title}</h2>" in text
    rows = records.read(tmp_path / "run")
    assert {row["model"] for row in rows} == {"accurate", "robust", *KINDS}
    gates = {row["attack"] for row in rows if row["model"] == "gate on MixedNUTS"}
    assert gates == {"clean", "A", "B", "C", "D", "std", "rob"}
    told = records.summary(tmp_path / "run")
    value = {(row["model"], row["metric"]): row["value"] for row in told["results"]}
    for row in told["bounds"]:
        assert row["value"] >= value[row["model"], row["metric"]]
    assert set(told["matched"]) == set(KINDS)
    both = {row["model"]: row["value"] for row in told["joint"]}
    assert both["plain"] == value["plain", "C"] and both["gate"] <= min(value["gate", "C"], value["gate", "D"])
    lined = {row["model"] for row in records.read(tmp_path / "run" / "trade-off")}
    assert lined == {"plain, 0.8", "MixedNUTS, 0.8"}
    assert {row["model"] for row in records.read(tmp_path / "run" / "trade-off-gates")} == {
        "gate, 0.8", "gate on MixedNUTS, 0.8"}
    found = leads([*rows, *records.read(tmp_path / "run" / "trade-off")], GATED, FIXED)
    assert told["leads"] == found, "the lines are those of the part trade-off and the chosen mixtures"
    loaded = mixing.load(f"mixture:{tmp_path}/run/mixtures/gate-0.9")
    assert isinstance(loaded, GatedClassifier)
    ablated = {row["model"] for row in records.read(tmp_path / "run" / "ablation")}
    assert {"constant", "scale 4", "c_CE 1.5, c_BCE 0, c_prod 0"} <= ablated
    # DemoResult again, nothing is done anew and not a byte of the page changes.
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*.*")
            if path.suffix in (".jsonl", ".safetensors", ".json")}
    assert _study(tmp_path).tell(PARTS).read_text() == text
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


def test_a_fit_without_help_still_gives_mixednuts_a_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a fit answers with the robust model alone; under its name plain mixing would be compared."""
    study = _study(tmp_path)
    points = [Point(lose, 0.9, 0.8, "linear", scale, 1.0, 0.0) for lose, scale in ((0.5, 3.0), (0.05, 7.0))]
    alone = MixedClassifier(study.pair.accurate, study.pair.robust, 1.0, hard=True, frontier=tuple(points))
    monkeypatch.setattr("equipoise.studies.adaptive_choice.fit_into", lambda *given, **more: alone)
    for kind in ("MixedNUTS", "gate on MixedNUTS"):
        found = study.shelf._candidates(kind, study._fresh)
        assert {each.logit_map.facts()["scale"] for each in found if each.logit_map is not None} == {7.0}
        assert all(each.hard and each.logit_map is not None for each in found)


def test_parts_can_be_told_one_by_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="part train"):
        _study(tmp_path).tell(["choose"])
    with pytest.raises(InputError, match="part choose"):
        _study(tmp_path).tell(["adversaries"])
    text = _study(tmp_path).tell(["train"]).read_text()
    assert "<h2>What was found</h2>" in text and "What the gate says" not in text
    assert (tmp_path / "run" / "gates" / "C.safetensors").exists()
