"""A report as a test reads it: titles, tables, text and attributes."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path


class ParsedReport(HTMLParser):
    """Tables as lists of rows of texts, titles, text, scripts with their data, and every
    attribute."""

    _block: str | None = None

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.tables: list[list[list[str]]] = []
        self.titles: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.scripts: list[str] = []  # those that a browser runs
        self.data_blocks: dict[str, str] = {}  # by id: what scripts read
        self._open: list[str] = []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self._open.append(tag)
        if tag == "script":
            self._block = dict(attrs).get("id") or "" if "type" in dict(attrs) else None
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag == "h2":
            self.titles.append("")

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "script" in self._open:
            if self._block is None:
                self.scripts.append(data)
            else:
                self.data_blocks[self._block] = data
            return
        data = data.replace("\u00a0", " ")
        if "style" in self._open:
            return
        self.text += data
        if "td" in self._open or "th" in self._open:
            # The note is below the value; here it follows after a space.
            self.tables[-1][-1][-1] += (" " if "small" in self._open else "") + data
        elif "h2" in self._open:
            self.titles[-1] += data
