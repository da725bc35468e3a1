"""`equipoise reproduce`: names, sizes and parts that do not exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from equipoise.cli.main import run
from equipoise.studies import reproduce as studies


@pytest.mark.parametrize(("arguments", "said"), [
    (["local-smothing"], "did you mean 'local-smoothing'?"),
    (["local-smoothing", "--size", "ful"], "did you mean 'full'?"),
    (["local-smoothing", "--part", "trusts"], "did you mean 'trust'?"),
    (["local-smoothing", "--size", "full"], "`accurate` must be given"),
    (["adaptive-smoothing", "--part", "trusts"], "`part` must be one of ablation, adversaries, aimed, choose"),
    (["adaptive-smoothing", "--size", "full"], "`accurate` must be given"),
])
def test_mistakes_are_one_sentence(arguments: list[str], said: str, tmp_path: Path,
                                   capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["reproduce", *arguments, "--out", str(tmp_path / "run"), "--device", "cpu"]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_command_on_the_page_names_both_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def note(*given: object, command: str, **more: object) -> Path:
        told.append(command)
        return tmp_path

    monkeypatch.setattr(studies, "reproduce", note)
    full = ["--size", "full", "--accurate", "my g.safetensors", "--robust", "h.safetensors"]
    assert run(["reproduce", "local-smoothing", *full, "--device", "cpu"]) == 0
    assert run(["reproduce", "local-smoothing", "--device", "cpu"]) == 0
    assert told == ["equipoise reproduce local-smoothing --size full --seed 0 --accurate 'my g.safetensors' --robust "
                    "h.safetensors", "equipoise reproduce local-smoothing --size smoke --seed 0"]
