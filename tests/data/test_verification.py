from __future__ import annotations

from pathlib import Path

import pytest

from equipoise.cli.main import run
from equipoise.core.checks import InputError
from equipoise.data import cifar, verification, verify
from equipoise.data.checksums import SHA256


def test_every_file_that_is_read_has_a_checksum() -> None:
    for source in (cifar.CIFAR10, cifar.CIFAR100):
        assert {file for files in source.files.values() for file in files} <= SHA256[
            source.name
        ].keys()
    for name, digests in SHA256.items():
        assert all(len(digest) == 64 and int(digest, 16) for digest in digests.values()), name
        assert len(set(digests.values())) == len(digests)


def test_different_and_missing_files_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    (folder / "train").write_bytes(b"train")
    monkeypatch.setitem(
        SHA256["cifar100"],
        "test",
        "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    )
    result = verify("cifar100", tmp_path)
    assert not result.ok
    assert result.states == {
        str(folder / "train"): verification.DIFFERENT,
        str(folder / "test"): verification.MISSING,
    }
    (folder / "test").write_bytes(b"test")
    assert verify("cifar100", tmp_path).states[str(folder / "test")] == verification.OFFICIAL
    assert run(["data", "verify", "cifar100", "--data-dir", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert f"{folder / 'test'}: official" in captured.out
    assert captured.err.endswith(
        f"equipoise: `cifar100` must have the official files, got '{folder / 'train'}: different'\n"
    )


def test_files_without_a_recorded_checksum_are_said_to_be_so(tmp_path: Path) -> None:
    for name in ("train-images-idx3-ubyte", "train-labels-idx1-ubyte.gz"):
        (tmp_path / name).write_bytes(b"")
    states = {
        Path(path).name: state for path, state in verify("fashion-mnist", tmp_path).states.items()
    }
    assert states == {
        "train-images-idx3-ubyte": verification.UNKNOWN,
        "train-labels-idx1-ubyte.gz": verification.DIFFERENT,
        "t10k-images-idx3-ubyte": verification.MISSING,
        "t10k-labels-idx1-ubyte": verification.MISSING,
    }


@pytest.mark.parametrize(
    ("name", "message"), [("digits", "`data` must be one of"), ("mnist", "`data_dir` must hold")]
)
def test_nothing_to_verify(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        verify(name, tmp_path)


@pytest.mark.reference
@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_the_real_files_are_official(
    real_data: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(name, real_data).ok
    assert run(["data", "verify", name, "--data-dir", str(real_data)]) == 0
