"""The experiment on certified mixtures: its kept rows, and a run at smoke size."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments import common
from experiments.mixing_classifiers import __main__ as experiment

README = (experiment.HERE / "README.md").read_text(encoding="utf-8")
KEPT = common.read_kept(experiment.ROWS / "cifar10.csv.gz")


def test_the_page_shows_the_kept_rows() -> None:
    assert experiment.page(KEPT, experiment.read_official()) in README


def test_differences_and_constants_of_the_page_follow_from_the_kept_rows() -> None:
    prose = " ".join(README.split()).replace("−", "-")
    for line in experiment.differences(KEPT, experiment.read_official()).splitlines():
        points = line.split(": ")[1].split(" points")[0]
        assert points in prose
    constants = common.read_kept(experiment.ROWS / "lipschitz.csv.gz")
    for line in experiment.constants(constants).splitlines():
        assert line.split(": ")[1].split(", n")[0] in prose


def test_no_radius_of_a_theorem_exceeds_ours() -> None:
    for base in experiment.bases(KEPT, "certify").values():
        for alpha in (0.6, experiment.ALPHA, 1.0):
            ours = base.radius(alpha, "ours")
            for theorem in experiment.STYLES:
                assert (base.radius(alpha, theorem) <= ours + 1e-6).all()


def test_the_figure_is_drawn_from_the_kept_rows(tmp_path: Path) -> None:
    experiment.draw(KEPT, tmp_path / "certified.svg")
    drawn = (tmp_path / "certified.svg").read_text(encoding="utf-8")
    assert drawn.count("<path") > 6


@pytest.mark.slow
def test_a_run_at_smoke_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--out", str(tmp_path)]
    common.run(experiment.main, experiment.parser(), arguments)
    printed = capsys.readouterr().out
    rows = common.read_kept(tmp_path / "rows.csv.gz")
    assert {(row["part"], row["sigma"]) for row in rows} == {
        ("select", "0.12"),
        ("select", "0.25"),
        ("certify", "0.12"),
        ("certify", "0.25"),
    }
    alone = experiment.bases(rows, "certify")[0.12]
    assert alone.clean_accuracy(1.0) > 0.8
    assert (alone.radius(1.0, "ours") > 0).mean() > 0.8
    assert "gaussian 0.12" in printed
    # A finished run is read and gives the same rows.
    first = (tmp_path / "rows.csv.gz").read_bytes()
    common.run(experiment.main, experiment.parser(), [*arguments, "--part", "certify"])
    assert (tmp_path / "rows.csv.gz").read_bytes() == first


def test_every_robust_model_needs_a_sigma(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--size", "full", "--accurate", "a", "--robust", "b", "--robust", "c"]
    with pytest.raises(SystemExit) as stopped:
        common.run(
            experiment.main,
            experiment.parser(),
            [*arguments, "--sigma", "0.5", "--out", str(tmp_path)],
        )
    assert stopped.value.code == 2
    assert "`--sigma` must name one for each --robust" in capsys.readouterr().err
