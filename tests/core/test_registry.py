from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from equipoise.core.checks import InputError
from equipoise.core.registry import Registry


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed package that adds `answer` to the group `test.things`."""
    (tmp_path / "someone_elses.py").write_text("answer = 42\n")
    information = tmp_path / "someone_elses-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: someone-elses\nVersion: 1.0\n"
    )
    (information / "entry_points.txt").write_text("[test.things]\nanswer = someone_elses:answer\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield information
    sys.modules.pop("someone_elses", None)


def test_entry_points_join_the_builtin_entries(package: Path) -> None:
    registry = Registry("test.things", "thing", {"one": 1})
    assert list(registry) == ["one", "answer"] and len(registry) == 2
    assert registry["one"] == 1 and registry.get_entry("answer") == 42 and "answer" in registry


def test_entry_points_are_not_read_for_a_builtin_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise AssertionError("read")

    monkeypatch.setattr(metadata, "entry_points", fail)
    registry = Registry("test.things", "thing", {"one": 1})
    assert registry.get_entry("one") == 1 and registry["one"] == 1 and "one" in registry


def test_a_builtin_name_cannot_be_replaced(package: Path) -> None:
    with pytest.raises(InputError, match="must not replace a built-in thing"):
        list(Registry("test.things", "thing", {"answer": 1}))


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(
        InputError, match=r"`thing` must be one of one, two, got 'twp' \(did you mean 'two'\?\)"
    ):
        Registry("test.none", "thing", {"one": 1, "two": 2}).get_entry("twp")
    with pytest.raises(InputError, match=r"`thing` must be one of one, two"):
        Registry("test.none", "thing", {"one": 1, "two": 2}).get_entry(["one"])  # type: ignore[arg-type]
