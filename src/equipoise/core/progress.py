"""Progress of long work: a bar in a terminal or notebook; elsewhere plain lines of a command, silence in a library.

Packages write `with progress.task("attacking", total=1000) as task: task.advance(64, robust=400)`. A command opens
`with progress.display():`, so that its progress is also shown without a terminal.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING

from equipoise.core.text import literal

if TYPE_CHECKING:
    from rich.progress import Progress

_SECONDS_BETWEEN_LINES = 5.0
_SHORTEST_REPORTED = 1.0  # seconds; shorter work gets no final line


class Task:
    """One piece of work in progress; this base class shows nothing."""

    def advance(self, amount: int, **status: object) -> None:
        """`amount` more units are done; `status` such as `robust=400` is shown beside the bar."""


class _Line(Task):
    def __init__(self, name: str, total: int, done: int) -> None:
        self.name, self.total, self.done, self.before = literal(name), total, done, done
        self.start = self.last = time.monotonic()

    def advance(self, amount: int, **status: object) -> None:
        self.done += amount
        now = time.monotonic()
        done = self.done >= self.total and now - self.start >= _SHORTEST_REPORTED
        if now - self.last < _SECONDS_BETWEEN_LINES and not done:
            return
        self.last = now
        left = (now - self.start) * (self.total - self.done) / max(self.done - self.before, 1)
        shown = literal("".join(f", {key} {value}" for key, value in status.items()))
        print(f"{self.name}: {self.done}/{self.total}{shown}, {left:.0f} s left", file=sys.stderr, flush=True)


class _Bar(Task):
    def __init__(self, bars: Progress, name: str, total: int, done: int) -> None:
        self.bars, self.number = bars, bars.add_task(literal(name), total=total, completed=done, status="")

    def advance(self, amount: int, **status: object) -> None:
        shown = literal(", ".join(f"{key} {value}" for key, value in status.items()))
        self.bars.update(self.number, advance=amount, status=shown)


def _new_bars() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
               TextColumn("{task.fields[status]}", markup=False), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


_display: ContextVar[Progress | str | None] = ContextVar("display", default=None)  # bars, or "lines"


@contextmanager
def display() -> Iterator[None]:
    """Show the progress of everything inside on standard error; of several processes, only that of the first."""
    if os.environ.get("RANK", "0") != "0" or _display.get() is not None:
        yield
        return
    with _new_bars() if _is_interactive() else nullcontext("lines") as style:
        token = _display.set(style)
        try:
            yield
        finally:
            _display.reset(token)


def _is_interactive() -> bool:
    """Whether standard error is a terminal, or the code runs in a notebook."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def note(text: str) -> None:
    """Show a line, such as where a run resumes, wherever progress is shown."""
    style = _display.get()
    if os.environ.get("RANK", "0") != "0" or (style is None and not _is_interactive()):
        return
    if style is None or isinstance(style, str):
        print(text, file=sys.stderr, flush=True)
    else:
        style.console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def task(name: str, total: int, done: int = 0) -> Iterator[Task]:
    """A piece of work of `total` units, of which `done` were finished before the clock started."""
    style = _display.get()
    if style is None and _is_interactive() and os.environ.get("RANK", "0") == "0":
        with display(), task(name, total, done) as shown:
            yield shown
    elif style is None:
        yield Task()
    elif isinstance(style, str):
        yield _Line(name, total, done)
    else:
        bar = _Bar(style, name, total, done)
        try:
            yield bar
        finally:
            style.refresh()
            style.remove_task(bar.number)
