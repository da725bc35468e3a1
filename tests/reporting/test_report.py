"""The whole report: sections, self-containment, reproducibility, errors, extension."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import explored_run
import numpy as np
import pytest
import report_runs
import synthetic_run
from parsed_report import ParsedReport

from equipoise import reporting
from equipoise.core import arrays, progress, records
from equipoise.core.arrays import FrontierArrays, PictureArrays
from equipoise.core.checks import InputError
from equipoise.core.registry import Registry
from equipoise.core.results import Summary
from equipoise.reporting import charts, report, sections
from equipoise.reporting.run_view import read_run
from equipoise.reporting.section import Section
from equipoise.reporting.sections import SECTIONS, sections_of

KINDS = {
    "evaluation": report_runs.evaluation,
    "training": report_runs.training,
    "certificates": report_runs.certificates,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = synthetic_run.make(tmp_path_factory.mktemp("report") / "run")
    report(folder)
    return folder


@pytest.fixture(scope="module")
def parsed(folder: Path) -> ParsedReport:
    return ParsedReport(folder / "report.html")


def test_the_verdict_comes_first_and_how_to_repeat_it_last(parsed: ParsedReport) -> None:
    assert parsed.titles == [
        "Verdict",
        "Accuracy under each attack",
        "Images",
        "What broke images",
        "Margins",
        "Accuracy against alpha",
        "How to repeat it",
    ]
    links = [value for name, value in parsed.attributes if name == "href"]
    assert len(links) == len(parsed.titles) and links[0] == "#verdict"


def test_the_report_is_self_contained(parsed: ParsedReport) -> None:
    assert not parsed.tags & {"link", "iframe", "object", "embed"}
    for name, value in parsed.attributes:
        if name in ("src", "srcset", "data", "poster", "action"):
            assert value.startswith("data:image/png;base64,")
        if name == "href":
            assert value.startswith("#")
    assert "prefers-color-scheme: dark" in parsed.source


def test_only_our_own_scripts_may_run(parsed: ParsedReport) -> None:
    policy = next(value for name, value in parsed.attributes if value.startswith("default-src"))
    assert policy.startswith("default-src 'none';") and "unsafe-eval" not in policy
    scripts = policy.split("script-src ")[1].split(";")[0].split()
    hashes = [hashlib.sha256(script.encode()).digest() for script in parsed.scripts]
    assert scripts == [f"'sha256-{base64.b64encode(own).decode()}'" for own in hashes]
    assert not any(name.startswith("on") for name, _ in parsed.attributes)


def test_figures_are_saved_in_light_colours(folder: Path, parsed: ParsedReport) -> None:
    names = {path.stem for path in (folder / "figures").iterdir()}
    assert names == {"verdict", "accuracy", "broken-by", "margins", "alpha"}
    for name in names:
        svg = (folder / "figures" / f"{name}.svg").read_text("utf-8")
        ElementTree.fromstring(svg)
        assert "var(--" not in svg
        assert (folder / "figures" / f"{name}.pdf").read_bytes().startswith(b"%PDF")
    verdict = (folder / "figures" / "verdict.svg").read_text("utf-8")
    assert charts.LIGHT["mixed"] in verdict
    assert "Clean against robust accuracy" in verdict


def test_a_second_report_has_the_same_bytes(folder: Path) -> None:
    def content() -> dict[str, bytes]:
        # The converter lists the fonts of a PDF in any order.
        paths = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pdf"]
        return {str(path): path.read_bytes() for path in paths}

    before = content()
    report(folder)
    assert content() == before


@pytest.mark.parametrize("kind", KINDS)
def test_every_figure_has_title_description_axes_and_numbers(tmp_path: Path, kind: str) -> None:
    run = KINDS[kind](tmp_path / "run")
    figures = [figure for section in sections_of(run) for figure in section.figures]
    assert len({figure.name for figure in figures}) == len(figures) > 0
    for figure in figures:
        assert figure.records and figure.title and figure.specification["description"]
        assert "title" in json.dumps(figure.specification)
        for record in figure.records:
            for key, value in record.items():
                if key.endswith("_low"):
                    name = key.removesuffix("_low")
                    assert value <= record[name] <= record[f"{name}_high"]


def test_text_from_disk_is_escaped(tmp_path: Path) -> None:
    hostile = r"<script>alert('$\frac$')</script>"
    folder = synthetic_run.make(
        tmp_path / "<i>run",
        n=6,
        names={"accurate": hostile},
        command="<script>&",
        with_sweep=False,
        methods={"mixed": hostile},
    )
    parsed = ParsedReport(report(folder))
    assert len(parsed.scripts) == 2
    assert hostile not in "".join([*parsed.scripts, *parsed.data_blocks.values()])
    assert any(hostile in row[0] for row in parsed.tables[0])
    assert "<script>&" in parsed.text and parsed.source.count("<script>alert") == 0


def test_class_names_are_data(tmp_path: Path) -> None:
    run = explored_run.make(tmp_path / "run", n=30, pictures=4)
    parsed = ParsedReport(report(run.folder))
    assert parsed.source.count("<script>alert") == 0
    assert explored_run.CLASSES[-1] in json.loads(parsed.data_blocks["images-gallery"])["classes"]


def test_control_characters_are_shown(tmp_path: Path) -> None:
    folder = synthetic_run.make(
        tmp_path / "run", n=6, names={"accurate": "a\x1b[31m\u202eb"}, with_sweep=False
    )
    source = ParsedReport(report(folder)).source
    assert "\x1b" not in source and "\u202e" not in source and r"a\x1b[31m\u202eb" in source


def test_a_run_without_attacks_has_no_margins(tmp_path: Path) -> None:
    folder = synthetic_run.make(tmp_path / "run", n=6, with_sweep=False, attacks=())
    parsed = ParsedReport(report(folder))
    assert parsed.titles == ["Verdict", "How to repeat it"]
    assert parsed.tables[0][0] == ["model", "clean accuracy", "n"]
    assert "nothing was attacked" in parsed.text


def test_a_run_without_accuracies_has_a_report(tmp_path: Path) -> None:
    summary = Summary(command="evaluate", seconds=1.0)
    synthetic_run.write_run(tmp_path / "run", summary)
    parsed = ParsedReport(report(tmp_path / "run"))
    assert parsed.titles == ["Verdict", "How to repeat it"]
    assert "no accuracies" in parsed.text


def test_a_run_without_a_sweep_has_no_alphas(tmp_path: Path) -> None:
    folder = synthetic_run.make(tmp_path / "run", n=6, with_sweep=False)
    assert "Accuracy against alpha" not in synthetic_run.section_titles(read_run(folder))


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"run\.toml"):
        report(tmp_path)
    (tmp_path / "file").write_text("")
    for name, got in (("file", "a file"), ("missing", "no such folder")):
        with pytest.raises(InputError, match=got):
            read_run(tmp_path / name)
    with pytest.raises(InputError, match="`folder`"):
        report(5)  # type: ignore[arg-type]


def test_the_report_of_a_run_without_rows_says_so(tmp_path: Path) -> None:
    identity = {"command": "evaluate", "data": {"count": 9}, "attacks": {"m": {"pgd": {}}}}
    records.Run(tmp_path / "run", identity, {})
    text = ParsedReport(report(tmp_path / "run")).text
    assert "0 of 9 rows" in text and "Repeat the command" in text


@pytest.mark.parametrize("content", [b"no archive", b"PK\x03\x04 damaged"])
def test_damaged_arrays_are_refused(tmp_path: Path, content: bytes) -> None:
    folder = synthetic_run.make(tmp_path / "run", n=6)
    (folder / "arrays.npz").write_bytes(content)
    with pytest.raises(InputError, match="plain arrays"):
        report(folder)


def test_pickled_arrays_are_never_opened(tmp_path: Path) -> None:
    run = explored_run.make(tmp_path / "run", n=12, pictures=4)
    with np.load(run.folder / "arrays.npz") as archive:
        content = dict(archive)
    content["pictures.index"] = np.array([{}] * 4, dtype=object)
    np.savez(run.folder / "arrays.npz", **content)
    with pytest.raises(InputError, match="plain arrays"):
        report(run.folder)


def test_our_own_bugs_keep_their_traceback(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(run: object) -> Section:
        raise AttributeError("a bug")

    monkeypatch.setitem(SECTIONS.builtin, "margins", broken)
    with pytest.raises(AttributeError, match="a bug"):
        report(folder)


def test_no_model_package_is_loaded(folder: Path) -> None:
    code = (
        "import sys; from equipoise import reporting; reporting.report(sys.argv[1]);"
        "packages = ['models', 'data', 'attacks', 'mixing', 'evaluation'];"
        "loaded = {f'equipoise.{package}' for package in packages} | {'matplotlib'};"
        "sys.exit(str(loaded & sys.modules.keys()) if loaded & sys.modules.keys() else 0)"
    )
    done = python(code, str(folder))
    assert done.returncode == 0, done.stderr


def test_altair_is_imported_only_where_a_page_is_written() -> None:
    code = "import sys, equipoise.reporting; sys.exit('altair' in sys.modules)"
    assert python(code).returncode == 0


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(reporting.__file__).parents[2])}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_without_altair_a_run_ends_well_and_says_how_to_go_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    monkeypatch.setattr(reporting, "PACKAGES", {"no_such_package": "altair"})
    monkeypatch.setattr(progress, "note", notes.append)
    assert reporting.report_after_run(folder) is None
    assert f"equipoise report {folder}" in notes[0] and "altair" in notes[0]
    with pytest.raises(InputError, match="altair"):
        report(folder)


def test_an_installed_package_adds_a_section_before_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A section is one function, registered by an entry point."""
    installed = tmp_path / "toy_report-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-report\nVersion: 1\n")
    (installed / "entry_points.txt").write_text(
        "[equipoise.report_sections]\ntoy = toy_report:count_rows\n"
    )
    (tmp_path / "toy_report.py").write_text(
        "from equipoise.reporting.section import Section\n"
        "def count_rows(run):\n    return Section('Toy', [f'{len(run.rows)} rows'])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    run = read_run(synthetic_run.make(tmp_path / "run", n=6, with_sweep=False))
    extended = Registry(SECTIONS.group, SECTIONS.noun, SECTIONS.builtin)
    listed = sections_of(run, extended)
    assert listed[-2] == Section("Toy", ["54 rows"])
    assert listed[-1].title == "How to repeat it"


def test_ten_thousand_images_are_a_page_below_two_megabytes(tmp_path: Path) -> None:
    run, *groups = explored_run.in_memory(tmp_path, 10_000, pictures=500, size=32)
    pictures, frontier = groups
    assert isinstance(pictures, PictureArrays) and isinstance(frontier, FrontierArrays)
    shown = synthetic_run.write_run(
        tmp_path / "run", run.summary, run.rows, dict(run.identity), dict(run.settings)
    )
    arrays.save(shown.folder, pictures, frontier)
    assert sections.write_report(shown.folder).stat().st_size < 2_600_000


def test_names_of_models_are_the_same_everywhere(tmp_path: Path) -> None:
    """Short names, or whole ones where two short ones would be the same."""
    run = read_run(synthetic_run.make(tmp_path / "run", n=6, with_sweep=False))
    assert list(run.names.values()) == ["accurate", "robust", "mixture"]
    assert run.colours == {"accurate": "accurate", "robust": "robust", "mixture": "mixed"}
    both = replace(run, summary=replace(run.summary, results=()), rows=[])
    assert both.names == {} and both.name("file:a/b.pt") == "b"


def test_the_page_has_no_plain_markup_of_ours_twice(parsed: ParsedReport) -> None:
    identifiers = re.findall(r'<(?:section|script)[^>]* id="([^"]+)"', parsed.source)
    assert len(set(identifiers)) == len(identifiers) > 5
