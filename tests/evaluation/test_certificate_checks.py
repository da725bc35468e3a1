"""Attacks on certified images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from brightness_models import CONDITIONS, PLAN, brightness_images, job

from equipoise.attacks import make_attack
from equipoise.core.records import read_rows
from equipoise.core.results import Summary, find
from equipoise.core.rows import CertificateAttackRow, CertificateRow
from equipoise.evaluation.certificate_checks import CertificateAttack
from equipoise.evaluation.certifier import run_certification

ATTACK = CertificateAttack(make_attack("pgd", steps=3), "pgd")


def test_valid_certificates_are_not_broken(tmp_path: Path) -> None:
    summary, rows = run_certification(
        [job()], brightness_images(6), CONDITIONS, tmp_path / "run", attack=ATTACK
    )
    broken = find(summary.results, "m", "broken-pgd")
    attacked = [row for row in rows if isinstance(row, CertificateAttackRow)]
    assert broken.count == 0 and broken.n == len(attacked) > 2
    assert all(row.attack == "break-pgd" and row.distance <= row.radius for row in attacked)


def test_an_attack_can_be_added_to_a_finished_run(tmp_path: Path) -> None:
    run_certification([job()], brightness_images(6), CONDITIONS, tmp_path / "run")
    first, _ = run_certification(
        [job()], brightness_images(6), CONDITIONS, tmp_path / "run", attack=ATTACK
    )
    second, _ = run_certification(
        [job()], brightness_images(6), CONDITIONS, tmp_path / "run", attack=ATTACK
    )
    assert first.results == second.results and find(first.results, "m", "broken-pgd").n > 2


def attack_false_certificates(folder: Path, mixed: bool) -> Summary:
    """Radii in a finished run are made ten times larger before they are attacked."""
    jobs, images = (
        [job(replace(PLAN, alpha=0.9 if mixed else 1.0), mixed=mixed)],
        brightness_images(6),
    )
    run_certification(jobs, images, CONDITIONS, folder)
    rows = [
        replace(row, radius=10 * row.radius)
        for row in read_rows(folder)
        if isinstance(row, CertificateRow)
    ]
    (folder / "rows.jsonl").write_text("".join(row.to_json() + "\n" for row in rows))
    attack = CertificateAttack(make_attack("pgd"), "pgd")
    return run_certification(jobs, images, CONDITIONS, folder, attack=attack)[0]


@pytest.mark.parametrize("mixed", [False, True])
def test_false_certificates_are_exposed(tmp_path: Path, mixed: bool) -> None:
    broken = find(attack_false_certificates(tmp_path / "run", mixed).results, "m", "broken-pgd")
    assert broken.allowed is not None and broken.count > broken.allowed


def test_abstentions_count_as_images_tried() -> None:
    """At p = ½ a certificate is rare and always wrong: valid ones must pass, although all that
    exist are broken."""
    tried = [
        CertificateRow(
            index=i,
            model="m",
            attack="certify",
            label=0,
            predicted=0,
            correct=True,
            radius=0.1,
            lower=0.6,
            samples=140,
            top=0,
            answer=0,
            sigma=0.1,
        )
        for i in range(10_000)
    ]
    attacked = [
        CertificateAttackRow(
            index=i,
            model="m",
            attack="break-pgd",
            label=0,
            predicted=1,
            correct=False,
            radius=0.1,
            apparent=True,
            distance=0.1,
        )
        for i in range(90)
    ]
    (many,) = ATTACK.results([*tried, *attacked], PLAN)
    assert many.n == many.count == 90 and many.allowed is not None and 200 < many.allowed < 250
    (few,) = ATTACK.results([*tried[:100], *attacked], PLAN)
    assert few.allowed is not None and few.count > few.allowed
