"""The comparison of runs and the index of a folder in a real browser, without a network."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import CHROMIUM, Page
from browser import downloads as downloads
from browser import page as page
from several_runs import FIRST, HOSTILE, SECOND, certification, evaluation, training

from equipoise.reporting import compare, index, report

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM, reason="Chromium is not installed"),
]
OPERABLE = {"button", "combobox", "searchbox", "link", "img"}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of runs, one of them with a name that is markup, its index, and comparisons."""
    root = tmp_path_factory.mktemp("pages")
    first = evaluation(root / "runs" / "a", {"robust": SECOND["mixed"], **FIRST})
    second = evaluation(root / "runs" / HOSTILE, {**SECOND, HOSTILE: FIRST["mixed"]}, digest="e")
    evaluation(root / "runs" / "half", finished=False)
    sigmas = [
        certification(root / "runs" / f"sigma-{sigma}", radii, sigma=sigma)
        for sigma, radii in ((0.25, [0.3, 0.6, -0.1]), (0.5, [0.5, 0.9, 0.2]))
    ]
    trained = [
        training(root / "runs" / f"train-{number}", [2.0, 1.0 / (number + 1)])
        for number in range(2)
    ]
    (root / "runs" / "broken").mkdir()
    (root / "runs" / "broken" / "run.toml").write_text("[")
    report(first)
    return {
        "index": index(root / "runs"),
        "evaluations": compare([first, second], root / "evaluations.html"),
        "certificates": compare(sigmas, root / "certificates.html"),
        "trainings": compare(trained, root / "trainings.html"),
    }


def shown(page: Page) -> list[str]:
    """Titles of the rows that are shown, in order."""
    titles: list[str] = page.js(
        "[...document.querySelectorAll('.runs tbody tr')].filter(r => r.offsetParent)"
        ".map(r => r.cells[0].textContent)"
    )
    return titles


def choose(page: Page, label: str, value: str) -> None:
    page.js(
        f"(() => {{ const e = document.querySelector('[aria-label=\"{label}\"]'); e.value = '{value}';"
        "e.dispatchEvent(new Event(e.tagName === 'SELECT' ? 'change' : 'input')); })()"
    )


def sort(page: Page, name: str) -> None:
    page.js(f"document.querySelector('[title=\"Sort by {name}\"]').click()")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_every_page_has_no_error_no_request_and_fits(
    pages: dict[str, Path], width: int, dark: bool
) -> None:
    with Page(width, 844, dark=dark) as page:
        for path in pages.values():
            page.open(path)
            assert page.js("document.documentElement.scrollWidth <= innerWidth"), path
            assert page.js("[...document.images].every(i => i.complete && i.naturalWidth > 0)")
            assert (
                page.js("getComputedStyle(document.body).backgroundColor") == "rgb(21, 24, 28)"
            ) == dark
            assert page.js("document.querySelectorAll('script').length") == 1  # no name became one
        assert page.errors == []
        assert {url.partition(":")[0] for url in page.requests} <= {"file", "data", "about", "blob"}


def test_the_decisive_columns_are_visible_on_a_phone(pages: dict[str, Path]) -> None:
    with Page(390, 844) as page:
        page.open(pages["evaluations"])
        for table in (0, 1):
            assert page.js(
                f"[...document.querySelectorAll('main table')[{table}].rows[1].cells].slice(0, 3)"
                ".every(c => c.getBoundingClientRect().right <= innerWidth)"
            )
        page.open(pages["index"])
        assert page.js(
            "[...document.querySelectorAll('.runs tbody td')].every("
            "c => c.getBoundingClientRect().right <= innerWidth)"
        )
        assert (
            page.js("getComputedStyle(document.querySelector('.runs td.none')).display") == "none"
        )


def test_tables_of_many_columns_are_cards_on_a_phone(page: Page, pages: dict[str, Path]) -> None:
    """No table scrolls sideways; every number says what it is, where its column has no head any
    more."""
    cells = "[...document.querySelectorAll('.cards td')].filter(c => c.offsetParent)"
    for name in ("evaluations", "certificates", "trainings"):
        page.resize(390)
        page.open(pages[name])
        assert page.js(
            "[...document.querySelectorAll('.wide')].every(w => w.scrollWidth <= w.clientWidth)"
        ), name
        labels = page.js(f"{cells}.map(c => getComputedStyle(c, '::before').content.slice(1, -1))")
        assert labels == page.js(
            f"{cells}.map(c => c.closest('table').tHead.rows[0].cells[c.cellIndex].textContent)"
        )
        assert labels or name == "trainings"
        assert page.js(f"{cells}.every(c => c.textContent !== '–')")
        page.resize(1280)
        assert page.js(
            "[...document.querySelectorAll('.cards table')].every("
            "t => getComputedStyle(t).display === 'table')"
        )


