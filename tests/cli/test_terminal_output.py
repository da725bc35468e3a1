"""What commands print: on a terminal, into a pipe, with `--json` and with `--quiet`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import webbrowser
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from small_files import write_pair
from terminal import COLUMNS, run_in_terminal, screen

from equipoise import reporting
from equipoise.attacks.sanity_checks import ADVICE
from equipoise.cli import demo, next_commands, output
from equipoise.cli.main import COMMANDS, run
from equipoise.core.audits import Audit
from equipoise.core.results import Result, SanityCheck, Summary
from equipoise.data.verification import MISSING, OFFICIAL, VerifiedFiles

COLOUR = re.compile(r"\x1b\[[0-9;]*[1-9][0-9;]*m")
DATA = ["--data", "npz:images.npz"]
PAIR = ["--accurate", "accurate.safetensors", "--robust", "robust.safetensors"]
EVALUATE = [
    "evaluate",
    "robust.safetensors",
    *DATA,
    "--count",
    "12",
    "--attack",
    "pgd",
    "--steps",
    "2",
]
FIT = [
    "fit",
    *PAIR,
    *DATA,
    "--eps",
    "0.002",
    "--steps",
    "2",
    "--targets",
    "1",
    "--pool",
    "1",
    "--lose-at-most",
    "20",
    "--start",
    "20",
]
RUNS = {
    "evaluate": EVALUATE,
    "fit": FIT,
    "certify": [
        "certify",
        "robust.safetensors",
        *DATA,
        "--count",
        "4",
        "--sigma",
        "0.25",
        "--samples",
        "20",
        "--n0",
        "4",
    ],
    "train": [
        "train",
        "standard",
        *DATA,
        "--arch",
        "cnn_small",
        "--epochs",
        "1",
        "--batch-size",
        "8",
    ],
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images that one network labels, and a pair of networks."""
    folder = tmp_path_factory.mktemp("terminal")
    write_pair(folder, 120)
    return folder


@pytest.fixture
def folder(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for path in files.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EQUIPOISE_NO_REPORT", "1")
    return tmp_path


def test_a_terminal_shows_stages_and_ends_with_a_coloured_table(folder: Path) -> None:
    text = run_in_terminal([*EVALUATE, "--out", "run"], folder)
    shown = screen_history(text)
    assert re.search(r"robust\.safetensors, pgd.*12/12.*robust \d+/12.*0:00:0\d", shown)
    assert re.search(r"sanity checks.*1/1", shown)
    end = screen(text)
    assert max(map(len, end)) <= COLUMNS and not any("━" in line for line in end), (
        "the bars are gone"
    )
    assert COLOUR.search(text) and "\x1b[1mAccuracy on 12 images" in text
    assert end[:2] == [
        "at most 2 passes per image for 12 images",
        "Accuracy on 12 images, 95 % intervals, ℓ∞ ≤ 8/255",
    ]
    assert [line for line in end if line][-2:] == [
        "results: run/summary.json",
        "next: equipoise open run",
    ]


def screen_history(text: str) -> str:
    """Everything that was ever shown, without colours and cursor movements."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


@pytest.mark.parametrize(
    ("environment", "escapes"), [({"NO_COLOR": "1"}, True), ({"TERM": "dumb"}, False)]
)
def test_no_colour(folder: Path, environment: dict[str, str], escapes: bool) -> None:
    text = run_in_terminal([*EVALUATE, "--out", "run"], folder, **environment)
    assert not re.search(r"\x1b\[[0-9;]*3[0-9][0-9;]*m", text), "no colour"
    assert ("\x1b" in text) == escapes, "a dumb terminal cannot move its cursor"
    assert "next: equipoise open run" in screen(text)


def test_a_pipe_gets_plain_lines_and_each_once(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A mixture is evaluated on images that it was fitted on, which is a warning and a note below
    the table."""
    assert run([*FIT, "--start", "0", "--out", "M", "--quiet"]) == 0
    command = [
        sys.executable,
        "-m",
        "equipoise",
        "evaluate",
        "mixture:M",
        *EVALUATE[2:],
        "--out",
        "E",
    ]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
    )
    assert "\r" not in done.stdout and "\x1b" not in done.stdout
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    said = [re.sub("^(warning|note): ", "", line) for line in lines if not line.startswith(" ")]
    assert "warning: mixed was fitted on images" in done.stdout and len(said) == len(set(said))
    assert run(command[3:]) == 0
    assert "note: mixed was fitted on images" in capfd.readouterr().out, (
        "apart from the warnings, the table says it"
    )


