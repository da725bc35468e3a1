"""One command at a time in a run folder.

The folder itself is locked, so that nothing is left lying in it; the system lets go of the lock when the
process ends, however it ends.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path

from equipoise.core import checks


class Lock:
    """Held for as long as this object lives."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __del__(self) -> None:
        os.close(self._number)


_held: weakref.WeakValueDictionary[tuple[int, int], Lock] = weakref.WeakValueDictionary()


def take(folder: Path) -> Lock | None:
    """The lock of a folder, which another process must not hold; within one process it is shared.

    None where the system has no such locks: better unguarded than not at all.
    """
    try:
        import fcntl
    except ImportError:
        return None
    there = folder.stat()
    key = there.st_dev, there.st_ino
    if (mine := _held.get(key)) is not None:
        return mine
    number = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(number)
        raise checks.InputError(
            f"`out` must be a folder that no other command is writing to, got {str(folder)!r}") from None
    except OSError:
        os.close(number)
        return None
    _held[key] = lock = Lock(number)
    return lock
