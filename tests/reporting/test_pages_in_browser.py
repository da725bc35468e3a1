"""Reports, comparisons and the index in a real browser: figures, gallery, tables and print, without
a network."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import explored_run
import numpy as np
import pytest
import report_runs
from accessibility import axe_violations, defects
from browser import CHROMIUM, Page, saved
from browser import downloads as downloads
from browser import page as page
from several_runs import FIRST, HOSTILE, SECOND, certification, evaluation, training

from equipoise.core.arrays import FrontierArrays, PictureArrays
from equipoise.core.rows import AttackRow
from equipoise.reporting import compare, index, report
from equipoise.reporting.run_view import read_run

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM, reason="Chromium is not installed"),
]
# Elements wider than their box; what is only for screen readers is clipped on purpose.
TOO_WIDE = """[...document.querySelectorAll('body *')].filter(node =>
  !node.closest('svg') && node.scrollWidth > node.clientWidth + 1 && getComputedStyle(node).display !== 'inline'
  && !node.closest('.verdict > .words > h2, thead')).map(node => `${node.tagName}.${node.className}`)"""
DRAWN = "[...document.querySelectorAll('figure')].every(f => f.dataset.drawn === 'done')"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def explored(root: Path) -> Path:
    run = explored_run.make(root / "explored", n=300, pictures=40)
    return report(run.folder)


@pytest.fixture(scope="module")
def pages(root: Path, explored: Path) -> dict[str, Path]:
    """A page of every kind, one of a run whose names are markup."""
    first = evaluation(root / "runs" / "a", {"robust": SECOND["mixed"], **FIRST})
    second = evaluation(root / "runs" / HOSTILE, {**SECOND, HOSTILE: FIRST["mixed"]}, digest="e")
    evaluation(root / "runs" / "half", finished=False)
    certified = []
    for sigma, radii in ((0.25, [0.3, 0.6, -0.1]), (0.5, [0.5, 0.9, 0.2])):
        certified.append(certification(root / "runs" / f"sigma-{sigma}", radii, sigma=sigma))
    trained = [training(root / "runs" / f"train-{k}", [2.0, 1.0 / (k + 1)]) for k in range(2)]
    (root / "runs" / "broken").mkdir()
    (root / "runs" / "broken" / "run.toml").write_text("[")
    report(first)
    return {
        "explored": explored,
        "training": report(report_runs.training(root / "training").folder),
        "certificates": report(report_runs.certificates(root / "certificates").folder),
        "hostile": report(second),
        "index": index(root / "runs"),
        "evaluations": compare([first, second], root / "evaluations.html"),
        "certified": compare(certified, root / "certified.html"),
        "trainings": compare(trained, root / "trainings.html"),
    }


def draw_all(page: Page) -> None:
    page.js("figures.forEach(draw)")
    page.wait_for(DRAWN)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_every_page_fits_without_message_or_request(
    pages: dict[str, Path], width: int, dark: bool
) -> None:
    with Page(width, 844, dark=dark) as page:
        for name, path in pages.items():
            page.open(path)
            draw_all(page)
            assert page.js(TOO_WIDE) == [], name
            assert page.js("document.documentElement.scrollWidth <= innerWidth"), name
            paper = page.js("getComputedStyle(document.body).backgroundColor")
            assert (paper == "rgb(21, 24, 28)") is dark
            assert defects(page) == [], name
            assert axe_violations(page) == []
        assert page.errors == []
        assert {url.partition(":")[0] for url in page.requests} <= {"file", "data", "about", "blob"}


@pytest.mark.parametrize("width", [1280, 390])
def test_verdict_and_first_figure_are_on_the_first_screen(explored: Path, width: int) -> None:
    with Page(width, 900) as page:
        page.open(explored)
        page.wait_for("document.querySelector('figure').dataset.drawn === 'done'")
        bottom = page.js("document.querySelector('figure .plot').getBoundingClientRect().bottom")
        assert 0 < bottom < 900


def test_the_first_figure_needs_no_script(explored: Path) -> None:
    source = explored.read_text("utf-8")
    figure = source[source.index("<figure") : source.index("</figure")]
    assert "<svg" in figure and source[: source.index("</main>")].count("<svg") == 1


def test_figures_are_drawn_when_scrolled_to(page: Page, explored: Path) -> None:
    page.open(explored)
    drawn = "document.querySelectorAll('figure[data-drawn=done]').length"
    page.wait_for(f"{drawn} > 0")
    before, count = page.js(drawn), page.js("figures.length")
    assert before < count
    page.js("figures.at(-1).scrollIntoView()")
    page.wait_for("figures.at(-1).dataset.drawn === 'done'")


def test_every_figure_is_printed(explored: Path, tmp_path: Path) -> None:
    """Also those that were never scrolled to."""
    with Page() as page:
        page.open(explored)
        page.js(
            "addEventListener('afterprint', () => { window.printed = "
            "figures.filter(f => f.querySelector('.plot svg')).length; }); undefined"
        )
        page.emulate_print(tmp_path / "page.pdf")
        assert page.js("window.printed === figures.length")
        assert page.errors == []


def test_colours_follow_light_and_dark_without_drawing_again(page: Page, explored: Path) -> None:
    read = "getComputedStyle(document.querySelector('figure .mark-symbol path')).fill"
    page.open(explored)
    page.wait_for("document.querySelector('figure').dataset.drawn === 'done'")
    light = page.js(read)
    page.resize(1280, dark=True)
    dark = page.js(read)
    page.resize(1280)
    assert light != dark and page.js(read) == light


def test_a_tooltip_has_the_numbers(page: Page, explored: Path) -> None:
    page.open(explored)
    page.wait_for("document.querySelector('figure').dataset.drawn === 'done'")
    x, y = page.js(
        "(() => { const r = document.querySelector('figure .mark-symbol path').getBoundingClientRect();"
        "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
    )
    page.mouse("move", x, y)
    page.wait_for("document.querySelector('#vg-tooltip-element.visible')")
    assert "clean" in page.js("document.querySelector('#vg-tooltip-element').textContent")


def test_numbers_of_a_figure_are_saved(page: Page, explored: Path, downloads: Path) -> None:
    page.open(explored)
    page.js("document.querySelector('figure .csv').click()")
    lines = list(csv.DictReader(saved(downloads, "verdict.csv").decode().splitlines()))
    run = read_run(explored.parent)
    assert [line["model"] for line in lines] == ["accurate", "robust", "mixture"]
    for line, name in zip(lines, explored_run.NAMES, strict=True):
        result = run.find(name, "worst")
        assert result is not None and float(line["robust"]) == pytest.approx(result.value, abs=1e-5)


def test_the_slider_moves_the_mixture_along_its_frontier(page: Page, explored: Path) -> None:
    stored = FrontierArrays.load(explored.parent)
    assert stored is not None
    page.open(explored)
    draw_all(page)
    figure = "document.querySelector('#frontier figure')"
    page.js(
        f"(() => {{ const e = {figure}.querySelector('input[type=range]'); e.value = 5;"
        "e.dispatchEvent(new Event('input')); })()"
    )
    alpha = np.sort(stored.alpha)[::-1][4]
    page.wait_for(f"{figure}.textContent.includes('alpha {alpha:.3g}')")


def select(page: Page, label: str, option: str) -> None:
    page.js(
        f"(() => {{ const box = [...document.querySelectorAll('.filters label')]"
        f".find(l => l.firstChild.textContent === {json.dumps(label)}).querySelector('select');"
        f"box.value = [...box.options].find(o => o.textContent === {json.dumps(option)}).value;"
        "box.dispatchEvent(new Event('change')); })()"
    )


def count(page: Page) -> int:
    return int(page.js("document.querySelector('.gallery [role=status]').textContent").split()[0])


def test_filters_of_the_gallery_count_what_the_rows_say(
    page: Page, explored: Path, downloads: Path
) -> None:
    run = read_run(explored.parent)
    rows = {
        (row.model, row.attack, row.index): row for row in run.rows if isinstance(row, AttackRow)
    }
    page.open(explored)
    assert count(page) == 300
    select(page, "Show", "mixture: broken by the attack")
    broken = [
        i
        for i in range(300)
        if rows["mixed", "clean", i].correct and not rows["mixed", "fast", i].correct
    ]
    assert count(page) == len(broken) > 0
    select(page, "True class", "cat")
    cats = [i for i in broken if rows["mixed", "clean", i].label == 3]
    assert count(page) == len(cats)
    select(page, "Show", "all images")
    select(page, "True class", "all classes")
    select(page, "Broken by", "fast: square")
    expected = {
        i for (_, attack, i), row in rows.items() if attack == "fast" and row.broken_by == "square"
    }
    assert count(page) == len(expected) > 0
    page.js("document.querySelector('.filters button').click()")
    table = list(csv.DictReader(saved(downloads, "images.csv").decode().splitlines()))
    assert {int(line["image"]) for line in table} == expected
    select(page, "Broken by", "anything or nothing")
    select(page, "Order", "smallest margin of mixture")
    smallest = min(range(300), key=lambda i: rows["mixed", "fast", i].margin or 0.0)
    assert f"(image {smallest})" in page.js("document.querySelector('.card h3').textContent")


def test_more_images_are_shown_when_asked_for(page: Page, explored: Path) -> None:
    page.open(explored)
    first = page.js("document.querySelectorAll('.card').length")
    page.js("document.querySelector('.more').click()")
    assert page.js("document.querySelectorAll('.card').length") == 2 * first
    pictures = PictureArrays.load(explored.parent)
    assert pictures is not None
    shown = page.js("document.querySelectorAll('.pair').length")
    assert shown == min(len(pictures.index), 2 * first)


def test_names_are_text(page: Page, pages: dict[str, Path]) -> None:
    for name in ("explored", "hostile", "index", "evaluations"):
        page.open(pages[name])
        assert page.js("document.body.textContent").count(HOSTILE) > 0
        scripts = "[...document.scripts].filter(s => s.type !== 'application/json').length"
        assert page.js(scripts) == 2


def test_the_index_is_searched_and_sorted(page: Page, pages: dict[str, Path]) -> None:
    page.open(pages["index"])
    shown = "[...document.querySelectorAll('tbody tr')].filter(r => r.offsetParent).map(r => r.cells[0].textContent)"
    everything = page.js(shown)
    page.js(
        "(() => { const e = document.querySelector('input[type=search]'); e.value = 'sigma';"
        "e.dispatchEvent(new Event('input')); })()"
    )
    assert 0 < len(page.js(shown)) == sum("sigma" in text for text in everything)
    page.js("document.querySelectorAll('thead button')[6].click()")
    radii = page.js(
        "[...document.querySelectorAll('tbody tr')].map(r => Number(r.cells[6].dataset.order))"
    )
    known = [value for value in radii if value is not None]
    assert known == sorted(known) and len(known) == 2


def test_a_page_of_ten_thousand_images_is_filtered(tmp_path: Path) -> None:
    """How long that takes is measured by benchmarks/report_page.py."""
    path = report(explored_run.make(tmp_path / "run", n=10_000, pictures=200, size=32).folder)
    with Page() as page:
        page.open(path)
        assert count(page) == 10_000
        select(page, "Show", "mixture: right under attack")
        robust = read_run(path.parent).find("mixed", "worst")
        assert robust is not None and count(page) == robust.count
