"""Progress of long work, on standard error.

Code that takes long writes `with progress.stage("attacking", total=1000) as stage:` and
`stage.advance(64)`. Nothing is shown unless a command, or the user, has written
`with progress.shown():` around it. Then each stage has a bar with the time left; where standard
error is no terminal, a line a minute says how far the stage in progress is.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from equipoise.core.text import literal

if TYPE_CHECKING:
    from rich.progress import Progress

SECONDS_BETWEEN_LINES = 60.0
LONGEST_NAME = 34  # characters beside a bar
# Seconds over which the speed is averaged: a batch of a slow attack takes minutes.
SPEED_PERIOD = 600.0


@dataclass
class _Display:
    bars: Progress  # they also count where lines are shown
    has_bars: bool
    last_line: float  # when it was shown


_display: ContextVar[_Display | None] = ContextVar("display", default=None)


@contextmanager
def shown() -> Iterator[None]:
    """Show the progress of everything inside; of several processes, only that of the first."""
    is_first = os.environ.get("RANK", "0") == "0"
    if not is_first or _display.get() is not None:
        yield
        return
    display = _Display(_new_bars(), _is_interactive(), time.monotonic())
    token = _display.set(display)
    try:
        with display.bars if display.has_bars else nullcontext():
            yield
    finally:
        _display.reset(token)


def note(text: str) -> None:
    """Show a line, such as where a run resumes."""
    display = _display.get()
    if display is not None:
        display.bars.console.print(literal(text), soft_wrap=True)


@contextmanager
def stage(name: str, total: int, done: int = 0) -> Iterator[StageProgress]:
    """A piece of work of `total` units, of which `done` were finished before."""
    display = _display.get()
    if display is None:
        yield StageProgress()
        return
    own = _ShownStage(display, name, total, done)
    try:
        yield own
    finally:
        own.end()


class StageProgress:
    """A piece of work in progress that is not shown."""

    def advance(self, amount: int, **status: object) -> None:
        """`amount` more units are done; `status` such as `robust="40/64"` is shown beside them."""


class _ShownStage(StageProgress):
    def __init__(self, display: _Display, name: str, total: int, done: int) -> None:
        self.display, self.bars, self.name = display, display.bars, literal(name)
        self.number = self.bars.add_task(_end_of(self.name), total=total, completed=done, status="")

    def advance(self, amount: int, **status: object) -> None:
        """Count, and show it."""
        text = literal(", ".join(f"{key} {value}" for key, value in status.items()))
        self.bars.update(self.number, advance=amount, status=text)
        now = time.monotonic()
        if not self.display.has_bars and now - self.display.last_line >= SECONDS_BETWEEN_LINES:
            self.display.last_line = now
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
