"""The command `equipoise`: one verb per file; mistakes are one sentence and exit code 2."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from equipoise import __version__
from equipoise.cli import certify, demo, evaluate, fit, report, reproduce, train
from equipoise.core import memory, progress
from equipoise.core.checks import InputError

# Typer carries its own copy of click in some releases, so the base class is reached through Typer.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

_STOPPED = "stopped; repeat the command to go on where it was"

app = typer.Typer(
    name="equipoise", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="One classifier that is both accurate and robust, out of two: mix, tune, attack, certify, report.",
)
app.command()(demo.demo)
app.command()(evaluate.evaluate)
app.command("fit")(fit.fit_)
app.command()(certify.certify)
app.command()(report.report)
app.command()(reproduce.reproduce)
app.add_typer(train.app)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"equipoise {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True,
                                          help="Print the version and leave.")] = False,
) -> None:
    pass


def run(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code."""
    try:
        with progress.shown():
            result = app(list(arguments), standalone_mode=False)
        # Some releases of Typer turn Ctrl-C into this code themselves, without a word.
        return _say(_STOPPED, 130) if result == 130 else 0
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message(), file=sys.stderr)  # type: ignore[attr-defined]
            return 2
        return _say(" ".join(error.format_message().split()), 2)  # type: ignore[attr-defined]
    except InputError as error:
        return _say(str(error), 2)
    except (KeyboardInterrupt, typer.Abort):
        return _say(_STOPPED, 130)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return _say("the disk is full; make room and repeat the command to go on where it was", 2)
        if error.errno is None:
            raise
        return _say(f"{error.filename or 'input or output'}: {error.strerror}", 2)
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and not memory.is_out_of_memory(error):
            raise
        return _say("out of memory even for one image at a time; use a smaller model or another device", 2)


def _say(sentence: str, code: int) -> int:
    if os.environ.get("RANK", "0") == "0":
        print(f"equipoise: {sentence}", file=sys.stderr)
    return code

