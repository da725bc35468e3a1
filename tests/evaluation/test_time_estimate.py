"""The estimate of time and passes before a long run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from small_models import CONDITIONS, AtMostFour, SmallNet, linear_model, random_images
from torch import nn

from equipoise.attacks import EOT, Apgd, Attack, Clean, Fab, Pgd, Square, Suite, make_attack
from equipoise.core import progress, progress_display
from equipoise.core.rows import Row
from equipoise.core.threat import Threat
from equipoise.evaluation import AuditPlan, Job, evaluate, time_estimate
from equipoise.evaluation.time_estimate import TimeEstimate, estimate_time, passes_per_image

ATTACK = Suite((Apgd(steps=2), Square(queries=900)), name="short")


@pytest.mark.parametrize(
    ("attack", "passes"),
    [
        (Clean(), 0),
        (Pgd(steps=7, restarts=3), 21),
        (Apgd(steps=30), 30),
        (Square(queries=300), 100),
        (Pgd(steps=7, eot=5), 35),
        (make_attack("rand"), 200 * EOT),
        (Suite((Apgd(steps=30), Fab(10, (1, 2)), Square(queries=30))), 30 + 2 * 15 + 10),
    ],
)
def test_passes_of_an_attack(attack: Attack, passes: float) -> None:
    assert passes_per_image(Job("m", linear_model(), "a", attack)) == pytest.approx(passes)


def test_passes_of_a_run_and_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """11 images × 5000 passes, and 3 × 9000 of the audit, at 2 ms each."""

    def fixed_time(model: nn.Module, *others: object) -> float:
        return 0.002

    monkeypatch.setattr(time_estimate, "time_pass", fixed_time)
    audit = AuditPlan("standard", Apgd(steps=9000), 3)
    jobs = [
        Job("m", linear_model(), "clean", Clean()),
        Job("m", linear_model(), "a", Apgd(steps=5000), audit=audit),
    ]
    estimate = estimate_time(jobs, random_images(), CONDITIONS)
    assert estimate is not None and estimate.seconds == pytest.approx(0.002 * (55_000 + 27_000))
    assert estimate.passes == pytest.approx((55_000 + 27_000) / 11)
    assert estimate_time(jobs[:1], random_images(), CONDITIONS) is None


@pytest.mark.parametrize(
    ("eps", "first", "audited"), [(1e-9, 1 / 3 + 8 / 11 * (2 + 1000), 3), (1.0, 1 / 3, 1)]
)
def test_images_that_break_in_the_first_attack_are_not_expected_to_need_the_others(
    eps: float, first: float, audited: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3 of 11 are misclassified. Of the others nothing breaks, or comes near enough for the long
    run; or all break."""

    def fixed_time(model: nn.Module, *others: object) -> float:
        return 0.002

    monkeypatch.setattr(time_estimate, "time_pass", fixed_time)
    attack = Suite(
        (Apgd(steps=2), Square(queries=3000), Apgd("dlr", steps=5000, margin_ratio_below=0.5))
    )
    job = Job("m", SmallNet().eval(), "a", attack, audit=AuditPlan("standard", Apgd(steps=9000), 3))
    data = random_images(labels_of=SmallNet())
    estimate = estimate_time([job], data, replace(CONDITIONS, threat=Threat("linf", eps)))
    assert (
        estimate is not None
        and estimate.usual_passes is not None
        and estimate.usual_seconds is not None
    )
    assert estimate.passes == pytest.approx(2 + 1000 + 5000 + 3 * 9000 / 11)
    most = first if eps < 0.1 else first + 2  # those that break may need both steps
    assert first - 1e-3 <= estimate.usual_passes - audited * 9000 / 11 <= most + 1e-3
    assert estimate.usual_seconds == pytest.approx(0.002 * 11 * estimate.usual_passes)
    assert sum(estimate.tasks.values()) == pytest.approx(11 * estimate.usual_passes)


