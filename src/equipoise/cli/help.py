"""Help texts in 80 columns: options below the heading of their group, and no sentence cut off."""

from __future__ import annotations

import inspect
import re
from typing import Any

from typer.core import TyperCommand, TyperGroup

# Headings of options, in the order in which `--help` shows them.
MODELS, DATA, THREAT, OUTPUT, COMPUTATION = (
    "Models",
    "Data",
    "Threat and attack",
    "Output",
    "Computation",
)
OTHERS = "Options"
FIRST, LAST = (MODELS, DATA, THREAT), (OUTPUT, COMPUTATION, OTHERS)
# Stand for a space and a hyphen at which a line must not break.
UNBROKEN = {" ": "\u00a0", "-": "\u2011"}
# What a value is, by Python's and typer's names of its type.
TYPES = {
    "str": "TEXT",
    "text": "TEXT",
    "int": "NUMBER",
    "integer": "NUMBER",
    "float": "NUMBER",
    "Path": "PATH",
    "path": "PATH",
}
_TYPE = re.compile(rf"<(?:list\[)?({'|'.join(TYPES)})\]?>")


def _order(heading: str) -> int:
    if heading in FIRST:
        return FIRST.index(heading)
    return len(FIRST) + (LAST.index(heading) + 1 if heading in LAST else 0)


class _Help:
    """Formats the help of a command or group."""

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write what the command does."""
        before = len(formatter.buffer)
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(_in_one_piece(inspect.cleandoc(self.help or "")))  # type: ignore[attr-defined]
        _restore(formatter, before)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options, and the commands of a group."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):  # type: ignore[attr-defined]
            if (record := param.get_help_record(ctx)) is not None:
                name, text = record
                named = (
                    _TYPE.sub(lambda match: TYPES[match[1]], name)
                    if name.startswith("-")
                    else _TYPE.sub("", name)
                )
                groups.setdefault(getattr(param, "rich_help_panel", None) or OTHERS, []).append(
                    (named.strip(), text)
                )
        write_lists(formatter, {heading: groups[heading] for heading in sorted(groups, key=_order)})
        if isinstance(self, TyperGroup):
            self.format_commands(ctx, formatter)


class GroupedCommand(_Help, TyperCommand):
    """A command whose options are grouped by `rich_help_panel`."""


class GroupedCommands(_Help, TyperGroup):
    """A group of commands, each listed with its whole line."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands."""
        listed = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        write_lists(
            formatter,
            {
                "Commands": [
                    (name, (own.short_help or own.help or "").strip())
                    for name, own in listed
                    if own is not None and not own.hidden
                ]
            },
        )


def write_lists(formatter: Any, lists: dict[str, list[tuple[str, str]]]) -> None:
    """Write names and descriptions below headings, aligned with one another; words and defaults
    stay in one piece."""
    widest = min(
        max((len(name) for records in lists.values() for name, _ in records), default=0), 30
    )
    before = len(formatter.buffer)
    for heading, records in lists.items():
        with formatter.section(heading):
            formatter.write_dl(
                [(name.ljust(widest), _in_one_piece(text)) for name, text in records]
            )
    _restore(formatter, before)


def _restore(formatter: Any, before: int) -> None:
    """Put spaces and hyphens in place of their marks, in what was written since."""
    for place in range(before, len(formatter.buffer)):
        for plain, unbroken in UNBROKEN.items():
            formatter.buffer[place] = formatter.buffer[place].replace(unbroken, plain)


def _in_one_piece(text: str) -> str:
    """The text with marks for hyphens, and for the spaces of a note at its end such as "[default:
    8/255]"."""
    start = text.rfind("  [") if text.endswith("]") else -1
    notes = text[start + 2 :].replace(" ", UNBROKEN[" "]) if start >= 0 else ""
    return (text if start < 0 else f"{text[:start]} {notes}").replace("-", UNBROKEN["-"])
