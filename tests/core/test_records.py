"""Run folders: rows appended, merged and read back; identities; locks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from equipoise import __version__
from equipoise.core import records
from equipoise.core.checks import InputError
from equipoise.core.records import Run
from equipoise.core.results import Result, Summary, read_summary
from equipoise.core.rows import AttackRow, Row

IDENTITY = {
    "command": "evaluate",
    "seed": 0,
    "threat": {"norm": "linf", "eps": 0.1},
    "attacks": ("a", "b"),
}


def attack_rows(index: list[int], attack: str = "clean") -> list[AttackRow]:
    return [AttackRow(index=i, model="m", attack=attack, label=0, correct=True) for i in index]


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def summary(value: float, seconds: float) -> Summary:
    return Summary(
        command="evaluate",
        seconds=seconds,
        results=(Result(model="m", metric="clean", value=value, low=0.0, high=1.0, n=10),),
    )


def test_rows_are_merged_in_image_order(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", IDENTITY, {})
    run.append(attack_rows([5, 3], "pgd"))
    run.append(attack_rows([3, 5]))
    rows = run.finish()
    assert [(row.index, row.attack) for row in rows] == [
        (3, "clean"),
        (3, "pgd"),
        (5, "clean"),
        (5, "pgd"),
    ]
    assert not (tmp_path / "run" / "parts").exists()
    assert records.read_rows(tmp_path / "run") == rows


def test_rows_are_read_once_when_a_run_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, calls, real = Run(tmp_path / "run", IDENTITY, {}), list[object](), records.read_rows

    def read_rows(*arguments: Any) -> list[Row]:
        calls.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(records, "read_rows", read_rows)
    run.append(attack_rows([3, 1]))
    rows = run.finish()
    assert run.finish() == rows == real(tmp_path / "run") and len(calls) == 1
    run.append(attack_rows([2]))
    assert [row.index for row in run.finish()] == [1, 2, 3] and len(calls) == 2
    assert Run(tmp_path / "run", IDENTITY, {}).finish() == run.finish()


def test_a_resumed_run_knows_its_rows_and_skips_them(tmp_path: Path) -> None:
    Run(tmp_path / "run", IDENTITY, {}).append(attack_rows([3]))
    resumed = Run(tmp_path / "run", IDENTITY, {})
    assert (3, "m", "clean", None) in resumed.done and (4, "m", "clean", None) not in resumed.done
    resumed.append(attack_rows([3, 4]))
    assert [row.index for row in resumed.finish()] == [3, 4]


def test_an_incomplete_last_line_is_removed(tmp_path: Path) -> None:
    Run(tmp_path / "run", IDENTITY, {}).append(attack_rows([1, 2]))
    part = tmp_path / "run" / "parts" / "0.jsonl"
    part.write_bytes(part.read_bytes() + b'{"index": 3, "mod')
    resumed = Run(tmp_path / "run", IDENTITY, {})
    assert len(resumed.done) == 2
    resumed.append(attack_rows([3]))
    assert [row.index for row in resumed.finish()] == [1, 2, 3]


def test_a_malformed_line_is_reported_with_its_number(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", IDENTITY, {})
    run.append(attack_rows([1]))
    run.finish()
    with (tmp_path / "run" / "rows.jsonl").open("a") as file:
        file.write('{"index": 2}\n')
    with pytest.raises(InputError, match="line 2, must be a row"):
        records.read_rows(tmp_path / "run")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed = 0, this run has 1"),
        ({"threat": {"norm": "linf", "eps": 0.2}}, "threat.eps = 0.1"),
        ({"attacks": ("a",)}, "attacks"),
        ({"more": True}, "has no more, this run has True"),
    ],
)
def test_the_folder_of_another_run_is_refused_and_unchanged(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    Run(tmp_path / "run", IDENTITY, {}).append(attack_rows([1]))
    before = contents(tmp_path / "run")
    with pytest.raises(InputError, match=message):
        Run(tmp_path / "run", {**IDENTITY, **change}, {})
    assert contents(tmp_path / "run") == before


def test_a_setting_that_only_the_folder_has_is_named(tmp_path: Path) -> None:
    Run(tmp_path / "run", {**IDENTITY, "more": True}, {})
    with pytest.raises(InputError, match="has more = True, this run has none"):
        Run(tmp_path / "run", IDENTITY, {})


def test_settings_may_differ(tmp_path: Path) -> None:
    Run(tmp_path / "run", IDENTITY, {"device": "cpu"})
    Run(tmp_path / "run", IDENTITY, {"device": "cuda"})


def test_nested_descriptions_are_part_of_the_identity(tmp_path: Path) -> None:
    def identity(steps: int) -> dict[str, object]:
        return {
            "attack": {
                "attack": "suite",
                "attacks": [{"attack": "apgd", "steps": steps, "loss": None}],
            }
        }

    Run(tmp_path / "run", identity(10), {})
    Run(tmp_path / "run", identity(10), {})
    with pytest.raises(InputError, match="attacks"):
        Run(tmp_path / "run", identity(20), {})


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("chapter one")
    for folder in (tmp_path, tmp_path / "thesis.tex"):
        with pytest.raises(InputError, match="`out` must be a new folder or hold a run"):
            Run(folder, IDENTITY, {})
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_with_files_of_the_system_or_of_a_killed_start_is_new(tmp_path: Path) -> None:
    (tmp_path / ".DS_Store").touch()
    (tmp_path / f".equipoise-{3:032x}.tmp").write_text("schema = 2\n[ident")
    Run(tmp_path, IDENTITY, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == [".DS_Store", "run.toml"]


def test_an_interrupted_merge_is_completed(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", IDENTITY, {})
    run.append(attack_rows([1]))
    rows = run.finish()
    (tmp_path / "run" / "parts").mkdir()
    assert Run(tmp_path / "run", IDENTITY, {}).finish() == rows
    assert not (tmp_path / "run" / "parts").exists()


def test_a_folder_of_schema_1_is_not_resumed(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('schema = 1\n[identity]\nverb = "evaluate"\n')
    with pytest.raises(
        InputError, match=r"old version of Equipoise \(schema 1\).* run its command again"
    ):
        Run(tmp_path, IDENTITY, {})


def test_a_folder_that_another_machine_does_not_see_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("equipoise.core.parallel.gather", lambda here: [here, False])
    with pytest.raises(InputError, match="`out` must be a folder that every machine sees"):
        Run(tmp_path / "run", {"seed": 0}, {})


def test_the_summary_is_rewritten_only_when_results_change(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", IDENTITY, {})
    run.write_summary(summary(0.1, seconds=9.0))
    run.write_summary(summary(0.1, seconds=1.0))
    assert read_summary(tmp_path / "run").seconds == 9.0
    run.write_summary(summary(0.2, seconds=1.0))
    assert read_summary(tmp_path / "run").seconds == 1.0


HOLD_THE_FOLDER = """
import sys, time
from equipoise.core.records import Run
run = Run(sys.argv[1], {"command": "v"}, {})
print("opened", flush=True)
time.sleep(float(sys.argv[2]))
"""


def try_to_open(folder: Path) -> str:
    process = subprocess.run(
        [sys.executable, "-c", HOLD_THE_FOLDER, str(folder), "0"],
        check=False,
        capture_output=True,
        text=True,
    )
    return process.stderr


def test_one_command_at_a_time(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_THE_FOLDER, str(tmp_path / "run"), "600"],
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "opened\n"
        before = contents(tmp_path / "run")
        for identity in ({"command": "v"}, {"command": "w"}):
            with pytest.raises(InputError, match=r"no other command is writing to, got '.*run'"):
                Run(tmp_path / "run", identity, {"device": "other"})
        assert contents(tmp_path / "run") == before
        other.kill()
    run = Run(tmp_path / "run", {"command": "v"}, {})
    assert run is not None and [path.name for path in (tmp_path / "run").iterdir()] == [
        "run.toml"
    ], "no lock is left"


def test_one_process_may_open_a_folder_twice(tmp_path: Path) -> None:
    first = Run(tmp_path / "run", IDENTITY, {})
    second = Run(tmp_path / "run", IDENTITY, {})
    del first
    assert "no other command is writing to" in try_to_open(tmp_path / "run")
    second.append(attack_rows([1]))
    del second
    assert "belong to this run" in try_to_open(tmp_path / "run"), (
        "the lock is free, but it is another run"
    )


def test_a_file_system_without_locks_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    Run(tmp_path / "run", IDENTITY, {}).append(attack_rows([1]))
    assert len(records.read_rows(tmp_path / "run")) == 1


EVALUATED = {"command": "evaluate", "attacks": {"m": {"clean": {}}, "m@0.5": {"clean": {}}}}


@pytest.mark.parametrize(
    ("identity", "row", "message"),
    [
        (EVALUATED, {"model": "other"}, "row of another: index 1, model 'other'"),
        (EVALUATED, {"attack": "pgd"}, "'pgd'"),
        (EVALUATED, {"alpha": 0.25}, "row of another"),
        (EVALUATED, {"index": 9}, "row of another: index 9"),
        (EVALUATED, {"label": 1}, "row of another"),
        ({"command": "certify", "models": {"x": {}}}, {}, "row of another"),
        ({"command": "train", "plan": {"epochs": 3}}, {}, "row of another"),
        (
            EVALUATED,
            {"index": 0, "correct": False},
            "must not contradict an earlier row, got two of index 0",
        ),
        ({}, {"index": 0, "attack": "pgd", "label": 1}, "got two labels of index 0"),
        (
            EVALUATED,
            {"predicted": 3},
            "`correct` must say whether label and prediction are equal, got True",
        ),
    ],
)
def test_rows_of_other_runs_are_refused(
    tmp_path: Path, identity: dict[str, object], row: dict[str, object], message: str
) -> None:
    run = Run(tmp_path / "run", identity, {}, labels={0: 0, 1: 0})
    base = {"index": 1, "model": "m", "attack": "clean", "label": 0, "correct": True}
    rows = [*attack_rows([0]), AttackRow(**{**base, **row})]  # type: ignore[arg-type]
    (run.folder / "rows.jsonl").write_text("".join(f"{row.to_json()}\n" for row in rows))
    with pytest.raises(InputError, match=message):
        Run(tmp_path / "run", identity, {}, labels={0: 0, 1: 0})


def test_a_newer_run_names_its_version(tmp_path: Path) -> None:
    path = Run(tmp_path / "run", IDENTITY, {}).folder / "run.toml"
    text = path.read_text()
    assert f'version = "{__version__}"' in text
    path.write_text(text.replace("schema = 2", "schema = 3").replace(__version__, "0.7"))
    with pytest.raises(
        InputError,
        match=r"was written by Equipoise 0.7 \(schema 3\) and needs that version; this is",
    ):
        Run(tmp_path / "run", IDENTITY, {})
