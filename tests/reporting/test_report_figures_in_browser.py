"""Figures that can be read and zoomed, downloads and links of every report, and what assistive
technology needs."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import explored_run
import pytest
import report_runs
from accessibility import axe_violations, defects
from browser import CHROMIUM, Page, saved
from browser import downloads as downloads
from browser import page as page

from equipoise.core import stats
from equipoise.core.rows import EpochRow, by_mixture
from equipoise.reporting import report
from equipoise.reporting.section import RunView

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM, reason="Chromium is not installed"),
]
MAKERS = {
    "evaluation": report_runs.evaluation,
    "training": report_runs.training,
    "certificates": report_runs.certificates,
}
KEYBOARD = "scrollable-region-focusable: .rows"  # scrolled by the arrow keys of the grid around it

DOWNLOADS = """(() => {
  const after = (node, text) => {
    for (let next = node.nextElementSibling, k = 0; next && k < 3; next = next.nextElementSibling, k++)
      if (next.matches('.tools') && next.textContent.includes(text)) return true;
    return false;
  };
  const shown = (selector) => [...document.querySelectorAll(selector)].filter((e) => !e.closest('dialog, [hidden]'));
  return [shown('main table, main [role=grid]').map((e) => after(e.role === 'grid' ? e : e.parentElement, 'CSV')),
          shown('main figure').map((e) => ['SVG', 'PNG'].every((x) => $('.tools', e).textContent.includes(x))),
          shown('.explorer .chart').map((e) => after(e, 'SVG') && after(e, 'PNG'))];
})()"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunView]:
    made = {name: make(tmp_path_factory.mktemp(name) / "run") for name, make in MAKERS.items()}
    for run in made.values():
        report(run.folder)
    return made


def opened(page: Page, run: RunView, fragment: str = "") -> None:
    page.open(run.folder / "report.html", fragment)


def press(page: Page, label: str) -> None:
    page.js(
        f"document.querySelector('[aria-label={json.dumps(label)}]').dispatchEvent("
        "new MouseEvent('click', {bubbles: true}))"
    )


def reading(page: Page, name: str) -> str:
    text: str = page.js(
        "[...document.querySelectorAll('figure[data-chart]')].find(f => JSON.parse(f.dataset.chart)"
        f".name === '{name}').querySelector('.reading').textContent"
    )
    return text


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
@pytest.mark.parametrize("name", MAKERS)
def test_nothing_hinders_anyone(
    page: Page, runs: dict[str, RunView], name: str, width: int, dark: bool
) -> None:
    page.resize(width, 844, dark=dark)
    states = (
        ("", "#tab=tradeoff", "#tab=classes", "#tab=margins", "#image=0")
        if name == "evaluation"
        else ("",)
    )
    for fragment in states:
        opened(page, runs[name], fragment)
        assert page.js("document.documentElement.scrollWidth <= innerWidth")
        assert (fragment, defects(page)) == (fragment, [])
        assert [item for item in axe_violations(page) if item != KEYBOARD] == []
    page.resize(1280)


@pytest.mark.parametrize("name", MAKERS)
def test_every_table_and_figure_can_be_saved_and_every_section_linked(
    page: Page, runs: dict[str, RunView], name: str
) -> None:
    for fragment in (
        ("", "#tab=tradeoff", "#tab=classes", "#tab=margins") if name == "evaluation" else ("",)
    ):
        opened(page, runs[name], fragment)
        tools = page.js(DOWNLOADS)
        assert (
            [all(found) for found in tools] == [True] * 3
            and len(tools[0]) > 1
            and len(tools[1]) > 0
        )
    links = page.js(
        "[...document.querySelectorAll('main h2')].map(h => h.parentElement.id && "
        "h.querySelector('a').getAttribute('href') === '#' + h.parentElement.id)"
    )
    assert links and all(links)
    copied = page.js(
        "[...document.querySelectorAll('main pre')].map(p => p.nextElementSibling.textContent)"
    )
    assert copied == ["copy"] * len(copied)


def test_certified_accuracy_is_read_at_a_radius_with_its_interval(
    page: Page, runs: dict[str, RunView]
) -> None:
    opened(page, runs["certificates"], "#certified-accuracy")
    assert page.js(
        "Math.abs(document.querySelector('#certified-accuracy').getBoundingClientRect().top) < 5"
    )
    box = page.js(
        "(() => { const r = document.querySelector('#certified-accuracy .plot rect').getBoundingClientRect();"
        "return [r.left, r.top, r.width, r.height]; })()"
    )
    page.mouse("move", box[0] + box[2] / 2, box[1] + box[3] / 2)
    page.wait_for("document.querySelector('#certified-accuracy .reading strong')")
    text = reading(page, "certified")
    radius = float(text.split("radius ")[1].split("smooth")[0])
    at = next(
        x
        for x in page.js(
            "JSON.parse(document.querySelector('#certified-accuracy figure').dataset.chart)"
            ".panels[0].lines[0].x"
        )
        if abs(x - radius) < 0.002
    )
    for (_, alpha), rows in by_mixture(runs["certificates"].rows).items():
        share = stats.clopper_pearson(
            sum(row.correct and row.radius >= at for row in rows), len(rows)
        )
        wanted = [float(f"{100 * value:.3g}") for value in (share.value, share.low, share.high)]
        found = text.split(f"alpha {alpha:g}) ")[1].split("]")[0].replace(" [", ", ").split(", ")
        assert [float(value) for value in found] == wanted


