"""Files: one atomic writer, durable appending, and a lock that lets one command at a time into a
folder.

A file is written under a temporary name in its own folder, synced and renamed, so that a kill or a
full disk never damages what was there. The temporary file of a killed process is removed by the
next write in that folder; those of running processes are locked, and stay.
"""

from __future__ import annotations

import difflib
import errno
import io
import os
import re
import secrets
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from equipoise.core.checks import InputError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_TEMPORARY = re.compile(r"\.equipoise-[0-9a-f]{32}\.tmp")
_SYSTEM_FILES = (".DS_Store", "Thumbs.db", "desktop.ini")  # written by file managers
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
_BUFFER = 1 << 20  # bytes


@contextmanager
def atomic_writer(path: Path) -> Iterator[BinaryIO]:
    """A new binary file that takes the place of `path` at the end of the block, or vanishes if the
    block fails."""
    path = Path(path)
    remove_stale(path.parent)
    raw = _open_temporary(path.parent)
    try:
        with io.BufferedWriter(raw, _BUFFER) as file:
            yield cast(BinaryIO, file)
            file.flush()
            os.fsync(file.fileno())
            Path(raw.name).replace(path)  # before the lock on the temporary file is released
        _sync_folder(path.parent)
    except BaseException as error:
        with suppress(OSError):
            Path(raw.name).unlink()
        _set_filename(error if raw.error is None else raw.error, path)
        if raw.error is None:
            raise
        raise raw.error from None


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace a file whole or not at all: a full disk or a kill never damages the previous
    content."""
    with atomic_writer(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


class _Temporary(io.FileIO):
    """Keeps the first failed write: libraries that write archives hide it behind errors of their
    own."""

    name: str
    error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.error = self.error or error
            raise


def _open_temporary(folder: Path) -> _Temporary:
    while True:
        path = str(folder / f".equipoise-{secrets.token_hex(16)}.tmp")
        raw = _Temporary(
            path, "xb", opener=lambda name, flags: os.open(name, flags | _NO_FOLLOW, 0o666)
        )
        _lock(raw.fileno(), wait=True)
        if os.name != "posix" or os.fstat(raw.fileno()).st_nlink:
            return raw
        raw.close()  # another process removed it as stale before it was locked


def remove_stale(folder: Path) -> None:
    """Remove the temporary files of killed processes, which no process has locked; links are not
    followed."""
    with os.scandir(folder) as entries:
        stale = [entry for entry in entries if _TEMPORARY.fullmatch(entry.name)]
    for entry in stale:
        with suppress(OSError):
            if entry.is_symlink():
                Path(entry.path).unlink()
            elif entry.is_file(follow_symlinks=False):
                descriptor = os.open(entry.path, os.O_RDWR | _NO_FOLLOW)
                try:
                    if _lock(descriptor):
                        Path(entry.path).unlink()
                finally:
                    os.close(descriptor)


def exists(path: str | Path) -> bool:
    """Whether a path exists; text that no file can have as its name is none."""
    try:
        return Path(path).exists()
    except (OSError, ValueError):  # too long, null characters
        return False


def near_miss(path: str | Path) -> str:
    """The end of a sentence about a missing file or folder: the most similar name beside it, or
    nothing."""
    path = Path(path)
    try:
        near = difflib.get_close_matches(
            path.name, [entry.name for entry in path.parent.iterdir()], n=1
        )
    except (OSError, ValueError):  # no such folder, no permission, a null character
        return ""
    return f" (did you mean {str(path.with_name(near[0]))!r}?)" if near else ""


def names(folder: Path) -> set[str]:
    """What a folder holds, except for temporary files of killed processes and files of the
    system."""
    return {
        path.name
        for path in folder.iterdir()
        if not _TEMPORARY.fullmatch(path.name) and path.name not in _SYSTEM_FILES
    }


def append_durably(path: Path, text: str) -> None:
    """Append text, whole or not at all unless the process is killed, and sync it to the disk."""
    path.parent.mkdir(exist_ok=True)
    is_first = not path.exists()
    descriptor = os.open(
        path,
        os.O_WRONLY | os.O_APPEND | os.O_CREAT | _NO_FOLLOW | getattr(os, "O_BINARY", 0),
        0o666,
    )
    try:
        size, rest = os.fstat(descriptor).st_size, memoryview(text.encode())
        try:
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            os.fsync(descriptor)
        except BaseException as error:
            with suppress(OSError):
                os.ftruncate(descriptor, size)
            _set_filename(error, path)
            raise
    finally:
        os.close(descriptor)
    if is_first:
        _sync_folder(path.parent)


def remove_incomplete_line(path: Path) -> None:
    """Cut the half line that a killed process may leave at the end, so that the next one starts on
    a new line."""
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        write_atomic(path, data[: data.rfind(b"\n") + 1])


def _set_filename(error: BaseException, path: Path) -> None:
    """Let an error of the system name the file that was to be written, not a temporary one."""
    if isinstance(error, OSError) and error.errno is not None:
        error.filename, error.filename2 = str(path), None


def _sync_folder(folder: Path) -> None:
    """Make new names in a folder durable, on systems where that is possible."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _lock(descriptor: int, wait: bool = False) -> bool:
    """Lock an open file; False if another process has locked it, or on systems without locks."""
    if fcntl is None:
        return False
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


class FolderLock:
    """Exclusive use of a folder, held for as long as this object lives.

    The folder itself is locked, so that no lock file is left behind; the system releases the lock
    when the process ends, however it ends.
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
    if fcntl is None:
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
        raise InputError(
            f"`out` must be a folder that no other command is writing to, got {str(folder)!r}"
        ) from None
    except OSError:
        os.close(descriptor)
        return None
    _held[key] = new = FolderLock(descriptor)
    return new
