"""The line before a run that says how many passes it takes at most."""

from __future__ import annotations

import pytest
from small_models import linear_model, random_images

from equipoise.attacks import EOT, Apgd, Attack, Clean, Fab, Pgd, Square, Suite, make_attack
from equipoise.core import progress
from equipoise.evaluation import AuditPlan, Job
from equipoise.evaluation.evaluator import most_passes, note_planned_passes


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
    assert most_passes(attack) == pytest.approx(passes)


def test_passes_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Of 11 images each has 50 passes, and 3 have 110 more in the audit."""
    clean = Job("m", linear_model(), "clean", Clean())
    audit = AuditPlan("standard", Apgd(steps=110), 3)
    attacked = Job("m", linear_model(), "a", Apgd(steps=50), audit=audit)
    with progress.shown():
        note_planned_passes([clean, attacked], random_images())
        note_planned_passes([clean], random_images())
    assert capsys.readouterr().err == "at most 80 passes per image for 11 images\n"
