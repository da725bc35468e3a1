"""Audits: a stronger attack on a random sample of the survivors."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from killed_runs import run_until_killed
from small_models import CONDITIONS, SmallNet, linear_model, random_images
from torch import nn

from equipoise import reporting
from equipoise.attacks import Apgd, Attack, Clean, Fab, Square, Suite
from equipoise.core import aggregation, records, stats
from equipoise.core.audits import Audit
from equipoise.core.checks import InputError
from equipoise.core.records import Run
from equipoise.core.results import read_summary
from equipoise.core.rows import AttackRow
from equipoise.core.threat import Threat
from equipoise.evaluation import AuditPlan, Evaluation, Job, evaluate, measure, open_run, run_jobs
from equipoise.evaluation.stage_log import StageLog
from equipoise.mixing import MixedClassifier
from simulated_processes import run_processes

WEAK = Suite((Square(2), Square(3)))
STRONG: Attack = Suite((Apgd("relative-margin", 12), Fab(8, (1, 2)), Square(40)))
DATA = random_images(41, labels_of=SmallNet())
THREAT_CONDITIONS = replace(CONDITIONS, threat=Threat("linf", 0.04), batch_size=16)


def attack_rows(folder: Path) -> list[AttackRow]:
    return [row for row in records.read_rows(folder) if isinstance(row, AttackRow)]


def run_audit(
    folder: Path, count: int, model: nn.Module | None = None
) -> tuple[list[AttackRow], Audit]:
    model = SmallNet().eval() if model is None else model
    jobs = [
        Job("m", model, "clean", Clean()),
        Job("m", model, "weak", WEAK, audit=AuditPlan("strong", STRONG, count)),
    ]
    run = open_run(folder, jobs, DATA, THREAT_CONDITIONS)
    summary = run_jobs(jobs, DATA, THREAT_CONDITIONS, run)
    return [row for row in attack_rows(folder) if row.attack == "weak"], summary.audits[0]


def verdicts(folder: Path, attack: Attack) -> dict[int, bool]:
    run = Run(folder, {"command": "test"}, {})
    measure(Job("m", SmallNet().eval(), "one", attack), DATA, run, THREAT_CONDITIONS)
    run.finish()
    return {row.index: row.correct for row in attack_rows(folder)}


def test_an_audit_of_all_survivors_is_both_attacks_together(tmp_path: Path) -> None:
    weak, strong = (
        verdicts(tmp_path / name, attack) for name, attack in (("weak", WEAK), ("strong", STRONG))
    )
    rows, audit = run_audit(tmp_path / "run", 1000)
    assert {row.index: row.correct for row in rows} == {i: weak[i] and strong[i] for i in weak}
    survivors = {i for i, survived in weak.items() if survived}
    assert {row.index for row in rows if row.audit_passes is not None} == survivors
    assert all(
        (row.broken_by or "").startswith("audit/") == (row.index in survivors and not row.correct)
        for row in rows
    )
    broken = sum(not strong[i] for i in survivors)
    assert broken > 0 and (audit.survivors, audit.audited, audit.broken) == (
        len(survivors),
        len(survivors),
        broken,
    )
    assert audit.excess == 0 and not audit.is_poor
    assert audit.passes == sum(row.audit_passes or 0 for row in rows) > len(survivors)


def test_a_sample_bounds_what_the_stronger_attack_would_break(tmp_path: Path) -> None:
    weak = verdicts(tmp_path / "weak", WEAK)
    rows, audit = run_audit(tmp_path / "run", 7)
    sample = AuditPlan("strong", STRONG, 7).sample(
        [i for i in weak if weak[i]], THREAT_CONDITIONS.seed
    )
    assert sorted(sample) == [row.index for row in rows if row.audit_passes is not None]
    strong = verdicts(tmp_path / "strong", STRONG)
    broken = sum(not strong[i] for i in sample)
    most = stats.hypergeometric_upper(broken, 7, sum(weak.values()))
    assert audit.excess == (most - broken) / len(DATA) and audit.n == len(DATA)
    assert audit.gap == pytest.approx(most / len(DATA)) and audit.accuracy == sum(
        weak.values()
    ) / len(DATA)
    assert sum(row.correct for row in rows) == sum(weak.values()) - broken and audit.is_poor


@pytest.mark.parametrize("count", [1, 7, 1000])
def test_the_accuracy_under_an_attack_does_not_depend_on_its_audit(
    tmp_path: Path, count: int
) -> None:
    """What only the audit broke is in the worst case, and beside the accuracy that it bounds."""
    weak = verdicts(tmp_path / "weak", WEAK)
    rows, audit = run_audit(tmp_path / "run", count)
    summary = read_summary(tmp_path / "run")
    assert summary.result("m", "weak").count == sum(weak.values()) == audit.survivors
    assert (
        summary.result("m", "worst").count
        == sum(row.correct for row in rows)
        == audit.survivors - audit.broken
    )
    assert audit.broken > 0 or count == 1
    assert f"weak {100 * sum(weak.values()) / len(DATA):.1f} %" in audit.explanation
    left = f"{audit.broken} broken, which leaves {100 * summary.result('m', 'worst').value:.1f} %"
    assert (left in audit.explanation) == (audit.broken > 0)
    counts = aggregation.broken_by(rows)
    assert sum(item.count for item in counts if item.attack == "weak audit") == audit.broken
    assert sum(item.count for item in counts if item.attack == "weak") == len(
        DATA
    ) - audit.survivors - sum(row.broken_by == "clean" for row in rows)
    assert sum(item.n for item in summary.as_bytes) == len(DATA) - audit.survivors - sum(
        row.broken_by == "clean" for row in rows
    )


@pytest.mark.parametrize("fail_at", range(1, 12, 2))
def test_a_killed_audit_resumes_to_the_same_rows(
    tmp_path: Path, fail_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, audit = run_audit(tmp_path / "complete", 9)
    run_until_killed(monkeypatch, fail_at, lambda: run_audit(tmp_path / "run", 9))
    rows, resumed = run_audit(tmp_path / "run", 9)
    assert rows == expected and replace(resumed, seconds=audit.seconds) == audit
    written = (tmp_path / "run" / "summary.json").read_bytes()
    assert run_audit(tmp_path / "run", 9)[1] == resumed, (
        "a finished run keeps its audit, with its seconds"
    )
    assert (tmp_path / "run" / "summary.json").read_bytes() == written


def test_the_seconds_of_earlier_starts_are_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was killed during its audit says how many passes it made, and not how long the end
    of it took."""
    stopped = StageLog.write

    def write(log: StageLog, *arguments: Any) -> None:
        stopped(log, *arguments)
        if log.job[-1] == "audit":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(StageLog, "write", write)
        run_audit(tmp_path / "run", 9)
    _, audit = run_audit(tmp_path / "run", 9)
    assert audit.seconds is None and f"({audit.passes} passes)" in audit.explanation
    assert read_summary(tmp_path / "run").audits == (audit,)
    assert run_audit(tmp_path / "run", 9)[1] == audit, "opened again"
    assert run_audit(tmp_path / "other", 9)[1].seconds is not None


