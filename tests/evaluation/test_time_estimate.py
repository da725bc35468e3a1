"""The estimate of time and passes before a long run."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_models import CONDITIONS, AtMostFour, linear_model, random_images
from torch import nn

from equipoise.attacks import Apgd, Attack, Clean, Fab, Pgd, Square, Suite
from equipoise.core import progress
from equipoise.evaluation import AuditPlan, Job, evaluate, time_estimate
from equipoise.evaluation.time_estimate import TimeEstimate, estimate_time, passes_per_image


@pytest.mark.parametrize(("attack", "passes"), [
    (Clean(), 0), (Pgd(steps=7, restarts=3), 21), (Apgd(steps=30), 30), (Square(queries=300), 100),
    (Suite((Apgd(steps=30), Fab(10, (1, 2)), Square(queries=30))), 30 + 2 * 15 + 10),
])
def test_passes_of_an_attack(attack: Attack, passes: float) -> None:
    assert passes_per_image(Job("m", linear_model(), "a", attack)) == pytest.approx(passes)


def test_passes_of_a_run_and_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """11 images × 5000 passes, and 3 × 9000 of the audit, at 2 ms each."""
    def fixed_time(model: nn.Module, *others: object) -> float:
        return 0.002

    monkeypatch.setattr(time_estimate, "time_pass", fixed_time)
    audit = AuditPlan("standard", Apgd(steps=9000), 3)
    jobs = [Job("m", linear_model(), "clean", Clean()), Job("m", linear_model(), "a", Apgd(steps=5000), audit=audit)]
    estimate = estimate_time(jobs, random_images(), CONDITIONS)
    assert estimate is not None and estimate.seconds == pytest.approx(0.002 * (55_000 + 27_000))
    assert estimate.passes == pytest.approx((55_000 + 27_000) / 11)
    assert estimate_time(jobs[:1], random_images(), CONDITIONS) is None


def test_a_pass_is_timed_and_halved_where_memory_runs_out() -> None:
    assert time_estimate.time_pass(AtMostFour(), random_images(), CONDITIONS) > 0


@pytest.mark.parametrize(("seconds", "text"), [(41.2, "about 41 s"), (240.0, "about 4 min"), (9000.0, "about 2.5 h")])
def test_the_line(seconds: float, text: str) -> None:
    line = str(TimeEstimate(1000, 38.2, seconds))
    assert line.startswith("at most 38 passes per image for 1000 images") and text in line


def test_a_command_shows_it_before_the_run_and_not_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                         capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(time_estimate, "MIN_PASSES", 10)
    for expected in (1, 0):  # the second start finds everything finished
        with progress.display():
            evaluate({"m": linear_model(), "same": linear_model()}, random_images(), threat=CONDITIONS.threat,
                     attack="pgd", steps=2, out=tmp_path / "run", device="cpu")
        assert capsys.readouterr().err.count("at most 2 passes per image for 11 images") == expected
