"""How progress is shown: bars, or plain lines; :mod:`equipoise.core.progress` is what packages
use."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from equipoise.core.text import literal

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_SECONDS_BETWEEN_LINES = 5.0
_SHORTEST_REPORTED = 1.0  # seconds; shorter work gets no final line
_LONGEST_NAME = 34  # characters beside a bar
_BAR = 16  # characters


class Task:
    """One piece of work in progress; this base class shows nothing."""

    def advance(self, amount: int, **status: object) -> None:
        """`amount` more units are done; `status` such as `robust=400` is shown beside the bar."""


class StagePlan:
    """The stages of a piece of work, and which of them are done."""

    def __init__(self, shares: Mapping[str, float] | Sequence[tuple[str, float]]) -> None:
        stages = list(shares.items() if isinstance(shares, Mapping) else shares)
        self.names, self.shares = [name for name, _ in stages], [share for _, share in stages]
        self.number, self.name, self.done, self.current = 0, "", 0.0, 0.0
        self.inside = (
            0.0  # how much of the stage in progress is done, by tasks that are not planned
        )
        self.is_unplanned = False  # the task in progress
        self.is_task = False  # the stage in progress

    def enter(self, name: str, is_task: bool) -> bool:
        """Start a stage, of several with one name the next; those before it are done. False if it
        is not planned."""
        if name not in self.names:
            return False
        start = self.number if name in self.names[self.number :] else 0
        place = self.names.index(name, start)
        self.is_task = is_task
        self.number, self.name, self.inside = place + 1, name, 0.0
        self.done, self.current = sum(self.shares[:place]), self.shares[place]
        return True

    def leave(self) -> None:
        """End the stage."""
        self.done, self.current, self.inside = self.done + self.current, 0.0, 0.0

    def fraction(self, of_task: float) -> float:
        """How much is done; a task that is not planned takes half of what is left of its stage."""
        of_stage = self.inside + of_task * (1 - self.inside) * (0.5 if self.is_unplanned else 1.0)
        return (self.done + self.current * of_stage) / (sum(self.shares) or 1.0)


class Display:
    """Shows tasks, and how far the outermost plan is; this base class shows nothing."""

    def __init__(self) -> None:
        self.plans: list[StagePlan] = []
        self.start = 0.0

    def new_task(self, name: str, total: int, done: int) -> AbstractContextManager[Task]:
        """Show a task while the block runs."""
        return nullcontext(Task())

    def note(self, text: str) -> None:
        """Show a line."""

    def show_plan(self, of_task: float = 0.0) -> None:
        """Show how far the outermost plan is, if there is one."""

    def fraction(self, of_task: float) -> float:
        """How far the outermost plan is."""
        for plan in reversed(self.plans):
            of_task = plan.fraction(of_task)
        return of_task

    def stage_title(self, longest: int | None = None) -> str:
        """The stage of the outermost plan, such as "2/7 fitting"; its number alone if it is a task,
        which is shown."""
        plan = self.plans[0]
        name = (
            "" if len(self.plans) == 1 and plan.is_task else _shortened(literal(plan.name), longest)
        )
        return f"{max(plan.number, 1)}/{len(plan.names)} {name}".rstrip()

    def left(self, of_task: float) -> str:
        """The time that the outermost plan still takes; empty if it cannot be told, as after
        unplanned tasks."""
        fraction, passed = self.fraction(of_task), time.monotonic() - self.start
        is_known = fraction > 0 and passed > 0 and all(plan.inside <= 0.5 for plan in self.plans)
        return duration(passed * (1 - fraction) / fraction) if is_known else ""


class Lines(Display):
    """Plain lines on standard error."""

    def note(self, text: str) -> None:
        """Print it."""
        print(text, file=sys.stderr, flush=True)

    def new_task(self, name: str, total: int, done: int) -> AbstractContextManager[Task]:
        """A task as lines."""
        return nullcontext(TaskLine(self, name, total, done))


class TaskLine(Task):
    """A task as lines, at most one in a few seconds, and one at its end."""

    def __init__(self, display: Lines, name: str, total: int, done: int) -> None:
        self.display, self.name, self.total, self.done, self.before = (
            display,
            literal(name),
            total,
            done,
            done,
        )
        self.start = self.last = time.monotonic()
        self.ended = False

    def advance(self, amount: int, **status: object) -> None:
        """Count, and show it."""
        self.done += amount
        now = time.monotonic()
        done = self.done >= self.total and now - self.start >= _SHORTEST_REPORTED
        if self.ended or (now - self.last < _SECONDS_BETWEEN_LINES and not done):
            return
        self.last, self.ended = now, self.done >= self.total
        left = (now - self.start) * (self.total - self.done) / max(self.done - self.before, 1)
        shown = literal("".join(f", {key} {value}" for key, value in status.items()))
        count = f"{self.name}: {self.done}/{self.total}{shown}"
        self.display.note(
            self._with_plan(count) if self.display.plans else f"{count}, {duration(left)} left"
        )

    def _with_plan(self, count: str) -> str:
        of_task = self.done / max(self.total, 1)
        left = self.display.left(of_task)
        return (
            f"[{self.display.stage_title()}] {count}; {100 * self.display.fraction(of_task):.0f} % of all"
            f"{f', {left} left' if left else ''}"
        )


class Bars(Display):
    """Bars on standard error: that of the outermost plan, and one per task."""

    def __init__(self, bars: Progress) -> None:
        super().__init__()
        self.bars = bars
        self.whole: TaskID | None = None

    def note(self, text: str) -> None:
        """Print it."""
        self.bars.console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def new_task(self, name: str, total: int, done: int) -> Iterator[Task]:
        """A task as a bar."""
        bar = TaskBar(self.bars, name, total, done, self)
        try:
            yield bar
        finally:
            self.bars.refresh()
            self.bars.remove_task(bar.number)

    def show_plan(self, of_task: float = 0.0) -> None:
        """Show or remove the bar of the plan."""
        if self.plans and self.whole is None:
            self.whole = self.bars.add_task("", total=1.0, count="", status="", left="")
        elif not self.plans and self.whole is not None:
            self.bars.remove_task(self.whole)
            self.whole = None
        if self.plans and self.whole is not None:
            fraction, left = self.fraction(of_task), self.left(of_task)
            title = self.stage_title(_LONGEST_NAME - 6)
            self.bars.update(
                self.whole,
                completed=fraction,
                description=title,
                status="",
                count=f"{100 * fraction:.0f} %",
                left=f"{left} left" if left else "",
            )


class TaskBar(Task):
    """A task as a bar."""

    def __init__(
        self, bars: Progress, name: str, total: int, done: int, display: Bars | None = None
    ) -> None:
        self.bars, self.display, self.total, self.done, self.before = (
            bars,
            display,
            total,
            done,
            done,
        )
        self.start = time.monotonic()
        self.number = bars.add_task(
            _shortened(literal(name), _LONGEST_NAME),
            total=total,
            completed=done,
            count=f"{done}/{total}",
            status="",
            left="",
        )

    def advance(self, amount: int, **status: object) -> None:
        """Count, and show it."""
        self.done += amount
        shown = literal(", ".join(f"{key} {value}" for key, value in status.items()))
        left = ""
        if self.display is None or not self.display.plans:
            seconds = (
                (time.monotonic() - self.start)
                * (self.total - self.done)
                / max(self.done - self.before, 1)
            )
            left = f"{duration(seconds)} left"
        self.bars.update(
            self.number, advance=amount, status=shown, count=f"{self.done}/{self.total}", left=left
        )
        if self.display is not None:
            self.display.show_plan(self.done / max(self.total, 1))


def duration(seconds: float) -> str:
    """Rounded as a person would.

    >>> duration(80), duration(400), duration(9000)
    ('80 s', '7 min', '2.5 h')
    """
    minutes = seconds / 60
    return (
        f"{seconds:.0f} s"
        if minutes < 2
        else f"{minutes:.0f} min"
        if minutes < 120
        else f"{minutes / 60:.1f} h"
    )


def _shortened(name: str, longest: int | None) -> str:
    """A name beside a bar; of a long one, such as a path, the end."""
    return name if longest is None or len(name) <= longest else f"…{name[1 - longest :]}"


def new_bars() -> Progress:
    """Bars on standard error that vanish in the end."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    texts = (
        "{task.description}",
        "{task.fields[count]}",
        "{task.fields[status]}",
        "{task.fields[left]}",
    )
    name, *others = (
        TextColumn(text, markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))
        for text in texts
    )
    return Progress(name, BarColumn(_BAR), *others, console=Console(stderr=True), transient=True)
