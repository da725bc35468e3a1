"""One self-contained HTML file out of sections: no network, a strict Content-Security-Policy."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import urllib.parse
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import vl_convert
from markupsafe import Markup

from equipoise.core import checks, files, format
from equipoise.reporting import charts
from equipoise.reporting.section import Section

REPORT, COMPARISON, INDEX = "report", "comparison", "index"
HEAD = 2000  # bytes at the start of a file, within which it says what it is


def write(
    path: Path,
    kind: str,
    title: str,
    facts: str,
    sections: Sequence[Section],
    *,
    figures: Path | None = None,
) -> None:
    """Write sections as one HTML file, and their figures as SVG and PDF.

    Args:
        path: of the file, which is replaced whole or not at all.
        kind: what the file says it is; see :func:`kind_of`.
        title, facts: the heading, and the line below it.
        sections: in the order in which they are shown.
        figures: folder for the files of the figures; without it they are only in the page.
    """
    scripts = [_vega(), _asset("page.js")]
    text = (
        templates()
        .get_template("page.html")
        .render(
            kind=kind,
            title=title,
            facts=facts,
            sections=list(zip(_anchors(sections), sections, strict=True)),
            light=charts.LIGHT,
            dark=charts.DARK,
            style=Markup(_asset("style.css")),
            scripts=[Markup(script) for script in scripts],
            hashes=Markup(" ".join(_digest(script) for script in scripts)),
        )
    )
    if figures is not None:
        save_figures(sections, figures)
    files.write_atomic(path, text + "\n")


def save_figures(sections: Sequence[Section], folder: Path) -> None:
    """Every figure in the light palette, as SVG and PDF."""
    for section in sections:
        for figure in section.figures:
            folder.mkdir(exist_ok=True)
            svg = charts.light_svg(figure, figure.title)
            files.write_atomic(folder / f"{figure.name}.svg", svg)
            files.write_atomic(folder / f"{figure.name}.pdf", vl_convert.svg_to_pdf(svg))


def templates() -> jinja2.Environment:
    """Templates in which every value is escaped and shown literally."""
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
        loader=jinja2.FunctionLoader(_asset),
    )
    # These two return JSON and SVG that our own code made, with the values of the run escaped.
    environment.globals["specification"] = lambda figure: Markup(charts.page_specification(figure))
    environment.globals["static_svg"] = lambda figure: Markup(charts.static_svg(figure))
    environment.globals["light_svg"] = lambda figure: Markup(charts.light_svg(figure))
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
    for folder in path.resolve().parents:
        inside = (folder / "run.toml").exists()
        checks.require(not inside, "out", "lie outside of runs, which are only read", str(path))
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
    relative = os.path.relpath(report.resolve(), page.resolve().parent)
    return urllib.parse.quote(Path(relative).as_posix())


def joined(facts: Iterable[str]) -> str:
    """The facts below a heading in one line."""
    return " · ".join(filter(None, facts))


@cache
def _vega() -> str:
    """Vega, Vega-Lite and vega-embed as one script."""
    script: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return script.replace("</script", "<\\/script").strip()


def _asset(name: str) -> str:
    return resources.files("equipoise.reporting").joinpath(name).read_text("utf-8").strip()


def _digest(script: str) -> str:
    """What the policy of a page calls this script, so that no other runs."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


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


def _shown(value: Any) -> Any:
    """Text with visible control characters, before it is escaped; markup and other values
    unchanged."""
    return format.literal(value, keep="\n") if type(value) is str else value
