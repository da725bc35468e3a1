"""The report in a real browser: every control of the explorer, without a network, by mouse and by
keyboard."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import explored_run
import numpy as np
import pytest
from browser import CHROMIUM, Page, saved
from browser import downloads as downloads
from browser import page as page
from synthetic_run import write_run

from equipoise.core import aggregation
from equipoise.core.arrays import FrontierArrays, PictureArrays
from equipoise.core.results import Summary
from equipoise.core.rows import AttackRow
from equipoise.reporting import report
from equipoise.reporting.section import RunView

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM, reason="Chromium is not installed"),
]
OPERABLE = {
    "button",
    "checkbox",
    "combobox",
    "dialog",
    "grid",
    "img",
    "searchbox",
    "slider",
    "tab",
    "tabpanel",
}
HOSTILE = explored_run.CLASSES[-1]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunView:
    run = explored_run.make(tmp_path_factory.mktemp("explored") / "run", n=300)
    report(run.folder)
    return run


def opened(page: Page, run: RunView, fragment: str = "") -> Page:
    page.open(run.folder / "report.html", fragment)
    return page


def rows_of(run: RunView) -> dict[tuple[str, str, int], AttackRow]:
    return {
        (row.model, row.attack, row.index): row for row in run.rows if isinstance(row, AttackRow)
    }


def choose(page: Page, label: str, value: str) -> None:
    page.js(
        f"(() => {{ const e = [...document.querySelectorAll('[role=tabpanel]:not([hidden]) [aria-label]')]"
        f".find(e => e.getAttribute('aria-label') === {json.dumps(label)}); e.value = {json.dumps(value)};"
        "e.dispatchEvent(new Event(e.tagName === 'SELECT' ? 'change' : 'input', {bubbles: true})); })()"
    )


def click(page: Page, selector: str, text: str) -> None:
    page.js(
        f"[...document.querySelectorAll({json.dumps(selector)})]"
        f".find(e => e.textContent.trim() === {json.dumps(text)}).click()"
    )


def shown(page: Page) -> int:
    return int(page.js("document.querySelector('[role=grid]').getAttribute('aria-rowcount')")) - 1


@pytest.mark.parametrize(
    ("width", "dark"), [(1280, False), (1280, True), (390, False), (390, True)]
)
def test_every_state_has_no_error_no_request_and_fits(run: RunView, width: int, dark: bool) -> None:
    with Page(width, 844, dark=dark) as page:
        for fragment in ("", "#tab=tradeoff", "#tab=classes", "#tab=margins", "#image=0"):
            opened(page, run, fragment)
            assert page.js("document.documentElement.scrollWidth <= innerWidth")
        page.js("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        dark_paper = page.js("getComputedStyle(document.body).backgroundColor") == "rgb(21, 24, 28)"
        assert dark_paper == dark
        assert page.errors == []
        assert {url.partition(":")[0] for url in page.requests} <= {"file", "data", "about", "blob"}


def test_the_worst_case_is_visible_on_a_phone(run: RunView) -> None:
    with Page(390, 844) as page:
        opened(page, run)
        assert page.js(
            "[...document.querySelectorAll('main table')[0].rows[1].cells].slice(0, 3)"
            ".every(c => c.getBoundingClientRect().right <= innerWidth)"
        )
        assert (
            page.js("document.querySelectorAll('main table')[0].rows[0].cells[2].textContent")
            == "worst"
        )


def test_filters_count_what_the_rows_say(page: Page, run: RunView) -> None:
    rows = rows_of(run)
    opened(page, run)
    assert shown(page) == 300
    click(page, ".chip", "g right, h wrong, mixture right")
    wanted = [
        i
        for i in range(300)
        if [rows[m, "clean", i].correct for m in explored_run.NAMES] == [True, False, True]
    ]
    assert shown(page) == len(wanted) > 0
    click(page, ".chip", "mixture fails under attack")
    assert shown(page) == sum(not rows["mixed", "fast", i].correct for i in range(300))
    choose(page, "True class", "3")
    assert shown(page) == sum(
        not rows["mixed", "fast", i].correct and rows["mixed", "fast", i].label == 3
        for i in range(300)
    )
    click(page, ".chip", "All images")
    name = "fast: square"
    code = page.js(
        f"[...document.querySelectorAll('select[aria-label=\"Broken by\"] option')]"
        f".find(o => o.textContent === '{name}').value"
    )
    choose(page, "Broken by", code)
    assert (
        shown(page) == sum(rows["mixed", "fast", i].broken_by == "square" for i in range(300)) > 0
    )
    click(page, ".chip", "All images")
    choose(page, "Search by class or number", "17")
    assert shown(page) == 1
    choose(page, "Search by class or number", "frog")
    assert shown(page) == sum(
        any(
            row.label == 6 or row.predicted == 6
            for (_, _, index), row in rows.items()
            if index == i
        )
        for i in range(300)
    )


def test_sorting_and_scrolling_hold_few_rows(page: Page, run: RunView) -> None:
    rows = rows_of(run)
    opened(page, run)
    assert page.js("document.querySelectorAll('.rows .row').length") < 40
    click(page, ".head button", "margin")
    smallest = min(range(300), key=lambda i: rows["mixed", "fast", i].margin or 0.0)
    assert page.js("document.querySelector('.rows .row .number').textContent") == str(smallest)
    assert (
        page.js("document.querySelector('.head [data-key=margin]').getAttribute('aria-sort')")
        == "ascending"
    )
    opened(page, run)
    page.js("document.querySelector('.rows').scrollTop = 1e6")
    page.wait_for("[...document.querySelectorAll('.rows .number')].at(-1).textContent === '299'")
    assert page.js("document.querySelectorAll('.rows .row').length") < 40


def test_the_keyboard_opens_and_closes_an_image(page: Page, run: RunView) -> None:
    opened(page, run)
    page.js("document.querySelector('[role=grid]').focus()")
    page.press("ArrowDown", "ArrowDown", "Enter")
    page.wait_for("document.querySelector('dialog').open")
    assert page.js("document.querySelector('dialog h3').textContent").startswith("Image 2: ")
    page.wait_for("location.hash.includes('image=2')")
    page.press(
        "ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft"
    )  # the focus stays in the dialog
    page.wait_for("document.querySelector('dialog h3').textContent.startsWith('Image 4: ')")
    page.js("document.querySelector('dialog [aria-label=\"next image\"]').focus()")
    page.press("Enter", "Enter")
    page.wait_for("document.querySelector('dialog h3').textContent.startsWith('Image 6: ')")
    page.press("Escape")
    page.wait_for(
        "!document.querySelector('dialog').open && document.activeElement.role === 'grid'"
    )
    page.wait_for("!location.hash.includes('image=')")
    page.js("document.querySelector('#tab-images').focus()")
    page.wait_for("document.activeElement.id === 'tab-images'")
    page.press("ArrowRight")
    page.wait_for("document.activeElement.id === 'tab-tradeoff'")


def test_pictures_are_those_of_the_run(page: Page, run: RunView) -> None:
    pictures = PictureArrays.load(run.folder)
    assert pictures is not None
    index = int(pictures.index[5])
    opened(page, run, f"#image={index}")
    read = (
        "[...document.querySelectorAll('dialog canvas')].map(c => [...c.getContext('2d')"
        ".getImageData(0, 0, c.width, c.height).data])"
    )
    page.wait_for("document.querySelectorAll('dialog canvas[data-drawn]').length === 3")
    clean, change, attacked = (
        np.array(values).reshape(16, 16, 4)[..., :3].transpose(2, 0, 1) for values in page.js(read)
    )
    before, after = pictures.clean[5].astype(int), pictures.attacked[5].astype(int)
    assert (clean == before).all() and (attacked == after).all()
    assert (change == np.clip(128 + 10 * (after - before), 0, 255)).all()
    assert page.js("document.querySelectorAll('dialog .bars').length") == 6
    first = page.js("document.querySelector('dialog .bars .value').textContent")
    assert first == f"{100 * float(pictures.top_probabilities[0, 0, 5, 0]):.1f}\u00a0%"


def test_the_slider_moves_the_mixture_along_its_frontier(page: Page, run: RunView) -> None:
    frontier = FrontierArrays.load(run.folder)
    assert frontier is not None
    label = np.array([rows_of(run)["mixed", "clean", i].label for i in range(300)])
    opened(page, run, "#tab=tradeoff")
    page.js(
        "(() => { const e = document.querySelector('#panel-tradeoff input[type=range]'); e.value = 1;"
        "e.dispatchEvent(new Event('input')); })()"
    )
    page.wait_for("location.hash.includes('step=1')")
    cells = page.js("[...document.querySelector('tr.moving').cells].map(c => c.textContent)")
    right, stands = frontier.predicted[1] == label, frontier.standing[1]
    assert cells[0] == "at 1 points"
    assert cells[1].startswith(f"{100 * right.mean():.1f}\u00a0%[") and cells[1].endswith("exact")
    assert cells[2].startswith(f"{100 * stands.mean():.1f}\u00a0%[") and cells[2].endswith(
        "estimate"
    )
    assert cells[3] == f"{100 * frontier.by_accurate[1].mean():.1f}\u00a0%"
    evaluated = explored_run.OWN
    gained = int((right & (frontier.predicted[evaluated] != label)).sum())
    lost = int((~right & (frontier.predicted[evaluated] == label)).sum())
    chips = page.js("[...document.querySelectorAll('.moved .chip')].map(c => c.textContent)")
    assert chips[:2] == [f"{gained} become right", f"{lost} become wrong"]
    assert gained + lost > 0
    kind, number = ("become right", gained) if gained else ("become wrong", lost)
    click(page, ".moved .chip", f"{number} {kind}")
    assert page.js("document.querySelector('#tab-images').getAttribute('aria-selected')") == "true"
    assert shown(page) == number


def test_measured_points_are_drawn_differently(page: Page, run: RunView) -> None:
    opened(page, run, "#tab=tradeoff")
    names = page.js(
        "[...document.querySelectorAll('#panel-tradeoff svg [role=img]')].map(g => "
        "[g.getAttribute('aria-label'), g.querySelector('circle') ? 'filled' : 'hollow'])"
    )
    assert [kind for name, kind in names if name.endswith("measured")] == ["filled"] * 3
    assert [kind for name, kind in names if name.endswith("estimate")] == ["hollow"] * len(
        explored_run.LOSSES
    )
    choose(page, "Move along", "alpha")
    assert page.js("document.querySelector('#panel-tradeoff input[type=range]').max") == "40"
    assert page.js("document.querySelector('#panel-tradeoff .summary').textContent").startswith(
        "This is the mixture"
    )


def test_classes_and_confusion_lead_to_their_images(page: Page, run: RunView) -> None:
    rows = rows_of(run)
    opened(page, run, "#tab=classes")
    assert page.js("document.querySelectorAll('.confusion tbody tr').length") == len(
        explored_run.CLASSES
    )
    pair = page.js(
        "(() => { const b = document.querySelector('.confusion td:not(.diagonal) button');"
        "const t = b.getAttribute('aria-label'); b.click(); return t; })()"
    )
    number = int(pair.split()[0])
    assert shown(page) == number
    names = pair.partition(" images of ")[2].split(" answered ")
    label, answered = (explored_run.CLASSES.index(name) for name in names)
    assert number == sum(
        rows["mixed", "fast", i].label == label and rows["mixed", "fast", i].predicted == answered
        for i in range(300)
    )
    opened(page, run, "#tab=classes")
    click(page, ".by-class th button", HOSTILE)
    assert shown(page) == sum(rows["mixed", "clean", i].label == 9 for i in range(300))


def test_a_threshold_counts_margins(page: Page, run: RunView) -> None:
    rows = rows_of(run)
    opened(page, run, "#tab=margins&threshold=0.25")
    above = [
        sum((rows["mixed", attack, i].margin or 0.0) > 0.25 for i in range(300))
        for attack in ("clean", "fast")
    ]
    text = page.js("document.querySelector('#panel-margins .summary').textContent")
    assert text == (
        f"Margin above 0.250: {above[0]} of 300 clean images, {above[1]} at their smallest margin."
    )
    choose(page, "Margins of", "mapped")  # the fixture's map doubles margins
    above = [
        sum((rows["robust", attack, i].margin or 0.0) > 0.25 for i in range(300))
        for attack in ("clean", "fast")
    ]
    text = page.js("document.querySelector('#panel-margins .summary').textContent")
    assert text.startswith(
        f"Margin above 0.250: {above[0]} of 300 clean images, {above[1]} at their smallest margin."
    )
    frontier = FrontierArrays.load(run.folder)
    assert frontier is not None
    label = np.array([rows["mixed", "clean", i].label for i in range(300)])
    alone, at = (
        next(
            t
            for t, (alpha, lost) in enumerate(zip(frontier.alpha, frontier.lost, strict=True))
            if np.isnan(lost) and abs(1 / alpha - 1 - q) < 1e-9
        )
        for q in (0.0, 0.25)
    )
    before, after = frontier.predicted[alone] == label, frontier.predicted[at] == label
    assert (
        f": {(after & ~before).sum()} clean images are gained and {(before & ~after).sum()} lost"
        in text
    )


def test_a_link_restores_what_was_seen(page: Page, run: RunView) -> None:
    opened(page, run)
    click(page, ".chip", "h stands, mixture does not")
    click(page, ".head button", "true class")
    page.wait_for("location.hash.includes('sort=label') && location.hash.includes('m2=wrong')")
    fragment, number = page.js("location.hash"), shown(page)
    opened(page, run, fragment)
    assert shown(page) == number
    assert (
        page.js("document.querySelector('.head [data-key=label]').getAttribute('aria-sort')")
        == "ascending"
    )


@pytest.mark.parametrize(
    "fragment",
    [
        "#tab=nothing&model=7&image=-1&step=x&m0=<b>",
        "#tab=constructor",
        "#sort=length",
        "#model=length&by=99&class=77&answer=-1",
        "#step=99&moved=everything&curve=none",
    ],
)
def test_a_wrong_link_shows_all_images(page: Page, run: RunView, fragment: str) -> None:
    opened(page, run, fragment)
    assert page.js("document.querySelector('#tab-images').getAttribute('aria-selected')") == "true"
    assert shown(page) == 300


@pytest.mark.parametrize(
    "fragment", ["#tab=margins&of=length", "#tab=margins&threshold=abc", "#tab=margins&of="]
)
def test_a_wrong_link_keeps_the_tab(page: Page, run: RunView, fragment: str) -> None:
    opened(page, run, fragment)
    assert page.js("document.querySelector('#panel-margins .summary').textContent").startswith(
        "Margin above 0.000: "
    )


def test_many_classes_and_no_mixture(page: Page, tmp_path: Path) -> None:
    rows = [
        AttackRow(
            index=i,
            model="m",
            attack=attack,
            label=i,
            predicted=(i + (attack == "pgd")) % 1000,
            correct=attack == "clean",
            margin=0.5,
        )
        for attack in ("clean", "pgd")
        for i in range(1000)
    ]
    run = write_run(
        tmp_path / "run",
        Summary(command="evaluate", seconds=1.0, results=tuple(aggregation.accuracies(rows, None))),
        rows,
    )
    report(run.folder)
    opened(page, run, "#tab=classes")
    assert page.js("document.querySelectorAll('#panel-classes .by-class tbody tr').length") == 1000
    assert page.js("document.querySelectorAll('#panel-classes tbody').length") == 2
    opened(page, run, "#moved=gained")  # there is nothing to move
    assert shown(page) == 1000


def test_many_movements_of_a_slider_end_in_the_address(page: Page, run: RunView) -> None:
    opened(page, run, "#tab=tradeoff")
    page.js(
        "(() => { const e = document.querySelector('#panel-tradeoff input[type=range]');"
        "for (let k = 0; k < 400; k++) { e.value = k % 7; e.dispatchEvent(new Event('input')); } })()"
    )
    page.wait_for("location.hash.includes('step=0')")  # 399 % 7 is 0


def test_the_evaluated_mixture_has_a_measurement_and_an_estimate(page: Page, run: RunView) -> None:
    opened(page, run, "#tab=tradeoff&curve=alpha")
    attacked = np.mean([rows_of(run)["mixed", "fast", i].correct for i in range(300)])
    frontier = FrontierArrays.load(run.folder)
    assert frontier is not None
    text = page.js("document.querySelector('#panel-tradeoff .summary').textContent")
    assert f": {100 * attacked:.1f}\u00a0% measured" in text
    assert f"Its estimate, {100 * frontier.standing[explored_run.OWN].mean():.1f}\u00a0%" in text
    assert page.js("document.querySelector('tr.moving').cells[0].textContent") == "estimate for it"


def test_filters_of_a_link_are_seen_and_cleared_on_a_phone(page: Page, run: RunView) -> None:
    page.resize(390)
    opened(page, run, "#class=3")
    assert page.js("document.querySelector('details.filters').open")
    click(page, "#panel-images .summary button", "clear")
    assert shown(page) == 300
    page.resize(1280)


def test_tables_and_figures_are_saved(page: Page, run: RunView, downloads: Path) -> None:
    rows = rows_of(run)
    opened(page, run, "#class=9")
    page.js("document.querySelector('[aria-label=\"Download the images shown as CSV\"]').click()")
    table = list(csv.reader(saved(downloads, "images.csv").decode("utf-8-sig").splitlines()))
    assert len(table) - 1 == shown(page) and {row[1] for row in table[1:]} == {HOSTILE}
    assert all(
        explored_run.CLASSES[rows["accurate", "clean", int(row[0])].predicted or 0] == row[2]
        for row in table[1:]
    )
    page.js(
        "document.querySelector('[aria-label=\"Download the table results-1 as CSV\"]').click()"
    )
    assert (
        saved(downloads, "results-1.csv")
        .decode("utf-8-sig")
        .startswith("model,clean,worst,fast\r\naccurate,")
    )
    opened(page, run, "#tab=tradeoff")
    page.js(
        "document.querySelector('[aria-label=\"Download the figure trade-off as SVG\"]').click()"
    )
    assert b"clean accuracy, %" in saved(downloads, "trade-off.svg")
    page.js(
        "document.querySelector('[aria-label=\"Download the figure trade-off as PNG\"]').click()"
    )
    assert saved(downloads, "trade-off.png").startswith(b"\x89PNG")
    page.js("document.querySelector('[aria-label=\"Copy the command\"]').click()")
    page.wait_for(
        "document.querySelector('[aria-label=\"Copy the command\"]').textContent === 'copied'"
    )


def test_a_class_name_is_text(page: Page, run: RunView) -> None:
    opened(page, run, "#class=9")
    assert page.js("document.querySelector('.rows .c-label').textContent") == HOSTILE
    assert page.js("document.querySelectorAll('script').length") == 3
    page.js("document.querySelector('.rows .row').click()")
    assert HOSTILE in page.js("document.querySelector('dialog h3').textContent")


@pytest.mark.parametrize("tab", ["images", "tradeoff", "classes", "margins"])
def test_everything_that_can_be_operated_has_a_name(page: Page, run: RunView, tab: str) -> None:
    opened(page, run, f"#tab={tab}")
    nodes = [node for node in page.names() if node["role"] in OPERABLE]
    assert len(nodes) > 10
    assert [node for node in nodes if not node["name"].strip()] == []


def test_models_have_one_name_in_every_tab_which_is_explained(page: Page, run: RunView) -> None:
    opened(page, run, "#tab=tradeoff")
    assert (
        "g: the accurate base model, accurate; h: the robust base model, robust; mixture: the mixture of both, "
        in (page.js("document.querySelector('#explore').textContent"))
    )
    assert page.js(
        "[...document.querySelectorAll('#panel-tradeoff tbody th')].map(c => c.textContent)"
    )[:3] == ["g", "h", "mixture"]
    options = "[...document.querySelectorAll('#panel-margins option')].map(o => o.textContent)"
    assert page.js(options) == ["g", "h", "mixture", "h, after the map"]


def test_axes_have_minus_signs(page: Page, run: RunView) -> None:
    opened(page, run, "#tab=margins")
    ticks = page.js(
        "[...document.querySelectorAll('#panel-margins svg text')].map(t => t.textContent)"
    )
    assert "−0.5" in ticks and "-0.5" not in ticks
