"""`python -m equipoise` is the command `equipoise`."""

import atexit
import os
import sys


def main() -> None:
    """Entry point; imports take seconds, so Ctrl-C is handled during them, too."""
    try:
        from equipoise.cli.main import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        print("equipoise: stopped", file=sys.stderr)
        code = 130
    if "torch" in sys.modules:
        _exit_at_once(code)
    sys.exit(code)


def _exit_at_once(code: int) -> None:
    """End the process without taking torch and CUDA apart object by object, which takes half a second.

    Returns where output cannot be written, for the interpreter to say so.
    """
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except OSError:
        return
    os._exit(code)


if __name__ == "__main__":
    main()