def test_samples_are_uniform_and_keyed_by_image() -> None:
    plan, survivors = AuditPlan("strong", STRONG, 3), [4, 7, 8, 15, 16]
    drawn = Counter(tuple(sorted(plan.sample(survivors, seed))) for seed in range(1000))
    assert len(drawn) == 10 and all(abs(count - 100) < 5 * 100**0.5 for count in drawn.values())
    assert plan.sample(reversed(survivors), 1) == plan.sample(survivors, 1)
    chosen = plan.sample(survivors, 1)
    assert set(chosen) - {16} <= set(plan.sample(survivors[:-1], 1)), (
        "without one image the others stay"
    )
    assert plan.sample([], 0) == [] and sorted(plan.sample([2, 1], 0)) == [1, 2]


def run_fast(models: Any, out: Path | None = None, **settings: Any) -> Evaluation:
    return evaluate(
        models, random_images(6), threat=CONDITIONS.threat, out=out, device="cpu", **settings
    )


@pytest.mark.usefixtures("figures_once")
def test_evaluate_audits_fast_by_default(tmp_path: Path) -> None:
    result = run_fast(linear_model(), tmp_path / "run", audit=1)
    audit = result.summary.audits[0]
    assert (audit.attack, audit.stronger, audit.n) == ("fast", "standard", 6)
    assert read_summary(tmp_path / "run").audits == result.summary.audits
    assert f"fast {100 * audit.accuracy:.1f} %" in str(result) and f"({audit.passes} passes" in str(
        result
    )
    assert "a random sample of the survivors" in reporting.report(tmp_path / "run").read_text(
        "utf-8"
    )
    with pytest.raises(InputError, match="audit"):
        run_fast(linear_model(), tmp_path / "run", audit=2)


