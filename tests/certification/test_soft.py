from __future__ import annotations

import pytest
from closed_form import Probit, images, random_stream

from equipoise.certification import Certificate, SamplerOptions, SmoothingPlan, certify


def run(**settings: float) -> Certificate:
    plan = SmoothingPlan(0.3, samples=1500, certificate="soft", **settings)  # type: ignore[arg-type]
    return certify(
        Probit(0.1),
        images(30),
        plan=plan,
        stream=random_stream(30),
        options=SamplerOptions(batch_size=1 << 16),
    )


@pytest.fixture(scope="module")
def full() -> Certificate:
    return run()


def test_stops_within_a_tolerance(full: Certificate) -> None:
    early = run(tolerance=0.05)
    assert early.samples.sum() < 0.8 * full.samples.sum()
    assert (full.radius - early.radius).mean() < 0.06


def test_stops_when_a_radius_is_decided(full: Certificate) -> None:
    assert run(decide_radius=0.1).samples.sum() < 0.8 * full.samples.sum()
