"""What a command prints in the end: a table with notes, or the summary as JSON, or nothing.

Progress and warnings go to standard error while the command runs; results go to standard output, in
colour and wrapped on a terminal, as plain lines elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equipoise import reporting
from equipoise.core import progress
from equipoise.core.checks import EquipoiseWarning
from equipoise.core.text import literal

# Parts of the printed text, by regular expression, and their style on a terminal.
STYLES = {
    "title": "bold",
    "head": "cyan",
    "rule": "dim",
    "interval": "dim",
    "note": "yellow",
    "failed": "red",
    "key": "bold green",
    "next": "bold",
}
PATTERNS = (
    r"(?m)^(?P<title>\S.*)\n\n(?P<head>(?:.+\n)+)(?P<rule> *─[─ ]*)$",
    r"(?P<interval>\[[−\d., ]+\])",
    r"(?m)^(?P<note>note:)",
    r"(?m)^(?P<failed>Failed sanity checks.*(?:\n- .*)*)",
    r"(?m)^(?P<key>(?:results|attacked images|mixture|checkpoint|gate|report|comparison|index|next):)",
    r"(?m)^next: (?P<next>.*)$",
)

printed_warnings: set[str] = set()  # warnings that were printed


@dataclass(frozen=True)
class Outcome:
    """The end of a command: its result, the files that it wrote, and the command that usually
    follows."""

    result: object  # `str()` of it is printed
    folder: Path | None = None  # run folder, whose summary `--json` prints
    files: Mapping[str, object] | None = None  # what → where
    next: Sequence[object] = ()  # arguments of the command `equipoise`
    more: str = ""  # printed after the result
    check: Callable[[], None] | None = None  # raises an error after all was printed

    def to_json(self) -> Any:
        """The content of `summary.json`; what the function returned where there is none."""
        if self.folder is not None and (path := self.folder / "summary.json").exists():
            return json.loads(path.read_text("utf-8"))
        to_dict = getattr(self.result, "to_dict", None)
        return (
            {key: str(value) for key, value in (self.files or {}).items()}
            if to_dict is None
            else to_dict()
        )

    def lines(self) -> list[str]:
        """The lines below the result."""
        files = [
            str(where)
            if str(where).startswith(f"{what}:")
            else f"{what}: {where}"  # `mixture:DIR` says it itself
            for what, where in (self.files or {}).items()
        ]
        return [*files, *([f"next: {_typed(self.next)}"] if self.next else [])]


def write_report(out: Path, no_report: bool = False) -> dict[str, object]:
    """Write the report of a run that has results, and return where it is; of several processes,
    only the first does."""
    if no_report or not _is_first() or not (out / "summary.json").exists():
        return {}
    with progress.stage("writing the report", total=1) as stage:
        path = reporting.report_after_run(out)
        stage.advance(1)
    return {} if path is None else {"report": path}


@contextlib.contextmanager
def during(as_json: bool, quiet: bool) -> Iterator[None]:
    """Show progress unless `quiet`; nothing but the summary may reach the standard output of
    `--json`."""
    with contextlib.ExitStack() as stack:
        if quiet:
            warnings.simplefilter("ignore")
        else:
            stack.enter_context(progress.shown())
        if as_json:
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield


def show(outcome: Outcome, as_json: bool = False, quiet: bool = False) -> None:
    """Print the outcome of a command; of several processes, only the first does."""
    if not _is_first() or (quiet and not as_json):
        return
    if as_json:
        print(json.dumps(outcome.to_json(), indent=1))
        return
    result = literal("\n\n".join(filter(None, [str(outcome.result), outcome.more])), keep="\n")
    if _is_one_stream():  # what a warning said is not repeated below the table
        result = "\n".join(
            line
            for line in result.split("\n")
            if line.removeprefix("note: ") not in printed_warnings
        )
    lines = [literal(line) for line in outcome.lines()]
    if sys.stdout.isatty():
        _print_styled(result, lines)
    else:
        print("\n".join([*([result] if result else []), *lines]))


def warn(message: Warning | str) -> None:
    """Print a warning on standard error."""
    if _is_first():
        # Our own warnings are one line; those of other packages may have several.
        text = literal(str(message), "" if isinstance(message, EquipoiseWarning) else "\n")
        printed_warnings.add(text)
        print(f"warning: {text}", file=sys.stderr)


def _is_one_stream() -> bool:
    """Whether standard output and standard error end in the same terminal or file."""
    try:
        return os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except (OSError, ValueError):  # replaced by something without a file
        return False


def _print_styled(result: str, lines: Sequence[str]) -> None:
    """Print on a terminal: prose is wrapped, paths and commands are left in one piece to be
    copied."""
    from rich.console import Console
    from rich.highlighter import RegexHighlighter
    from rich.theme import Theme

    class Highlighter(RegexHighlighter):
        base_style = "output."
        highlights = PATTERNS

    theme = Theme({f"output.{name}": style for name, style in STYLES.items()})
    console = Console(theme=theme, highlighter=Highlighter(), markup=False, emoji=False)
    if result:
        console.print(result)
    for line in lines:
        console.print(line, soft_wrap=True)


def _typed(arguments: Sequence[object]) -> str:
    import shlex

    return shlex.join(["equipoise", *map(str, arguments)])


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"
