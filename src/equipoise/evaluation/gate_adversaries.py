"""The adversaries of an adaptive mixture [Bai2024, Section 4.2], and what a perfect gate could do on their images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.attacks import Suite, pgd
from equipoise.attacks.worst_case import Stage
from equipoise.core import stats, summary
from equipoise.core.records import Row, Run
from equipoise.core.rng import Stream
from equipoise.core.threat import Threat
from equipoise.data import Dataset
from equipoise.evaluation.adaptive import white_box, with_extra
from equipoise.evaluation.attacked import attacked
from equipoise.evaluation.job import Attack, Conditions, Job, untouched
from equipoise.mixing import GatedClassifier, MixedClassifier
from equipoise.mixing.gated_surrogate import AlphaPenalty
from equipoise.mixing.oracle_gate import perfect

ADVERSARIES = ("A", "B", "C", "D")
AIMED, JOINT = "aimed", "C and D"


def adversaries(name: str, model: nn.Module, stages: Sequence[Stage], *, steps: int = 20, transfer: bool = True,
                targets: Sequence[float] = ()) -> list[Job]:
    """A model under all that knows how it is built, each adversary by its letter.

    - A: PGD that does not see the gate's gradient; B: PGD that does;
    - C: the list of attacks (AutoAttack) with all gradients; D: the same, with a term that pushes alpha down;
    - std, rob: PGD on either base alone; aimed: PGD on a fixed mixture with another alpha.

    D alone can be weaker than C on some images; :func:`joint` counts both.

    Without a gate A is B and D is C, and they are left out. Where a map or a hard decision hides the gradients, they
    come from what stands in for it (:func:`~equipoise.evaluation.adaptive.white_box`).

    Args:
        name: in the rows.
        model: a mixture, or any classifier (only B and C).
        stages: the list of C and D.
        steps: of PGD.
        transfer: whether std and rob are wanted.
        targets: alphas that further attacks aim at.
    """
    steep, fold = partial(pgd, steps=steps), Suite(tuple(stages))
    if not isinstance(model, MixedClassifier):
        plain: dict[str, Attack] = {"clean": untouched, "B": steep, "C": fold}
        return [Job(name, model, attack, run) for attack, run in plain.items()]
    source = None if model.differentiable else model.surrogate()
    attacks: dict[str, Attack] = {"clean": untouched, "B": partial(steep, surrogate=source),
                                  "C": white_box(model, fold)}
    if isinstance(model, GatedClassifier):
        attacks |= {"A": partial(steep, surrogate=model.stopped()), "D": lowering(model, stages)}
    if transfer:
        attacks |= {"std": partial(steep, surrogate=model.accurate), "rob": partial(steep, surrogate=model.robust)}
    found = [Job(name, model, attack, attacks[attack]) for attack in sorted(attacks, key=_place)]
    for alpha in targets:
        aim = MixedClassifier(model.accurate, model.robust, alpha).to(model.gate.device).eval()
        found.append(Job(name, model, AIMED, partial(steep, surrogate=aim), alpha))
    return found


def lowering(model: GatedClassifier, stages: Sequence[Stage]) -> Attack:
    """Adversary D."""
    attack = white_box(model, Suite(tuple(stages)))
    return with_extra(attack, AlphaPenalty(model))


def joint(rows: Sequence[Row], threat: Threat) -> list[Row]:
    """Results under C and D together: a term that helps against one image may hinder against another."""
    met = [{"model": model, "attack": JOINT, "index": index, "correct": stands}
           for model, attacks in _alone(rows).items() for index, stands in _together(attacks).items()]
    return [row for row in summary.results(met, threat) if row["metric"] == JOINT]


def leads(rows: Sequence[Row], kinds: Sequence[str], lines: Sequence[str]) -> list[Row]:
    """How many more clean images each kind answers than a line of others does, at equal accuracy under C and D.

    Args:
        rows: of all of them; those without the images that most have are left out.
        kinds: names of models.
        lines: names of lines; theirs are the models called so, and those with a comma and a remark after it.
    """
    both = {model: (attacks.get("clean", {}), _together(attacks)) for model, attacks in _alone(rows).items()}
    images = sorted({index for _, stands in both.values() for index in stands})
    met = {model: np.array([[verdict[i] for i in images] for verdict in pair]) for model, pair in both.items()
           if all(verdict.keys() >= set(images) for verdict in pair)}
    found: list[Row] = []
    for line in lines:
        others = [verdicts for model, verdicts in met.items() if model == line or model.startswith(f"{line}, ")]
        for kind in kinds:
            ahead = stats.lead(met[kind], np.stack(others)) if kind in met and len(others) > 1 else None
            if ahead is not None:
                found.append({"model": kind, "versus": line, **asdict(ahead)})
    return found


def _alone(rows: Sequence[Row]) -> dict[str, dict[str, summary.Verdicts]]:
    """Verdicts by model and attack, without attacks that aim at an alpha."""
    return {model: attacks for (model, alpha), attacks in summary.verdicts(rows).items() if alpha is None}


def _together(attacks: dict[str, summary.Verdicts]) -> summary.Verdicts:
    """Which images stand under C, and under D where it was made."""
    return {index: held and attacks.get("D", {}).get(index, True) for index, held in attacks.get("C", {}).items()}


def _place(attack: str) -> int:
    return ("clean", *ADVERSARIES, "std", "rob").index(attack)


def witnessed(subject: Job, data: Dataset, run: Run, conditions: Conditions) -> None:
    """Attack every batch that the run has no rows for; rows also tell alpha and what a perfect gate would answer.

    Of a mixture, `weight` is the alpha of the attacked image, and `possible` whether any alpha in [0, 1] answers it
    rightly [Bai2024, Theorem 4.1]: the bound beside every result.
    """
    attacked(replace(subject, run=partial(_laid, subject.run)), data, run, conditions, witness=_gate)


def _laid(attack: Attack, model: nn.Module, x: Tensor, y: Tensor, *, threat: Threat, stream: Stream) -> Tensor:
    """The attack with channels last, as lists have their images: convolutions are faster so, and round otherwise."""
    return attack(model, x.contiguous(memory_format=torch.channels_last), y, threat=threat, stream=stream)


def _gate(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, list[float] | list[bool]]:
    if not isinstance(model, MixedClassifier):
        return {}
    g, h = model.both(x)
    return {"weight": [round(value, 6) for value in model.alphas(x).tolist()], "possible": perfect(g, h, y).tolist()}
