"""The adversaries of an adaptive mixture [Bai2024, Section 4.2], and what a perfect gate could do on their images."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from equipoise import checks, losses, progress, rng, summary
from equipoise.attacks import Fold, pgd
from equipoise.attacks.called import inside
from equipoise.attacks.worst_case import Stage
from equipoise.data import Dataset, pixels
from equipoise.evaluate.adaptive import white_box, with_extra
from equipoise.evaluate.subject import Attack, Conditions, Subject, untouched
from equipoise.mixing import GatedClassifier, MixedClassifier
from equipoise.mixing.gated import Lowered
from equipoise.mixing.perfect import perfect
from equipoise.modes import inference
from equipoise.records import Row, Run, rows_of
from equipoise.threat import Threat

ADVERSARIES = ("A", "B", "C", "D")
AIMED, JOINT = "aimed", "C and D"


def adversaries(name: str, model: nn.Module, stages: Sequence[Stage], *, steps: int = 20, transfer: bool = True,
                targets: Sequence[float] = ()) -> list[Subject]:
    """A model under all that knows how it is built, each adversary by its letter.

    - A: PGD that does not see the gate's gradient; B: PGD that does;
    - C: the list of attacks (AutoAttack) with all gradients; D: the same, with a term that pushes alpha down;
    - std, rob: PGD on either base alone; aimed: PGD on a fixed mixture with another alpha.

    D alone can be weaker than C on some images; :func:`joint` counts both.

    Without a gate A is B and D is C, and they are left out. Where a map or a hard decision hides the gradients, they
    come from what stands in for it (:func:`~equipoise.evaluate.adaptive.white_box`).

    Args:
        name: in the rows.
        model: a mixture, or any classifier (only B and C).
        stages: the list of C and D.
        steps: of PGD.
        transfer: whether std and rob are wanted.
        targets: alphas that further attacks aim at.
    """
    steep, fold = partial(pgd, steps=steps), Fold(tuple(stages))
    if not isinstance(model, MixedClassifier):
        plain: dict[str, Attack] = {"clean": untouched, "B": steep, "C": fold}
        return [Subject(name, model, attack, run) for attack, run in plain.items()]
    source = None if model.differentiable else model.surrogate()
    attacks: dict[str, Attack] = {"clean": untouched, "B": partial(steep, surrogate=source),
                                  "C": white_box(model, fold)}
    if isinstance(model, GatedClassifier):
        attacks |= {"A": partial(steep, surrogate=model.stopped()), "D": lowering(model, stages)}
    if transfer:
        attacks |= {"std": partial(steep, surrogate=model.accurate), "rob": partial(steep, surrogate=model.robust)}
    found = [Subject(name, model, attack, attacks[attack]) for attack in sorted(attacks, key=_place)]
    for alpha in targets:
        aim = MixedClassifier(model.accurate, model.robust, alpha).to(model.gate.device).eval()
        found.append(Subject(name, model, AIMED, partial(steep, surrogate=aim), alpha))
    return found


def lowering(model: GatedClassifier, stages: Sequence[Stage]) -> Attack:
    """Adversary D."""
    attack = white_box(model, Fold(tuple(stages)))
    return with_extra(attack, Lowered(model))


def joint(rows: Sequence[Row], threat: Threat) -> list[Row]:
    """Results under C and D together: a term that helps against one image may hinder against another."""
    stands: dict[tuple[str, int], bool] = {}
    for row in rows:
        if row["attack"] in ("C", "D") and "alpha" not in row:
            key = (row["model"], row["index"])
            stands[key] = stands.get(key, True) and row["correct"]
    met = [{**row, "attack": JOINT, "correct": stands[row["model"], row["index"]]} for row in rows
           if row["attack"] == "C"]
    return [row for row in summary.results(met, threat) if row["metric"] == JOINT]


def _place(attack: str) -> int:
    return ("clean", *ADVERSARIES, "std", "rob").index(attack)


def witnessed(subject: Subject, data: Dataset, run: Run, conditions: Conditions) -> None:
    """Attack every batch that the run has no rows for; rows also tell alpha and what a perfect gate would answer.

    Of a mixture, `weight` is the alpha of the attacked image, and `possible` whether any alpha in [0, 1] answers it
    rightly [Bai2024, Theorem 4.1]: the bound beside every result.
    """
    with progress.task(str(subject), total=len(data)) as task:
        for rows in torch.arange(len(data)).split(conditions.batch_size)[run.world.rank :: run.world.size]:
            batch = data.take(rows)
            if any((i, subject.name, subject.attack, subject.alpha) not in run.done for i in batch.index.tolist()):
                run.append(_rows(subject, batch, conditions))
            task.advance(len(batch))


def _rows(subject: Subject, batch: Dataset, conditions: Conditions) -> list[Row]:
    x = pixels(batch.images.to(conditions.device)).contiguous(memory_format=torch.channels_last)
    y, model = batch.labels.to(conditions.device), subject.model
    chance = rng.stream(conditions.seed, subject.attack, batch.index.to(conditions.device))
    with inference(model):
        x_adv = subject.run(model, x, y, threat=conditions.threat, stream=chance)
        inside(subject.attack, x_adv, x, conditions.threat)
        with torch.no_grad():
            logits = checks.logits(model(x_adv), len(x)).float()
            told = _gate(model, x_adv, y) if isinstance(model, MixedClassifier) else {}
    predicted, margin = logits.argmax(dim=1), losses.probability_margin(logits, y)
    found = rows_of(batch.index.tolist(), model=subject.name, attack=subject.attack, label=y.tolist(),
                    predicted=predicted.tolist(), correct=(predicted == y).tolist(),
                    margin=[round(value, 6) for value in margin.tolist()], **told)
    return found if subject.alpha is None else [{**row, "alpha": subject.alpha} for row in found]


def _gate(model: MixedClassifier, x: Tensor, y: Tensor) -> dict[str, list[float] | list[bool]]:
    g, h = model.both(x)
    return {"weight": [round(value, 6) for value in model.alphas(x).tolist()], "possible": perfect(g, h, y).tolist()}
