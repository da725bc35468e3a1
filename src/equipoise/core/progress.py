"""Long work says how far it is: a bar on a terminal, plain lines elsewhere, silence in a library.

Rooms write `with progress.task("attacking", total=1000) as task: task.advance(64, standing=400)`.
Nothing is shown unless the command line has opened `with progress.shown():`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

_SECONDS_BETWEEN_LINES = 5.0
_WORTH_A_LINE = 1.0  # seconds


class Task(Protocol):
    """One piece of work under way."""

    def advance(self, amount: int, **facts: object) -> None:
        """`amount` more is done; facts such as `standing=400` are shown beside the bar."""


class _Silent:
    def advance(self, amount: int, **facts: object) -> None:
        pass


class _Lines:
    def __init__(self, name: str, total: int, done: int) -> None:
        self.name, self.total, self.done, self.before = name, total, done, done
        self.start = self.last = time.monotonic()

    def advance(self, amount: int, **facts: object) -> None:
        self.done += amount
        now = time.monotonic()
        done = self.done >= self.total and now - self.start >= _WORTH_A_LINE
        if now - self.last < _SECONDS_BETWEEN_LINES and not done:
            return
        self.last = now
        left = (now - self.start) * (self.total - self.done) / max(self.done - self.before, 1)
        shown = "".join(f", {key} {value}" for key, value in facts.items())
        print(f"{self.name}: {self.done}/{self.total}{shown}, {left:.0f} s left", file=sys.stderr, flush=True)


class _Bars:
    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
                   TextColumn("{task.fields[facts]}"), TimeRemainingColumn())
        self.progress = Progress(*columns, console=Console(stderr=True), transient=True)

    @contextmanager
    def task(self, name: str, total: int, done: int) -> Iterator[Task]:
        number = self.progress.add_task(name, total=total, completed=done, facts="")
        progress = self.progress

        class Bar:
            def advance(self, amount: int, **facts: object) -> None:
                shown = ", ".join(f"{key} {value}" for key, value in facts.items())
                progress.update(number, advance=amount, facts=shown)

        try:
            yield Bar()
        finally:
            progress.refresh()
            progress.remove_task(number)


_shown: ContextVar[_Bars | type[_Lines] | None] = ContextVar("shown", default=None)


@contextmanager
def shown() -> Iterator[None]:
    """Show the progress of everything inside on standard error; of several processes, the first shows its own."""
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    if not sys.stderr.isatty():
        token = _shown.set(_Lines)
        try:
            yield
        finally:
            _shown.reset(token)
        return
    bars = _Bars()
    token = _shown.set(bars)
    try:
        with bars.progress:
            yield
    finally:
        _shown.reset(token)


@contextmanager
def task(name: str, total: int, done: int = 0) -> Iterator[Task]:
    """A piece of work of `total` units, of which `done` were done before the clock started."""
    how = _shown.get()
    if how is None:
        yield _Silent()
    elif isinstance(how, _Bars):
        with how.task(name, total, done) as bar:
            yield bar
    else:
        yield how(name, total, done)
