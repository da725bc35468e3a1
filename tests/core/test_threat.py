from __future__ import annotations

import math

import pytest
import torch

from equipoise.core.checks import InputError
from equipoise.core.threat import Threat, ThreatSettings


def test_reads_fractions_and_prints_them() -> None:
    assert Threat("linf", "8/255") == Threat("linf", 8 / 255)
    assert str(Threat("linf", 8 / 255)) == "ℓ∞ ≤ 8/255"
    assert str(Threat("l2", 0.5)) == "ℓ2 ≤ 0.5"
    assert str(Threat("l1", 12)) == "ℓ1 ≤ 12"


@pytest.mark.parametrize(
    "eps", [8, None, -1, 0, "8/0", "a", "", "1e999", math.nan, math.inf, "__import__('os')"]
)
def test_bad_eps(eps: object) -> None:
    with pytest.raises(InputError, match="`eps` must be"):
        Threat("linf", eps)  # type: ignore[arg-type]


def test_bad_norm_names_the_near_miss() -> None:
    with pytest.raises(InputError, match="did you mean 'linf'"):
        Threat("Linf", 0.1)


def test_eps_is_rounded_down() -> None:
    for numerator in range(1, 65):
        threat = Threat("linf", numerator / 255)
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            assert 0 < threat.eps_in(dtype) <= threat.eps


def test_eps_has_a_limit_per_norm_and_no_default_in_l1() -> None:
    assert ThreatSettings(norm="l1", eps=12).threat() == Threat("l1", 12)
    with pytest.raises(InputError, match="`eps` must be at most 1e\\+06 for l1"):
        Threat("l1", 2e6)
    with pytest.raises(InputError, match="`eps` must be given for l1, such as 12"):
        ThreatSettings(norm="l1")
