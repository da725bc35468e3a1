"""What the documents say is true."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import typer

from equipoise.cli.main import app

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "equipoise"


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_readme_lists_all_commands() -> None:
    commands = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert set(re.findall(r"^\| `equipoise ([\w-]+)", text("README.md"), re.MULTILINE)) == commands


def test_every_citation_is_in_the_references() -> None:
    known = set(re.findall(r"^\| (\w+) \|", text("docs/references.md"), re.MULTILINE))
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
