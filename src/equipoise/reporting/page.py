"""One self-contained HTML file out of sections: figures inlined, no network, a strict
Content-Security-Policy."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import re
import urllib.parse
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.core import checks, files, format
from equipoise.reporting.chart_data import chart_data
from equipoise.reporting.charts import DARK, LIGHT, Chart, Palette, Picture, styled
from equipoise.reporting.section import Section

if TYPE_CHECKING:
    import jinja2
    from matplotlib.figure import Figure

REPORT, COMPARISON, INDEX = "report", "comparison", "index"
# The script of a page is these files, one after the other.
SCRIPTS = (
    "elements",
    "downloads",
    "charts",
    "figure_marks",
    "figures",
    "view",
    "images",
    "image",
    "tradeoff",
    "classes",
    "margins",
    "explorer",
    "start",
)
HEAD = 2000  # bytes at the start of a file, within which it says what it is
# Empty, so that the bytes depend neither on the date nor on the version of matplotlib.
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


def write(
    path: Path,
    kind: str,
    title: str,
    subtitle: str,
    sections: Sequence[Section],
    *,
    figures: Path | None = None,
    scripts: Sequence[str] = (),
) -> None:
    """Write sections as one HTML file.

    Args:
        path: of the file, which is replaced whole or not at all.
        kind: what the file says it is; see :func:`kind_of`.
        title, subtitle: the heading and the line above it.
        sections: in the order in which they are shown.
        figures: folder for the figures as SVG and PNG files; without it they are only in the page.
        scripts: further scripts of this package by file name.
    """
    import markupsafe

    images = {
        picture.name: _encode_both(picture, figures)
        for section in sections
        for picture in section.pictures
    }
    environment = template_environment()
    script = "\n".join(map(_asset, (*(f"explorer/{part}.js" for part in SCRIPTS), *scripts)))
    style = "\n".join(
        [
            environment.from_string(_asset("report.css")).render(light=LIGHT, dark=DARK),
            _asset("explorer/explorer.css"),
        ]
    )
    content = (
        environment.from_string(_asset("report.html")).render(
            kind=kind,
            title=title,
            subtitle=subtitle,
            sections=sections,
            images=images,
            anchors=_anchors(sections),
            charts={
                picture.name: chart_data(picture)
                for section in sections
                for picture in section.pictures
                if isinstance(picture, Chart)
            },
            script=markupsafe.Markup(script),
            style=markupsafe.Markup(style),
            script_hash=_hash(script),
            style_hash=_hash(style),
        )
        + "\n"
    )
    files.write_atomic(path, content)


def template_environment() -> jinja2.Environment:
    """Templates with text escaped and shown literally; they can import one another by file name."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_show_literally,
        loader=jinja2.FunctionLoader(_asset),
    )
    # Non-breaking spaces between a number and its unit.
    environment.filters["keep_units"] = lambda text: text.replace(" %", "\u00a0%").replace(
        "n = ", "n\u00a0=\u00a0"
    )
    return environment


def kind_of(path: Path) -> str | None:
    """What a file written by :func:`write` is: a report, a comparison or an index; None for any
    other file."""
    with path.open("rb") as file:
        match = re.search(rb'<meta name="generator" content="Equipoise (\w+)">', file.read(HEAD))
    return None if match is None else match[1].decode()


def check_target(path: Path, kind: str) -> None:
    """Refuse to write a page of this kind inside a run folder, or over a file that is not an
    earlier one."""
    checks.require(path.parent.is_dir(), "out", "lie in a folder that exists", str(path))
    inside = next(
        (folder for folder in path.resolve().parents if (folder / "run.toml").exists()), None
    )
    checks.require(inside is None, "out", "lie outside of runs, which are only read", str(path))
    checks.require(not path.is_dir(), "out", "be a file, not a folder", str(path))
    checks.require(
        not path.exists() or kind_of(path) == kind,
        "out",
        f"be a new file or an earlier {kind}; this file is something else",
        str(path),
    )


def link_to(folder: Path, page: Path) -> str:
    """The address of a run's report relative to a page; empty if the run has none."""
    report = folder / "report.html"
    if not report.exists():
        return ""
    return urllib.parse.quote(
        Path(os.path.relpath(report.resolve(), page.resolve().parent)).as_posix()
    )


def _anchors(sections: Sequence[Section]) -> list[str]:
    """The fragment of an address that leads to each section: its title, with a number where it
    occurs again."""
    used: Counter[str] = Counter()
    anchors = []
    for section in sections:
        slug = re.sub(r"[^a-z0-9]+", "-", section.title.lower()).strip("-") or "section"
        used[slug] += 1
        anchors.append(slug if used[slug] == 1 else f"{slug}-{used[slug]}")
    return anchors


def _asset(name: str) -> str:
    return resources.files("equipoise.reporting").joinpath(name).read_text("utf-8").strip()


def _hash(text: str) -> str:
    """The hash by which a Content-Security-Policy allows an inlined script or style."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _show_literally(value: Any) -> Any:
    """Text with visible control characters, before it is escaped for HTML; markup and other values
    unchanged."""
    return format.literal(value, keep="\n") if type(value) is str else value


def _encode_both(picture: Chart | Picture, folder: Path | None) -> dict[str, str]:
    """A figure as data URIs for both palettes; the light one is also saved as SVG and PNG, if there
    is a folder."""
    uris = {}
    for name, palette in {"light": LIGHT, "dark": DARK}.items():
        with _drawn(picture, palette) as figure:
            svg = _encode(figure, format="svg", metadata=NO_METADATA)
            if name == "light" and folder is not None:
                folder.mkdir(exist_ok=True)
                png = _encode(figure, format="png", metadata={"Software": None})
                files.write_atomic(folder / f"{picture.name}.svg", svg)
                files.write_atomic(folder / f"{picture.name}.png", png)
        uris[name] = _data_uri(svg)
    return uris


def to_svg(picture: Chart | Picture) -> str:
    """A figure in light colours as a data URI."""
    with _drawn(picture, LIGHT) as figure:
        return _data_uri(_encode(figure, format="svg", metadata=NO_METADATA))


@contextmanager
def _drawn(picture: Chart | Picture, palette: Palette) -> Iterator[Figure]:
    """The figure, in whose style it is to be encoded."""
    from matplotlib.text import Text

    with styled(palette):
        figure = picture.draw(palette)
        for text in figure.findobj(Text):  # a control character would make the SVG invalid
            text.set_text(_show_literally(text.get_text()))
        yield figure


def _data_uri(svg: bytes) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"


def _encode(figure: Figure, **options: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, **options)
    return buffer.getvalue()
