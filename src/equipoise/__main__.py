"""`python -m equipoise` is the command `equipoise`."""

import sys
from pathlib import Path


def main() -> None:
    """Entry point; imports take seconds, so Ctrl-C is handled during them, too."""
    try:
        from equipoise.cli.main import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        print("equipoise: stopped", file=sys.stderr)
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    # `python -m` puts the current directory on the import path, which may be a folder received from somebody else.
    if not sys.flags.safe_path and sys.path[:1] == [str(Path.cwd())]:
        del sys.path[0]
    main()
