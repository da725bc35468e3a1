"""Whatever happens to a folder, a command that reads it ends well or with one sentence, never with
a traceback."""

from __future__ import annotations

import random
import shutil
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import mutations
import pytest
import real_folders
from hypothesis import HealthCheck, Phase
from real_folders import KINDS, Kind

from equipoise.attacks import Apgd, Square, Suite
from equipoise.core.checks import SENTENCE_LENGTH
from equipoise.reporting import charts, page

CHANCE = st.integers(0, 2**62)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        shorten_audits(patch)
        real_folders.make(folder)
    return folder


def shorten_audits(patch: pytest.MonkeyPatch) -> None:
    """The whole of `standard` would take most of the time of the folders of the attack `fast`."""
    patch.setattr(
        "equipoise.evaluation.plan.standard", lambda norm: Suite((Apgd("ce", 3), Square(4)))
    )


def check(root: Path, name: str, kind: Kind, seed: int, capsys: pytest.CaptureFixture[str]) -> int:
    """Mutate a copy of a folder once or twice and read it in one way; returns the exit code."""
    chance = random.Random(seed)
    place = Path(tempfile.mkdtemp(dir=root.parent)) / "copy"
    try:
        folder = real_folders.copy(root, kind, place)
        changes = [mutations.mutate(chance, folder) for _ in range(chance.choice((1, 1, 1, 2)))]
        command = chance.choice(kind.commands)
        hypothesis.note(f"{name}: {'; '.join(changes)}; then {' '.join(command)}")
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what numpy says about strange numbers is no traceback
            patch.chdir(place)
            shorten_audits(patch)
            code = real_folders.read(command)
        sentence = (capsys.readouterr().err.strip().splitlines() or [""])[-1]
        assert code in (0, 2), sentence
        assert len(sentence) <= SENTENCE_LENGTH + 20
    finally:
        shutil.rmtree(place.parent)
    return code


def repeat(
    cases: int, kinds: dict[str, Kind], root: Path, capsys: pytest.CaptureFixture[str]
) -> Counter[int]:
    codes: Counter[int] = Counter()

    @hypothesis.settings(
        max_examples=cases,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(name=st.sampled_from(sorted(kinds)), seed=CHANCE)
    def run(name: str, seed: int) -> None:
        codes[check(root, name, kinds[name], seed, capsys)] += 1

    run()
    with capsys.disabled():
        print(f"\n{codes.total()} mutated folders: {codes[0]} read, {codes[2]} refused")
    return codes


def draw_nothing(patch: pytest.MonkeyPatch) -> None:
    """Figures are described, and drawn in the slow tier only."""
    patch.setattr(page, "save_figures", lambda sections, folder: None)
    patch.setattr(charts, "static_svg", lambda figure: "")


def test_mutated_folders_are_read_or_refused(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_nothing(monkeypatch)
    codes = repeat(150, KINDS, root, capsys)
    assert codes[0] > 20 and codes[2] > 20


@pytest.mark.slow
def test_many_mutated_folders(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        draw_nothing(patch)
        codes = repeat(2000, KINDS, root, capsys)
    codes += repeat(150, KINDS, root, capsys)
    assert codes.total() >= 2150


@pytest.mark.parametrize("name", [".DS_Store", "Thumbs.db", "desktop.ini", "run.toml~"])
def test_files_of_desktops_and_editors_do_not_matter(
    root: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = KINDS["train"]
    folder = real_folders.copy(root, kind, tmp_path / "copy")
    (folder / name).write_bytes(b"\0\1\2")
    monkeypatch.chdir(tmp_path / "copy")
    assert [real_folders.read(command) for command in kind.commands] == [0, 0, 0]
