"""Render a run folder to `report.html`, one self-contained file, and the sections that it consists of.

To add a section, write a function from a run to a section and list it in :data:`SECTIONS`, or register an entry point.
"""

from __future__ import annotations

import base64
import io
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.core import checks, files, format
from equipoise.core.checks import InputError
from equipoise.core.registry import Registry
from equipoise.reporting import (
    accuracy,
    alphas,
    attacked,
    certificates,
    comparison,
    gate,
    local_policy,
    local_smoothing,
    mixture_fit,
    provenance,
    radius_curves,
)
from equipoise.reporting.charts import DARK, LIGHT, Chart, Picture, styled
from equipoise.reporting.section import RunView, Section, read_run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SectionFunction = Callable[[RunView], Section | None]

# Each function returns None for runs that have nothing to show in it. Sections of other packages come before the last.
SECTIONS: Registry[SectionFunction] = Registry("equipoise.report_sections", "report section", {
    "headline": accuracy.headline,
    "promise": mixture_fit.promise,
    "compared-rules": comparison.compared_rules,
    "radius-curves": radius_curves.radius_curves,
    "autoattack": local_policy.autoattack,
    "sanity-checks": accuracy.sanity_checks,
    "attack-details": attacked.details,
    "attacked-images": attacked.pictures,
    "training": provenance.training,
    "certified": certificates.certified,
    "frontier": certificates.frontier,
    "fit": mixture_fit.fitted,
    "fit-trade-off": mixture_fit.trade_off,
    "alpha": alphas.alpha_sweep,
    "transfer": alphas.transfer,
    "confidence": alphas.confidence,
    "trust": local_smoothing.trust,
    "fixed-strength": local_smoothing.fixed_strength,
    "neighbours": local_smoothing.neighbours,
    "crossing": local_policy.crossing,
    "policy-targets": local_policy.targets,
    "policy-losses": local_policy.policy_losses,
    "policy-radii": local_policy.radii,
    "gradients": local_policy.gradients,
    "theorem-radii": local_policy.theorems,
    "oracle-gate": gate.oracle_gate,
    "gate-alphas": gate.alphas,
    "gate-trade-off": gate.trade_off,
    "fixed-alphas": gate.fixed_alphas,
    "gate-settings": gate.settings,
    "gate-ablation": gate.ablation,
    "examples": accuracy.examples,
    "margins": accuracy.margins,
    "estimates": certificates.estimates,
    "map-margins": mixture_fit.map_margins,
    "landscape": mixture_fit.landscape,
    "cost": mixture_fit.cost,
    "provenance": provenance.provenance,
})
CONTRADICTION = "whose files agree with one another"
# Empty, so that the bytes depend neither on the date nor on the version of matplotlib.
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


def ordered(sections: Registry[SectionFunction] = SECTIONS) -> list[SectionFunction]:
    """All section functions in the order of the report: built-in ones, external ones, provenance."""
    return [sections[name] for name in sections if name != "provenance"] + [sections["provenance"]]


def report(folder: Path | str) -> Path:
    """Write `report.html` and `figures/` into a finished run folder.

    The report is a pure function of the folder (`run.toml`, `rows.jsonl`, `summary.json` and perhaps `arrays.npz` and
    runs in subfolders): the same rows give the same bytes. No model is loaded, and neither this function nor the report
    downloads anything.

    Returns:
        The path of the report.
    """
    import jinja2

    checks.path("folder", checks.instance("folder", folder, (str, Path), "be a path"))
    run = read_run(folder)
    with _files_agree(run.folder):
        shown = [section for function in ordered() if (section := function(run)) is not None]
        images = {picture.name: _save(picture, run.folder / "figures") for section in shown
                  for picture in section.pictures}
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
                                     lstrip_blocks=True, keep_trailing_newline=True, finalize=_show_literally)
    # Non-breaking spaces between a number and its unit.
    environment.filters["keep_units"] = lambda text: text.replace(" %", "\u00a0%").replace("n = ", "n\u00a0=\u00a0")
    source = resources.files("equipoise.reporting").joinpath("report.html").read_text("utf-8")
    content = environment.from_string(source).render(
        name=run.folder.resolve().name, command=run.summary.command, sections=shown, images=images, light=LIGHT,
        dark=DARK)
    path = run.folder / "report.html"
    files.write_atomic(path, content)
    return path


def _show_literally(value: Any) -> Any:
    """Text with visible control characters, before it is escaped for HTML; markup and other values unchanged."""
    return format.literal(value, keep="\n") if type(value) is str else value


@contextmanager
def _files_agree(folder: Path) -> Iterator[None]:
    """Refuse files that are valid one by one but contradict one another, such as a summary without its rows."""
    try:
        yield
    except InputError:
        raise
    except (ArithmeticError, AttributeError, LookupError, StopIteration, TypeError, ValueError) as error:
        place = next((frame for frame in reversed(traceback.extract_tb(error.__traceback__))
                      if Path(frame.filename).parent == Path(__file__).parent), None)
        where = "" if place is None else f" in {Path(place.filename).name}, line {place.lineno}"
        raise InputError(f"{folder} must hold a run {CONTRADICTION}, got one that cannot be shown "
                         f"({type(error).__name__}{where})") from error


def _save(picture: Chart | Picture, folder: Path) -> dict[str, str]:
    """Save a figure as SVG and PNG; return it as data URIs for both palettes."""
    from matplotlib.text import Text

    folder.mkdir(exist_ok=True)
    uris = {}
    for name, palette in {"light": LIGHT, "dark": DARK}.items():
        with styled(palette):
            figure = picture.draw(palette)
            for text in figure.findobj(Text):  # a control character would make the SVG invalid
                text.set_text(_show_literally(text.get_text()))
            svg = _encode(figure, format="svg", metadata=NO_METADATA)
            if name == "light":
                png = _encode(figure, format="png", metadata={"Software": None})
                files.write_atomic(folder / f"{picture.name}.svg", svg)
                files.write_atomic(folder / f"{picture.name}.png", png)
        uris[name] = f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
    return uris


def _encode(figure: Figure, **options: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, **options)
    return buffer.getvalue()
