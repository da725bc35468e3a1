"""A package imports from lower layers only; packages on one layer do not import each other."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "equipoise"
LAYERS = {
    "core": 1,
    "models": 2,
    "data": 2,
    "mixing": 3,
    "local_smoothing": 3,
    "attacks": 3,
    "certification": 3,
    "evaluation": 4,
    "training": 4,
    "fitting": 5,
    "reporting": 5,
    "cli": 6,
}


def _package(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def _imported(path: Path) -> set[str]:
    packages = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "equipoise":
            packages |= {name.name for name in node.names}
        elif (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.startswith("equipoise.")
        ):
            packages.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            packages |= {
                name.name.split(".")[1] for name in node.names if name.name.startswith("equipoise.")
            }
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path}: relative import"
    return packages


def test_layers() -> None:
    for path in ROOT.rglob("*.py"):
        here = _package(path)
        if here in ("__init__", "__main__"):
            continue
        for there in _imported(path) - {here, "__version__"}:
            known = (ROOT / there).is_dir() or (ROOT / f"{there}.py").exists()
            assert known, f"{path.relative_to(ROOT)} imports {there} through the public API"
            low, high = LAYERS.get(there, 0), LAYERS.get(here, 0)
            place = path.relative_to(ROOT)
            assert low < high or low == high == 0, (
                f"{place} (layer {high}) imports {there} (layer {low})"
            )


def test_networks_and_layers_know_no_sources_of_models() -> None:
    """Inside of `models`: only the loader of references and sources themselves import what depends
    on a scheme."""
    allowed = {
        "layers": {"layers", "inspection", "options"},
        "architectures": {"architectures", "layers"},
    }
    for path in (ROOT / "models").rglob("*.py"):
        place = path.relative_to(ROOT / "models").parts[0].removesuffix(".py")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in [node for node in tree.body if isinstance(node, ast.ImportFrom)]:
            package, _, rest = str(node.module).partition("models")
            if package == "equipoise.":
                parts = {rest.split(".")[1]} if rest else {name.name for name in node.names}
                assert "sources" not in parts or place in ("sources", "reference", "__init__"), path
                assert parts <= allowed.get(place, parts), f"{path} imports {parts}"


def test_every_package_has_a_floor() -> None:
    assert {
        path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"
    } <= LAYERS.keys()


def test_no_line_of_a_script_or_style_is_long() -> None:
    """Those of Python are checked by ruff."""
    paths = [*ROOT.rglob("*.js"), *ROOT.rglob("*.css")]
    assert paths
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            assert len(line) <= 120, f"{path}:{number}"


def test_every_public_name_resolves() -> None:
    import equipoise

    for name in dir(equipoise):
        assert getattr(equipoise, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        equipoise.nothing  # noqa: B018
