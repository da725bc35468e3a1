"""What the documents say is true."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import typer

import equipoise
from equipoise.cli.main import app

ROOT = Path(__file__).parents[1]


def _text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_verbs_of_the_readme_are_the_verbs() -> None:
    verbs = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    told = set(re.findall(r"^\| `equipoise (\w+)", _text("README.md"), re.MULTILINE))
    assert told == verbs


def test_the_example_of_the_readme_uses_what_exists() -> None:
    code = _text("README.md").split("```python\n")[1].split("```")[0]
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "eq":
            assert hasattr(equipoise, node.attr), node.attr
        if isinstance(node, ast.ImportFrom):
            room = __import__(node.module or "", fromlist=["*"])
            assert all(hasattr(room, name.name) for name in node.names)


def test_every_key_that_is_cited_is_spelled_out() -> None:
    known = set(re.findall(r"^\| (\w+) \|", _text("docs/references.md"), re.MULTILINE))
    cited = {key for path in (ROOT / "src").rglob("*.py")
             for key in re.findall(r"\[([A-Z][A-Za-z]+(?:20|19)\d\d[a-z]*|SmoothMix)[,\]]", path.read_text("utf-8"))}
    assert cited and cited <= known, sorted(cited - known)


def test_the_files_that_the_architecture_names_exist() -> None:
    named = re.findall(r"`((?:\w+/)?\w+\.py)`", _text("docs/architecture.md"))
    there = {str(path.relative_to(ROOT / "src" / "equipoise")) for path in (ROOT / "src").rglob("*.py")}
    loose = {Path(path).name for path in there} | {"test_layers.py"}
    missing = [name for name in named if name not in there and name not in loose and "NAME" not in name]
    assert named and not missing
