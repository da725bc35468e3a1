from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from equipoise import data, mixing
from equipoise.attacks import Apgd, Square, Suite
from equipoise.cli.main import run
from equipoise.core import records, summary
from equipoise.core.threat import Threat
from equipoise.fitting import AttackStrength
from equipoise.mixing import MixedClassifier
from equipoise.studies import demo as story
from equipoise.studies.demo import DemoResult, demo


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same story with few images, hardly any training and short attacks."""
    for name, value in {"TRAINED": 4992, "TESTED": 16, "EPOCHS": (1, 1), "LOSE": 20.0, "SWEPT": 24,
                        "STRENGTH": AttackStrength(steps=2, targets=1, pool=1), "ALPHAS": (0.0, 0.5, 1.0)}.items():
        monkeypatch.setattr(story, name, value)
    monkeypatch.setattr("equipoise.attacks.registry", lambda name: Suite((Apgd("margin", 4), Square(4))))


def _told(out: Path) -> DemoResult:
    return demo(out, torch.device("cpu"))


def test_the_story_leaves_everything_it_promises(tmp_path: Path, small: None) -> None:
    told = _told(tmp_path / "demo")
    there = {str(path.relative_to(tmp_path / "demo")) for path in (tmp_path / "demo").rglob("*") if path.is_file()}
    assert {"run.toml", "rows.jsonl", "summary.json", "report.html", "mixture/mixture.toml", "mixture/summary.json",
            "accurate/last.safetensors", "robust/last.safetensors", "sweep/summary.json", "figures/alpha.svg",
            "figures/nuts-margins.svg", "figures/nuts-landscape.svg", "figures/nuts-trade-off.svg"} <= there
    kept = json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert {(row["model"], row["metric"]) for row in kept["results"]} >= {
        (model, metric) for model in ("accurate", "robust", "mixed") for metric in ("clean", "worst")}
    assert {row["attack"] for row in records.read(tmp_path / "demo") if row["model"] == "mixed"} == {
        "clean", "fast", "adaptive"}
    mixture = mixing.load(f"mixture:{tmp_path}/demo/mixture")
    assert isinstance(mixture, MixedClassifier) and mixture.fitted is not None and mixture.logit_map is not None
    assert told.promise == kept["promise"] == mixture.fitted.promise and kept["verb"] == "demo"
    # What is judged was neither learnt from nor fitted on: that is another split.
    assert not mixture.fitted.overlap(data.load("shapes", split="test", count=16))
    assert mixture.fitted.overlap(data.load("shapes", split="train").slice(4992, 128)) == ("4992-5119",)
    page = told.page.read_text()
    for title in ("What was fitted", "Trade-off against plain mixing", "Margins before and after the map", "Landscape",
                  "Cost of a prediction"):
        assert f"<h2>{title}</h2>" in page
    assert str(tmp_path) not in page, "the page says nothing of this machine's folders"


def test_the_same_numbers_every_time_also_when_resumed(tmp_path: Path, small: None,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equipoise.reporting.render", lambda out: out / "report.html")  # drawing is half of the time
    _told(tmp_path / "one")
    _told(tmp_path / "two")
    names = ("rows.jsonl", "sweep/rows.jsonl", "mixture/rows.jsonl", "mixture/mixture.toml", "robust/last.safetensors")
    first = {name: (tmp_path / "one" / name).read_bytes() for name in names}
    assert first == {name: (tmp_path / "two" / name).read_bytes() for name in names}
    (tmp_path / "one" / "summary.json").unlink()
    (tmp_path / "one" / "mixture" / "summary.json").unlink()
    (tmp_path / "one" / "robust" / "summary.json").unlink()
    _told(tmp_path / "one")
    assert first == {name: (tmp_path / "one" / name).read_bytes() for name in names}
    with np.load(tmp_path / "one" / "arrays.npz") as arrays:
        assert {"example_clean", "nuts_landscape"} <= set(arrays.files)


def test_the_verb_tells_the_promise_and_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    row = {"model": "mixed", "metric": "clean", "value": 0.5, "low": 0.4, "high": 0.6, "n": 9}
    monkeypatch.setattr(story, "demo", lambda out, device, seed: DemoResult(
        [row], seed > 0, f"keeps seed {seed}", Threat("linf", 0.1), out / "report.html"))
    assert run(["demo", "--out", str(tmp_path / "D"), "--device", "cpu", "--seed", "3"]) == 0
    out = capsys.readouterr().out
    assert "50.0 %" in out and "the mixture keeps seed 3" in out and "report.html" in out
    assert run(["demo", "--out", str(tmp_path / "D"), "--device", "cpu"]) == 0
    assert "the mixture" not in capsys.readouterr().out, "what did not help is not called a mixture"
    assert threads == [1, 1], "the numbers must not depend on the number of cores"


@pytest.mark.slow
def test_the_trade_off_is_there_and_the_mixture_has_the_better_of_it(tmp_path: Path) -> None:
    results = _told(tmp_path / "demo").results
    clean, worst = ({model: summary.value(results, model, metric) for model in ("accurate", "robust", "mixed")}
                    for metric in ("clean", "worst"))
    gap = clean["accurate"] - clean["robust"]
    assert gap >= 0.05
    assert clean["mixed"] >= clean["robust"] + 0.6 * gap
    assert worst["mixed"] >= worst["robust"] - 0.03
    assert worst["accurate"] <= 0.10
