"""The command `equipoise`: a user's mistake is one sentence and exit code 2.

Commands import torch, which takes seconds, so they are loaded when one is called: `equipoise
--help` needs none.
"""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from equipoise import __version__
from equipoise.cli.help import GroupedCommand, GroupedCommands
from equipoise.core import interrupts, launch
from equipoise.core.checks import EquipoiseWarning, InputError, shorten, shown
from equipoise.core.text import literal

# Typer carries its own copy of click in some releases, so the base class is reached through Typer.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

IN_PROCESSES = ("evaluate", "certify", "train")  # commands that several processes can share
_STOPPED = "stopped; repeat the command to resume it"

# In the order of the list that `equipoise --help` shows, with the line that it shows for each.
COMMANDS = {
    "demo": "Train, fit a mixture, attack and report on embedded data.",
    "evaluate": "Clean and robust accuracy of models on the same images; resumes where it stopped.",
    "fit": "Fit a mixture to a target on images that are never evaluated on, and write it as `mixture:DIR`.",
    "certify": "Certified ℓ2 radii (in [0, 1] pixels) by randomized smoothing; resumes where it stopped.",
    "report": "Write report.html into a run folder.",
    "compare": "Compare existing runs on one page.",
    "index": "List all runs below a folder on one page, with main figures and links to their reports.",
    "open": "Open the report of a run, or the index of a folder of runs, in the browser; it is written first where it "
    "is missing or out of date.",
    "train": "Train a classifier with an objective, or the gate of two classifiers; repeating the command resumes it.",
    "data": "Work with the official data sets.",
}


def load_command(name: str) -> Any:
    """The command of that name."""
    from equipoise.cli import commands

    loaded = typer.Typer(add_completion=False, rich_markup_mode=None)
    if name == "train":
        from equipoise.cli import train

        loaded.add_typer(train.app)
    elif name == "data":
        loaded.add_typer(commands.data_app)
    else:
        function = (
            "open_report" if name == "open" else name.replace("-", "_")
        )  # `open` is Python's own
        loaded.command(name, cls=GroupedCommand)(getattr(commands, function))
        loaded.callback()(_listed)  # without it, the one command would take the place of the group
    return typer.main.get_command(loaded).commands[name]  # type: ignore[attr-defined]


def _listed() -> None:
    pass  # takes the place of a command that is not loaded


class _Commands(GroupedCommands):
    """The list of commands; they are loaded when one is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in COMMANDS:
            self.commands[args[0]] = load_command(args[0])
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="equipoise",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="One classifier that is both accurate and robust, out of two: mix, tune, attack, certify, report.",
)
for _name, _line in COMMANDS.items():
    app.command(_name, help=_line)(_listed)


def _version(requested: bool) -> None:
    if requested:
        typer.echo(f"equipoise {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


def run(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code."""
    if (
        count := launch.requested(arguments, IN_PROCESSES)
    ) > 1:  # before this process imports torch
        return launch.run(arguments, count)
    with interrupts.as_exceptions() as received:
        return _run(arguments, received)


def _usage_message(error: Exception) -> str:
    """The message of Typer in one line, with the value that it could not read, which it leaves
    out."""
    message = " ".join(error.format_message().split())  # type: ignore[attr-defined]
    if type(error.__cause__).__name__ != "ValidationError":
        return message
    return f"{message}, got {shown(error.__cause__.errors()[0]['input'])}"  # type: ignore[union-attr]


def _run(arguments: Sequence[str], received: interrupts.Received) -> int:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", EquipoiseWarning)
            warnings.showwarning = _print_warning
            result = app(list(arguments), standalone_mode=False)
        # Some releases of Typer turn Ctrl-C into this code themselves, without a message.
        return (
            _print_error(received.message or _STOPPED, received.exit_code) if result == 130 else 0
        )
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message(), file=sys.stderr)  # type: ignore[attr-defined]
            return 2
        return _print_error(_usage_message(error), 2)
    except InputError as error:
        return _print_error(str(error), 2)
    except (KeyboardInterrupt, typer.Abort):
        return _print_error(received.message or _STOPPED, received.exit_code)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return _print_error(
                "the disk is full; free some space and repeat the command to resume it", 2
            )
        if error.errno is None:
            raise
        return _print_error(f"{error.filename or 'input or output'}: {error.strerror}", 2)
    except (RuntimeError, MemoryError) as error:
        from equipoise.core import memory

        if isinstance(error, RuntimeError) and not memory.is_out_of_memory(error):
            raise
        return _print_error(
            "out of memory even for one image at a time; use a smaller model or another device", 2
        )


def _print_error(sentence: str, code: int) -> int:
    if (
        os.environ.get("RANK", "0") == "0" or launch.started_here() > 1
    ):  # which shows what others than the first say
        print(f"equipoise: {literal(shorten(sentence))}", file=sys.stderr)
    return code


def _print_warning(message: Warning | str, *details: object, **more: object) -> None:
    from equipoise.cli import output  # loaded by the command that warns

    output.warn(message)
