from __future__ import annotations

from pathlib import Path

import pytest
import torch

from equipoise import models
from equipoise.core import config
from equipoise.core.checks import InputError
from equipoise.core.records import Run
from equipoise.core.threat import Threat
from equipoise.evaluation import Conditions
from equipoise.studies.local_pair import Pair
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
    with pytest.raises(InputError, match="`data` must be left out for the smoke size"):
        reproduce(name, tmp_path / "e", "smoke", cpu, data="digits")
    with pytest.raises(InputError, match="`eps` must be given for the norm l2"):
        reproduce(name, tmp_path / "f", "full", cpu, accurate="a", robust="b", norm="l2")
    with pytest.raises(InputError, match="did you mean 'digits'"):
        reproduce(name, tmp_path / "g", "full", cpu, accurate="a", robust="b", data="digit")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", STUDIES)
def test_any_pair_on_any_data_in_either_norm(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[Run, Pair, Conditions]] = []

    class Short:
        def __init__(self, run: Run, pair: Pair, size: object, conditions: Conditions) -> None:
            told.append((run, pair, conditions))

        def tell(self, parts: object) -> Path:
            return tmp_path

    monkeypatch.setattr(STUDIES[name], "Study", Short)
    monkeypatch.setattr(models, "load", lambda reference: models.build(
        reference, num_classes=10, image_shape=(1, 8, 8), seed=0))
    reproduce(name, tmp_path / "run", "full", torch.device("cpu"), accurate="cnn_small", robust="resnet8",
              data="digits", norm="l2", eps=0.5)
    run, pair, conditions = told[0]
    assert conditions.threat == Threat("l2", 0.5)
    assert config.read(run.folder / "run.toml")["identity"]["data"] == "digits"
    indices = [set(part.index.tolist()) for part in (pair.test, pair.held_out)]
    assert indices[0] and len(indices[0]) == len(indices[1]) and not indices[0] & indices[1]
    assert len(pair.learnt) == len(pair.remembered) > 1000  # fewer than the policy would take


def test_a_study_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="did you mean 'local-smoothing'"):
        reproduce("local-smoothin", tmp_path / "a", "smoke", torch.device("cpu"))
