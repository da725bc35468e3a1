"""The public functions: the README's example, and the same rows as the commands, byte for byte."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import equipoise as eq
from equipoise.attacks import Apgd, Square, Suite
from equipoise.cli.main import run
from equipoise.mixing import LogitMap, MixedClassifier

ROOT = Path(__file__).parents[1]
WEIGHTS = ROOT / "tests" / "fixtures" / "weights"
BASES = {"accurate": "standard", "robust": "adversarial"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two classifiers of digits."""
    monkeypatch.chdir(tmp_path)
    for side, name in BASES.items():
        shutil.copy(WEIGHTS / f"digits-{name}.safetensors", tmp_path / f"{side}.safetensors")
    return tmp_path


def assert_same_rows(command: Path, function: Path) -> None:
    assert (command / "rows.jsonl").read_bytes() == (function / "rows.jsonl").read_bytes()
    assert (command / "rows.jsonl").stat().st_size > 0


def shorten_audits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole of `standard` takes as long for one image as for many;
    tests/evaluation/test_audit.py runs it."""
    monkeypatch.setattr(
        "equipoise.evaluation.plan.standard", lambda norm: Suite((Apgd("ce", 3), Square(4)))
    )


def test_at_most_fifteen_names() -> None:
    assert len(eq.__all__) <= 15 and all(getattr(eq, name) is not None for name in eq.__all__)


def test_evaluate(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_audits(monkeypatch)
    arguments = [
        "--data",
        "digits",
        "--count",
        "12",
        "--eps",
        "0.12",
        "--audit",
        "1",
        "--device",
        "cpu",
    ]
    assert run(["evaluate", "robust.safetensors", *arguments, "--out", "command"]) == 0
    model = eq.load_model("robust.safetensors")
    eq.evaluate(
        model,
        eq.load_data("digits", count=12),
        threat=eq.Threat("linf", 0.12),
        audit=1,
        device="cpu",
        out="function",
    )
    assert_same_rows(folder / "command", folder / "function")


def test_evaluate_a_mixture(folder: Path) -> None:
    """The same policy: its bases beside it, adaptive attacks, differences, costs and sanity
    checks."""
    accurate, robust = (eq.load_model(f"{side}.safetensors") for side in BASES)
    logit_map = LogitMap(scale=5.5, power=1.5, shift=0.96)
    eq.save("mixture", MixedClassifier(accurate, robust, 0.76, hard=True, logit_map=logit_map))
    arguments = [
        "--data",
        "digits",
        "--count",
        "8",
        "--eps",
        "0.12",
        "--attack",
        "pgd",
        "--steps",
        "3",
        "--device",
        "cpu",
    ]
    assert run(["evaluate", "mixture:mixture", *arguments, "--out", "command"]) == 0
    result = eq.evaluate(
        eq.load_model("mixture:mixture"),
        eq.load_data("digits", count=8),
        attack="pgd",
        steps=3,
        threat=eq.Threat("linf", 0.12),
        device="cpu",
        out="function",
    )
    assert_same_rows(folder / "command", folder / "function")
    assert {row.attack for row in result.rows if row.model == "mixed"} == {
        "clean",
        "pgd",
        "adaptive",
    }
    summaries = [
        json.loads((folder / name / "summary.json").read_text()) for name in ("command", "function")
    ]
    assert {**summaries[0], "seconds": 0} == {**summaries[1], "seconds": 0}
    assert {"differences", "costs", "sanity_checks"} <= summaries[0].keys()


def test_fit(folder: Path) -> None:
    arguments = [
        "--data",
        "digits",
        "--split",
        "train",
        "--start",
        "1142",
        "--count",
        "60",
        "--eps",
        "0.12",
        "--steps",
        "4",
        "--targets",
        "2",
        "--lose-at-most",
        "20",
        "--device",
        "cpu",
    ]
    assert (
        run(
            [
                "fit",
                "--accurate",
                "accurate.safetensors",
                "--robust",
                "robust.safetensors",
                *arguments,
                "--out",
                "command",
            ]
        )
        == 0
    )
    accurate, robust = (eq.load_model(f"{side}.safetensors") for side in BASES)
    eq.fit(
        accurate,
        robust,
        eq.load_data("digits", split="train", start=1142, count=60),
        lose_at_most=20.0,
        steps=4,
        targets=2,
        threat=eq.Threat("linf", 0.12),
        device="cpu",
        out="function",
    )
    assert_same_rows(folder / "command", folder / "function")
    command, function = (
        (folder / name / "mixture.toml").read_text() for name in ("command", "function")
    )
    assert command == function


def test_certify(folder: Path) -> None:
    arguments = [
        "--data",
        "digits",
        "--count",
        "6",
        "--sigma",
        "0.12",
        "--samples",
        "200",
        "--device",
        "cpu",
    ]
    assert run(["certify", "robust.safetensors", *arguments, "--out", "command"]) == 0
    certification = eq.certify(
        eq.load_model("robust.safetensors"),
        eq.load_data("digits", count=6),
        sigma=0.12,
        samples=200,
        device="cpu",
        out="function",
    )
    assert_same_rows(folder / "command", folder / "function")
    assert "acr" in str(certification)


def without_times(path: Path) -> list[dict[str, object]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        {key: value for key, value in row.items() if key not in ("seconds", "images_per_second")}
        for row in rows
    ]


def test_train(folder: Path) -> None:
    """Rows of epochs hold times; everything else, and the weights, are equal."""
    arguments = [
        "--arch",
        "cnn_small",
        "--data",
        "digits",
        "--count",
        "64",
        "--epochs",
        "2",
        "--batch-size",
        "32",
        "--device",
        "cpu",
    ]
    assert run(["train", "standard", *arguments, "--out", "command"]) == 0
    result = eq.train(
        "standard",
        arch="cnn_small",
        data=eq.load_data("digits", split="train", count=64),
        epochs=2,
        batch_size=32,
        device="cpu",
        out="function",
    )
    assert without_times(folder / "command" / "rows.jsonl") == without_times(
        folder / "function" / "rows.jsonl"
    )
    for name in ("best.safetensors", "last.safetensors"):
        assert (folder / "command" / name).read_bytes() == (folder / "function" / name).read_bytes()
    assert "clean" in str(result)


def test_attack_returns_the_images_that_evaluate_counts(folder: Path) -> None:
    model, data = eq.load_model("robust.safetensors"), eq.load_data("digits", count=12)
    for attack in ("pgd", "apgd"):
        attacked = eq.attack(
            model, data, threat=eq.Threat("linf", 0.12), attack=attack, device="cpu"
        )
        result = eq.evaluate(
            model, data, threat=eq.Threat("linf", 0.12), attack=attack, device="cpu"
        )
        assert int(attacked.robust.sum()) == result.result("robust.safetensors", attack).count
