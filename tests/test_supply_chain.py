"""What the tests and CI install is pinned, with hashes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINE = re.compile(r"([\w.-]+)==[\w.]+ --hash=sha256:[0-9a-f]{64}")


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_dependency_but_torch_is_locked_with_its_hash() -> None:
    lines = [
        line
        for line in (ROOT / "requirements.lock").read_text("utf-8").splitlines()
        if not line.startswith("#")
    ]
    matches = [LINE.fullmatch(line) for line in lines]
    assert all(matches), [line for line, match in zip(lines, matches, strict=True) if not match]
    locked = [normalized(match[1]) for match in matches if match]
    assert len(set(locked)) == len(locked)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    asked = [
        *project["project"]["dependencies"],
        *project["project"]["optional-dependencies"]["dev"],
        *project["build-system"]["requires"],
    ]
    names = {normalized(re.match(r"[\w.-]+", text)[0]) for text in asked}  # type: ignore[index]
    assert names - set(locked) == {"torch"}


def test_make_installs_from_the_lock() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert makefile.count("--require-hashes --no-deps -r requirements.lock") == 2
    for target in ("lock", "audit", "compat"):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_nothing_is_extracted_by_path() -> None:
    """`tarfile.extractall` is only safe with a filter, which Python has from 3.11.4 on."""
    for path in (ROOT / "src").rglob("*.py"):
        assert "extractall" not in path.read_text("utf-8"), path


def test_every_file_that_is_not_python_is_part_of_the_package() -> None:
    """An installed package would lack a page's script without a word."""
    source = ROOT / "src" / "equipoise"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["equipoise"]
    packaged = {path for pattern in patterns for path in source.glob(pattern)}
    others = {
        path for path in source.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert others and others <= packaged, sorted(others - packaged)
