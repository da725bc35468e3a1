"""The whole report: sections, self-containment, reproducibility, errors, extension."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib import resources
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
import synthetic_run
from parsed_report import ParsedReport

from equipoise import reporting
from equipoise.core import records
from equipoise.core.checks import InputError
from equipoise.core.registry import Registry
from equipoise.core.results import Summary
from equipoise.core.text import literal
from equipoise.reporting import SECTIONS, report
from equipoise.reporting.page import SCRIPTS
from equipoise.reporting.render import ordered
from equipoise.reporting.section import Section, read_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = synthetic_run.make(tmp_path_factory.mktemp("report") / "run")
    report(folder)
    return folder


@pytest.fixture(scope="module")
def parsed(folder: Path) -> ParsedReport:
    return ParsedReport(folder / "report.html")


def test_every_section_is_there_in_order(parsed: ParsedReport) -> None:
    assert parsed.titles == [
        "Results",
        "Explore",
        "Attack progress",
        "Accuracy against alpha",
        "Examples of attacked images",
        "Margins",
        "Provenance",
    ]


def test_the_report_is_self_contained(parsed: ParsedReport) -> None:
    assert not parsed.tags & {"link", "iframe", "object", "embed"}
    for name, value in parsed.attributes:
        if name in ("src", "srcset", "href", "data", "poster", "action"):
            assert value.startswith("data:image/svg+xml;base64,")
    assert not re.search(r"url\(|@import|https?://", parsed.source)
    assert "prefers-color-scheme: dark" in parsed.source


def test_only_our_own_script_may_run(parsed: ParsedReport) -> None:
    scripts = resources.files("equipoise.reporting.explorer")
    own = "\n".join(scripts.joinpath(f"{name}.js").read_text("utf-8").strip() for name in SCRIPTS)
    assert sorted(f"{name}.js" for name in SCRIPTS) == sorted(
        item.name for item in scripts.iterdir() if item.name.endswith(".js")
    )
    assert parsed.scripts == [own]
    policy = next(value for name, value in parsed.attributes if value.startswith("default-src"))
    digest = base64.b64encode(hashlib.sha256(own.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none';")
    assert not re.search("unsafe|blob:|https?:", policy)
    assert not any(name.startswith("on") or name == "style" for name, _ in parsed.attributes)


def test_inlined_figures_are_well_formed_and_saved(folder: Path, parsed: ParsedReport) -> None:
    names = ("alpha-trade-off", "alpha", "examples", "margins")
    light = [
        base64.b64decode(value.partition(",")[2])
        for name, value in parsed.attributes
        if name == "src"
    ]
    assert [path.name for path in sorted((folder / "figures").iterdir())] == [
        f"{name}.{extension}" for name in names for extension in ("png", "svg")
    ]
    shown = ("alpha", "alpha-trade-off", "examples", "margins")  # in this order
    assert light == [(folder / "figures" / f"{name}.svg").read_bytes() for name in shown]
    for svg in light:
        root = ElementTree.fromstring(svg)
        links = [
            value
            for node in root.iter()
            for key, value in node.attrib.items()
            if key.endswith("href")
        ]
        assert all(link.startswith(("#", "data:")) for link in links)


def test_a_second_report_has_the_same_bytes(folder: Path) -> None:
    def content() -> dict[str, bytes]:
        return {
            str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
        }

    before = content()
    report(folder)
    assert content() == before


@pytest.mark.usefixtures("figures_once")
def test_text_from_disk_is_escaped(tmp_path: Path) -> None:
    hostile = r"<script>alert('$\frac$')</script>"
    folder = synthetic_run.make(
        tmp_path / "<i>run", n=6, names={"accurate": hostile}, command="<script>&", with_sweep=False
    )
    parsed = ParsedReport(report(folder))
    assert not parsed.tags & {"i", "b"}
    assert len(parsed.scripts) == 1 and hostile not in parsed.scripts[0]
    assert hostile in [row[0] for row in parsed.tables[0]]
    assert "<script>&" in parsed.text


def test_names_of_classes_and_models_are_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    classes = ("<script>alert(1)</script>", "$\\foo", "a\x1b[31m\x00b", "--><b>")
    names = {"accurate": "[red]x[/red]\x1b[31m", "robust": "$\\frac{\x9b", "mixed": "a\udcff\u202e"}
    named = replace(synthetic_run.examples(np.random.default_rng(7)), class_names=classes)
    monkeypatch.setattr(synthetic_run, "examples", lambda rng: named)
    folder = synthetic_run.make(tmp_path / "run", n=6, names=names, with_sweep=False)
    parsed = ParsedReport(report(folder))
    assert not parsed.tags & {"b"}
    assert len(parsed.scripts) == 1 and "alert" not in parsed.scripts[0]
    assert {literal(name) for name in names.values()} <= {row[0] for row in parsed.tables[0]}
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert text == literal(text, keep="\n")
    figures = list((folder / "figures").glob("*.svg"))
    assert "examples.svg" in {path.name for path in figures}
    for path in figures:
        ElementTree.fromstring(path.read_bytes())


@pytest.mark.parametrize(
    ("missing", "title"),
    [("examples", "Examples of attacked images"), ("sweep", "Accuracy against alpha")],
)
def test_a_section_without_data_is_left_out(tmp_path: Path, missing: str, title: str) -> None:
    folder = synthetic_run.make(
        tmp_path / "run", n=6, with_examples=missing != "examples", with_sweep=missing != "sweep"
    )
    titles = synthetic_run.section_titles(read_run(folder))
    assert title not in titles
    assert len(titles) == 6


def test_a_run_without_attacks_has_no_margins(tmp_path: Path) -> None:
    folder = synthetic_run.make(
        tmp_path / "run", n=6, with_examples=False, with_sweep=False, attacks=()
    )
    parsed = ParsedReport(report(folder))
    assert parsed.titles == ["Results", "Provenance"]
    assert parsed.tables[0][0] == ["model", "clean"]
    assert "under every attack" not in parsed.text


def test_a_run_without_accuracies_has_a_report(tmp_path: Path) -> None:
    summary = Summary(
        command="train", seconds=1.0, results=(synthetic_run.result("m", "acr", 0.4),)
    )
    synthetic_run.write_run(tmp_path / "run", summary)
    parsed = ParsedReport(report(tmp_path / "run"))
    assert parsed.titles == ["Results", "Provenance"]
    assert "no accuracies" in parsed.text


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"must be a run folder, got one without run\.toml"):
        report(tmp_path)
    (tmp_path / "file").write_text("")
    for name, got in (("file", "a file"), ("missing", "no such folder")):
        with pytest.raises(InputError, match=f"{name} must be a run folder, got {got}"):
            read_run(tmp_path / name)


def test_the_report_of_a_run_without_rows_says_so(tmp_path: Path) -> None:
    records.Run(
        tmp_path / "run",
        {"command": "evaluate", "data": {"count": 9}, "attacks": {"m": {"pgd": {}}}},
        {},
    )
    text = ParsedReport(report(tmp_path / "run")).text
    assert (
        "Nothing has been measured yet. Repeat the command to go on." in text and "0 of 9" in text
    )


@pytest.mark.parametrize("content", [b"no archive", b"PK\x03\x04 damaged"])
def test_damaged_arrays_are_refused(tmp_path: Path, content: bytes) -> None:
    folder = synthetic_run.make(tmp_path / "run", n=6, with_examples=False)
    (folder / "arrays.npz").write_bytes(content)
    with pytest.raises(InputError, match="plain arrays"):
        report(folder)


def test_pickled_arrays_are_never_opened(tmp_path: Path) -> None:
    folder = synthetic_run.make(tmp_path / "run", n=6)
    with np.load(folder / "arrays.npz") as archive:
        content = dict(archive)
    content["examples.label"] = np.array([{}] * 5, dtype=object)
    np.savez(folder / "arrays.npz", **content)
    with pytest.raises(InputError, match="plain arrays"):
        report(folder)


def test_the_callers_matplotlib_settings_are_kept(tmp_path: Path) -> None:
    folder = synthetic_run.make(tmp_path / "run", n=6, with_examples=False, with_sweep=False)
    before = dict(matplotlib.rcParams)
    report(folder)
    assert dict(matplotlib.rcParams) == before


def test_no_model_package_and_no_pyplot_is_loaded(tmp_path: Path) -> None:
    folder = synthetic_run.make(tmp_path / "run", n=6, with_sweep=False, with_examples=False)
    code = (
        "import sys; from equipoise import reporting; reporting.report(sys.argv[1]);"
        "packages = ['models', 'data', 'attacks', 'mixing', 'evaluation'];"
        "loaded = {f'equipoise.{package}' for package in packages} | {'matplotlib.pyplot'};"
        "sys.exit(str(loaded & sys.modules.keys()) if loaded & sys.modules.keys() else 0)"
    )
    source = str(Path(reporting.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_an_installed_package_adds_a_section_before_provenance(
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
    run = read_run(synthetic_run.make(tmp_path / "run", n=6, with_sweep=False, with_examples=False))
    sections = [
        function(run)
        for function in ordered(Registry(SECTIONS.group, SECTIONS.noun, SECTIONS.builtin))
    ]
    assert sections[-2] == Section("Toy", ["54 rows"])
    assert sections[-1] is not None and sections[-1].title == "Provenance"
