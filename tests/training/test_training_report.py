from __future__ import annotations

import numpy as np
import pytest

from equipoise.reporting import style
from equipoise.reporting.training import draw, training
from equipoise.reporting.view import Arrays, RunView


@pytest.fixture
def view(tmp_path_factory: pytest.TempPathFactory) -> RunView:
    folder = tmp_path_factory.mktemp("run")
    rows = [{"index": epoch, "model": "trained", "attack": "epoch", "loss": 2.0 - epoch, "accuracy": 0.5, "lr": 0.1,
             "seconds": 1.0, "images_per_second": 90.0, **({"clean": 0.7, "noisy": 0.6} if epoch else {})}
            for epoch in range(2)]
    results = [{"model": "best", "metric": "clean", "value": 0.7, "low": 0.5, "high": 0.8, "n": 20}]
    return RunView(folder, {}, {}, {"verb": "train", "epoch": 1, "results": results}, rows, Arrays(folder / "none.npz"))


def test_curves_of_what_the_rows_hold(view: RunView) -> None:
    section = training(view)
    assert section is not None and "n = 20" in section.prose[0] and "is 2 of 2" in section.prose[1]
    assert [cell.text for cell in section.tables[0].body[0]] == ["1", "2.0000", "0.1", "50.0 %", "–", "–", "90"]
    with style.styled(style.LIGHT):
        figure = draw(style.LIGHT, view.rows)
    above, below = figure.axes
    assert np.asarray(above.lines[0].get_ydata()).tolist() == [2.0, 1.0]
    assert [line.get_label() for line in below.lines] == ["training, as trained on", "held out, clean",
                                                          "held out, under noise"]


def test_other_runs_have_none(view: RunView) -> None:
    view.rows[:] = [{"index": 0, "model": "mixed", "attack": "clean", "correct": True}]
    assert training(view) is None
