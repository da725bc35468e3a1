"""Lists of attacks in an evaluation: rows, journal, resume, symptoms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise.attacks import Apgd, Fab, Square, Suite, Targeted
from equipoise.core import records, summary
from equipoise.core.threat import Threat
from equipoise.data import Dataset, pixels
from equipoise.evaluation import Conditions, evaluate

CONDITIONS = Conditions(Threat("linf", 0.02), torch.device("cpu"), batch_size=16)
FOLD = Suite((Apgd("margin", 9), Targeted(1, 12), Targeted(2, 12), Fab(1, 10), Square(60)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head = nn.Linear(280, 6)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.relu(self.norm(self.first(x))).flatten(1))
        return logits


def _data(count: int = 37) -> Dataset:
    chance = torch.Generator().manual_seed(0)
    images = torch.randint(256, (count, 3, 5, 7), generator=chance, dtype=torch.uint8)
    with torch.no_grad():
        labels = Net().eval()(pixels(images)).argmax(dim=1)
    labels[::5] = (labels[::5] + 1) % 6
    return Dataset("made", "test", images, labels, torch.arange(count) + 50, tuple("abcdef"))


def _run(out: Path, conditions: Conditions = CONDITIONS) -> list[records.Row]:
    return evaluate({"m": Net().eval()}, _data(), attacks={"mine": FOLD}, conditions=conditions, out=out)


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    _run(tmp_path / "whole")
    return tmp_path / "whole"


def test_rows_tell_what_broke_each_image(whole: Path) -> None:
    rows = records.read(whole)
    mine = [row for row in rows if row["attack"] == "mine"]
    clean = {row["index"]: row for row in rows if row["attack"] == "clean"}
    assert [row["index"] for row in mine] == list(range(50, 87))
    for row in mine:
        assert row["correct"] == (row["predicted"] == row["label"]) == (row["broken_by"] is None)
        assert (row["broken_by"] == "clean") == (not clean[row["index"]]["correct"])
        assert row["margin"] <= clean[row["index"]]["margin"]
    assert {"apgd-margin@9", None, "clean"} <= {row["broken_by"] for row in mine}
    told = records.summary(whole)
    assert summary.value(told["results"], "m", "worst") == summary.value(told["results"], "m", "mine")
    assert not (whole / "stages").exists(), "the journal goes when the run is finished"


def test_symptoms_stand_in_the_summary(whole: Path) -> None:
    told = records.summary(whole)["symptoms"]
    assert len(told) == 8 and all(row["model"] == "m" and row["attack"] == "mine" for row in told)
    assert {"name", "value", "alarm", "says"} <= told[0].keys()
    before = (whole / "summary.json").stat().st_mtime_ns
    _run(whole)
    assert (whole / "summary.json").stat().st_mtime_ns == before, "a finished run is read, not repeated"


class KilledError(Exception):
    pass


@pytest.mark.parametrize("fatal", [2, 4, 6])
def test_killed_and_repeated_gives_the_same_rows(
    tmp_path: Path, whole: Path, fatal: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from equipoise.evaluation import staged

    writes: list[str] = []
    notes, rows = staged._write, records.Run.append

    def counted(kind: str, real: Any) -> Any:
        def write(*arguments: Any) -> None:
            real(*arguments)
            writes.append(kind)
            if len(writes) == fatal:
                raise KilledError
        return write

    monkeypatch.setattr(staged, "_write", counted("note", notes))
    monkeypatch.setattr(records.Run, "append", counted("rows", rows))
    with pytest.raises(KilledError):
        _run(tmp_path / "run")
    journals = list((tmp_path / "run" / "stages").glob("*.jsonl"))
    if journals:
        with journals[0].open("ab") as file:
            file.write(b'{"subject": "m, mi')  # a torn line
    _run(tmp_path / "run")
    assert (tmp_path / "run" / "rows.jsonl").read_bytes() == (whole / "rows.jsonl").read_bytes()
    assert records.summary(tmp_path / "run")["results"] == records.summary(whole)["results"]


def test_a_torn_line_of_the_journal_spoils_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from equipoise.evaluation import staged

    real, left = staged._write, [2]

    def dying(*arguments: Any) -> None:
        real(*arguments)
        left[0] -= 1
        if left[0] == 0:
            raise KilledError

    monkeypatch.setattr(staged, "_write", dying)
    journal = tmp_path / "run" / "stages" / "0.jsonl"
    for _ in range(2):
        with pytest.raises(KilledError):
            _run(tmp_path / "run")
        with journal.open("ab") as file:
            file.write(b'{"subject": "m, mi')
        left[0] = 1
    lines = journal.read_text().splitlines()
    assert len([json.loads(line) for line in lines[:-1]]) == 3, "two lines of the first sitting, one of the second"


@pytest.mark.parametrize("size", [3, 8, 64])
def test_batch_size_does_not_matter(tmp_path: Path, whole: Path, size: int) -> None:
    _run(tmp_path / "run", Conditions(CONDITIONS.threat, CONDITIONS.device, batch_size=size))
    ours, theirs = ([row for row in records.read(folder) if row["attack"] == "mine"]
                    for folder in (tmp_path / "run", whole))
    assert ours == theirs


def test_two_processes_write_the_same_rows(tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process in turn, without the process group: the parts are merged as they are."""
    from equipoise.core import parallel

    for rank in (0, 1):
        monkeypatch.setattr(parallel, "world", lambda rank=rank: parallel.World(rank, 2))
        monkeypatch.setattr(records.Run, "finish", lambda run: records.read(run.folder))
        _run(tmp_path / "run")
    monkeypatch.undo()
    _run(tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "rows.jsonl").read_text().splitlines()]
    assert lines == [json.loads(line) for line in (whole / "rows.jsonl").read_text().splitlines()]
