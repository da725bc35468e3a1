from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
import synthetic_run

from equipoise import reporting
from equipoise.core import records, summary
from equipoise.core.checks import InputError
from equipoise.reporting import numbers
from equipoise.reporting.section import Section
from equipoise.reporting.sections import SECTIONS
from equipoise.reporting.view import RunView


class Page(HTMLParser):
    """Tables as lists of rows of texts, titles, text, and every attribute."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.tables: list[list[list[str]]] = []
        self.titles: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self._inside: list[str] = []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self._inside.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag == "h2":
            self.titles.append("")

    def handle_endtag(self, tag: str) -> None:
        while self._inside and self._inside.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        data = data.replace("\u00a0", " ")
        if "style" in self._inside:
            return
        self.text += data
        if "td" in self._inside or "th" in self._inside:
            # The small print stands under the value; here it follows after a space.
            self.tables[-1][-1][-1] += (" " if "small" in self._inside else "") + data
        elif "h2" in self._inside:
            self.titles[-1] += data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = synthetic_run.make(tmp_path_factory.mktemp("report") / "run")
    reporting.write(made)
    return made


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    return Page(folder / "report.html")


def test_every_section_is_there_in_order(page: Page) -> None:
    assert page.titles == ["What was found", "Accuracy against alpha", "Examples of attacked images", "Margins",
                           "How this was made"]


def test_headline_table_holds_the_figures_of_the_rows(folder: Path, page: Page) -> None:
    results = summary.results(records.read(folder), synthetic_run.THREAT)
    found = {(row["model"], row["metric"]): row for row in results}
    metrics = ["clean", "apgd", "pgd", "worst"]
    expected = [["model", *metrics]]
    for model in ("accurate", "robust", "mixed"):
        cells = [found[model, metric] for metric in metrics]
        expected.append([model, *(f"{numbers.percent(c['value'])} {numbers.interval(c['low'], c['high'])}"
                                  for c in cells)])
    assert page.tables[0] == expected
    assert "n = 200 images" in page.text


def test_worst_case_by_hand(folder: Path, page: Page) -> None:
    right: dict[int, bool] = {}
    for row in records.read(folder):
        if row["model"] == "robust":
            right[row["index"]] = right.get(row["index"], True) and row["correct"]
    assert page.tables[0][2][-1].startswith(f"{100 * sum(right.values()) / len(right):.1f} % [")


def test_headline_sentence_states_the_numbers(folder: Path, page: Page) -> None:
    results = records.summary(folder)["results"]
    clean, worst = (numbers.percent(summary.value(results, "mixed", metric)) for metric in ("clean", "worst"))
    assert f"The mixture answers {clean} of clean images and {worst} of attacked images rightly" in page.text
    assert "every pixel by up to 8/255 of its range (ℓ∞)" in page.text


def test_differences_match_and_unclear_ones_are_not_claimed(folder: Path, page: Page) -> None:
    told = records.summary(folder)["differences"]
    expected = [[f"{row['model']} − {row['versus']}", row["metric"],
                 f"{numbers.points(row['value'])} {numbers.interval(row['low'], row['high'])}", str(row["n"])]
                for row in told]
    assert page.tables[1][1:] == expected
    unclear = [row for row in told if row["low"] <= 0 <= row["high"]]
    assert page.text.count("no clear difference") == len(unclear)
    assert any(row["low"] > 0 for row in told)
    assert "the mixture " in page.text and "gains " in page.text


def test_alpha_table_holds_the_sweep(folder: Path, page: Page) -> None:
    found = {(row["alpha"], row["metric"]): row
             for row in summary.results(records.read(folder / "sweep"), synthetic_run.THREAT)}
    expected = [[f"{alpha:g}", *(numbers.estimate(found[alpha, metric]) for metric in ("clean", "worst"))]
                for alpha in synthetic_run.ALPHAS]
    assert page.tables[2] == [["alpha", "clean", "worst"], *expected]
    assert "alpha of this run, 0.75" in page.text


def test_page_is_complete_in_itself(page: Page) -> None:
    assert not page.tags & {"script", "link", "iframe", "object", "embed"}
    for name, value in page.attributes:
        if name in ("src", "srcset", "href", "data", "poster", "action"):
            assert value.startswith("data:image/svg+xml;base64,")
    assert not re.search(r"url\(|@import|https?://", page.source)
    assert "prefers-color-scheme: dark" in page.source


def test_inlined_figures_are_well_formed_and_saved_beside(folder: Path, page: Page) -> None:
    light = [base64.b64decode(value.partition(",")[2]) for name, value in page.attributes if name == "src"]
    assert [path.name for path in sorted((folder / "figures").iterdir())] == [
        f"{name}.{kind}" for name in ("alpha", "examples", "margins") for kind in ("png", "svg")]
    assert light == [(folder / "figures" / f"{name}.svg").read_bytes() for name in ("alpha", "examples", "margins")]
    for svg in light:
        root = ElementTree.fromstring(svg)
        refs = [value for node in root.iter() for key, value in node.attrib.items() if key.endswith("href")]
        assert all(ref.startswith(("#", "data:")) for ref in refs)


def test_two_writes_are_the_same_bytes(folder: Path) -> None:
    def held() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}

    before = held()
    reporting.write(folder)
    assert held() == before


def test_text_from_disk_is_escaped(tmp_path: Path) -> None:
    hostile = r"<script>alert('$\frac$')</script>"
    made = synthetic_run.make(tmp_path / "<i>run", n=6, names={"accurate": hostile}, command="<script>&")
    page = Page(reporting.write(made))
    assert not page.tags & {"script", "i", "b"}
    assert hostile in [row[0] for row in page.tables[0]]
    assert "<script>&" in page.text


@pytest.mark.parametrize(("without", "title"), [("arrays", "Examples of attacked images"),
                                                ("sweep", "Accuracy against alpha")])
def test_a_missing_ingredient_leaves_its_section_out(tmp_path: Path, without: str, title: str) -> None:
    made = synthetic_run.make(tmp_path / "run", n=6, arrays=without != "arrays", sweep=without != "sweep")
    titles = Page(reporting.write(made)).titles
    assert title not in titles
    assert len(titles) == 4


def test_a_clean_run_has_no_margins_section_but_a_headline(tmp_path: Path) -> None:
    made = synthetic_run.make(tmp_path / "run", n=6, arrays=False, sweep=False, attacks=())
    page = Page(reporting.write(made))
    assert page.titles == ["What was found", "How this was made"]
    assert page.tables[0][0] == ["model", "clean"]
    assert "under every attack" not in page.text


def test_a_run_without_accuracies_still_has_a_page(tmp_path: Path) -> None:
    run = records.Run(tmp_path / "run", {"verb": "train"}, {})
    run.summarise("train", 1.0, [{"model": "m", "metric": "acr", "value": 0.4, "low": 0.3, "high": 0.5, "n": 9}])
    page = Page(reporting.write(tmp_path / "run"))
    assert page.titles == ["What was found", "How this was made"]
    assert "no accuracies" in page.text


def test_unequal_counts_stand_in_every_cell(tmp_path: Path) -> None:
    made = synthetic_run.make(tmp_path / "run", n=9, arrays=False, sweep=False)
    told = json.loads((made / "summary.json").read_text())
    told["results"][0]["n"] = 8
    (made / "summary.json").write_text(json.dumps(told))
    cells = [cell for row in Page(reporting.write(made)).tables[0][1:] for cell in row[1:]]
    assert sorted(cell.rpartition("n = ")[2] for cell in cells) == ["8"] + ["9"] * 11


def test_an_unfinished_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="finished run"):
        reporting.write(tmp_path)
    records.Run(tmp_path / "run", {"verb": "evaluate"}, {})
    with pytest.raises(InputError, match="finished run"):
        reporting.write(tmp_path / "run")
    assert not (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize("broken", [b"no archive", b"PK\x03\x04 torn"])
def test_broken_arrays_are_refused(tmp_path: Path, broken: bytes) -> None:
    made = synthetic_run.make(tmp_path / "run", n=6, arrays=False)
    (made / "arrays.npz").write_bytes(broken)
    with pytest.raises(InputError, match=r"plain arrays"):
        reporting.write(made)


def test_pickled_arrays_are_never_opened(tmp_path: Path) -> None:
    made = synthetic_run.make(tmp_path / "run", n=6)
    with np.load(made / "arrays.npz") as held:
        arrays = dict(held)
    arrays["example_label"] = np.array([{}] * 5, dtype=object)
    np.savez(made / "arrays.npz", **arrays)
    with pytest.raises(InputError, match=r"plain arrays"):
        reporting.write(made)


def test_a_section_is_added_by_one_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def more(view: RunView) -> Section | None:
        return Section("More", [f"{len(view.rows)} rows & counting"])

    monkeypatch.setattr("equipoise.reporting.render.SECTIONS", [*SECTIONS, more])
    page = Page(reporting.write(synthetic_run.make(tmp_path / "run", n=6, sweep=False, arrays=False)))
    assert page.titles[-1] == "More"
    assert "54 rows & counting" in page.text


def test_the_callers_own_drawing_is_left_alone(tmp_path: Path) -> None:
    made = synthetic_run.make(tmp_path / "run", n=6, arrays=False, sweep=False)
    before = dict(matplotlib.rcParams)
    reporting.write(made)
    assert dict(matplotlib.rcParams) == before


def test_no_model_room_and_no_pyplot_is_loaded(folder: Path) -> None:
    code = ("import sys; from equipoise import reporting; reporting.write(sys.argv[1]);"
            "rooms = ['models', 'data', 'attacks', 'mixing', 'evaluation'];"
            "bad = [m for m in sys.modules if m in [f'equipoise.{r}' for r in rooms] or m == 'matplotlib.pyplot'];"
            "sys.exit(str(bad) if bad else 0)")
    source = str(Path(reporting.__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", code, str(folder)], env={**os.environ, "PYTHONPATH": source},
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
