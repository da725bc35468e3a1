"""Names, parts and settings of studies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from equipoise.core.checks import InputError
from equipoise.core.threat import Threat
from equipoise.studies import STUDIES, StudySettings, reproduce

FULL = {"size": "full", "accurate": "a", "robust": "b"}


@pytest.mark.parametrize("name", [name for name in STUDIES if STUDIES[name].uses_pair])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": "smok"}, "did you mean 'smoke'"),
        ({"size": "full"}, "`accurate` must be given for the full size"),
        ({"robust": "file:x.safetensors"}, "`robust` must be left out"),
        ({"data": "digits"}, "`data` must be left out for the smoke size"),
        ({**FULL, "norm": "l2"}, "`eps` must be given for the norm l2"),
        ({**FULL, "data": "digit"}, "did you mean 'digits'"),
        ({"parts": ["nothing"]}, "`part` must be one of"),
        ({"method": "gaussian"}, "`method` must be left out"),
        ({"configs": Path("configs")}, "`configs` must be left out"),
        ({**FULL, "method": "gaussian"}, "`method` must be left out"),
        ({"join": ["runs/other"]}, "`join` must be left out"),
        ({"join": [1]}, "`join` must be a run folder"),
    ],
)
def test_a_mistake_leaves_no_folder(
    name: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        reproduce(name, out=tmp_path / "run", device="cpu", **settings)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["adaptive-smoothing", "local-smoothing"])
def test_one_robust_model_where_several_are_not_compared(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"`robust` must be one model for the study {name}"):
        reproduce(
            name, out=tmp_path / "run", device="cpu", size="full", accurate="a", robust=["b", "c"]
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": "ful"}, "did you mean 'full'"),
        ({"accurate": "file:x.safetensors"}, "`accurate` must be left out for the study smoothmix"),
        ({"eps": 0.5}, "`eps` must be left out for the study smoothmix"),
        ({"size": "full", "data": "mnist"}, "`data` must be left out for the study smoothmix"),
        ({"samples": 1000}, "`samples` must be left out for the study smoothmix"),
        ({"data": "cifar10"}, "`data` must be one of digits, mnist"),
        (
            {"size": "full", "configs": Path("no-such-folder")},
            "`configs` must be the folder of the recipes",
        ),
        ({"data": "digits", "method": "gausian"}, "did you mean 'gaussian'"),
        (
            {"data": "digits", "sigma": "0.3", "parts": ["table-2"]},
            "`sigma` must be among those of this size, 0.25, got",
        ),
        ({"data": "digits", "parts": ["table-3"]}, "`part` must have classifiers"),
        ({"data": "digits", "parts": ["table-4"]}, "`part` must be one of"),
    ],
)
def test_a_mistake_with_recipes_leaves_no_folder(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        reproduce("smoothmix", out=tmp_path / "run", device="cpu", **settings)
    assert not any(tmp_path.iterdir())


def test_an_unknown_study(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="did you mean 'local-smoothing'"):
        reproduce("local-smoothin", out=tmp_path / "run")


@pytest.mark.parametrize(
    ("settings", "threat"),
    [
        ({}, Threat("linf", 0.12)),
        (FULL, Threat("linf", "8/255")),
        ({**FULL, "eps": "4/255"}, Threat("linf", "4/255")),
        ({**FULL, "norm": "l2", "eps": 0.5}, Threat("l2", 0.5)),
    ],
)
def test_the_threat(settings: dict[str, Any], threat: Threat) -> None:
    assert StudySettings(**settings).threat() == threat


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_has_parts_and_both_sizes(name: str) -> None:
    study = STUDIES[name]
    assert study.name == name and study.parts and study.sizes.keys() == {"smoke", "full"}
