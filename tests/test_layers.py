"""The floors of the house: a room imports from lower floors only, and neighbours are strangers."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "equipoise"
FLOORS = {"models": 1, "data": 1, "mixing": 2, "attacks": 2, "certify": 2, "train": 3, "fit": 3,
          "evaluate": 4, "report": 4, "serve": 4, "studies": 5, "cli": 6}


def _room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def _imported(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "equipoise":
            rooms |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("equipoise."):
            rooms.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            rooms |= {name.name.split(".")[1] for name in node.names if name.name.startswith("equipoise.")}
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path}: relative import"
    return rooms


def test_floors() -> None:
    for path in ROOT.rglob("*.py"):
        here = _room(path)
        if here in ("__init__", "__main__"):
            continue
        for there in _imported(path) - {here, "__version__"}:
            known = (ROOT / there).is_dir() or (ROOT / f"{there}.py").exists()
            assert known, f"{path.relative_to(ROOT)} imports {there} through the public door"
            low, high = FLOORS.get(there, 0), FLOORS.get(here, 0)
            place = path.relative_to(ROOT)
            assert low < high or low == high == 0, f"{place} (floor {high}) imports {there} (floor {low})"


def test_every_room_has_a_floor() -> None:
    assert {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"} <= FLOORS.keys()


def test_no_file_is_long() -> None:
    for path in ROOT.rglob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 300, path



def test_the_public_door_opens() -> None:
    import equipoise

    for name in dir(equipoise):
        assert getattr(equipoise, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        equipoise.nothing  # noqa: B018
