"""A command in several processes of this machine, which divide its images.

As with `torchrun`, but without that command's own process, which imports torch before the others
start. Does not import torch.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import IO

from equipoise.core import interrupts

OPTION = "--processes"
MOST = 1024
# Their number, in the environment of processes that were started here
_MARK = "EQUIPOISE_PROCESSES"
_MEETING_FILE = "EQUIPOISE_MEETING_FILE"  # likewise
_POLL = 0.05  # seconds
# Seconds that the others have after one has failed: to end by themselves, and to end when asked to.
# After a signal they save their state, which may take longer.
_PATIENCE, _PATIENCE_WITH_SAVING = (5.0, 10.0), (60.0, 10.0)
# The path of this process, whether it is a script or was started by `python -m`; not the folder of
# the user.
_CODE = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); from equipoise.__main__ import main; main()"


def requested(arguments: Sequence[str], commands: Sequence[str]) -> int:
    """The number of processes to start for these arguments; 1 if there is nothing to start or to
    divide."""
    is_one_of_several = os.environ.get("WORLD_SIZE", "1") != "1"
    if not arguments or arguments[0] not in commands or "--help" in arguments or is_one_of_several:
        return 1
    values = [
        word.removeprefix(f"{OPTION}=") for word in arguments if word.startswith(f"{OPTION}=")
    ]
    values += [value for word, value in pairwise(arguments) if word == OPTION]
    # Anything else than a number in range is refused by the command itself.
    numbers = [
        int(value) for value in values if value.isascii() and value.isdigit() and len(value) < 6
    ]
    return numbers[0] if len(values) == len(numbers) == 1 and 1 < numbers[0] <= MOST else 1


def started_here() -> int:
    """The number of processes, if :func:`run` started this one; else 1."""
    return int(os.environ.get(_MARK, "1"))


@functools.cache
def meeting_file() -> str | None:
    """Where processes may make a file in which they find each other, if :func:`run` started this
    one.

    It is removed from the environment: processes that this one starts do not belong to them.
    """
    return os.environ.pop(_MEETING_FILE, None)


def run(arguments: Sequence[str], count: int) -> int:
    """Run `equipoise` with these arguments in so many processes.

    Where one fails the others are ended: they would wait for it. Only the first one prints, unless
    another has failed.

    Returns:
        0, or the exit code of the first that failed.
    """
    group = _Processes()
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        interrupts.installed(group.pass_on),
    ):
        try:
            meeting = Path(folder) / "meeting" if _can_lock_files(Path(folder)) else None
            for rank, environment in enumerate(_environments(count, meeting)):
                group.start(arguments, rank, environment)
            failed = group.wait()
        finally:
            group.end()
    if failed is None:
        return 0
    code = group.processes[failed].returncode
    if code < 0:
        message = (
            f"equipoise: a process was ended by signal {-code}; repeat the command to resume it"
        )
        print(message, file=sys.stderr)
    return 128 - code if code < 0 else code


class _Processes:
    """The processes of one command. Ctrl-C and SIGTERM are for them, which save their state; this
    one waits."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.errors: list[IO[bytes]] = []  # of all processes but the first
        self.received: int | None = None

    def start(self, arguments: Sequence[str], rank: int, environment: dict[str, str]) -> None:
        command = [
            sys.executable,
            "-P",
            "-c",
            _CODE,
            json.dumps([part for part in sys.path if part]),
            *arguments,
        ]
        if rank == 0:
            self.processes.append(subprocess.Popen(command, env=environment))
        else:
            self.errors.append(tempfile.TemporaryFile())  # noqa: SIM115
            self.processes.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=self.errors[-1],
                )
            )
        if self.received is not None:
            self.processes[-1].send_signal(self.received)

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal. On Windows the terminal alone can send Ctrl-C to a process."""
        self.received = None if os.name == "nt" and number == signal.SIGINT else number
        for process in self.processes:
            if self.received is not None and process.poll() is None:
                process.send_signal(number)

    def wait(self) -> int | None:
        """Wait for all processes, or for the first that fails; returns its number."""
        while True:
            codes = [process.poll() for process in self.processes]
            failed = next((rank for rank, code in enumerate(codes) if code), None)
            if failed is not None:
                self._show_errors(failed)
            if failed is not None or None not in codes:
                return failed
            time.sleep(_POLL)

    def _show_errors(self, failed: int) -> None:
        """Print what a process said that failed alone; of a mistake of the user all say the
        same."""
        self._has_ended((_PATIENCE if self.received is None else _PATIENCE_WITH_SAVING)[0])
        if failed and self.processes[0].poll() in (None, 0):
            self.errors[failed - 1].seek(0)
            print(self.errors[failed - 1].read().decode(errors="replace"), end="", file=sys.stderr)

    def _has_ended(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while (
            running := any(process.poll() is None for process in self.processes)
        ) and time.monotonic() < deadline:
            time.sleep(_POLL)
        return not running

    def end(self) -> None:
        """End the processes that still run."""
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        if not self._has_ended(_PATIENCE[1]):
            for process in self.processes:
                process.kill()
        for process in self.processes:
            process.wait()
        for file in self.errors:
            file.close()


def _can_lock_files(folder: Path) -> bool:
    """Whether files in this folder can be locked, as processes that meet in one do it; not on every
    network disk."""
    try:
        import fcntl

        with (folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):
        return False
    return True


def _environments(count: int, meeting: Path | None) -> Iterator[dict[str, str]]:
    """What `torchrun` would tell every process, and in which file they meet, if not through the
    port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    for rank in range(count):
        yield {
            "OMP_NUM_THREADS": str(max(cores // count, 1)),
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            _MARK: str(count),
            **({} if meeting is None else {_MEETING_FILE: str(meeting)}),
        }
