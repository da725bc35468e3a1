"""A trained gate in place of one alpha: its range chosen on images that are never evaluated on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equipoise import mixing, models
from equipoise.attacks import Apgd, FunctionAttack, Stage, Suite, Targeted
from equipoise.core import records, summary
from equipoise.core.records import Row, Run
from equipoise.core.rng import Stream
from equipoise.core.threat import Threat
from equipoise.data import Dataset
from equipoise.evaluation import Conditions, facts
from equipoise.evaluation.adaptive import white_box
from equipoise.fitting import FitSettings, Target
from equipoise.fitting.candidates import CandidateEvaluator, Pool
from equipoise.fitting.margin_attack import MarginAttack
from equipoise.fitting.run import fit_into, identity_of
from equipoise.fitting.selection import Selected, Selection
from equipoise.mixing import GatedClassifier, MixedClassifier
from equipoise.mixing.gate import load_gate
from equipoise.mixing.gated_surrogate import AlphaPenalty
from equipoise.mixing.provenance import Provenance

SHORT = "short"  # the attack on candidates, in the rows
MAP = "map"  # folder of the fit, in that of the gate over it
# Ends of ranges as thresholds q = (1 − α)/α, and what is added to the gate before the sigmoid.
GAPS = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.98)
MOVES = (-1.0, 0.4, 2.0)


def short() -> list[Stage]:
    """The attack on candidates, where many have to be tried."""
    return [Apgd("margin", 20), *(Targeted(rank, 15, "distance") for rank in range(1, 4))]


def short_both() -> list[Stage]:
    """Of the attack on both sides of a candidate with a map."""
    return [Apgd("ce", 15), Apgd("dlr", 15), Targeted(1, 10)]


def strike(model: MixedClassifier, stages: Sequence[Stage], both: Sequence[Stage]) -> Suite:
    """The attack on a candidate: short, on both sides at once where a map hides the way, as in the evaluation; a gate
    meets it with and without the term that pushes alpha down."""
    plain = white_box(model, Suite(tuple(stages)), both=both)
    assert isinstance(plain, Suite)
    if not isinstance(model, GatedClassifier):
        return plain

    def unmoved(model: nn.Module, x: Tensor, y: Tensor, *, threat: Threat, stream: Stream, **other: object) -> Tensor:
        return plain(model, x, y, threat=threat, stream=stream)

    return replace(plain, stages=(*plain.stages, FunctionAttack("unmoved", unmoved)), extra=AlphaPenalty(model))


def ranged(model: GatedClassifier, gaps: Sequence[float] = GAPS, moves: Sequence[float] = MOVES) -> list[
        MixedClassifier]:
    """The same gate over many ranges; without a map also over wide ones, in which g alone may decide."""
    ends = [(1 / (1 + high), 1 / (1 + low)) for low in gaps for high in gaps if low < high]
    if model.logit_map is None:
        ends += [(low, high) for low in (0.0, 0.3) for high in (0.8, 0.9, 1.0)]
    return [model.with_range(*pair, shift=move) for pair in ends for move in moves]


def choose(model: GatedClassifier, images: Dataset, target: Target, conditions: Conditions,
           folder: Path | None = None) -> tuple[Selected, Selected]:
    """The most accurate range that loses at most so much of the robust model's accuracy on these images, and what the
    robust model reaches; both under the same short attack. With a folder, a choice that is stopped goes on."""
    arena = CandidateEvaluator(images, conditions.threat, conditions.device, conditions.seed, conditions.batch_size)
    alone = MixedClassifier(model.accurate, model.robust, 1.0).to(conditions.device).eval()
    pool = Pool(arena, lambda each: strike(each, short(), short_both()), folder)
    standard = Selection([alone], pool).choose(clean=0.0)
    least = standard.attacked * (1 - target.share) if target.of_robust else standard.attacked - target.share
    return Selection(ranged(model), pool).choose(robust=max(least, 0.0)), standard


def told(found: Selected, standard: Selected, target: Target) -> str:
    """What a chosen range reached on the images that chose it, for after "it"."""
    missed = "" if found.met else f" (no range that was tried loses at most {target})"
    return (f"kept {100 * found.attacked:.1f} % of the {len(found.stands)} images that chose its range under a short "
            f"attack, the robust model {100 * standard.attacked:.1f} %{missed}; that flatters it and promises nothing, "
            "so evaluate it on others")


def rows(found: Selected, standard: Selected, images: Dataset) -> list[Row]:
    """Both on the images that chose, clean and under the short attack."""
    return [row for model, match in (("robust", standard), ("mixed", found))
            for attack, correct in (("clean", match.right), (SHORT, match.stands))
            for row in records.rows_of(images.index.tolist(), model=model, attack=attack,
                                       label=images.labels.tolist(), correct=correct.tolist())]


def gate_into(
    out: Path, gate: Path, references: Sequence[str], images: Dataset, *, threat: Threat, target: Target,
    settings: FitSettings, device: torch.device, batch_size: int, command: str, **wishes: Any,
) -> tuple[MixedClassifier, GatedClassifier]:
    """Fit a map, put a trained gate over it, choose its range, and leave `mixture:DIR` in `out`; repeated, it is read.

    The fit has a folder of its own in `out`. Where it is no help, the gate is over plain mixing.

    Args:
        out: run folder.
        gate: file of the gate, or the folder of its training; one for other bases is refused.
        references, images, threat, target, settings, device, batch_size, command, wishes: see
            :func:`~equipoise.fitting.run.fit_into`.

    Returns:
        The mixture of the fit, and the one with the gate.
    """
    begun, conditions = time.monotonic(), Conditions(threat, device, settings.seed, batch_size)
    bases = [models.load(text, num_classes=images.num_classes, image_shape=images.image_shape, **wishes)
             for text in references]
    network = load_gate(gate / mixing.folder.GATE if gate.is_dir() else gate, bases[0], bases[1])
    MarginAttack(bases[0], bases[1], images, threat, device).probe()  # what cannot be fitted leaves no folder
    identity = {**identity_of(bases, images, threat, target, settings), "gate": models.model_identity(network)}
    run = Run(out, identity, {**facts(conditions), "references": list(references), "command": command})
    mixture = fit_into(out / MAP, references, images, threat=threat, target=target, settings=settings, device=device,
                       batch_size=batch_size, command=command, **wishes)
    if not ((out / mixing.folder.NAME).exists() and (out / "summary.json").exists()):
        model = GatedClassifier(mixture.accurate, mixture.robust, network).to(device).eval()
        over = model.on(mixture) if mixture.logit_map is not None else model
        found, standard = choose(over, images, target, conditions, out / "pool")
        made: Any = found.model
        promise = told(found, standard, target)
        made.fitted = Provenance.on(images, promise)
        run.append([row for row in rows(found, standard, images) if records.key_of(row) not in run.done])
        run.summarise("fit", time.monotonic() - begun, summary.results(run.finish(), threat), promise=promise,
                      gate={**found.facts(), "robust": standard.attacked})
        mixing.save(out, made, accurate=references[0], robust=references[1])
    loaded = mixing.load(f"mixture:{out}", **wishes)
    assert isinstance(loaded, GatedClassifier)
    return mixture, loaded
