"""What every command shares: errors of the machine, bugs, version and help."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from small_files import write_files

from equipoise import __version__
from equipoise.__main__ import main as entry_point
from equipoise.cli import main
from equipoise.cli.main import run
from equipoise.core.checks import EquipoiseWarning
from equipoise.core.records import Run
from equipoise.core.rows import Row

EVALUATE = [
    "evaluate",
    "robust.safetensors",
    "--data",
    "npz:images.npz",
    "--out",
    "run",
    "--attack",
    "pgd",
    "--steps",
    "2",
]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 2, "the disk is full"),
        (
            PermissionError(errno.EACCES, "Permission denied", "run/run.toml"),
            2,
            "run/run.toml: Permission denied",
        ),
        (
            torch.OutOfMemoryError("CUDA out of memory"),
            2,
            "out of memory even for one image at a time",
        ),
        (KeyboardInterrupt(), 130, "stopped; repeat the command to resume it"),
    ],
)
def test_errors_of_the_machine_are_one_sentence_and_the_run_can_be_resumed(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    sentence: str,
) -> None:
    def fail(self: Run, rows: Iterable[Row]) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Run, "append", fail)
        assert run(EVALUATE) == code
    assert sentence in capsys.readouterr().err
    assert run(EVALUATE) == 0


def test_ctrl_c_during_the_imports_is_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "run", interrupt)
    with pytest.raises(SystemExit) as ended:
        entry_point()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "equipoise: stopped\n"


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Run, rows: Iterable[Row]) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(Run, "append", fail)
    with pytest.raises(ValueError, match="a bug"):
        run(EVALUATE)


@pytest.mark.parametrize(
    ("option", "text"), [("--version", f"equipoise {__version__}\n"), ("--help", "evaluate")]
)
def test_version_and_help(option: str, text: str) -> None:
    command = [sys.executable, "-m", "equipoise", option]
    assert text in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def imported_by(*line: str) -> set[str]:
    """The packages of other projects, and submodules of scipy, that a fresh Python process imports
    for this."""
    code = (
        "import atexit, sys; atexit.register(lambda: print('modules', *sys.modules))\n"
        f"sys.argv = ['equipoise', *{list(line[1:])!r}]\n{line[0]}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "modules " in done.stdout
    return set(done.stdout.rpartition("modules ")[2].split())


COMMAND_LINE = (
    "from equipoise.__main__ import main\nmain()"  # which runs what is registered for the exit
)


@pytest.mark.parametrize(
    "line", [["import equipoise"], [COMMAND_LINE, "--help"], [COMMAND_LINE, "--version"]]
)
def test_help_and_the_package_itself_import_neither_torch_nor_numpy(line: list[str]) -> None:
    assert not imported_by(*line) & {"torch", "numpy", "scipy", "altair", "rich"}


def test_an_evaluation_imports_nothing_large_that_it_does_not_use() -> None:
    """The run loads a model, attacks it and prints a table."""
    modules = imported_by(COMMAND_LINE, *EVALUATE)
    assert {"torch", "rich"} <= modules, "the test would notice the others, too"
    assert not modules & {
        "scipy.stats",
        "scipy.optimize",
        "altair",
        "sympy",
        "torch._dynamo",
        "torch._inductor",
    }


def test_the_list_of_commands_is_that_of_the_commands() -> None:
    """The list is written down apart from the commands, so that it is shown without loading
    them."""
    lines = {
        name: " ".join((command.help or "").split())
        for name, command in ((name, main.load_command(name)) for name in main.COMMANDS)
    }
    assert lines == main.COMMANDS


def test_names_are_shown_literally(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """Markup, escapes, line breaks and undecodable bytes in a file name, in a table and in an
    error."""
    name = b"[red]x\x1b[31m\ny.safetensors"
    shutil.copy(b"robust.safetensors", name)
    line: list[str | bytes] = [sys.executable, "-m", "equipoise", "evaluate", name, *EVALUATE[2:]]
    done = subprocess.run(line, capture_output=True, check=False)
    assert (
        done.returncode == 0
        and rb"[red]x\x1b[31m\ny" in done.stdout
        and b"\x1b" not in done.stdout + done.stderr
    )
    assert (
        run(
            [
                "evaluate",
                "[/red]\x1b[31m\n\udcff.safetensors",
                *EVALUATE[2:5],
                "other",
                *EVALUATE[6:],
            ]
        )
        == 2
    )
    error = capfdbinary.readouterr().err
    assert (
        rb"[/red]\x1b[31m\n\udcff.safetensors" in error
        and error.count(b"\n") == 1
        and b"\x1b" not in error
    )


def test_a_folder_whose_name_is_not_unicode() -> None:
    assert run([*EVALUATE[:4], "--out", "run\udcff", *EVALUATE[6:]]) == 0
    assert run([*EVALUATE[:4], "--out", "run\udcff", *EVALUATE[6:]]) == 0, "resumed"


def test_warnings_are_one_literal_line(capsys: pytest.CaptureFixture[str]) -> None:
    main._print_warning(EquipoiseWarning("[red]a\x1b[31m\nb"))
    main._print_warning("of torch,\non two lines")
    assert (
        capsys.readouterr().err
        == "warning: [red]a\\x1b[31m\\nb\nwarning: of torch,\non two lines\n"
    )


@pytest.mark.parametrize(("value", "got"), [("1e3", "'1e3'"), ("", "''"), ("9" * 5000, "'999")])
def test_a_value_that_is_no_number_is_named(
    value: str, got: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, also of a long value: older releases of Typer name it themselves."""
    assert run(["evaluate", "zoo:cnn", "--data", "shapes", "--count", value]) == 2
    err = capsys.readouterr().err
    assert "'--count'" in err and got in err and len(err.splitlines()) == 1 and len(err) < 400


def test_the_help_of_models_names_every_scheme() -> None:
    from equipoise.cli import options
    from equipoise.models import SCHEMES

    text = options.Models.__metadata__[0].help  # type: ignore[attr-defined]
    assert [name for name in SCHEMES.builtin if f"{name}:" not in text] == ["https"]
