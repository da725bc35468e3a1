"""From a run folder to `report.html`: one file, complete in itself."""

from __future__ import annotations

import base64
import io
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.core import records
from equipoise.reporting import style
from equipoise.reporting.section import Picture
from equipoise.reporting.sections import SECTIONS
from equipoise.reporting.view import view

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Left empty, so that neither the day nor the version of the drawing library changes a byte.
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


def write(folder: Path | str) -> Path:
    """Write `report.html` and `figures/` into a finished run folder.

    The page is a function of what the folder holds: the same rows give the same bytes, no model is
    loaded and nothing is fetched, by this function or by the page.

    Args:
        folder: holds `run.toml`, `rows.jsonl`, `summary.json`, perhaps `arrays.npz` and a run `sweep/`.

    Returns:
        The path of the page.
    """
    import jinja2

    run = view(folder)
    sections = [section for make in SECTIONS if (section := make(run)) is not None]
    pictures = {picture.name: _save(picture, run.folder / "figures")
                for section in sections for picture in section.pictures}
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
                                     lstrip_blocks=True, keep_trailing_newline=True)
    environment.filters["tied"] = _tied
    template = environment.from_string(resources.files("equipoise.reporting").joinpath("page.html").read_text("utf-8"))
    page = template.render(name=run.folder.resolve().name, verb=run.summary.get("verb", "run"), sections=sections,
                           pictures=pictures, light=style.LIGHT, dark=style.DARK)
    path = run.folder / "report.html"
    records.write(path, page)
    return path


def _save(picture: Picture, folder: Path) -> dict[str, str]:
    """Keep the figure as SVG and PNG, and give it as data: URIs for both palettes."""
    folder.mkdir(exist_ok=True)
    inlined = {}
    for name, palette in {"light": style.LIGHT, "dark": style.DARK}.items():
        with style.styled(palette):
            figure = picture.draw(palette)
            svg = _bytes(figure, format="svg", metadata=NO_METADATA)
            if name == "light":
                records.write(folder / f"{picture.name}.svg", svg)
                records.write(folder / f"{picture.name}.png", _bytes(figure, format="png",
                                                                     metadata={"Software": None}))
        inlined[name] = f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
    return inlined


def _bytes(figure: Figure, **how: Any) -> bytes:
    held = io.BytesIO()
    figure.savefig(held, **how)
    return held.getvalue()


def _tied(text: str) -> str:
    """A number is not parted from its unit at the end of a line."""
    return text.replace(" %", "\u00a0%").replace("n = ", "n\u00a0=\u00a0")
