"""The adversaries of an adaptive mixture [Bai2024, Section 4.2], and the accuracy of an oracle gate
on their images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.attacks import Attack, Clean, Pgd, Suite
from equipoise.core import aggregation, stats
from equipoise.core.records import Run
from equipoise.core.results import Difference, Result
from equipoise.core.rows import AttackRow, Row
from equipoise.core.threat import Threat
from equipoise.data import Dataset
from equipoise.evaluation.adaptive import white_box
from equipoise.evaluation.job import Conditions, Job
from equipoise.evaluation.measure import measure
from equipoise.mixing import AlphaPenalty, GatedClassifier, MixedClassifier
from equipoise.mixing.formula import oracle_is_correct

ADVERSARIES = ("A", "B", "C", "D")
FIXED_ALPHA, JOINT = "aimed", "C and D"


def adversaries(
    name: str,
    model: nn.Module,
    suite: Suite,
    *,
    steps: int = 20,
    transfer: bool = True,
    targets: Sequence[float] = (),
) -> list[Job]:
    """A model under every adversary that knows how it is built, each by its letter.

    - A: PGD without the gate's gradient; B: PGD with it;
    - C: the suite (AutoAttack) with all gradients; D: the same, with a term that lowers alpha;
    - std, rob: PGD on either base alone; aimed: PGD on a fixed mixture with another alpha.

    D alone can be weaker than C on some images; :func:`joint_results` counts both. Without a gate A
    equals B and D equals C, and they are left out. C also attacks both sides at once. Where a map
    or a hard decision hides the gradients, they come from a surrogate
    (:func:`~equipoise.evaluation.adaptive.white_box`). A classifier that is no mixture gets B and C
    only.

    `steps` are those of PGD, `transfer` includes std and rob, and `targets` are the alphas of the
    fixed mixtures.
    """
    pgd = Pgd(steps=steps)
    attacks: dict[str, Attack] = {"clean": Clean(), "B": pgd, "C": suite}
    if not isinstance(model, MixedClassifier):
        return [Job(name, model, letter, attack) for letter, attack in attacks.items()]
    attacks |= {
        "B": replace(pgd, surrogate=None if model.differentiable else model.surrogate()),
        "C": white_box(model, suite),
    }
    if isinstance(model, GatedClassifier):
        attacks |= {
            "A": replace(pgd, surrogate=model.without_gate_gradient()),
            "D": replace(attacks["C"], extra=AlphaPenalty(model)),
        }
    if transfer:
        attacks |= {
            "std": replace(pgd, surrogate=model.accurate),
            "rob": replace(pgd, surrogate=model.robust),
        }
    order = ("clean", *ADVERSARIES, "std", "rob")
    jobs = [
        Job(name, model, letter, attacks[letter]) for letter in sorted(attacks, key=order.index)
    ]
    for alpha in targets:
        fixed = MixedClassifier(model.accurate, model.robust, alpha).to(model.gate.device).eval()
        jobs.append(Job(name, model, FIXED_ALPHA, replace(pgd, surrogate=fixed), alpha))
    return jobs


def joint_results(rows: Sequence[Row], threat: Threat) -> list[Result]:
    """Results under C and D together: a term that helps against one image may hinder against
    another."""
    joint = [
        AttackRow(model=model, attack=JOINT, index=index, label=-1, correct=correct)
        for model, attacks in _without_alpha(rows).items()
        for index, correct in _c_and_d(attacks).items()
    ]
    return [result for result in aggregation.accuracies(joint, threat) if result.metric == JOINT]


def leads(rows: Sequence[Row], models: Sequence[str], lines: Sequence[str]) -> list[Difference]:
    """Clean accuracy of models above lines of other models, at equal accuracy under C and D.

    A line is made of the models of its name, and of those with a comma and a remark after it.
    Models without rows for all images are skipped.
    """
    both = {
        model: (attacks.get("clean", {}), _c_and_d(attacks))
        for model, attacks in _without_alpha(rows).items()
    }
    images = sorted({index for _, robust in both.values() for index in robust})
    correct = {
        model: np.array([[flags[i] for i in images] for flags in pair])
        for model, pair in both.items()
        if all(flags.keys() >= set(images) for flags in pair)
    }
    differences: list[Difference] = []
    for line in lines:
        others = [
            flags
            for model, flags in correct.items()
            if model == line or model.startswith(f"{line}, ")
        ]
        for model in models:
            lead = (
                stats.lead(correct[model], np.stack(others))
                if model in correct and len(others) > 1
                else None
            )
            if lead is not None:
                differences.append(Difference(model=model, versus=line, **asdict(lead)))
    return differences


def _without_alpha(rows: Sequence[Row]) -> dict[str, dict[str, aggregation.Correct]]:
    """Correct images by model and attack, without attacks that target an alpha."""
    return {
        model: attacks
        for (model, alpha), attacks in aggregation.correct_by_attack(rows).items()
        if alpha is None
    }


def _c_and_d(attacks: dict[str, aggregation.Correct]) -> aggregation.Correct:
    """Which images are correct under C, and under D where it was run."""
    return {
        index: correct and attacks.get("D", {}).get(index, True)
        for index, correct in attacks.get("C", {}).items()
    }


def measure_with_alpha(job: Job, data: Dataset, run: Run, conditions: Conditions) -> None:
    """Attack every batch that the run has no rows for; rows also hold alpha and the result of an
    oracle gate.

    Of a classifier that is no mixture, `top_gap` is the probability of the predicted class minus
    that of the runner-up [Bai2024, Table 1].

    Of a mixture, `image_alpha` is the alpha of the attacked image, and `oracle_correct` whether any
    alpha in [0, 1] classifies it correctly [Bai2024, Theorem 4.1]: the bound beside every result.
    """
    measure(job, data, run, conditions, record_extra=_alpha_columns)


def _alpha_columns(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, list[float] | list[bool]]:
    if not isinstance(model, MixedClassifier):
        top = torch.softmax(model(x), dim=1).topk(2, dim=1).values
        return {"top_gap": [round(value, 6) for value in (top[:, 0] - top[:, 1]).tolist()]}
    g, h = model.log_probabilities(x)
    return {
        "image_alpha": [round(value, 6) for value in model.alphas(x).tolist()],
        "oracle_correct": oracle_is_correct(g, h, y).tolist(),
    }
