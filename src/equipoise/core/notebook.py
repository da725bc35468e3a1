"""Results that a notebook shows as tables and figures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equipoise.core.results import Summary
    from equipoise.core.rows import Row

# Reports are made above the packages whose results they show. So the module is named here, and
# loaded when a notebook asks for it, as the functions of `equipoise` are when they are first used.
RENDERER = "equipoise.reporting.notebook"


class NotebookResult(ABC):
    """What a public function returns; a notebook shows the sections of its report."""

    @abstractmethod
    def notebook_content(self) -> tuple[Summary, Sequence[Row], Path | None]:
        """Summary and rows, and the run folder if there is one, which holds more."""

    def _repr_html_(self) -> str:
        shown: str = import_module(RENDERER).render(self)
        return shown