def test_an_estimate_changes_no_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = random_images(labels_of=SmallNet())

    def rows() -> list[Row]:
        with progress.display():
            return evaluate(
                {"m": SmallNet()}, data, threat=Threat("linf", 0.04), attack=[ATTACK], device="cpu"
            ).rows

    expected = rows()
    for name in ("MIN_PASSES", "MIN_SECONDS"):
        monkeypatch.setattr(time_estimate, name, 0)
    assert "if they break as the first" not in capsys.readouterr().err
    assert (
        rows() == expected
        and "if they break as the first 11 do; at most" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "attack",
    [
        Apgd(steps=5000),
        Pgd(steps=5000),
        Suite((Apgd(steps=4000), Square(3000))),
        Suite((Apgd(steps=2), Square(6000)), repeats=2),
    ],
)
def test_a_long_first_attack_and_one_on_a_randomised_model_are_not_tried(
    attack: Attack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_trial(*arguments: object, **settings: object) -> None:
        raise AssertionError

    monkeypatch.setattr(time_estimate, "attack_dataset", no_trial)
    monkeypatch.setattr(time_estimate, "MIN_SECONDS", 0)
    monkeypatch.setattr(time_estimate, "MIN_PASSES", 0)
    estimate = estimate_time([Job("m", linear_model(), "a", attack)], random_images(), CONDITIONS)
    assert (
        estimate is not None
        and estimate.usual_passes is None
        and str(estimate).startswith("at most")
    )


@pytest.mark.parametrize(("seconds", "tried"), [(0.9, False), (1.1, True)])
def test_the_first_attack_is_tried_only_before_long_runs(
    seconds: float, tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job("m", linear_model(), "a", ATTACK)
    most = len(random_images()) * time_estimate.passes_per_image(job)
    monkeypatch.setattr(time_estimate, "MIN_PASSES", 0)
    monkeypatch.setattr(
        time_estimate, "time_pass", lambda *arguments: seconds * time_estimate.MIN_SECONDS / most
    )
    estimate = estimate_time([job], random_images(), CONDITIONS)
    assert estimate is not None and (estimate.usual_passes is not None) == tried


def test_a_pass_is_timed_and_halved_where_memory_runs_out() -> None:
    assert time_estimate.time_pass(AtMostFour(), random_images(), CONDITIONS) > 0


@pytest.mark.parametrize(
    ("seconds", "text"), [(41.2, "about 41 s"), (240.0, "about 4 min"), (9000.0, "about 2.5 h")]
)
def test_the_line(seconds: float, text: str) -> None:
    line = str(TimeEstimate(1000, 38.2, seconds))
    assert line.startswith("at most 38 passes per image for 1000 images") and text in line


def test_the_line_says_what_is_usual_and_what_is_a_bound() -> None:
    line = str(TimeEstimate(1000, 4000.0, 9000.0, 31.4, 70.0))
    assert line == (
        "about 31 passes per image for 1000 images, 70 s on this machine, if they break as the first 16 "
        "do; at most 4000 passes, 2.5 h"
    )


def test_a_command_shows_it_before_the_run_and_not_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(time_estimate, "MIN_PASSES", 10)
    for expected in (1, 0):  # the second start finds everything finished
        with progress.display():
            evaluate(
                {"m": linear_model()},
                random_images(),
                threat=CONDITIONS.threat,
                attack="pgd",
                steps=2,
                out=tmp_path / "run",
                device="cpu",
            )
        assert capsys.readouterr().err.count("at most 2 passes per image for 11 images") == expected


def test_sanity_checks_are_a_part_of_the_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without it, a run would be at 100 % while they take as long as the attack."""
    for name in ("_SECONDS_BETWEEN_LINES", "_SHORTEST_REPORTED"):
        monkeypatch.setattr(progress_display, name, 0.0)
    with progress.display():
        evaluate(
            {"m": linear_model()},
            random_images(),
            threat=CONDITIONS.threat,
            attack="pgd",
            steps=66,
            device="cpu",
        )
    lines = capsys.readouterr().err.splitlines()
    attacked = next(line for line in lines if line.startswith("[2/3] m, pgd: 11/11"))
    assert "; 67 % of all" in attacked, "66 of 1 + 66 + 3 × 11 passes"
    assert any(line.startswith("[3/3] sanity checks: 1/1; 100 % of all") for line in lines)
