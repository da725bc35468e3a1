from __future__ import annotations

import io

import pytest

from equipoise.core import progress
from equipoise.core.text import literal


def test_silent_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.task("work", total=3) as task:
        task.advance(3)
    assert capsys.readouterr() == ("", "")


def test_plain_lines_without_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 3.0, 10.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    with progress.display(), progress.task("work", total=3) as task:
        task.advance(1)
        task.advance(2, robust="2/3")
    out, err = capsys.readouterr()
    assert out == "" and err == "work: 3/3, robust 2/3, 0 s left\n"


def test_what_was_done_before_does_not_shorten_the_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 10.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    with progress.display(), progress.task("work", total=100, done=80) as task:
        task.advance(10)
    assert capsys.readouterr().err == "work: 90/100, 10 s left\n"


def test_only_the_first_of_several_processes_shows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    clock = iter([0.0, 10.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    with progress.display(), progress.task("work", total=1) as task:
        task.advance(1)
    assert capsys.readouterr().err == ""


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with progress.display(), progress.task("work", total=3) as task:
        task.advance(3, robust="2/3")
    assert "work" in screen.getvalue() and "2/3" in screen.getvalue()


def test_without_a_command_progress_is_shown_only_in_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    with progress.task("work", total=1) as task:
        task.advance(1)
    assert capsys.readouterr().err == ""
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with progress.task("work", total=1) as task:
        task.advance(1)
    assert "work" in screen.getvalue()


@pytest.mark.parametrize("name", ["[red]x[/red]", "[/]", "a\x1b[2Jb", "a\rb", ":smile:", "{task}"])
def test_names_are_shown_literally(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str,
) -> None:
    from rich.console import Console

    clock = iter([0.0, 10.0])
    with monkeypatch.context() as patch:
        patch.setattr("time.monotonic", lambda: next(clock))
        with progress.display(), progress.task(name, total=1) as task:
            task.advance(1, model=name)
    shown = literal(name)
    assert capsys.readouterr().err == f"{shown}: 1/1, model {shown}, 0 s left\n"
    bars = progress._new_bars()
    bars.live.console = Console(file=io.StringIO(), force_terminal=True, width=200, color_system=None)
    task = progress._Bar(bars, name, 1, 0)
    task.advance(1, model=name)
    bars.console.print(bars.make_tasks_table(bars.tasks))
    text = bars.console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count(shown) == 2 and text.rstrip("\n").isprintable()
