"""The experiment on local smoothing: its kept rows, and a run at smoke size."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments import attacked, common
from experiments.local_smoothing import __main__ as experiment

README = (experiment.HERE / "README.md").read_text(encoding="utf-8")
KEPT = {name: common.read_kept(experiment.ROWS / f"{name}.csv.gz") for name in experiment.KEPT}


def run(*arguments: object) -> None:
    parser = common.new_parser("local_smoothing", experiment.PARTS, experiment.__doc__)
    common.run(experiment.main, parser, [str(argument) for argument in arguments])


def test_the_page_shows_the_kept_rows() -> None:
    assert experiment.page(KEPT) in README


def test_the_figure_is_drawn_from_the_kept_rows(tmp_path: Path) -> None:
    experiment.draw(KEPT["cifar10-resnet8"], tmp_path / "trust.svg")
    assert (tmp_path / "trust.svg").read_text(encoding="utf-8").count("<path") > 8


@pytest.mark.slow
def test_a_run_at_smoke_size(tmp_path: Path) -> None:
    run("--count", 20, "--out", tmp_path)
    rows = common.read_kept(tmp_path / "rows.csv.gz")
    assert {row["part"] for row in rows} == {
        "models",
        "trust",
        "neighbours",
        "crossing",
        "targets",
        "policy",
        "radii",
    }
    trust = {row["model"] for row in rows if row["part"] == "trust"}
    assert trust == {f"{term}, {space}" for term in experiment.TERMS for space in experiment.SPACES}
    # Attacks at γ = 0 are on g, those at γ = ∞ on h.
    at_h = {"part": "targets", "strength": "inf"}
    at_g = {"part": "targets", "strength": "0"}
    for name, weak, strong in (("robust", at_g, at_h), ("accurate", at_h, at_g)):
        first = attacked.worst(rows, ["at γ"], model=name, **weak)
        second = attacked.worst(rows, ["at γ"], model=name, **strong)
        assert first is not None and second is not None and first.value >= second.value
    assert len(experiment.lines(rows)) == 2 + 8 + 2 + 1
    # A finished run is read and gives the same rows.
    kept = (tmp_path / "rows.csv.gz").read_bytes()
    run("--count", 20, "--out", tmp_path)
    assert (tmp_path / "rows.csv.gz").read_bytes() == kept


def test_the_worst_case_is_that_of_each_image() -> None:
    rows = [
        attacked.row("trust", "constant, logits", "0.7", "clean", index, index < 3)
        for index in range(4)
    ]
    rows += [
        attacked.row("trust", "constant, logits", "0.7", "on g", index, index != 1)
        for index in range(4)
    ]
    line = experiment.line(rows, "1, logits", "trust", "constant, logits", "0.7")
    assert line == ["1, logits", "75.0", "75.0", "", "", "50.0"]


def test_no_other_rule_of_that_clean_accuracy_keeps_more() -> None:
    rows = KEPT["cifar10-resnet8"]
    for space in experiment.SPACES:
        for term in experiment.TERMS:
            for weight in experiment.weights_of(rows, f"{term}, {space}"):
                key = {"part": "trust", "model": f"{term}, {space}", "strength": weight}
                clean = float(attacked.percent(rows, ["clean"], **key))
                survived = float(attacked.percent(rows, experiment.WORST, **key))
                best = (term, space) == ("constant", "probabilities")
                assert best or clean <= 70 or survived <= 3


def test_the_numbers_in_the_text_follow_from_the_kept_rows() -> None:
    prose = " ".join(README.split())
    digits, cifar = KEPT["digits"], KEPT["cifar10-resnet8"]
    policy = {"part": "policy", "model": "adaptive"}
    robust = {"part": "policy", "model": "robust"}
    accurate = {"part": "policy", "model": "accurate"}
    pgd = [attacked.percent(digits, ["pgd-20"], **key) for key in (policy, robust)]
    assert "PGD-20 leaves {} % (h {} %)".format(*pgd) in prose
    fast = [attacked.percent(digits, ["fast"], **key) for key in (policy, robust, accurate)]
    assert "suite {} % (h {} %, g {} %)".format(*fast) in prose
    at_strengths = [
        float(attacked.percent(digits, ["at γ"], part="targets", model="adaptive", strength=gamma))
        for gamma in {row["strength"] for row in digits if row["part"] == "targets"}
    ]
    assert f"it keeps {min(at_strengths)} % or more" in prose
    radii = [
        attacked.percent(digits, ["pgd-20"], part="radii", model=model, strength="1.5")
        for model in ("adaptive", "robust")
    ]
    assert "{} against {} %".format(*radii) in prose
    crossing = attacked.find_crossing(digits, "crossing")
    assert f"γ = {crossing.gamma:.3g} [{crossing.low:.3g}, {crossing.high:.3g}]" in prose
    votes = [
        attacked.percent(cifar, ["clean"], part="neighbours", model=model, strength=gamma)
        for model in ("K = 10, plain", "K = 10, distance")
        for gamma in ("10", "inf")
    ]
    assert votes == ["40.0", "35.0", "36.0", "36.0"]
    assert "40 against 35 %" in prose and "36 and 36 %" in prose
    for term in ("gradient", "top-gradient", "ratio"):
        for weight in experiment.weights_of(cifar, f"{term}, probabilities"):
            key = {"part": "trust", "model": f"{term}, probabilities", "strength": weight}
            assert float(attacked.percent(cifar, ["on g"], **key)) <= 1
            assert float(attacked.percent(cifar, ["through"], **key)) <= 36
