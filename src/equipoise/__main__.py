"""`python -m equipoise` is the command `equipoise`."""

import sys


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
    main()
