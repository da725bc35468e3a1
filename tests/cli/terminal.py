"""Commands in a pseudo-terminal of 80 columns, as a user sees them."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path

COLUMNS = 80
TOKEN = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b.|\r|\n|[^\x1b\r\n]+")


def run_in_terminal(arguments: Sequence[str], folder: Path, **environment: str) -> str:
    """Run the command line and return everything that it wrote to the terminal; it must succeed."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, COLUMNS, 0, 0))
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("COLUMNS", "NO_COLOR", "TERM")
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "equipoise", *arguments],
        cwd=folder,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**inherited, "TERM": "xterm-256color", **environment},
    )
    os.close(slave)
    parts = []
    while True:
        try:
            part = os.read(master, 1 << 16)
        except OSError:  # the other side is closed
            break
        if not part:
            break
        parts.append(part)
    os.close(master)
    text = b"".join(parts).decode()
    assert process.wait(timeout=600) == 0, text
    return text


def screen(text: str) -> list[str]:
    """The lines that are on the screen in the end, without colours."""
    lines, row, column = [""], 0, 0
    for token in TOKEN.findall(text):
        if token == "\r":
            column = 0
        elif token == "\n":
            row, column = row + 1, 0
            lines += [""] * (row == len(lines))
        elif token == "\x1b[2K":
            lines[row] = ""
        elif token.endswith("A") and token.startswith("\x1b["):
            row -= int(token[2:-1] or 1)
        elif not token.startswith("\x1b"):
            before = lines[row].ljust(column)
            lines[row], column = (
                before[:column] + token + before[column + len(token) :],
                column + len(token),
            )
    return [line.rstrip() for line in lines]
