"""Compare the files of an official data set with their recorded checksums: `equipoise data
verify`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from equipoise.core import checks
from equipoise.data import cifar, download, mnist
from equipoise.data.checksums import SHA256
from equipoise.data.sources import data_directory

OFFICIAL, DIFFERENT, MISSING, UNKNOWN = "official", "different", "missing", "no recorded checksum"
_CIFAR = {source.name: source for source in (cifar.CIFAR10, cifar.CIFAR100)}
_IDX = {source.name: source for source in (mnist.MNIST, mnist.FASHION_MNIST)}


@dataclass(frozen=True)
class VerifiedFiles:
    """The files of a data set, and whether each is the official one; `str()` is what the command
    prints."""

    states: dict[str, str]  # path → official, different, missing, or no recorded checksum

    @property
    def wrong(self) -> list[str]:
        """The files that are not known to be official, with the reason."""
        return [f"{path}: {state}" for path, state in self.states.items() if state != OFFICIAL]

    @property
    def ok(self) -> bool:
        """Whether all files are official."""
        return not self.wrong

    def to_dict(self) -> dict[str, str]:
        """The state of every file."""
        return self.states

    def __str__(self) -> str:
        return "\n".join(f"{path}: {state}" for path, state in self.states.items())


def verify(name: str, data_dir: Path | str | None = None) -> VerifiedFiles:
    """Compare the files of a data set with their recorded SHA-256 checksums; nothing is downloaded.

    Args:
        name: mnist, fashion-mnist, cifar10 or cifar100.
        data_dir: where the files are; else $EQUIPOISE_DATA. The same folders are searched as by
            `load_data`.
    """
    checks.one_of("data", name, SHA256)
    root = data_directory(checks.path("data_dir", data_dir))
    files = _expected(name, root)
    checks.require(bool(files), "data_dir", f"hold files of {name}", str(root))
    return VerifiedFiles({str(path): _state(path, SHA256[name].get(path.name)) for path in files})


def _expected(name: str, root: Path) -> list[Path]:
    """The files of the first folder that holds any, so that missing ones are also reported."""
    if name in _CIFAR:
        names = [file for split in _CIFAR[name].files.values() for file in split]
        layouts = [
            [folder / f"{file}{suffix}" for file in names]
            for folder, suffix in _CIFAR[name].layouts(root)
        ]
    else:
        names = [file for split in mnist.FILES.values() for file in split]
        layouts = [
            [
                root
                / folder
                / (
                    f"{file}.gz"
                    if (root / folder / f"{file}.gz").is_file()
                    and not (root / folder / file).is_file()
                    else file
                )
                for file in names
            ]
            for folder in _IDX[name].folders
        ]
    return next((files for files in layouts if any(path.is_file() for path in files)), [])


def _state(path: Path, checksum: str | None) -> str:
    if not path.is_file():
        return MISSING
    if checksum is None:
        return UNKNOWN
    return OFFICIAL if download.sha256(path) == checksum else DIFFERENT
