"""A command in several processes of this machine, which divide its images.

As with `torchrun`, but without that command's own process, which imports torch before the others start. Does not import
torch.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from types import FrameType

OPTION = "--processes"
MOST = 1024
_MARK = "EQUIPOISE_PROCESSES"  # their number, in the environment of processes that were started here
_POLL = 0.05  # seconds
_PATIENCE = (5.0, 30.0)  # seconds until the others are asked to end, and until they are killed


def requested(arguments: Sequence[str], commands: Sequence[str]) -> int:
    """The number of processes to start for these arguments; 1 if there is nothing to start or to divide."""
    if not arguments or arguments[0] not in commands or "--help" in arguments or "WORLD_SIZE" in os.environ:
        return 1
    values = [word.removeprefix(f"{OPTION}=") for word in arguments if word.startswith(f"{OPTION}=")]
    values += [value for word, value in pairwise(arguments) if word == OPTION]
    # Anything else than a number in range is refused by the command itself.
    numbers = [int(value) for value in values if value.isascii() and value.isdigit() and len(value) < 6]
    return numbers[0] if len(values) == len(numbers) == 1 and 1 < numbers[0] <= MOST else 1


def started_here() -> int:
    """Of how many processes that were started here this one is; 1 if it is not."""
    return int(os.environ.get(_MARK, "1"))


def run(arguments: Sequence[str], count: int) -> int:
    """Run `equipoise` with these arguments in so many processes.

    Only the first one prints results. Where one fails the others are ended: they would wait for it.

    Returns:
        0, or the exit code of the first that failed.
    """
    processes: list[subprocess.Popen[bytes]] = []
    with _passing_signals_on(processes):
        for rank, environment in enumerate(_environments(count)):
            processes.append(_start(arguments, rank, environment))
        while all(code in (None, 0) for code in _codes(processes)) and None in _codes(processes):
            time.sleep(_POLL)
        code = next((code for code in _codes(processes) if code), 0)
        for patience, end in zip(_PATIENCE, (subprocess.Popen.terminate, subprocess.Popen.kill), strict=True):
            deadline = time.monotonic() + patience
            while None in _codes(processes) and time.monotonic() < deadline:
                time.sleep(_POLL)
            for process in processes:
                if process.poll() is None:
                    end(process)
        for process in processes:
            process.wait()
    if code < 0:
        print(f"equipoise: a process was ended by signal {-code}; repeat the command to resume it", file=sys.stderr)
    return 128 - code if code < 0 else code


def _codes(processes: Sequence[subprocess.Popen[bytes]]) -> list[int | None]:
    return [process.poll() for process in processes]


def _environments(count: int) -> Iterator[dict[str, str]]:
    """What `torchrun` would tell every process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # What this process imports from, whether it was started as a script or by `python -m`.
    path = os.pathsep.join(filter(None, sys.path))
    for rank in range(count):
        yield {"OMP_NUM_THREADS": str(max(cores // count, 1)), **os.environ, "PYTHONPATH": path,
               "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count),
               "LOCAL_WORLD_SIZE": str(count), "RANK": str(rank), "LOCAL_RANK": str(rank), _MARK: str(count)}


def _start(arguments: Sequence[str], rank: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    first = rank == 0
    return subprocess.Popen([sys.executable, "-P", "-m", "equipoise", *arguments], env=environment,
                            stdin=None if first else subprocess.DEVNULL, stdout=None if first else subprocess.DEVNULL)


@contextmanager
def _passing_signals_on(processes: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Ctrl-C and SIGTERM are for the processes, which save their state; this one waits for them."""
    def handle(number: int, frame: FrameType | None) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
