"""The adversaries A to D: whose gradients they use, what their rows hold, and that they resume."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from small_gates import conditions, gated, gated_over_map, labelled_digits
from torch import Tensor, nn

from equipoise.attacks import Apgd, BatchAttack, Pgd, Square, Suite
from equipoise.core import aggregation
from equipoise.core.records import Run
from equipoise.core.results import find
from equipoise.core.rng import Stream
from equipoise.core.rows import AttackRow
from equipoise.core.threat import Threat
from equipoise.data import Dataset, pixels
from equipoise.evaluation import Job
from equipoise.evaluation.gate_adversaries import (
    adversaries,
    joint_results,
    leads,
    measure_with_alpha,
)
from equipoise.mixing import AlphaPenalty, GatedSurrogate, MixedClassifier, gate_of, mix
from equipoise.mixing.formula import oracle_is_correct

SUITE = Suite(attacks=(Apgd(loss="margin", steps=5), Square(queries=20)))


def by_letter(model: nn.Module, **settings: object) -> dict[str, Job]:
    return {job.attack_name: job for job in adversaries("m", model, SUITE, steps=3, **settings)}  # type: ignore[arg-type]


def rows_of(model: str, attack: str, correct: list[bool]) -> list[AttackRow]:
    return [
        AttackRow(index=i, model=model, attack=attack, label=0, correct=flag)
        for i, flag in enumerate(correct)
    ]


def measured(folder: Path, job: Job, data: Dataset, batch_size: int = 5) -> list[AttackRow]:
    run = Run(folder, {"command": "test"}, {})
    measure_with_alpha(job, data, run, conditions(batch_size))
    return [row for row in run.finish() if isinstance(row, AttackRow)]


def test_every_adversary_has_its_gradients() -> None:
    model = gated()
    jobs = by_letter(model, targets=(0.2, 1.0))
    assert list(jobs) == ["clean", "A", "B", "C", "D", "std", "rob", "aimed"]
    without_gate = jobs["A"].attack.surrogate
    assert isinstance(without_gate, GatedSurrogate) and without_gate.detach_gate
    assert jobs["B"].attack.surrogate is None
    assert (
        jobs["std"].attack.surrogate is model.accurate
        and jobs["rob"].attack.surrogate is model.robust
    )


def test_d_is_c_with_a_term_that_lowers_alpha() -> None:
    jobs = by_letter(gated())
    c, d = jobs["C"].attack, jobs["D"].attack
    assert isinstance(d.extra, AlphaPenalty) and replace(d, extra=None) == c


def test_a_gate_is_attacked_as_plain_mixing_is() -> None:
    """Otherwise the comparison of both would favour the gate."""
    model = gated()
    plain = MixedClassifier(model.accurate, model.robust, 0.7)
    of_gate, of_plain = (
        [stage.name for stage in by_letter(own)["C"].attack.stages()] for own in (model, plain)
    )
    assert of_gate == of_plain and any(name.startswith("hinges/mapped") for name in of_gate)


def test_attacks_at_fixed_alphas() -> None:
    jobs = adversaries("m", gated(), SUITE, targets=(0.2, 1.0))
    assert [job.alpha for job in jobs if job.attack_name == "aimed"] == [0.2, 1.0]


def test_models_without_a_gate_have_fewer_adversaries() -> None:
    model = gated()
    assert list(by_letter(MixedClassifier(model.accurate, model.robust, 0.7))) == [
        "clean",
        "B",
        "C",
        "std",
        "rob",
    ]
    assert list(by_letter(model.robust)) == ["clean", "B", "C"]


def test_over_a_map_gradients_come_from_a_surrogate() -> None:
    jobs = by_letter(gated_over_map())
    for letter in ("C", "D"):
        surrogate = jobs[letter].attack.surrogate
        assert isinstance(surrogate, GatedSurrogate) and surrogate.soft
        assert any(stage.name.startswith("hinges/") for stage in jobs[letter].attack.stages())


def test_c_and_d_are_counted_together() -> None:
    rows = [
        *rows_of("m", "C", [True, True, False]),
        *rows_of("m", "D", [True, False, True]),
        *rows_of("n", "C", [True, True, False]),
    ]
    values = {result.model: result.value for result in joint_results(rows, Threat("linf", 0.1))}
    assert values == {"m": pytest.approx(1 / 3), "n": pytest.approx(2 / 3)}


def test_leads_are_at_equal_attacked_accuracy() -> None:
    def rows(model: str, clean: int, c: int, d: int | None = None) -> list[AttackRow]:
        counts = {"clean": clean, "C": c} | ({} if d is None else {"D": d})
        return [
            row
            for attack, count in counts.items()
            for row in rows_of(model, attack, [i < count for i in range(10)])
        ]

    everything = [
        *rows("plain", 8, 6),
        *rows("plain, 0.8", 10, 4),
        *rows("plain tea", 10, 10),
        *rows("other", 9, 3),
        *rows("gate", 10, 6, 5),
        *rows("gate on it", 9, 7, 7),
    ]
    (lead,) = leads(everything, ["gate", "gate on it", "missing"], ["plain", "other"])
    assert (lead.model, lead.versus, lead.n) == ("gate", "plain", 10)
    assert lead.value == pytest.approx(0.1), "under C and D together, 5 of 10"


@pytest.mark.parametrize("over_map", [False, True])
def test_rows_hold_alpha_and_the_result_of_an_oracle_gate(over_map: bool, tmp_path: Path) -> None:
    model = gated_over_map() if over_map else gated()
    images = labelled_digits(model)
    run = Run(tmp_path / "run", {"command": "test"}, {})
    for job in adversaries("m", model, SUITE, steps=3, targets=(0.5,)):
        measure_with_alpha(job, images, run, conditions(12))
    rows = [row for row in run.finish() if isinstance(row, AttackRow)]
    assert len(rows) == 12 * 8
    assert all(row.image_alpha is not None and 0.3 <= row.image_alpha <= 0.9 for row in rows)
    assert all(row.oracle_correct for row in rows if row.correct)
    results = aggregation.accuracies(rows, None)
    assert find(results, "m", "C").value <= find(results, "m", "clean").value < 1


def test_no_fixed_alpha_is_better_than_the_oracle_gate(tmp_path: Path) -> None:
    model = gated()
    images = labelled_digits(model)
    rows = measured(tmp_path / "run", by_letter(model)["clean"], images, 12)
    with torch.no_grad():
        g, h = model.log_probabilities(pixels(images.images))
        alphas = model.alphas(pixels(images.images))
    best = max(
        int((mix(g, h, gate_of(a)).argmax(1) == images.labels).sum())
        for a in (0.0, 0.2, 0.5, 0.8, 1.0)
    )
    assert sum(bool(row.oracle_correct) for row in rows) >= best
    torch.testing.assert_close(
        torch.tensor([row.image_alpha for row in rows]), alphas, atol=1e-5, rtol=1e-4
    )


def test_an_interrupted_run_is_resumed(tmp_path: Path) -> None:
    model = gated()
    images, job = labelled_digits(model), by_letter(model)["D"]
    complete = measured(tmp_path / "complete", job, images)
    measured(tmp_path / "run", job, images.take(torch.arange(5)))
    assert measured(tmp_path / "run", job, images) == complete


@dataclass(frozen=True, kw_only=True)
class RecordedPgd(BatchAttack):
    """PGD that keeps its images by index."""

    name: ClassVar[str] = "recorded"
    images: dict[int, Tensor] = field(default_factory=dict)

    def run(
        self, model: nn.Module, x: Tensor, y: Tensor, *, threat: Threat, stream: Stream
    ) -> Tensor:
        x_adv = Pgd(steps=3)(model, x, y, threat=threat, stream=stream)
        self.images.update(zip(stream.index.tolist(), x_adv, strict=True))
        return x_adv


def test_columns_belong_to_their_images_after_a_kill(tmp_path: Path) -> None:
    """Killed inside a batch and inside a line: the batch is attacked again."""
    model, attack = gated(), RecordedPgd()
    images = labelled_digits(model).take(torch.arange(12).flip(0))
    job = Job("m", model, "B", attack)
    measure_with_alpha(job, images, Run(tmp_path / "run", {"command": "test"}, {}), conditions())
    part = tmp_path / "run" / "parts" / "0.jsonl"
    lines = part.read_text().splitlines(keepends=True)
    part.write_text("".join(lines[:7]) + lines[7][:20])
    rows = {row.index: row for row in measured(tmp_path / "run", job, images)}
    assert len({row.image_alpha for row in rows.values()}) > 6, "the images differ"
    for index, y in zip(images.index.tolist(), images.labels, strict=True):
        x_adv = attack.images[index][None]
        with torch.no_grad():
            g, h = model.log_probabilities(x_adv)
            assert rows[index].image_alpha == pytest.approx(float(model.alphas(x_adv)), abs=1e-5)
        assert rows[index].oracle_correct == bool(oracle_is_correct(g, h, y[None]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_adversaries_on_cuda_are_as_strong(tmp_path: Path) -> None:
    """CUDA graphs, lower precision and the extra term give about the accuracies of the CPU."""
    accuracies = []
    for device in ("cpu", "cuda"):
        model = gated()
        images = labelled_digits(model)
        run = Run(tmp_path / device, {"command": "test"}, {})
        for job in adversaries("m", model.to(device), SUITE, steps=5, transfer=False):
            measure_with_alpha(job, images, run, conditions(12, device))
        accuracies.append(
            {result.metric: result.value for result in aggregation.accuracies(run.finish(), None)}
        )
    assert accuracies[0]["clean"] == accuracies[1]["clean"]
    assert all(abs(accuracies[0][letter] - accuracies[1][letter]) <= 2 / 12 for letter in "ABCD")
