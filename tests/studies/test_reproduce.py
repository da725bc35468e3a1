from __future__ import annotations

from pathlib import Path

import pytest
import torch

from equipoise.checks import InputError
from equipoise.studies.reproduce import STUDIES, reproduce


@pytest.mark.parametrize("name", STUDIES)
def test_mistakes_are_named(name: str, tmp_path: Path) -> None:
    cpu, nearly = torch.device("cpu"), STUDIES[name].PARTS[1]
    with pytest.raises(InputError, match="did you mean 'smoke'"):
        reproduce(name, tmp_path / "a", "smok", cpu)
    with pytest.raises(InputError, match="`accurate` must be given for the full size"):
        reproduce(name, tmp_path / "b", "full", cpu)
    with pytest.raises(InputError, match="`robust` must be left out"):
        reproduce(name, tmp_path / "c", "smoke", cpu, robust="file:x.safetensors")
    with pytest.raises(InputError, match=f"did you mean '{nearly}'"):
        reproduce(name, tmp_path / "d", "smoke", cpu, parts=[nearly + "s"])
    assert not any(tmp_path.iterdir())


def test_a_study_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="did you mean 'local-smoothing'"):
        reproduce("local-smoothin", tmp_path / "a", "smoke", torch.device("cpu"))
