"""The comparison of rules: its page, and runs at smoke size."""

from __future__ import annotations

from pathlib import Path

import pytest

from equipoise.core.results import read_summary
from experiments import common
from experiments.rules import __main__ as rules

SMALL = ["--device", "cpu"]


def test_the_page_shows_the_kept_rows() -> None:
    page = (rules.HERE / "README.md").read_text(encoding="utf-8")
    assert rules.table(rules.HERE / "rows") in page


def test_plain_mixing_has_the_smallest_alpha_that_keeps_the_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common.run(rules.main, rules.parser(), [*SMALL, "--part", "plain", "--out", str(tmp_path)])
    assert rules.table(tmp_path / "rows") in capsys.readouterr().out
    rows = common.read_kept(tmp_path / "rows" / "evaluation.csv.gz")
    assert {row["model"] for row in rows} == {"accurate", "robust", "plain mixing"}
    sweep = read_summary(tmp_path / "alphas").results
    robust = {result.alpha or 0.0: result.value for result in sweep if result.metric == "worst"}
    smallest = min(alpha for alpha, value in robust.items() if value >= robust[1.0] - 0.2)
    mixture = tmp_path / "fits" / "plain" / "mixture.toml"
    assert f"alpha = {smallest}\n" in mixture.read_text(encoding="utf-8")


@pytest.mark.slow
def test_all_rules_at_smoke_size(tmp_path: Path) -> None:
    common.run(rules.main, rules.parser(), [*SMALL, "--out", str(tmp_path)])
    rows = common.read_kept(tmp_path / "rows" / "evaluation.csv.gz")
    names = {"accurate", "robust", *rules.NAMES.values()} - {rules.NAMES["gate"]}
    assert {row["model"] for row in rows} == names | {f"{rules.NAMES['gate']}, gate"}
    assert len(rows) == 40 * 8


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--count", "9999"], "`--count` must leave 1000"),
        (["--count", "20", "--part", "cascade"], "`--robust` must have views"),
    ],
)
def test_a_mistake_is_one_sentence(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    full = ["--size", "full", "--accurate", "zoo:cnn", "--robust", "zoo:cnn_small"]
    with pytest.raises(SystemExit) as stopped:
        common.run(rules.main, rules.parser(), [*full, "--data", "shapes", *arguments])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and words in error and error.count("\n") == 1
