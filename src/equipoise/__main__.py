"""`python -m equipoise` is the command `equipoise`."""

import atexit
import os
import stat
import sys
import threading
from pathlib import Path


def main() -> None:
    """Entry point; imports take seconds, so Ctrl-C is handled during them, too."""
    try:
        from equipoise.cli.main import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        print("equipoise: stopped", file=sys.stderr)
        code = 130
    if "torch" in sys.modules and not _has_work_left():
        _exit_at_once(code)
    sys.exit(code)


def _has_work_left() -> bool:
    """Whether threads, processes or files, which a user's model may have opened, or a profiler must
    end normally."""
    from multiprocessing import active_children

    threads = [
        thread
        for thread in threading.enumerate()
        if not (thread.daemon or thread is threading.main_thread())
    ]
    is_observed = sys.getprofile() is not None or sys.gettrace() is not None
    if sys.version_info >= (3, 12):
        is_observed |= any(sys.monitoring.get_tool(number) is not None for number in range(6))
    return bool(threads or active_children() or is_observed or _writes_a_file())


def _writes_a_file() -> bool:
    """Whether a file is open for writing, besides the standard streams: what its buffer holds must
    reach it."""
    try:
        import fcntl

        for number in [int(path.name) for path in Path("/dev/fd").iterdir()]:
            try:
                can_write = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
                if number > 2 and can_write and stat.S_ISREG(os.fstat(number).st_mode):
                    return True
            except OSError:  # it was that of the list
                continue
    except (ImportError, OSError):  # nothing is known
        return True
    return False


def _exit_at_once(code: int) -> None:
    """End the process without taking torch and CUDA apart object by object, which takes half a
    second.

    Returns where output cannot be written, for the interpreter to say so.
    """
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            if stream is not None:
                stream.flush()
    except (OSError, ValueError):  # of a full disk, and of a stream that was closed
        return
    os._exit(code)


if __name__ == "__main__":
    main()
