"""The MixedNUTS experiment: its page, and a run at smoke size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from experiments import common
from experiments.mixednuts import __main__ as mixednuts


def run(*arguments: str) -> None:
    parser = common.new_parser("mixednuts", mixednuts.PARTS, "")
    common.run(mixednuts.main, parser, [*arguments, "--device", "cpu"])


def test_the_page_shows_the_kept_rows() -> None:
    page = (mixednuts.HERE / "README.md").read_text(encoding="utf-8")
    assert mixednuts.table(mixednuts.HERE / "rows") in page


def test_the_largest_alpha_that_is_as_accurate() -> None:
    g = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.2, 0.8]])
    h = torch.tensor([[0.3, 0.7], [0.45, 0.55], [0.1, 0.9]])
    y = torch.tensor([0, 0, 1])
    # The second image needs 0.9 − 0.45 alpha > 0.1 + 0.45 alpha, the first 0.9 − 0.6 alpha likewise.
    for least, largest in ((1 / 3, 1.0), (2 / 3, 0.8 / 0.9), (1.0, 0.8 / 1.2)):
        alpha = mixednuts.alpha_of_accuracy(g, h, y, least - 1e-6)
        assert largest - 0.01 < alpha <= largest
    assert mixednuts.alpha_of_accuracy(h, h, y, 1.0) == 1.0, "no mixture is so accurate"


@pytest.mark.filterwarnings("ignore:mixed was fitted on images")  # those that the fit has seen
@pytest.mark.slow
def test_all_parts_at_smoke_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("--out", str(tmp_path / "run"))
    shown = capsys.readouterr().out
    assert shown.strip() == mixednuts.table(tmp_path / "run" / "rows").strip()
    kept = common.read_kept(tmp_path / "run" / "rows" / "robust.csv.gz")
    assert {row["part"] for row in kept} == {*mixednuts.PARTS, "mapped", "seen"}
    assert all(row["clean"] >= row["attacked"] for row in kept)
    run("--out", str(tmp_path / "run"), "--part", "objective")
    again = common.read_kept(tmp_path / "run" / "rows" / "robust.csv.gz")
    assert sorted(again, key=str) == sorted(kept, key=str), "rows of other parts stay"


def test_a_mistake_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, word in (
        (["--size", "full"], "--accurate"),
        (["--accurate", "zoo:cnn"], "left out for the smoke size"),
    ):
        with pytest.raises(SystemExit) as stopped:
            run(*arguments)
        error = capsys.readouterr().err
        assert stopped.value.code == 2 and word in error and error.count("\n") == 1
