"""Runs that end in the middle, as if their process had been killed."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from equipoise.core.records import Run
from equipoise.core.rows import Row


class KilledError(Exception):
    """Stands for the end of the process."""


def run_until_killed(
    monkeypatch: pytest.MonkeyPatch, writes: int, run: Callable[[], object]
) -> None:
    """Call `run`, which ends after it has appended rows so many times; it is an error if it ends by
    itself."""
    append, done = Run.append, []

    def counted(self: Run, rows: Iterable[Row]) -> None:
        append(self, rows)
        done.append(1)
        if len(done) == writes:
            raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(Run, "append", counted)
        with pytest.raises(KilledError):
            run()
