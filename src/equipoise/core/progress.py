"""Progress of long work, on standard error.

Code that takes long writes `with progress.stage("attacking", total=1000) as stage:` and
`stage.advance(64)`. Nothing is shown unless a command, or the user, has written
`with progress.shown():` around it. Then each stage has a bar with the time left; where standard
error is no terminal, it has a line with its name and at most one more line a minute.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from datetime import timedelta
from typing import TYPE_CHECKING

from equipoise.core.text import literal

if TYPE_CHECKING:
    from rich.progress import Progress

SECONDS_BETWEEN_LINES = 60.0
LONGEST_NAME = 34  # characters beside a bar
# Seconds over which the speed is averaged: a batch of a slow attack takes minutes.
SPEED_PERIOD = 600.0

_bars: ContextVar[Progress | None] = ContextVar("bars", default=None)


@contextmanager
def shown() -> Iterator[None]:
    """Show the progress of everything inside; of several processes, only that of the first."""
    is_first = os.environ.get("RANK", "0") == "0"
    if not is_first or _bars.get() is not None:
        yield
        return
    bars = _new_bars()
    token = _bars.set(bars)
    try:
        with bars if _is_interactive() else nullcontext():
            yield
    finally:
        _bars.reset(token)


def note(text: str) -> None:
    """Show a line, such as where a run resumes."""
    bars = _bars.get()
    if bars is not None:
        bars.console.print(literal(text), soft_wrap=True)


@contextmanager
def stage(name: str, total: int, done: int = 0) -> Iterator[StageProgress]:
    """A piece of work of `total` units, of which `done` were finished before."""
    bars = _bars.get()
    if bars is None:
        yield StageProgress()
        return
    own = _ShownStage(bars, name, total, done)
    try:
        yield own
    finally:
        own.end()


class StageProgress:
    """A piece of work in progress that is not shown."""

    def advance(self, amount: int, **status: object) -> None:
        """`amount` more units are done; `status` such as `robust="40/64"` is shown beside them."""


class _ShownStage(StageProgress):
    """A stage with a bar, or with lines where the bars were not started."""

    def __init__(self, bars: Progress, name: str, total: int, done: int) -> None:
        self.bars, self.name = bars, literal(name)
        self.has_bar = bars.live.is_started
        self.last_line = time.monotonic()
        self.number = bars.add_task(_end_of(self.name), total=total, completed=done, status="")
        if not self.has_bar:
            note(self.name)

    def advance(self, amount: int, **status: object) -> None:
        """Count, and show it."""
        text = literal(", ".join(f"{key} {value}" for key, value in status.items()))
        self.bars.update(self.number, advance=amount, status=text)
        now = time.monotonic()
        if not self.has_bar and now - self.last_line >= SECONDS_BETWEEN_LINES:
            self.last_line = now
            note(self._line())

    def _line(self) -> str:
        task = next(task for task in self.bars.tasks if task.id == self.number)
        parts = [f"{self.name}: {task.completed:.0f}/{task.total:.0f}"]
        if task.fields["status"]:
            parts.append(task.fields["status"])
        if task.time_remaining is not None:
            parts.append(f"{timedelta(seconds=int(task.time_remaining))} left")
        return ", ".join(parts)

    def end(self) -> None:
        """Take the bar away."""
        self.bars.refresh()
        self.bars.remove_task(self.number)


def _is_interactive() -> bool:
    """Whether bars can be drawn: on a terminal that can move its cursor, and in a notebook."""
    is_terminal = sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
    return is_terminal or "ipykernel" in sys.modules


def _end_of(name: str) -> str:
    """A name beside a bar; of a long one, such as a path, the end."""
    return name if len(name) <= LONGEST_NAME else f"…{name[1 - LONGEST_NAME :]}"


def _new_bars() -> Progress:
    """Bars on standard error, which vanish in the end."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}", markup=False),
        TimeRemainingColumn(),
        console=Console(stderr=True, markup=False, emoji=False, highlight=False),
        get_time=time.monotonic,
        speed_estimate_period=SPEED_PERIOD,
        transient=True,
    )
