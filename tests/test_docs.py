"""What the documents say is true."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
import typer

import own_models
from equipoise.attacks import Apgd, Square, Suite
from equipoise.cli.main import app, load_command

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "equipoise"
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("experiments/*/*.md")]
)


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_readme_lists_all_commands() -> None:
    commands = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert set(re.findall(r"^\| `equipoise ([\w-]+)", text("README.md"), re.MULTILINE)) == commands


@pytest.mark.parametrize(
    "is_short", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["short", "as printed"]
)
def test_the_readme_example(
    is_short: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With two networks of our own; in the fast tier with few images, and a short attack as audit
    of one of them."""
    code, printed = own_models.example()
    networks = own_models.as_module(count=1024, epochs=3) if is_short else own_models.as_module()
    if is_short:
        assert "count=500" in code and "count=200" in code
        code = code.replace("count=500", "count=120").replace("count=200", "count=6")
        monkeypatch.setattr("equipoise.evaluation.plan.COUNT", 1)
        monkeypatch.setattr(
            "equipoise.evaluation.plan.standard", lambda norm: Suite((Apgd("ce", 3), Square(4)))
        )
    monkeypatch.setitem(sys.modules, "my_models", networks)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
    table = capsys.readouterr().out
    columns = ["model", "clean", "fast", "adaptive", "worst"]
    rows = ["accurate", "robust", "mixed"]
    for text in (table, printed):
        assert columns in [line.split() for line in text.splitlines()]
        first_words = [line.split()[0] for line in text.splitlines() if " % " in line]
        assert [word for word in first_words if word in rows] == rows
    assert (tmp_path / "runs" / "example" / "report.html").exists()


def heading_anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    content = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)\s]+)\)", content) + re.findall(r'src(?:set)?="([^"]+)"', content)
    for link in links:
        target, _, anchor = link.partition("#")
        if "://" in target:
            continue
        path = page.parent / target if target else page
        assert path.exists(), link
        assert not anchor or anchor in heading_anchors(path), link


def named_options(page: Path) -> set[tuple[str, str]]:
    """Commands and options that a page writes as code: `equipoise fit … --rule switch`."""
    code = re.findall(r"`+([^`]+)`+", page.read_text(encoding="utf-8").replace("\\\n", " "))
    named = set()
    for line in "\n".join(code).splitlines():
        for command, rest in re.findall(r"\bequipoise ([a-z-]+)(.*)", line):
            named |= {(command, option) for option in re.findall(r"--[a-z][a-z0-9-]*", rest)}
    return named


def known_options(command: str) -> set[str]:
    """The options of a command and of its subcommands."""
    loaded = load_command(command)
    parts = [loaded, *getattr(loaded, "commands", {}).values()]
    parameters = [parameter for part in parts for parameter in part.params]
    return {option for parameter in parameters for option in parameter.opts}


def test_options_in_the_documents_exist() -> None:
    named = {item for page in PAGES for item in named_options(page)}
    commands = sorted({command for command, _ in named})
    known = {(command, option) for command in commands for option in known_options(command)}
    assert len(named) > 20 and named <= known, sorted(named - known)


def test_every_citation_is_in_the_references() -> None:
    known = set(re.findall(r"^- (\w+):", text("docs/references.md"), re.MULTILINE))
    cited = {
        key
        for path in SOURCE.rglob("*.py")
        for key in re.findall(
            r"\[([A-Z][A-Za-z]+(?:20|19)\d\d[a-z]*|SmoothMix)[,\]]", path.read_text("utf-8")
        )
    }
    assert cited and cited <= known, sorted(cited - known)


def test_files_named_in_the_architecture_exist() -> None:
    named = re.findall(r"\b((?:\w+/)+\w+\.py)\b", text("docs/architecture.md"))
    missing = [
        name
        for name in named
        if "NAME" not in name and not (SOURCE / name).exists() and not (ROOT / name).exists()
    ]
    assert named and not missing


def test_at_most_fifteen_files_from_the_command_to_a_row() -> None:
    drawing = text("docs/architecture.md").split("to a row\n```")[1].split("```")[0]
    assert len(set(re.findall(r"\w+/\w+\.py", drawing))) <= 15


def test_no_two_classes_of_one_name() -> None:
    names: dict[str, str] = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                assert node.name not in names, f"{node.name} in {path} and {names[node.name]}"
                names[node.name] = str(path)
