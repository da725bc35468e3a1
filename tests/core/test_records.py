from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from equipoise.core import records, summary
from equipoise.core.checks import InputError
from equipoise.core.records import Run
from equipoise.core.threat import Threat

IDENTITY = {"verb": "evaluate", "seed": 0, "threat": {"norm": "linf", "eps": 0.1}, "attacks": ("a", "b")}


def _rows(index: list[int], attack: str = "clean", model: str = "m", correct: bool = True) -> list[records.Row]:
    return records.rows_of(index, model=model, attack=attack, correct=[correct] * len(index))


def test_rows_come_back_in_image_order_and_once(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", IDENTITY, {})
    run.append(_rows([5, 3], "pgd"))
    run.append(_rows([3, 5]))
    again = Run(tmp_path / "run", IDENTITY, {})
    assert (3, "m", "pgd", None) in again.done and (4, "m", "pgd", None) not in again.done
    again.append(_rows([4]))
    rows = again.finish()
    assert [(row["index"], row["attack"]) for row in rows] == [
        (3, "clean"), (3, "pgd"), (4, "clean"), (5, "clean"), (5, "pgd")]
    assert not (tmp_path / "run" / "parts").exists()
    assert records.read(tmp_path / "run") == rows


def test_a_torn_line_is_forgotten(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", IDENTITY, {})
    run.append(_rows([1, 2]))
    part = tmp_path / "run" / "parts" / "0.jsonl"
    part.write_bytes(part.read_bytes() + b'{"index": 3, "mod')
    again = Run(tmp_path / "run", IDENTITY, {})
    assert len(again.done) == 2
    again.append(_rows([3]))
    assert [row["index"] for row in again.finish()] == [1, 2, 3]


def test_a_spoiled_line_is_named(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", IDENTITY, {})
    run.append(_rows([1]))
    run.finish()
    with (tmp_path / "run" / "rows.jsonl").open("a") as file:
        file.write('{"index": 2}\n')
    with pytest.raises(InputError, match="line 2, must be a row"):
        records.read(tmp_path / "run")


@pytest.mark.parametrize(
    ("change", "named"),
    [({"seed": 1}, "seed = 0, this run has 1"), ({"threat": {"norm": "linf", "eps": 0.2}}, "threat.eps = 0.1"),
     ({"attacks": ("a",)}, "attacks"), ({"more": True}, "more = None, this run has True")],
)
def test_a_folder_of_another_run_is_refused(tmp_path: Path, change: dict[str, object], named: str) -> None:
    Run(tmp_path / "run", IDENTITY, {}).append(_rows([1]))
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=named):
        Run(tmp_path / "run", {**IDENTITY, **change}, {})
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}


def test_settings_may_differ(tmp_path: Path) -> None:
    Run(tmp_path / "run", IDENTITY, {"device": "cpu"})
    Run(tmp_path / "run", IDENTITY, {"device": "cuda"})


def test_a_folder_with_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("chapter one")
    with pytest.raises(InputError, match="`out` must be a new folder or hold a run"):
        Run(tmp_path, IDENTITY, {})
    with pytest.raises(InputError, match="`out` must be a new folder or hold a run"):
        Run(tmp_path / "thesis.tex", IDENTITY, {})
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_that_another_machine_does_not_see_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equipoise.core.parallel.gather", lambda here: [here, False])
    with pytest.raises(InputError, match="`out` must be a folder that every machine sees"):
        Run(tmp_path / "run", {"seed": 0}, {})


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.json"
    records.write(path, "old")

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        records.write(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_summary_is_not_touched_when_nothing_changed(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", IDENTITY, {})
    run.summarise("evaluate", 9.0, [{"model": "m", "metric": "clean", "value": 0.1}])
    run.summarise("evaluate", 1.0, [{"model": "m", "metric": "clean", "value": 0.1}])
    assert records.summary(tmp_path / "run")["seconds"] == 9.0
    run.summarise("evaluate", 1.0, [{"model": "m", "metric": "clean", "value": 0.2}])
    assert records.summary(tmp_path / "run")["seconds"] == 1.0
    with pytest.raises(InputError, match="finished run folder"):
        records.summary(tmp_path)


def test_results_worst_and_differences() -> None:
    right = {("ours", "clean"): [1, 1, 1, 0], ("ours", "a"): [1, 0, 1, 0], ("ours", "b"): [0, 1, 1, 0],
             ("theirs", "clean"): [1, 0, 1, 1], ("theirs", "a"): [1, 0, 1, 1]}
    rows = [{"index": i, "model": model, "attack": attack, "correct": bool(value)}
            for (model, attack), values in right.items() for i, value in enumerate(values)]
    threat = Threat("linf", 0.1)
    results = summary.results(rows, threat)
    assert summary.value(results, "ours", "worst") == 0.25
    assert summary.value(results, "theirs", "worst") == 0.75
    assert all(row["n"] == 4 and row["low"] <= row["value"] <= row["high"] for row in results)
    assert next(row for row in results if row["metric"] == "clean").get("threat") is None
    assert next(row for row in results if row["metric"] == "worst")["threat"] == {"norm": "linf", "eps": 0.1}
    differences = summary.differences(rows, [("ours", "theirs")], threat)
    assert {row["metric"]: row["value"] for row in differences} == {"clean": 0.0, "worst": -0.5}


def test_rows_are_plain_json() -> None:
    rows = records.rows_of([7], model="m", attack="a", correct=[True], margin=[0.5])
    assert json.loads(json.dumps(rows)) == [
        {"index": 7, "model": "m", "attack": "a", "correct": True, "margin": 0.5}]


SITTING = """
import sys, time
from equipoise.core.records import Run
run = Run(sys.argv[1], {"verb": "v"}, {})
print("inside", flush=True)
time.sleep(600)
"""


def test_one_command_at_a_time(tmp_path: Path) -> None:
    """The second is told so, whatever it wants; a killed one leaves no lock and nothing else behind."""
    with subprocess.Popen([sys.executable, "-c", SITTING, str(tmp_path / "run")], stdout=subprocess.PIPE,
                          text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "inside\n"
        before = (tmp_path / "run" / "run.toml").read_bytes()
        for identity in ({"verb": "v"}, {"verb": "w"}):
            with pytest.raises(InputError, match=r"no other command is writing to, got '.*run'"):
                Run(tmp_path / "run", identity, {"device": "other"})
        assert (tmp_path / "run" / "run.toml").read_bytes() == before
        Run(tmp_path / "another", {"verb": "v"}, {})
        other.kill()
    run = Run(tmp_path / "run", {"verb": "v"}, {})
    assert run is not None and [path.name for path in (tmp_path / "run").iterdir()] == ["run.toml"]


def test_one_process_may_open_a_folder_twice(tmp_path: Path) -> None:
    first = Run(tmp_path / "run", IDENTITY, {})
    second = Run(tmp_path / "run", IDENTITY, {})
    del first
    trial = subprocess.run([sys.executable, "-c", SITTING.replace("600", "0"), str(tmp_path / "run")], check=False,
                           capture_output=True, text=True)
    assert "no other command is writing to" in trial.stderr
    second.append(_rows([1]))
    del second
    trial = subprocess.run([sys.executable, "-c", SITTING.replace("600", "0"), str(tmp_path / "run")], check=False,
                           capture_output=True, text=True)
    assert "belong to this run" in trial.stderr, "free again; it only is another run"


def test_where_there_are_no_locks_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")

    def refused(number: int, how: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refused)
    Run(tmp_path / "run", IDENTITY, {}).append(_rows([1]))
    assert len(records.read(tmp_path / "run")) == 1
