from __future__ import annotations

import io

import pytest

from equipoise.core import progress, progress_display
from equipoise.core.text import literal


def test_silent_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.task("work", total=3) as task:
        task.advance(3)
    assert capsys.readouterr() == ("", "")


def test_plain_lines_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 3.0, 10.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    with progress.display(), progress.task("work", total=3) as task:
        task.advance(1)
        task.advance(2, robust="2/3")
    out, err = capsys.readouterr()
    assert out == "" and err == "work: 3/3, robust 2/3, 0 s left\n"


def test_what_was_done_before_does_not_shorten_the_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 10.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    with progress.display(), progress.task("work", total=100, done=80) as task:
        task.advance(10)
    assert capsys.readouterr().err == "work: 90/100, 10 s left\n"


def test_only_the_first_of_several_processes_shows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
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
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
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
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    from rich.console import Console

    clock = iter([0.0, 10.0])
    with monkeypatch.context() as patch:
        patch.setattr("time.monotonic", lambda: next(clock))
        with progress.display(), progress.task(name, total=1) as task:
            task.advance(1, model=name)
    shown = literal(name)
    assert capsys.readouterr().err == f"{shown}: 1/1, model {shown}, 0 s left\n"
    bars = progress_display.new_bars()
    bars.live.console = Console(
        file=io.StringIO(), force_terminal=True, width=200, color_system=None
    )
    task = progress_display.TaskBar(bars, name, 1, 0)
    task.advance(1, model=name)
    bars.console.print(bars.make_tasks_table(bars.tasks))
    text = bars.console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count(shown) == 2 and text.rstrip("\n").isprintable()


def plan_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a plan with a stage of two stages, an unplanned task and a task prints, a line per
    step."""
    clock = iter(float(second) for second in range(100))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    monkeypatch.setattr(progress_display, "_SECONDS_BETWEEN_LINES", 0.0)
    with progress.display(), progress.plan({"fitting": 1, "attacking": 3}):
        with progress.stage("fitting"), progress.plan({"a": 1, "b": 1}):
            for name in "ab":
                with progress.task(name, total=2) as task:
                    task.advance(2)
        with progress.stage("attacking"):
            for _ in range(2):
                with progress.task("image", total=2) as task:
                    task.advance(1)
                    task.advance(1)
    return capsys.readouterr().err.splitlines()


def test_a_plan_says_how_far_the_whole_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = [line.split(", ")[0] for line in plan_lines(capsys, monkeypatch)]
    assert shown == [
        "[1/2 fitting] a: 2/2; 12 % of all",
        "[1/2 fitting] b: 2/2; 25 % of all",
        "[2/2 attacking] image: 1/2; 44 % of all",
        "[2/2 attacking] image: 2/2; 62 % of all",
        "[2/2 attacking] image: 1/2; 72 % of all",
        "[2/2 attacking] image: 2/2; 81 % of all",
    ]


def test_the_time_left_is_that_of_the_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 0.0, 10.0, 10.0])  # the plan starts, the task starts, a line, its time left
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    with (
        progress.display(),
        progress.plan({"work": 1, "more": 1}),
        progress.task("work", total=4) as task,
    ):
        task.advance(2)
    assert capsys.readouterr().err == "[1/2] work: 2/4; 25 % of all, 30 s left\n"


def test_stages_that_are_skipped_count_as_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_display, "_SECONDS_BETWEEN_LINES", 0.0)
    with (
        progress.display(),
        progress.plan({"a": 1, "b": 2, "c": 1}),
        progress.task("c", total=2) as task,
    ):
        task.advance(1)
    assert capsys.readouterr().err.startswith("[3/3] c: 1/2; 88 % of all")


def test_stages_of_one_name_are_entered_one_after_the_other(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_display, "_SECONDS_BETWEEN_LINES", 0.0)
    with progress.display(), progress.plan([("a", 1), ("b", 1), ("a", 2)]):
        for name in "aaa":  # one more than planned repeats the first
            with progress.task(name, total=1) as task:
                task.advance(1)
    shown = [line.split(",")[0] for line in capsys.readouterr().err.splitlines()]
    assert shown == [
        "[1/3] a: 1/1; 25 % of all",
        "[3/3] a: 1/1; 100 % of all",
        "[1/3] a: 1/1; 25 % of all",
    ]


def test_the_end_of_a_task_is_said_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 10.0, 20.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    with progress.display(), progress.task("work", total=1) as task:
        task.advance(1)
        task.advance(0)
    assert capsys.readouterr().err == "work: 1/1, 0 s left\n"


def test_hidden_progress(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_display, "_SECONDS_BETWEEN_LINES", 0.0)
    with (
        progress.hidden(),
        progress.display(),
        progress.plan({"work": 1}),
        progress.task("work", total=1) as task,
    ):
        progress.note("note")
        task.advance(1)
    assert capsys.readouterr() == ("", "")
