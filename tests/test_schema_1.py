"""Folders that version 0.1 wrote stay readable: every kind is in `tests/fixtures/schema1`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from equipoise import reporting
from equipoise.core import records
from equipoise.core.checks import InputError
from equipoise.core.records import Run
from equipoise.core.results import read_summary
from equipoise.data import load_data, pixels
from equipoise.mixing import MixedClassifier, load_model

FIXTURES = Path(__file__).parent / "fixtures"
EXPECTED = json.loads((FIXTURES / "schema1-expected.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy elsewhere, as if it had been sent by a colleague."""
    return Path(shutil.copytree(FIXTURES / "schema1", tmp_path_factory.mktemp("old") / "schema1"))


@pytest.mark.parametrize("name", sorted(EXPECTED["finished"]))
def test_rows_and_summaries_are_read(name: str, folders: Path) -> None:
    expected, summary = EXPECTED["finished"][name], read_summary(folders / name)
    assert summary.command == expected["verb"] and len(summary.results) == expected["results"]
    assert len(records.read_rows(folders / name)) == expected["rows"]


@pytest.mark.parametrize("name", sorted(name for name in EXPECTED["finished"] if "/" not in name))
@pytest.mark.usefixtures("figures_once")
def test_reports_are_written(name: str, folders: Path) -> None:
    page = reporting.report(folders / name).read_text(encoding="utf-8")
    later = page.count("<h2>Explore</h2>") + page.count(
        "<h2>Attack progress</h2>"
    )  # sections of later versions
    assert page.count("<h2") - later == len(EXPECTED["finished"][name]["sections"])


@pytest.mark.parametrize("name", sorted(EXPECTED["mixtures"]))
def test_mixtures_predict_the_same(name: str, folders: Path) -> None:
    expected = EXPECTED["mixtures"][name]
    mixture = load_model(f"mixture:{folders / name}")
    assert isinstance(mixture, MixedClassifier) and mixture.alpha == pytest.approx(
        expected["alpha"]
    )
    x = pixels(load_data(expected["data"], split="test", count=10).images)
    with torch.no_grad():
        logits = mixture(x)
    assert logits.argmax(dim=1).tolist() == expected["predicted"]
    torch.testing.assert_close(logits[:2], torch.tensor(expected["logits"]), atol=1e-4, rtol=1e-3)


def test_old_folders_are_not_resumed(folders: Path) -> None:
    before = {
        path: path.read_bytes()
        for path in (folders / "evaluate-killed").rglob("*")
        if path.is_file()
    }
    with pytest.raises(InputError, match="written by another version of Equipoise"):
        Run(folders / "evaluate-killed", {"command": "evaluate"}, {})
    assert before == {
        path: path.read_bytes()
        for path in (folders / "evaluate-killed").rglob("*")
        if path.is_file()
    }
