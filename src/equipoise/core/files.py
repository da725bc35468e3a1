"""Files of a run folder: atomic writes, and a lock that lets one command at a time into a folder."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

from equipoise.core.checks import InputError


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace a file whole or not at all: a full disk or a kill never damages the previous content."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def append_durably(path: Path, text: str) -> None:
    """Append text in one write and sync it to the disk."""
    path.parent.mkdir(exist_ok=True)
    with path.open("ab") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def remove_incomplete_line(path: Path) -> None:
    """Cut the half line that a killed process may leave at the end, so that the next one starts on a new line."""
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        write_atomic(path, data[: data.rfind(b"\n") + 1])


class FolderLock:
    """Exclusive use of a folder, held for as long as this object lives.

    The folder itself is locked, so that no lock file is left behind; the system releases the lock when the process
    ends, however it ends.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __del__(self) -> None:
        os.close(self._descriptor)


_held: weakref.WeakValueDictionary[tuple[int, int], FolderLock] = weakref.WeakValueDictionary()


def lock(folder: Path) -> FolderLock | None:
    """Lock a folder against other processes; within one process the lock is shared.

    Returns None on systems without such locks.
    """
    try:
        import fcntl
    except ImportError:
        return None
    status = folder.stat()
    key = status.st_dev, status.st_ino
    if (held := _held.get(key)) is not None:
        return held
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise InputError(f"`out` must be a folder that no other command is writing to, got {str(folder)!r}") from None
    except OSError:
        os.close(descriptor)
        return None
    _held[key] = new = FolderLock(descriptor)
    return new
