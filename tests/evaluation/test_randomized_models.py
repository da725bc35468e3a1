"""Evaluation of randomised models: mean accuracy, resuming, sharding, and what the command
prints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from killed_runs import run_until_killed
from small_models import CONDITIONS

import equipoise as eq
from conftest import NoiseDefence
from equipoise import reporting
from equipoise.attacks import Apgd, Clean, Suite
from equipoise.core import format, parallel, records, stats
from equipoise.core.checks import InputError
from equipoise.core.records import Run
from equipoise.core.results import read_summary
from equipoise.core.rows import AttackRow
from equipoise.core.threat import Threat
from equipoise.data import Dataset, pixels
from equipoise.evaluation import Evaluation, Job, evaluate, measure, open_run, run_jobs

THREAT = Threat("linf", 0.02)
SHORT = Suite((Apgd("ce", 3),), eot=2, repeats=4)


def accuracy(model: NoiseDefence, data: Dataset, eps: float = 0.0) -> float:
    """Mean probability of a correct prediction at the worst points of the balls."""
    return float(model.probability(pixels(data.images), data.labels, eps).mean())


def images(count: int) -> Dataset:
    drawn = torch.randint(
        20, 236, (count, 1, 4, 4), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    labels = ((pixels(drawn) - 0.5).flatten(1) @ NoiseDefence().weight < 0).long().detach()
    return Dataset("noise", "test", drawn, labels, torch.arange(count) + 7, ("a", "b"))


DATA = images(40)


def run_evaluation(attack: Any = "rand", out: Path | None = None, **settings: Any) -> Evaluation:
    return evaluate(
        NoiseDefence().eval(),
        DATA,
        threat=THREAT,
        attack=attack,
        device="cpu",
        batch_size=20,
        out=out,
        **settings,
    )


def test_accuracies_of_a_noise_defence_are_those_in_closed_form(tmp_path: Path) -> None:
    """Where one pass decides, an attack gets a new chance with every pass, and breaks images by
    chance alone."""
    model = NoiseDefence()
    result = run_evaluation(out=tmp_path / "run", steps=6, repeats=100)
    for metric, eps in (("clean", 0.0), ("rand", THREAT.eps), ("worst", THREAT.eps)):
        measured, exact = result.result("model", metric), accuracy(model, DATA, eps)
        assert abs(measured.value - exact) < 4 * 0.5 / (100 * len(DATA)) ** 0.5 + 0.01 * (eps > 0)
        assert (
            measured.low < exact < measured.high
            and measured.passes == 100
            and measured.n == len(DATA)
        )
    once = run_evaluation(Suite((Apgd("ce", 20),)))
    assert once.result("model", "worst").value < accuracy(model, DATA, THREAT.eps) - 0.15
    assert "100 passes each" in str(result) and "passes each" not in str(once)
    assert [check.name for check in once.summary.sanity_checks if check.alarm] == ["randomness"]
    assert not any(
        check.alarm for check in result.summary.sanity_checks if check.name == "randomness"
    )
    assert read_summary(tmp_path / "run").results == result.results
    assert reporting.report(tmp_path / "run").exists()


def attack_rows(folder: Path) -> list[AttackRow]:
    rows = [row for row in records.read_rows(folder) if isinstance(row, AttackRow)]
    return sorted(rows, key=lambda row: str(row.key))


def jobs() -> list[Job]:
    return [
        Job("m", NoiseDefence(), "clean", Clean(repeats=4)),
        Job("m", NoiseDefence(), "short", SHORT),
    ]


def run_all(folder: Path) -> list[AttackRow]:
    conditions = replace(CONDITIONS, threat=THREAT, batch_size=8)
    run_jobs(jobs(), DATA, conditions, open_run(folder, jobs(), DATA, conditions))
    return attack_rows(folder)


@pytest.mark.parametrize("fail_at", [1, 4, 7])
def test_a_killed_evaluation_resumes_to_the_same_rows(
    tmp_path: Path, fail_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run_all(tmp_path / "complete")
    run_until_killed(monkeypatch, fail_at, lambda: run_all(tmp_path / "run"))
    torch.rand(5)  # another process has other global random numbers
    assert run_all(tmp_path / "run") == expected
    assert {row.passes for row in expected} == {4} and {row.share_correct for row in expected} > {
        0.5,
        1.0,
    }
    assert all(row.correct == (row.predicted == row.label) for row in expected)


def test_two_processes_write_the_rows_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, conditions = (
        run_all(tmp_path / "one"),
        replace(CONDITIONS, threat=THREAT, batch_size=8),
    )
    for rank in (0, 1):
        with monkeypatch.context() as patch:
            patch.setattr(parallel, "world", lambda rank=rank: parallel.World(rank, 2))
            patch.setattr(Run, "finish", lambda run: records.read_rows(run.folder))
            for job in jobs():
                measure(job, DATA, Run(tmp_path / "two", {"command": "test"}, {}), conditions)
    assert attack_rows(tmp_path / "two") == expected


def test_verdicts_use_passes_that_the_attack_has_not_seen() -> None:
    """An attack that keeps the image gives an unbiased share, not the smallest of many."""
    shares = [
        eq.attack(
            NoiseDefence(),
            DATA,
            threat=Threat("linf", 1e-6),
            attack="rand",
            device="cpu",
            seed=seed,
            steps=5,
            eot=1,
            repeats=20,
        ).share_correct
        for seed in range(4)
    ]
    mean = float(torch.stack([share for share in shares if share is not None]).mean())
    assert abs(mean - accuracy(NoiseDefence(), DATA)) < 4 * 0.5 / (4 * 20 * len(DATA)) ** 0.5


def test_attacked_images_of_a_randomised_model() -> None:
    attacked = eq.attack(
        NoiseDefence(), DATA, threat=THREAT, attack="rand", device="cpu", steps=2, eot=2, repeats=10
    )
    again = eq.attack(
        NoiseDefence(), DATA, threat=THREAT, attack="rand", device="cpu", steps=2, eot=2, repeats=10
    )
    assert (
        torch.equal(attacked.images, again.images)
        and attacked.passes == 10
        and attacked.share_correct is not None
    )
    assert str(attacked).startswith(
        format.percent(stats.mean_share(attacked.share_correct.tolist(), 10).value)
    )


def test_repeats_exclude_an_audit() -> None:
    with pytest.raises(InputError, match="`audit` must be left out where passes are repeated"):
        run_evaluation("fast", eot=2, audit=3)