def test_training_curves_are_read_and_zoomed_by_keyboard_and_link(
    page: Page, runs: dict[str, RunView]
) -> None:
    rows = [row for row in runs["training"].rows if isinstance(row, EpochRow)]
    opened(page, runs["training"])
    page.js("document.querySelector('.plot').focus()")
    page.press("Home", "ArrowRight", "ArrowRight")
    assert reading(page, "training").startswith(f"epoch 3{rows[2].loss:.3g} loss")
    for part in ("held out, clean 58 [50.8, 64.9]", "training 60", "0.025 learning rate"):
        assert part in reading(page, "training")
    assert page.js("document.querySelector('.plot').getAttribute('aria-valuenow')") == "3"
    press(page, "Zoom into the figure training")
    press(page, "Curve training")
    fragment = page.js("location.hash")
    shown = page.js("document.querySelector('#training figure svg').textContent")
    assert (
        "figure=training" in fragment
        and "x=" in fragment
        and "hide=0" in fragment
        and "at=3" in fragment
    )
    opened(page, runs["training"], fragment)
    assert page.js("document.querySelector('#training figure svg').textContent") == shown
    assert (
        page.js(
            "document.querySelector('[aria-label=\"Curve training\"]').getAttribute('aria-pressed')"
        )
        == "false"
    )
    assert "training 60" not in reading(page, "training")
    press(page, "Show all of the figure training")
    assert "x=" not in page.js("location.hash")
    opened(page, runs["training"], "#figure=training&x=a:b&hide=77&at=x")  # a link may be wrong
    assert page.js("document.querySelectorAll('.plot').length") == 1


def test_dragging_zooms(page: Page, runs: dict[str, RunView]) -> None:
    opened(page, runs["training"])
    page.js("document.querySelector('#training .plot').scrollIntoView({block: 'center'})")
    left, top, width = page.js(
        "(() => { const r = document.querySelector('.plot rect').getBoundingClientRect();"
        "return [r.left, r.top, r.width]; })()"
    )
    page.mouse("press", left + 0.25 * width, top + 40)
    page.mouse("move", left + 0.5 * width, top + 40)
    page.mouse("release", left + 0.5 * width, top + 40)
    page.wait_for("location.hash.includes('x=')")
    low, high = (
        float(value)
        for value in page.js("new URLSearchParams(location.hash.slice(1)).get('x')").split(":")
    )
    assert low == pytest.approx(0.79 + 0.25 * 7.42, abs=0.1) and high == pytest.approx(
        0.79 + 0.5 * 7.42, abs=0.1
    )


def test_figures_are_saved_as_shown_with_their_numbers(
    page: Page, runs: dict[str, RunView], downloads: Path
) -> None:
    opened(page, runs["training"])
    press(page, "Download the figure training as SVG")
    assert (
        b"held out, clean" in (svg := saved(downloads, "training.svg")) and b"learning rate" in svg
    )
    press(page, "Download the figure training as PNG")
    assert saved(downloads, "training.png").startswith(b"\x89PNG")
    press(page, "Download the numbers of the figure training as CSV")
    table = list(csv.reader(saved(downloads, "training.csv").decode("utf-8-sig").splitlines()))
    rows = [row for row in runs["training"].rows if isinstance(row, EpochRow)]
    losses = [[float(row[2]), float(row[3])] for row in table[1:] if row[0] == "loss"]
    assert losses == [[row.index + 1, pytest.approx(row.loss, rel=1e-5)] for row in rows]


def test_a_printed_picture_is_saved(page: Page, runs: dict[str, RunView], downloads: Path) -> None:
    opened(page, runs["evaluation"])
    alt = page.js("document.querySelector('main figure:not([data-chart]) img').alt")
    press(page, f"Download the figure as PNG: {alt}")
    name = page.js(f"slug({json.dumps(alt)})")
    assert saved(downloads, f"{name}.png").startswith(b"\x89PNG")
    press(page, f"Download the figure as SVG: {alt}")
    assert b"<svg" in saved(downloads, f"{name}.svg")


def test_attack_progress_is_in_the_report_of_an_evaluation(
    page: Page, runs: dict[str, RunView]
) -> None:
    opened(page, runs["evaluation"], "#attack-progress")
    page.js("document.querySelector('#attack-progress .plot').focus()")
    page.press("Home", "ArrowRight")
    assert reading(page, "attack-progress").startswith("passes with a gradient, per image 10")
    page.press("End")  # beyond the last point of the accurate model, all of which it broke
    assert reading(page, "attack-progress").startswith("passes with a gradient, per image 70")
    opened(page, runs["evaluation"], "#figure=attack-progress&at=11")  # no curve has a point at 11
    assert reading(page, "attack-progress").startswith("passes with a gradient, per image 10")
    stages = page.js(
        "[...document.querySelectorAll('#attack-progress tbody th small')].map(s => s.textContent)"
    )
    assert stages == list(explored_run.STAGES)