def test_no_audit_without_a_sample_or_of_other_attacks() -> None:
    assert run_fast(linear_model(), audit=0).summary.audits == ()
    assert run_fast(linear_model(), attack="apgd", steps=2).summary.audits == ()
    with pytest.raises(
        InputError,
        match="`audit` must be left out for the attack apgd: only fast is audited, got 3",
    ):
        run_fast(linear_model(), attack="apgd", audit=3)
    with pytest.raises(InputError, match="`audit` must be"):
        run_fast(linear_model(), audit=-1)


def test_the_adaptive_attack_on_a_mixture_is_audited_by_its_own_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The adaptive attack with the adaptive version of standard, which has the surrogate and its
    hinges."""
    monkeypatch.setattr(
        "equipoise.evaluation.plan.standard", lambda norm: Suite((Apgd("ce", 3), Square(4)))
    )
    monkeypatch.setattr(
        "equipoise.evaluation.plan.make_attack", lambda name, **_: Suite((Apgd("ce", 1),))
    )
    mixture = MixedClassifier(linear_model(0), linear_model(1), 0.8, hard=True)
    audits = run_fast(mixture, audit=2).summary.audits
    assert {(audit.model, audit.attack) for audit in audits} == {
        ("accurate", "fast"),
        ("robust", "fast"),
        ("mixed", "adaptive"),
    }


SHARDED = """
import sys
sys.path[:0] = {tests!r}
from pathlib import Path
from test_audit import DATA, THREAT_CONDITIONS, run_audit
from equipoise.core import parallel
with parallel.process_group(THREAT_CONDITIONS.device):
    run_audit(Path({folder!r}), 9)
"""


@pytest.mark.parametrize("processes", [2, 3])
def test_several_processes_audit_the_sample_of_one(
    processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, audit = run_audit(tmp_path / "one", 9)
    models = [
        SmallNet().eval() for _ in range(processes)
    ]  # made before the threads, which share the random state
    added = [list[AttackRow]() for _ in range(processes)]
    append = Run.append

    def noted(run: Run, rows: Any) -> None:
        listed = list(rows)
        added[run.world.rank] += [row for row in listed if row.key not in run.done]
        append(run, listed)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "append", noted)
        done = run_processes(
            processes, lambda rank: run_audit(tmp_path / "several", 9, models[rank])
        )
    assert all(rows == expected for rows, _ in done)
    assert replace(read_summary(tmp_path / "several").audits[0], seconds=audit.seconds) == audit
    keys = [row.key for rows in added for row in rows]
    assert len(keys) == len(set(keys)) == 2 * len(DATA), (
        "a clean row and one of the attack for every image, once"
    )
    audited = [sum(row.audit_passes is not None for row in rows) for rows in added]
    assert sum(audited) == 9 and max(audited) - min(audited) <= 1


@pytest.mark.slow
def test_two_processes_audit_the_sample_of_one(tmp_path: Path) -> None:
    expected, _ = run_audit(tmp_path / "one", 9)
    tests = [str(folder) for folder in Path(__file__).parents[:2]]
    script = SHARDED.format(tests=tests, folder=str(tmp_path / "two"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    processes = [
        subprocess.Popen([sys.executable, "-c", script], env={**environment, "RANK": str(rank)})
        for rank in (0, 1)
    ]
    assert [process.wait(timeout=300) for process in processes] == [0, 0]
    assert [row for row in attack_rows(tmp_path / "two") if row.attack == "weak"] == expected
    assert read_summary(tmp_path / "two").audits[0].audited == 9
