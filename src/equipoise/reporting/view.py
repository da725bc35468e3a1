"""A run folder, opened for reading."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from equipoise.core import checks, config, records
from equipoise.core.records import Row
from equipoise.core.threat import Threat

T = TypeVar("T")


class Arrays(Mapping[str, NDArray[Any]]):
    """`arrays.npz`, each array read when it is asked for; a missing file is an empty one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._names = self._open(lambda held: tuple(held.files)) if path.exists() else ()

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self._names:
            raise KeyError(name)
        return self._open(lambda held: held[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _open(self, use: Callable[[NpzFile], T]) -> T:
        try:
            # Opened here because numpy leaves a torn archive open.
            with self._path.open("rb") as file:
                held = np.load(file, allow_pickle=False)
                if not isinstance(held, NpzFile):
                    raise ValueError
                with held:
                    return use(held)
        except (OSError, ValueError, EOFError, zipfile.BadZipFile):
            raise checks.InputError(f"{self._path} must be an .npz file of plain arrays") from None


@dataclass(frozen=True)
class RunView:
    """All that a section may look at."""

    folder: Path
    identity: Mapping[str, Any]
    settings: Mapping[str, Any]
    summary: Mapping[str, Any]
    rows: list[Row]
    arrays: Arrays

    @property
    def results(self) -> list[Row]:
        """One per model and metric."""
        found: list[Row] = self.summary.get("results", [])
        return found

    @property
    def differences(self) -> list[Row]:
        """Paired differences between two models."""
        found: list[Row] = self.summary.get("differences", [])
        return found

    @property
    def attacks(self) -> list[str]:
        """Names of the attacks that rows tell of, the clean image left out."""
        return sorted({row["attack"] for row in self.rows} - {"clean"})

    @property
    def threat(self) -> Threat | None:
        """What the adversary was allowed, if there was one."""
        facts = self.identity.get("threat") or next((r["threat"] for r in self.results if "threat" in r), None)
        return Threat(facts["norm"], facts["eps"]) if facts else None

    def sub(self, name: str) -> RunView | None:
        """A finished run inside this folder; one that is missing or still under way is not shown."""
        folder = self.folder / name
        return view(folder) if (folder / "summary.json").exists() else None


def view(folder: Path | str) -> RunView:
    """Open a finished run folder."""
    folder = Path(folder)
    summary = records.summary(folder)
    asked = config.read(folder / "run.toml")
    return RunView(folder, asked.get("identity", {}), asked.get("settings", {}), summary, records.read(folder),
                   Arrays(folder / "arrays.npz"))
