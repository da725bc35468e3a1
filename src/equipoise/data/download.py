"""Official files over HTTP: checked, resumed where they broke off, never half there."""

from __future__ import annotations

import hashlib
import http.client
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from equipoise.core import progress
from equipoise.core.checks import InputError

_CHUNK = 1 << 18
_TIMEOUT_SECONDS = 30
_RANGE_NOT_SATISFIABLE = 416
_PARTIAL = 206


@dataclass(frozen=True)
class Remote:
    """A file somewhere else, and the checksum by which it is known."""

    url: str
    md5: str

    @property
    def file(self) -> str:
        """Its name, which it keeps here."""
        return self.url.rpartition("/")[2]


def fetch(remote: Remote, folder: Path, *, needed: Sequence[str]) -> Path:
    """Bring a file into `folder`, unless it is there.

    Bytes gather in `<file>.part` and get their name once the checksum holds; a later call goes on where an
    earlier one broke off. Processes that want the same file wait for one another.

    Args:
        remote: the file.
        folder: made if absent.
        needed: the files the user would have to put there by hand, for the error message.
    """
    path = folder / remote.file
    part = folder / f"{remote.file}.part"
    try:
        if path.exists():
            if (found := _md5(path)) != remote.md5:
                raise _altered(path, remote, found)
            return path
        folder.mkdir(parents=True, exist_ok=True)
        with part.open("a+b") as file, _locked(file):
            if not path.exists():
                _complete(remote, file)
                part.rename(path)
    except (OSError, http.client.HTTPException) as problem:
        raise _absent(needed, folder, remote, problem) from None
    return path


def unpack(archive: Remote, root: Path, folder: str, *, needed: Sequence[str]) -> None:
    """Fetch a tar archive into `root` and put the files of its `folder` into `root/folder`."""
    path = fetch(archive, root, needed=[f"{folder}/{name}" for name in needed])
    # Unpacked aside and then moved, so that an interrupted call leaves no half-written file behind.
    try:
        with tempfile.TemporaryDirectory(dir=root, prefix=".unpack-") as aside:
            with tarfile.open(path) as tar:
                tar.extractall(aside, filter="data")
            (root / folder).mkdir(exist_ok=True)
            for one in sorted((Path(aside) / folder).iterdir()):
                one.replace(root / folder / one.name)
    except (OSError, tarfile.TarError) as problem:
        raise _absent(needed, root / folder, archive, problem) from None


def _complete(remote: Remote, file: BinaryIO) -> None:
    """Fill `file` until the checksum holds; what an earlier call left may be of another file, so twice."""
    resumed = file.seek(0, 2) > 0
    for _ in range(1 + resumed):
        _gather(remote, file)
        if (found := _md5(Path(file.name))) == remote.md5:
            return
        # Emptied, not removed: another process may be waiting for the lock on it.
        file.truncate(0)
    raise _altered(Path(file.name).with_suffix(""), remote, found)


def _gather(remote: Remote, file: BinaryIO) -> None:
    """Append until nothing is missing; give up once an attempt brings no further byte."""
    while True:
        before = file.seek(0, 2)
        try:
            if _append(remote, file):
                return
            problem: Exception = http.client.HTTPException("the connection broke off")
        except (OSError, http.client.HTTPException) as raised:
            problem = raised
        if file.seek(0, 2) <= before:
            raise problem


def _append(remote: Remote, file: BinaryIO) -> bool:
    """Ask for what is missing behind the end of `file`; whether all of it came."""
    have = file.seek(0, 2)
    request = urllib.request.Request(remote.url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS)
    except urllib.error.HTTPError as problem:
        problem.close()
        if have and problem.code == _RANGE_NOT_SATISFIABLE:
            return True  # nothing is missing, or what is here is of another file: the checksum tells
        raise
    with response:
        if have and response.status != _PARTIAL:
            have = file.truncate(0)  # the server sends the whole file again
        size = int(response.headers.get("Content-Length") or 0)
        with progress.task(f"downloading {remote.file}", total=have + size, done=have) as task:
            got = 0
            while chunk := response.read(_CHUNK):
                file.write(chunk)
                got += len(chunk)
                task.advance(len(chunk))
        file.flush()
    return got >= size


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _absent(needed: Sequence[str], folder: Path, remote: Remote, problem: Exception) -> InputError:
    reason = str(problem) or type(problem).__name__
    return InputError(f"`data_dir` must hold {', '.join(needed)} in {folder}, got neither them nor a download "
                      f"of {remote.url} ({reason})")


def _altered(path: Path, remote: Remote, found: str) -> InputError:
    return InputError(f"`{path}` must have the MD5 checksum {remote.md5} of {remote.url}, got {found}")


@contextmanager
def _locked(file: BinaryIO) -> Iterator[None]:
    """Held by one process at a time, where the system has such locks; released when the file is closed."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with suppress(OSError):  # some network file systems have none
        fcntl.flock(file, fcntl.LOCK_EX)
    yield
