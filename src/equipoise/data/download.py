"""Download official files: checked against SHA-256, resumed after interruptions, never left
incomplete."""

from __future__ import annotations

import hashlib
import http.client
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import BinaryIO

from equipoise.core import progress
from equipoise.core.checks import InputError

_CHUNK = 1 << 18
_TIMEOUT_SECONDS = 30


@dataclass(frozen=True)
class Remote:
    """A file on a server and its checksum."""

    url: str
    sha256: str

    @property
    def file(self) -> str:
        """The name of the file."""
        return self.url.rpartition("/")[2]


def fetch(remote: Remote, folder: Path, *, needed: Sequence[str]) -> Path:
    """Download a file into `folder`, unless it is there.

    Bytes are written to `<file>.part`, which is renamed once the checksum is right; a later call
    continues an interrupted one. Processes that need the same file wait for one another. `needed`
    are the files that the user could put there by hand, for the error message.
    """
    path = folder / remote.file
    part = folder / f"{remote.file}.part"
    try:
        if path.exists():
            if (checksum := sha256(path)) != remote.sha256:
                raise _wrong_checksum(path, remote, checksum)
            return path
        folder.mkdir(parents=True, exist_ok=True)
        with part.open("a+b") as file, _locked(file):
            if not path.exists():
                _download(remote, file)
                part.rename(path)
    except (OSError, http.client.HTTPException) as problem:
        raise _missing(needed, folder, remote, problem) from None
    return path


def unpack(archive: Remote, root: Path, folder: str, *, needed: Sequence[str]) -> None:
    """Download a tar archive into `root` and put the files of its `folder` into `root/folder`."""
    path = fetch(archive, root, needed=[f"{folder}/{name}" for name in needed])
    # Unpacked in a temporary folder and then moved, so that an interrupted call leaves no
    # incomplete file.
    try:
        with tempfile.TemporaryDirectory(dir=root, prefix=".unpack-") as temporary:
            with tarfile.open(path) as tar:
                # Only plain files of this folder, and only their content: no links, no other paths,
                # no permissions.
                for member in tar:
                    parent, _, name = member.name.rpartition("/")
                    if member.isreg() and parent == folder and name not in ("", ".", ".."):
                        content = tar.extractfile(member)
                        assert content is not None
                        with content, (Path(temporary) / name).open("wb") as file:
                            shutil.copyfileobj(content, file)
            missing = [name for name in needed if not (Path(temporary) / name).is_file()]
            if missing:
                raise tarfile.TarError(f"the archive has no {', '.join(missing)}")
            (root / folder).mkdir(exist_ok=True)
            for unpacked in sorted(Path(temporary).iterdir()):
                unpacked.replace(root / folder / unpacked.name)
    except (OSError, tarfile.TarError) as problem:
        raise _missing(needed, root / folder, archive, problem) from None


def _download(remote: Remote, file: BinaryIO) -> None:
    """Complete `file` and check it; bytes of an earlier call may be of another file, so that gets a
    second attempt."""
    resumed = file.seek(0, 2) > 0
    for _ in range(1 + resumed):
        _append_all(remote, file)
        if (checksum := sha256(Path(file.name))) == remote.sha256:
            return
        # Emptied, not removed: another process may be waiting for the lock on it.
        file.truncate(0)
    raise _wrong_checksum(Path(file.name).with_suffix(""), remote, checksum)


def _append_all(remote: Remote, file: BinaryIO) -> None:
    """Append until nothing is missing; give up after an attempt without progress."""
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
    """Request the bytes after the end of `file` and append them; returns whether all were
    received."""
    have = file.seek(0, 2)
    request = urllib.request.Request(
        remote.url, headers={"Range": f"bytes={have}-"} if have else {}
    )
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS)
    except urllib.error.HTTPError as problem:
        problem.close()
        if have and problem.code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return (
                True  # nothing is missing, or these bytes are of another file: the checksum decides
            )
        raise
    with response:
        if have and response.status != HTTPStatus.PARTIAL_CONTENT:
            have = file.truncate(0)  # the server sends the whole file again
        size = int(response.headers.get("Content-Length") or 0)
        with progress.stage(f"downloading {remote.file}", total=have + size, done=have) as stage:
            received = 0
            while chunk := response.read(_CHUNK):
                file.write(chunk)
                received += len(chunk)
                stage.advance(len(chunk))
        file.flush()
    return received >= size


def sha256(path: Path) -> str:
    """The checksum of a file, with progress for a long one."""
    total = hashlib.sha256()
    with (
        path.open("rb") as file,
        progress.stage(f"checking {path.name}", total=path.stat().st_size) as stage,
    ):
        while chunk := file.read(_CHUNK):
            total.update(chunk)
            stage.advance(len(chunk))
    return total.hexdigest()


def _missing(needed: Sequence[str], folder: Path, remote: Remote, problem: Exception) -> InputError:
    reason = str(problem) or type(problem).__name__
    return InputError(
        f"`data_dir` must hold {', '.join(needed)} in {folder}, got neither them nor a download "
        f"of {remote.url} ({reason})"
    )


def _wrong_checksum(path: Path, remote: Remote, checksum: str) -> InputError:
    return InputError(
        f"`{path}` must have the SHA-256 checksum {remote.sha256} of {remote.url}, got {checksum}"
    )


@contextmanager
def _locked(file: BinaryIO) -> Iterator[None]:
    """An exclusive lock, on systems that have them; released when the file is closed."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with suppress(OSError):  # some network file systems have none
        fcntl.flock(file, fcntl.LOCK_EX)
    yield
