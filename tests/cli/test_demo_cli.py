"""`equipoise demo` as a user types it."""

from __future__ import annotations

from pathlib import Path

import pytest

from equipoise.cli import demo
from equipoise.cli.main import run


@pytest.mark.parametrize(
    ("options", "variable", "expected"),
    [([], "", True), (["--no-report"], "", False), ([], "1", False)],
)
def test_the_report_can_be_left_out(
    options: list[str], variable: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[bool] = []
    monkeypatch.setattr(demo, "run_demo", lambda *_, report: given.append(report))
    monkeypatch.setenv("EQUIPOISE_NO_REPORT", variable)
    assert run(["demo", *options]) == 0 and given == [expected]


def test_a_mistake_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["demo", "--out", str(tmp_path / "demo"), "--seed", "-1"]) == 2
    assert "`seed` must be" in capsys.readouterr().err and not (tmp_path / "demo").exists()
