"""Progress of long work: bars in a terminal or notebook; elsewhere plain lines of a command,
silence in a library.

Packages write `with progress.task("attacking", total=1000) as task: task.advance(64, robust=400)`.
Work of several tasks says so first, `with progress.plan({"attacking": 20, "searching": 1}):`, with
the shares of the tasks, so that it is also shown how far the whole is and how long it takes. A
command opens `with progress.display():`, so that its progress is shown without a terminal, too.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

from equipoise.core.progress_display import Bars, Display, Lines, StagePlan, new_bars
from equipoise.core.progress_display import Task as Task

_display: ContextVar[Display | None] = ContextVar("display", default=None)


@contextmanager
def display() -> Iterator[None]:
    """Show the progress of everything inside on standard error; of several processes, only that of
    the first."""
    if not _is_first() or _display.get() is not None:
        yield
        return
    with (
        new_bars() if _is_interactive() else nullcontext() as bars,
        _shown_by(Lines() if bars is None else Bars(bars)),
    ):
        yield


def hidden() -> AbstractContextManager[None]:
    """Show no progress of anything inside."""
    return _shown_by(Display())


@contextmanager
def _shown_by(shown: Display) -> Iterator[None]:
    token = _display.set(shown)
    try:
        yield
    finally:
        _display.reset(token)


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _is_interactive() -> bool:
    """Whether standard error is a terminal that can move its cursor, or the code runs in a
    notebook."""
    return (
        sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
    ) or "ipykernel" in sys.modules


def note(text: str) -> None:
    """Show a line, such as where a run resumes, wherever progress is shown."""
    shown = _display.get()
    if shown is not None:
        shown.note(text)
    elif _is_interactive() and _is_first():
        print(text, file=sys.stderr, flush=True)


@contextmanager
def _visible() -> Iterator[Display]:
    """The display, or a new one in a terminal."""
    if (shown := _display.get()) is not None:
        yield shown
    elif _is_interactive() and _is_first():
        with display():
            yield _display.get() or Display()
    else:
        yield Display()


@contextmanager
def plan(shares: Mapping[str, float] | Sequence[tuple[str, float]]) -> Iterator[None]:
    """Work that consists of these tasks or stages, in this order, with their shares of the time.

    Inside a stage of another plan it is a part of it. Stages are skipped where others come next,
    and those of one name, which only a sequence can have, are entered one after the other.
    """
    with _visible() as shown:
        shown.plans.append(StagePlan(shares))
        if len(shown.plans) == 1:
            shown.start = time.monotonic()
        try:
            shown.show_plan()
            yield
        finally:
            shown.plans.pop()
            shown.show_plan()


@contextmanager
def stage(name: str) -> Iterator[None]:
    """A stage of a plan that has tasks or plans of its own."""
    with _visible() as shown, _entered(shown, name, is_task=False):
        shown.show_plan()
        yield


@contextmanager
def _entered(shown: Display, name: str, is_task: bool) -> Iterator[None]:
    if not shown.plans:
        yield
        return
    current = shown.plans[-1]
    current.is_unplanned = not current.enter(name, is_task)
    try:
        yield
    finally:
        if current.is_unplanned:
            current.inside, current.is_unplanned = (1 + current.inside) / 2, False
        else:
            current.leave()


@contextmanager
def task(name: str, total: int, done: int = 0) -> Iterator[Task]:
    """A piece of work of `total` units, of which `done` were finished before the clock started."""
    with (
        _visible() as shown,
        _entered(shown, name, is_task=True),
        shown.new_task(name, total, done) as own,
    ):
        yield own