def test_a_log_has_the_passes_and_a_line_a_minute(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run([*EVALUATE, "--out", "short"]) == 0
    assert capfd.readouterr().err == "at most 2 passes per image for 12 images\n"
    assert run([*EVALUATE, "--out", "short"]) == 0
    assert capfd.readouterr().err == "", "nothing is left to attack"
    monkeypatch.setattr("equipoise.core.progress.SECONDS_BETWEEN_LINES", 0.0)
    assert run([*EVALUATE, "--out", "long"]) == 0
    assert re.fullmatch(
        r"at most 2 passes per image for 12 images\n"
        r"robust\.safetensors, clean: 12/12, robust \d+/12, 0:00:00 left\n"
        r"robust\.safetensors, pgd: 12/12, robust \d+/12, 0:00:00 left\n"
        r"sanity checks: 1/1, 0:00:00 left\n",
        capfd.readouterr().err,
    )


@pytest.mark.parametrize("name", RUNS)
def test_json_is_the_summary_and_quiet_is_nothing(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(reporting, "report", lambda folder: None)
    command = [*RUNS[name], "--out", "run"]
    assert run([*command, "--json"]) == 0
    printed = capfd.readouterr().out
    assert json.loads(printed) == json.loads((folder / "run" / "summary.json").read_text())
    assert json.loads(printed)["command"] == name and json.loads(printed)["results"]
    assert run([*command, "--quiet"]) == 0 and capfd.readouterr() == ("", "")
    assert run([*command, "--json", "--quiet"]) == 0 and capfd.readouterr() == (printed, "")
    assert run(command) == 0
    plain = capfd.readouterr().out
    table = [line for line in plain.splitlines() if line.startswith(" ")]
    assert max(map(len, table)) <= COLUMNS and table[1].startswith(" ────"), "one style of table"
    assert plain.splitlines()[-1].startswith("next: equipoise ")
    assert run([*RUNS[name], "--out", "run", "--seed", "-1", "--quiet"]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1 and "`seed` must be" in err


def test_json_of_commands_without_a_summary(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run([*EVALUATE, "--out", "run", "--quiet"]) == 0
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    for command in ("report", "open"):
        assert run([command, "run", "--json"]) == 0
        assert json.loads(capfd.readouterr().out) == {"report": "run/report.html"}
        assert run([command, "run", "--quiet"]) == 0 and capfd.readouterr() == ("", "")
    assert len(opened) == 2
    assert run(["fit", *PAIR, "--alpha", "0.8", "--out", "P", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["mixture"]["alpha"] == 0.8
    monkeypatch.setattr(
        "equipoise.cli.commands.verify", lambda *given: VerifiedFiles({"a": OFFICIAL})
    )
    assert run(["data", "verify", "mnist", "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == {"a": "official"}
    assert run(["data", "verify", "mnist", "--quiet"]) == 0 and capfd.readouterr() == ("", "")
    monkeypatch.setattr(
        "equipoise.cli.commands.verify", lambda *given: VerifiedFiles({"a": OFFICIAL, "b": MISSING})
    )
    assert run(["data", "verify", "mnist", "--json"]) == 2
    out, err = capfd.readouterr()
    assert (
        json.loads(out) == {"a": "official", "b": "missing"}
        and "must have the official files" in err
    )


def test_json_and_quiet_of_the_demo(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the run of another command in place of the long one."""
    assert run([*EVALUATE, "--out", "run", "--quiet"]) == 0
    monkeypatch.setattr(demo, "run_demo", lambda *given, **named: Path("run/report.html"))
    assert run(["demo", "--out", "run", "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == json.loads(
        (folder / "run" / "summary.json").read_text()
    )
    assert run(["demo", "--out", "run", "--quiet"]) == 0 and capfd.readouterr() == ("", "")


def test_what_a_model_prints_is_not_in_the_json(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "talkative.py").write_text(
        "import equipoise as eq\ndef make():\n    print('loading')\n"
        "    return eq.load_model('robust.safetensors')\n"
    )
    assert (
        run(["evaluate", "python:talkative.py:make", *EVALUATE[2:], "--out", "run", "--json"]) == 0
    )
    out, err = capfd.readouterr()
    assert json.loads(out)["command"] == "evaluate" and "loading" in err


def helps() -> Iterator[list[str]]:
    from equipoise.training import OBJECTIVES

    yield []
    for name in COMMANDS:
        yield [name]
    for objective in [*OBJECTIVES, "gate"]:
        yield ["train", objective]
    yield ["data", "verify"]


@pytest.mark.parametrize("command", list(helps()), ids=" ".join)
def test_help_fits_and_cuts_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    assert run([*command, "--help"]) == 0
    printed = capsys.readouterr().out
    text = printed.partition("\n")[2]  # without the line of usage
    assert max(map(len, printed.splitlines())) <= COLUMNS
    assert "…" not in text and "..." not in text and "\u00a0" not in text and "\u2011" not in text
    words = " ".join(text.split())
    for line in helped(command):
        assert " ".join(line.split()) in words
    headings = re.findall(r"(?m)^(\w[\w ]*):$", text)
    assert len(headings) == len(set(headings))
    if command in (["evaluate"], ["fit"], ["certify"]):
        assert headings[:2] == ["Models", "Data"] and headings[-3:] == [
            "Output",
            "Computation",
            "Options",
        ]
    if command and command != ["train"] and command != ["data"]:
        assert "--json" in text and "--quiet" in text


def helped(command: list[str]) -> list[str]:
    """The help of every option and command."""
    from equipoise.cli import main

    if not command:
        return list(COMMANDS.values())
    own = main.load_command(command[0])
    for name in command[1:]:
        own = own.commands[name]
    return [own.help, *(param.help for param in own.params if getattr(param, "help", None))]


def test_the_next_command_after_a_doubtful_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "argv", ["equipoise", "evaluate", "m.pt", "--out=r", "--steps", "3", "--eps", "4/255"]
    )
    check = SanityCheck(
        name="c",
        value=1.0,
        alarm=True,
        explanation="e",
        model="m",
        attack="fast",
        advice=ADVICE["black box beats white box"],
    )
    audit = Audit(
        model="m",
        attack="fast",
        stronger="standard",
        n=10,
        survivors=9,
        audited=3,
        broken=1,
        excess=0.2,
        passes=1,
        seconds=1.0,
    )
    fine = Summary(command="evaluate", seconds=1.0)

    def after(summary: Summary, attack: str = "fast") -> list[object]:
        return next_commands.after_evaluate(summary, Path("r"), attack)

    assert after(fine) == ["open", Path("r")]
    expected = ["evaluate", "m.pt", "--eps", "4/255", "--attack", "standard", "--out", "r-standard"]
    assert after(Summary(command="evaluate", seconds=1.0, sanity_checks=(check,))) == expected
    audited = Summary(command="evaluate", seconds=1.0, audits=(audit,))
    assert after(audited) == after(audited, "fast,square") == expected
    for strongest in ("standard", "fast, autoattack"):
        assert after(audited, strongest) == ["open", Path("r")]
    in_the_model = replace(check, advice=ADVICE["probabilities for logits"])
    assert after(replace(fine, sanity_checks=(in_the_model,))) == ["open", Path("r")], (
        "no attack would change that"
    )
    broken = Result(model="m", metric="worst", value=0.0, low=0.0, high=0.1, n=10)
    assert after(replace(fine, sanity_checks=(check,), results=(broken,))) == ["open", Path("r")], (
        "nothing is left"
    )
    random = Summary(
        command="evaluate", seconds=1.0, sanity_checks=(replace(check, name="randomness"),)
    )
    for attack in ("fast", "standard"):
        assert next_commands.after_evaluate(random, Path("r"), attack) == [
            *expected[:4],
            "--attack",
            "rand",
            "--out",
            "r-rand",
        ], "the same attack would decide by one pass again"


def test_failed_checks_are_red_below_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    output.show(
        output.Outcome(
            "Title\n\n model\n ─────\n x\n\nFailed sanity checks, so:\n- one [bold]m[/bold]: do"
        )
    )
    assert "\x1b[31mFailed sanity checks, so:" in capsys.readouterr().out
