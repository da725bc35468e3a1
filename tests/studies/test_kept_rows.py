"""Scripts that keep rows of runs, and that draw kept rows."""

from __future__ import annotations

import re
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.text import Annotation, Text

import equipoise as eq
from equipoise import models
from equipoise.core.aggregation import compared_lines
from equipoise.core.checks import InputError
from equipoise.mixing import MixedClassifier
from equipoise.reporting.charts import DARK, styled
from equipoise.studies.comparison_table import read_export

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run_script(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    runpy.run_path(str(BENCHMARKS / name), run_name="__main__")


def test_rows_of_an_evaluation_give_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bases = [
        models.build("cnn_small", num_classes=10, image_shape=(1, 8, 8), seed=seed).eval()
        for seed in (1, 2)
    ]
    data = eq.load_data("digits", split="test", count=40)
    with torch.no_grad():  # no class is preferred, and the robust model is right about most images
        for base in bases:
            base.fc.bias.sub_(base(data.images.float() / 255).mean(0))  # type: ignore[union-attr, operator]
        predicted = bases[1](data.images.float() / 255).argmax(1)
    data = replace(data, labels=torch.where(torch.arange(40) < 30, predicted, data.labels))
    result = eq.evaluate(
        {"mixed": MixedClassifier(bases[0], bases[1], 0.8)},
        data,
        threat=eq.Threat("linf", 0.05),
        attack="pgd,apgd",
        steps=2,
        out=tmp_path / "run",
        device="cpu",
    )
    run_script(
        monkeypatch,
        "evaluation_rows.py",
        tmp_path / "run",
        tmp_path / "kept",
        "--only",
        "robust",
        "--only",
        "mixed",
        "--name",
        "mixed=cascade",
    )
    robust, cascade = compared_lines(read_export(tmp_path / "kept"))
    assert (robust.method.name, cascade.method.name, cascade.method.mixture) == (
        "robust",
        "cascade",
        "alpha 0.8",
    )
    for line, model in ((robust, "robust"), (cascade, "mixed")):
        assert (line.clean.value, line.clean.n) == (result.result(model, "clean").value, 40)
        assert line.attacked.value == result.result(model, "worst").value < line.clean.value
    first = (tmp_path / "kept" / "rows.csv.gz").read_bytes()
    run_script(
        monkeypatch,
        "evaluation_rows.py",
        tmp_path / "run",
        tmp_path / "kept",
        "--only",
        "robust",
        "--only",
        "mixed",
        "--name",
        "mixed=cascade",
    )
    assert (tmp_path / "kept" / "rows.csv.gz").read_bytes() == first
    with pytest.raises(InputError, match="mixture"):
        run_script(
            monkeypatch,
            "evaluation_rows.py",
            tmp_path / "run",
            tmp_path / "kept",
            "--only",
            "mixture",
        )


def trade_offs() -> dict[str, Any]:
    return runpy.run_path(str(BENCHMARKS / "trade_offs.py"))


def test_points_are_those_of_the_rows() -> None:
    script = trade_offs()
    source = script["Source"]
    read = script["read_points"](source("", "mixtures/resnet18", detail="six views"))
    points = {point.label: point for point in read}
    switch = points["confidence switch, six views"]
    assert (switch.clean, switch.attacked) == (pytest.approx(87.4), pytest.approx(44.3))
    assert switch.attacked_interval == pytest.approx((46.0 - 2.5, 46.0 - 0.9), abs=0.06), (
        "of the paired loss"
    )
    assert points["robust, six views"].attacked_interval == pytest.approx((42.9, 49.1), abs=0.06), (
        "exact"
    )
    assert not any(label.startswith("auto") for label in points), "equal mixtures are one point"
    study = script["read_points"](
        source("", "mixednuts/smoke", part="curves", only=("MixedNUTS", "robust"))
    )
    shown = sorted(
        (point.family, round(point.clean, 1), round(point.attacked, 1), point.joined)
        for point in study
    )
    assert shown == [
        ("MixedNUTS", 95.0, 65.0, True),
        ("MixedNUTS", 95.0, 68.3, True),
        ("MixedNUTS", 98.3, 53.3, True),
        ("robust", 95.0, 66.7, False),
    ]


def test_labels_cover_neither_points_nor_each_other() -> None:
    script = trade_offs()
    with styled(DARK):
        panels: dict[str, list[Any]] = {}
        for source in script["SOURCES"]:
            panels.setdefault(source.panel, []).extend(script["read_points"](source))
        figure = script["draw"](panels, DARK)
        figure.draw_without_rendering()
        for axes in figure.axes:
            labels = [
                text for text in axes.texts if isinstance(text, Annotation) and text.get_text()
            ]
            assert {"robust", "confidence switch"} <= {text.get_text() for text in labels}
            boxes = [Text.get_window_extent(text) for text in labels]
            points = [
                axes.transData.transform(point)
                for line in axes.lines
                for point in line.get_xydata()
            ]
            assert points and not any(box.contains(*point) for box in boxes for point in points)
            assert not any(
                box.overlaps(other) for i, box in enumerate(boxes) for other in boxes[:i]
            )


def test_rows_of_gates_give_the_tables_of_the_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = BENCHMARKS.parent / "docs" / "results"
    page = (results / "adaptive-smoothing.md").read_text()
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for data in ("cifar100", "cifar10"):
        run_script(monkeypatch, "adaptive_smoothing_rows.py", results / "adaptive-smoothing" / data)
        printed = dict(re.findall(r"^(.+): ([\d.]+) \[", capsys.readouterr().out, re.MULTILINE))
        for adversary in "ABC":
            cells = [
                f"{printed[f'settings, trained against {adversary}, {attack}']} %"
                for attack in ("clean", "A", "B", "C", "D")
            ]
            assert f"| {adversary} | {' | '.join(cells)} |" in page
    for c_prod in ("0", "0.1", "0.2"):
        pairs = ("c_CE 0, c_BCE 1.5", "c_CE 0.5, c_BCE 1", "c_CE 1, c_BCE 0.5", "c_CE 1.5, c_BCE 0")
        row = next(
            line
            for line in page.splitlines()
            if line.startswith(f"| c_prod = {c_prod} |") and "(" in line
        )
        assert re.findall(r"\| ([\d.]+) %", row) == [
            printed[f"ablation, {pair}, c_prod {c_prod}, B"] for pair in pairs
        ]
    for name, attack in (("under B", "B"), ("clean", "clean")):
        names = ("scale 0.5", "scale 1", "scale 2", "scale 4", "constant")
        cells = [f"{printed[f'ablation, {model}, {attack}']} %" for model in names]
        assert f"| here: {name} | {' | '.join(cells)} |" in page
