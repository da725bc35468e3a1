"""Progress of long work: bars on a terminal, few lines elsewhere, nothing from a library call."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from equipoise.core import progress
from equipoise.core.text import literal


class Clock:
    """A time that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("time.monotonic", clock)
    return clock


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def use_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Make standard error a terminal of 200 columns."""
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    for name, value in {"TERM": "xterm", "COLUMNS": "200", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    return screen


def work(total: int = 3, **status: object) -> None:
    with progress.stage("work", total=total) as stage:
        for _ in range(total):
            stage.advance(1, **status)
        progress.note("a note")


def test_a_library_call_shows_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    work()
    screen = use_terminal(monkeypatch)
    work()
    assert screen.getvalue() == ""
    assert capsys.readouterr() == ("", "")


def test_a_bar_advances(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = use_terminal(monkeypatch)
    with progress.shown(), progress.stage("work", total=3) as stage:
        assert "0/3" in drawn()
        stage.advance(2, robust="1/2")
        line = drawn()
        assert "work" in line and "2/3" in line and "robust 1/2" in line
        stage.advance(1)
        assert re.search(r"3/3 .*0:00:00", drawn()), "the time left"
    assert "work" in screen.getvalue()


def drawn() -> str:
    """The bars as they are drawn now."""
    display = progress._display.get()
    assert display is not None
    page = io.StringIO()
    Console(file=page, width=200, emoji=False, markup=False).print(display.bars.get_renderable())
    return page.getvalue()


def test_every_task_has_a_bar_and_none_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    use_terminal(monkeypatch)
    with progress.shown():
        with progress.stage("outer", total=2), progress.stage("inner", total=3):
            assert "outer" in drawn() and "inner" in drawn()
        assert "outer" not in drawn() and "inner" not in drawn()


def test_lines_come_at_most_once_a_minute(capsys: pytest.CaptureFixture[str], clock: Clock) -> None:
    with progress.shown():
        with progress.stage("first", total=100) as stage:
            for second in range(1, 101):
                clock.now = 2.0 * second
                stage.advance(1, robust=f"{second}/100")
        with progress.stage("second", total=50) as stage:
            for second in range(1, 51):
                clock.now = 200.0 + second
                stage.advance(1)
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert [line.partition(",")[0] for line in lines] == [
        "first: 30/100",
        "first: 60/100",
        "first: 90/100",
        "second: 40/50",
    ]
    assert lines[1].startswith("first: 60/100, robust 60/100, 0:01:")
    assert lines[1].endswith(" left")


def test_what_was_done_before_does_not_shorten_the_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 30.0)
    with progress.shown(), progress.stage("work", total=100, done=80) as stage:
        for second in (10, 20, 30):
            clock.now = second
            stage.advance(1)
    assert capsys.readouterr().err.splitlines() == ["work: 83/100, 0:02:50 left"]


def test_only_the_first_of_several_processes_shows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    with progress.shown():
        work()
    assert capsys.readouterr().err == ""


def test_an_error_ends_the_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = use_terminal(monkeypatch)
    with pytest.raises(ZeroDivisionError), progress.shown(), progress.stage("work", total=1):
        raise ZeroDivisionError
    before = screen.getvalue()
    work()
    assert screen.getvalue() == before


@pytest.mark.parametrize("name", ["[red]x[/red]", "[/]", "a\x1b[2Jb", "a\rb", ":smile:", "{task}"])
def test_names_are_shown_literally(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    with progress.shown(), progress.stage(name, total=1) as stage:
        stage.advance(1, model=name)
        assert drawn().count(literal(name)) == 2
    err = capsys.readouterr().err
    assert err.count(literal(name)) == 2
    assert err.replace("\n", "").isprintable()


def test_a_note_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.shown():
        progress.note("word " * 100)
    assert capsys.readouterr().err == "word " * 100 + "\n"
