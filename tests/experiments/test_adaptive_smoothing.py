"""The experiment on adaptive smoothing: its kept rows, and a run at smoke size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import equipoise as eq
from equipoise import models
from equipoise.data import pixels
from equipoise.mixing import GatedClassifier, MixedClassifier, new_gate
from experiments import attacked, common
from experiments.adaptive_smoothing import __main__ as experiment

README = (experiment.HERE / "README.md").read_text(encoding="utf-8")
KEPT = {name: common.read_kept(experiment.ROWS / f"{name}.csv.gz") for name in experiment.KEPT}


def run(*arguments: object) -> None:
    parser = common.new_parser("adaptive_smoothing", experiment.PARTS, experiment.__doc__)
    common.run(experiment.main, parser, [str(argument) for argument in arguments])


def test_the_page_shows_the_kept_rows() -> None:
    assert experiment.page(KEPT) in README


def test_the_range_of_the_ablation_follows_from_the_kept_rows() -> None:
    models = {row["model"] for row in KEPT["cifar10"] if row["part"] == "ablation"}
    accuracies = {}
    for model in models:
        key = {"part": "ablation", "model": model}
        accuracies[model] = float(attacked.percent(KEPT["cifar10"], ["B"], **key))
    plain = accuracies.pop("plain")
    prose = " ".join(README.split())
    assert len(accuracies) == 16
    assert f"{min(accuracies.values())} to {max(accuracies.values())} %" in prose
    assert f"{plain} %" in prose


def test_the_crossing_and_the_gaps_of_the_page_follow_from_the_kept_rows() -> None:
    rows, prose = KEPT["cifar10-resnet8"], " ".join(README.split())
    assert experiment.crossing_text(rows) in prose
    text = experiment.confidence_text(rows)
    assert "robust, pgd, right: gap 0.20" in text and "0.20 under PGD" in prose
    assert "robust, smallest margin, right: gap 0.22" in text and "0.22 at the smallest" in prose
    assert "robust, clean, wrong: gap 0.11" in text and "against 0.11" in prose


def test_the_figure_is_drawn_from_the_kept_rows(tmp_path: Path) -> None:
    experiment.draw(KEPT["cifar10-resnet8"], tmp_path / "alphas.svg")
    assert (tmp_path / "alphas.svg").read_text(encoding="utf-8").count("<path") > 4


def test_a_run_without_gates_at_smoke_size(tmp_path: Path) -> None:
    parts = ("--part", "alphas", "--part", "transfer", "--part", "confidence")
    run("--count", 20, "--out", tmp_path, *parts)
    first = (tmp_path / "rows.csv.gz").read_bytes()
    rows = common.read_kept(tmp_path / "rows.csv.gz")
    assert {row["part"] for row in rows} == {"alphas", "transfer", "confidence"}
    # At alpha 1 the mixture is the robust model, and PGD on it is PGD on the mixture.
    at_one = {"part": "alphas", "strength": "1"}
    assert attacked.worst(rows, ["rob"], **at_one) == attacked.worst(rows, ["mix"], **at_one)
    key = {"part": "confidence", "model": "robust"}
    clean = attacked.correct_by_image(rows, attack="clean", **key)
    smallest = attacked.correct_by_image(rows, attack="smallest margin", **key)
    assert all(clean[index] for index in smallest if smallest[index])
    # A finished run is read, and a folder of another run is refused.
    run("--count", 20, "--out", tmp_path, *parts)
    assert (tmp_path / "rows.csv.gz").read_bytes() == first
    with pytest.raises(SystemExit) as stopped:
        run("--count", 20, "--seed", 1, "--out", tmp_path, *parts)
    assert stopped.value.code == 2


@pytest.mark.slow
def test_a_run_with_gates_at_smoke_size(tmp_path: Path) -> None:
    run("--count", 20, "--out", tmp_path, "--part", "adversaries", "--part", "ablation")
    rows = common.read_kept(tmp_path / "rows.csv.gz")
    for letter in experiment.TRAINED_AGAINST:
        key = {"part": "adversaries", "model": f"trained against {letter}"}
        correct = [
            attacked.correct_by_image(rows, attack=attack, **key)
            for attack in ("clean", *experiment.ADVERSARIES)
        ]
        assert [len(by_image) for by_image in correct] == [20] * 5
        for index, is_correct in correct[0].items():
            assert is_correct or not any(by_image[index] for by_image in correct[1:])
    ablated = {row["model"] for row in rows if row["part"] == "ablation"}
    assert ablated == {"c_CE 0, c_BCE 1.5, c_prod 0.2", "scale 0.5", "scale 2", "plain"}


def test_the_shift_is_the_largest_with_the_clean_accuracy() -> None:
    parser = common.new_parser("adaptive_smoothing", experiment.PARTS, None)
    args = parser.parse_args(["--device", "cpu"])
    digits = eq.load_data("digits", split="test", count=60)
    x = pixels(digits.images)
    g, h = (
        models.build("cnn_small", num_classes=10, image_shape=(1, 8, 8), seed=seed).eval()
        for seed in (1, 2)
    )
    gate = GatedClassifier(g, h, new_gate(g, h, x[:2], width=4)).eval()
    with torch.no_grad():  # g is right about the first 40 images, h about the others
        labels = torch.cat((g(x[:40]).argmax(1), h(x[40:]).argmax(1)))
    images = replace(digits, labels=labels)

    def accuracy(model: torch.nn.Module) -> float:
        with torch.no_grad():
            return float((model(x).argmax(1) == labels).float().mean())

    target = (accuracy(g) + accuracy(h)) / 2
    shifted = experiment.shifted(args, gate, images, scale=1.0)
    assert accuracy(shifted) >= target
    further = shifted.with_range(0.0, 1.0, shift=shifted.shift + 0.1)
    assert shifted.shift == experiment.SHIFTS[-1] or accuracy(further) < target
    plain = experiment.plain_mixture(args, gate, images)
    assert accuracy(plain) >= target
    assert accuracy(MixedClassifier(g, h, plain.alpha + 0.01).eval()) < target
