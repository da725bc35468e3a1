"""Render a run folder to `report.html`, one self-contained file, and the sections that it consists of.

To add a section, write a function from a run to a section and list it in :data:`SECTIONS`, or register an entry point.
"""

from __future__ import annotations

import base64
import hashlib
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
    certified_mixtures,
    comparison,
    gate,
    local_policy,
    local_smoothing,
    mixednuts,
    mixture_fit,
    provenance,
    radius_curves,
    smoothmix,
)
from equipoise.reporting.charts import DARK, LIGHT, Chart, Picture, styled
from equipoise.reporting.explorer.data import explorer
from equipoise.reporting.section import RunView, Section, read_run
from equipoise.reporting.title import title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SectionFunction = Callable[[RunView], Section | None]

# Each function returns None for runs that have nothing to show in it. Sections of other packages come before the last.
SECTIONS: Registry[SectionFunction] = Registry("equipoise.report_sections", "report section", {
    "progress": provenance.progress,
    "headline": accuracy.headline,
    "explorer": explorer,
    "promise": mixture_fit.promise,
    "compared-rules": comparison.compared_rules,
    "radius-curves": radius_curves.radius_curves,
    "autoattack": local_policy.autoattack,
    "sanity-checks": accuracy.sanity_checks,
    "attack-details": attacked.details,
    "attacked-images": attacked.pictures,
    "training": provenance.training,
    "certified": certificates.certified,
    "certified-theorems": certificates.theorems,
    "frontier": certificates.frontier,
    "certified-and-attacked": certified_mixtures.certified_and_attacked,
    "equal-clean": certified_mixtures.equal_clean,
    "smoothmix-methods": smoothmix.methods,
    "smoothmix-cifar10": smoothmix.methods_on_cifar10,
    "smoothmix-resnet110": smoothmix.methods_with_resnet110,
    "smoothmix-confidence": smoothmix.off_class_confidence,
    "smoothmix-interpolation": smoothmix.interpolation,
    "smoothmix-ablations": smoothmix.ablations,
    "mixednuts-fits": mixednuts.fits,
    "mixednuts-parts": mixednuts.parts,
    "mixednuts-margins": mixednuts.margins,
    "mixednuts-examples": mixednuts.example_maps,
    "mixednuts-map-margins": mixednuts.map_margins,
    "mixednuts-landscape": mixednuts.landscape,
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
    """Write `report.html` and `figures/` into a run folder; that of an unfinished run says how far it is.

    The report is a pure function of the folder (`run.toml`, `rows.jsonl`, `summary.json` and perhaps `arrays.npz` and
    runs in subfolders): the same rows give the same bytes. No model is loaded, and neither this function nor the report
    downloads anything.

    Returns:
        The path of the report.
    """
    import jinja2
    import markupsafe

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
    name, details = title(run)
    shown.sort(key=lambda section: not section.leads)
    script, style = _asset("explorer/explorer.js"), "\n".join([
        environment.from_string(_asset("report.css")).render(light=LIGHT, dark=DARK), _asset("explorer/explorer.css")])
    content = environment.from_string(_asset("report.html")).render(
        title=name, subtitle=details, sections=shown, images=images,
        script=markupsafe.Markup(script), style=markupsafe.Markup(style), script_hash=_hash(script),
        style_hash=_hash(style)) + "\n"
    path = run.folder / "report.html"
    files.write_atomic(path, content)
    return path


def open_report(folder: Path | str) -> Path:
    """Open the report of a run folder in the browser; it is written first where it is missing or out of date.

    Returns:
        The path of the report.
    """
    import webbrowser

    checks.path("folder", checks.instance("folder", folder, (str, Path), "be a path"))
    path = Path(folder) / "report.html"
    sources = [source for name in ("run.toml", "summary.json", "rows.jsonl", "parts", "arrays.npz")
               if (source := Path(folder) / name).exists()]
    if not path.exists() or any(source.stat().st_mtime > path.stat().st_mtime for source in sources):
        path = report(folder)
    webbrowser.open(path.resolve().as_uri())
    return path


def _asset(name: str) -> str:
    return resources.files("equipoise.reporting").joinpath(name).read_text("utf-8").strip()


def _hash(text: str) -> str:
    """The hash by which a Content-Security-Policy allows an inlined script or style."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


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
