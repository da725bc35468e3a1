from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from equipoise.certification import ABSTAIN, Certificate, SmoothingPlan
from equipoise.core.checks import InputError

PLAN = SmoothingPlan(0.3, samples=300, n0=30, failure=0.01)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sigma": 0.0}, "`sigma` must be positive"),
        ({"sigma": -1.0}, "`sigma` must be positive"),
        ({"failure": 0.0}, "`failure` must lie in"),
        ({"failure": 1.0}, "`failure` must lie in"),
        ({"samples": 29}, "`samples` must be at least n0"),
        ({"n0": 0}, "`n0` must be"),
        ({"alpha": 0.49}, "`alpha` must lie in"),
        ({"alpha": 1.1}, "`alpha` must lie in"),
        ({"tolerance": 0.0}, "`tolerance` must be positive"),
        ({"decide_radius": -1.0}, "`decide_radius` must be"),
        ({"tolerance": 0.1, "decide_radius": 0.1}, "`decide_radius` must be left out"),
        ({"certificate": "soft", "two_sided": True}, "`two_sided` must be left out"),
    ],
)
def test_bad_plans(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        dataclasses.replace(PLAN, **change)


def test_the_identity_of_a_plan_leaves_out_what_is_off() -> None:
    assert PLAN.describe() == {
        "sigma": 0.3,
        "alpha": 1.0,
        "samples": 300,
        "n0": 30,
        "failure": 0.01,
        "certificate": "votes",
    }
    assert dataclasses.replace(PLAN, sound=True, tolerance=0.1).describe() == {
        **PLAN.describe(),
        "sound": True,
        "tolerance": 0.1,
    }


def test_a_certificate_abstains_where_the_radius_is_zero() -> None:
    votes = torch.tensor([[1.0, 9.0], [6.0, 4.0]], dtype=torch.float64)
    certificate = Certificate.of(
        top=torch.tensor([1, 0]),
        radius=torch.tensor([0.2, 0.0]).double(),
        lower=torch.tensor([0.6, 0.3]).double(),
        votes=votes,
        n=torch.tensor([10, 10]),
        selection_samples=5,
        failure=0.1,
    )
    assert certificate.predicted.tolist() == [1, ABSTAIN] and certificate.samples.tolist() == [
        15,
        15,
    ]
    assert certificate.failure.tolist() == [0.1, 0.1]
    assert torch.allclose(certificate.gap(torch.tensor([0, 1])), torch.tensor([0.8, 0.2]).double())
