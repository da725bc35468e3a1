"""Training curves and provenance."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from synthetic_run import result, write_run

from equipoise.core.results import Summary
from equipoise.core.rows import EpochRow
from equipoise.reporting.charts import LIGHT, styled
from equipoise.reporting.provenance import provenance, training
from equipoise.reporting.section import Section


@pytest.fixture
def section(tmp_path: Path) -> Section:
    rows = [EpochRow(index=epoch, model="trained", attack="epoch", loss=2.0 - epoch, accuracy=0.5, lr=0.1, seconds=1.0,
                     images_per_second=90.0, validation={"clean": 0.7, "noisy": 0.6} if epoch else {})
            for epoch in range(2)]
    summary = Summary(command="train", seconds=2.0, best_epoch=1, results=(result("best", "clean", 0.7, n=20),))
    section = training(write_run(tmp_path / "run", summary, rows))
    assert section is not None
    return section


def test_the_best_epoch_comes_first(section: Section) -> None:
    assert section.prose[0].startswith("The best of 2 epochs is epoch 2.") and "n = 20" in section.prose[1]


def test_the_table_has_what_the_rows_have(section: Section) -> None:
    assert [cell.text for cell in section.tables[0].body[0]] == ["1", "2.0000", "0.1", "50.0 %", "–", "–", "90"]


def test_the_figure_has_a_line_per_accuracy(section: Section) -> None:
    with styled(LIGHT):
        loss, accuracies = section.pictures[0].draw(LIGHT).axes
    assert np.asarray(loss.lines[0].get_ydata()).tolist() == [2.0, 1.0]
    assert [line.get_label() for line in accuracies.lines] == ["training", "held out, clean", "held out, under noise"]


def test_other_runs_have_no_training_section(tmp_path: Path) -> None:
    assert training(write_run(tmp_path / "run", Summary(command="evaluate", seconds=1.0))) is None


def test_provenance_has_identity_settings_and_command(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Summary(command="evaluate", seconds=1.5),
                    identity={"seed": 0, "data": {"name": "shapes", "classes": ["a", "b"]}},
                    settings={"device": "cpu", "command": "equipoise evaluate m"})
    section = provenance(run)
    assert section.code == "equipoise evaluate m" and "1.5 seconds" in section.prose[0]
    rows = [[cell.text for cell in row] for table in section.tables for row in table.body]
    assert rows == [["seed", "0"], ["data.name", "shapes"], ["data.classes", "a, b"], ["device", "cpu"]]