def test_all_columns_of_the_index_are_visible(page: Page, tmp_path: Path) -> None:
    """With long names of models, a part of another run, certificates, and a run that is not
    finished."""
    name = "/weights/cifar10_resnet8_pgd_at_linf8.safetensors"
    evaluation(tmp_path / "a", {name: FIRST["mixed"], name.replace("linf8", "l2"): SECOND["mixed"]})
    evaluation(tmp_path / "half", finished=False)
    evaluation(tmp_path / "a" / "part", {name: {key: [True] * 9999 for key in ("clean", "pgd")}})
    certification(tmp_path / "c", [0.3, 0.6, -0.1])
    path = index(tmp_path)
    for width in (1600, 1280, 1160, 1150, 1024, 800, 390):
        page.resize(width)
        page.open(path)
        assert page.js("document.querySelectorAll('.runs tbody tr').length") == 4
        assert page.js(
            "[...document.querySelectorAll('.runs :is(th, td)')].every("
            "c => c.getBoundingClientRect().right <= innerWidth - 16)"
        ), width
        assert page.js(
            "document.querySelector('.runs').scrollWidth <= document.querySelector('.runs').clientWidth"
        )
    page.resize(1280)


def test_names_are_text(page: Page, pages: dict[str, Path]) -> None:
    page.open(pages["index"])
    assert any(HOSTILE in title for title in shown(page))
    page.open(pages["evaluations"])
    assert HOSTILE in page.js("document.querySelector('main').textContent")


def test_sorting(page: Page, pages: dict[str, Path]) -> None:
    page.open(pages["index"])
    column = "[...document.querySelectorAll('.runs tbody tr')].map(r => r.cells[4].dataset.order)"
    sort(page, "clean")
    values = [float(value) for value in page.js(column) if value is not None]
    assert values == sorted(values) and len(values) >= 4 and len(set(values)) > 1
    assert page.js("document.querySelector('[aria-sort=ascending]').textContent") == "clean"
    sort(page, "clean")
    assert [float(value) for value in page.js(column) if value is not None] == values[::-1]
    missing = [value is None for value in page.js(column)]
    assert missing == sorted(missing) and any(
        missing
    )  # those without a value last, in either direction
    sort(page, "run")
    words = [title.split()[0] for title in shown(page)]
    assert words == sorted(words, key=str.casefold) and words[0].startswith("broken")


def test_searching_and_filtering_with_a_link(page: Page, pages: dict[str, Path]) -> None:
    page.open(pages["index"])
    total = len(shown(page))
    assert (
        total == 8
        and page.js("document.querySelector('[role=status]').textContent") == "8 of 8 shown"
    )
    choose(page, "Filter by kind", "certify")
    assert len(shown(page)) == 2 and all("sigma" in title for title in shown(page))
    choose(page, "Search", "σ = 0.25")
    assert [title.endswith("sigma-0.25") for title in shown(page)] == [True]
    fragment = page.js("location.hash")
    page.open(pages["index"], fragment)
    assert [title.endswith("sigma-0.25") for title in shown(page)] == [True]
    assert page.js("document.querySelector('[aria-label=Search]').value") == "σ = 0.25"
    page.open(pages["index"], "#kind=nothing&sort=nothing&search=%E0%A4%A")  # a link may be wrong
    assert shown(page) == []
    page.open(pages["index"])
    choose(page, "Filter by state", "unreadable")
    assert len(shown(page)) == 1 and shown(page)[0].startswith("broken")


def test_the_link_of_a_run_leads_to_its_report(page: Page, pages: dict[str, Path]) -> None:
    for name in ("index", "evaluations"):
        page.open(pages[name])
        href = page.js("document.querySelector('main table a').href")
        assert href == (pages["index"].parent / "a" / "report.html").resolve().as_uri()


@pytest.mark.parametrize("name", ["index", "evaluations"])
def test_everything_that_can_be_operated_has_a_name(
    page: Page, pages: dict[str, Path], name: str
) -> None:
    page.open(pages[name])
    nodes = [node for node in page.names() if node["role"] in OPERABLE]
    assert len(nodes) >= 5 and [node for node in nodes if not node["name"].strip()] == []
