"""What the study of adaptive smoothing measures without a gate [Bai2024, Figures 2 and 4, Table
1]."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from equipoise.attacks import (
    Apgd,
    Attack,
    Clean,
    FunctionAttack,
    Pgd,
    Suite,
    TargetedApgd,
    TransferPgd,
    minimum_margin,
)
from equipoise.attacks.targeted import first_ranks
from equipoise.core.rng import Stream
from equipoise.core.rows import Row
from equipoise.core.threat import Threat
from equipoise.data import Dataset
from equipoise.evaluation import Conditions, Job
from equipoise.evaluation.alpha_sweep import AlphaSweep, transferred
from equipoise.local_smoothing.crossing import Crossing, find_crossing
from equipoise.mixing import MixedClassifier
from equipoise.studies.local_rules import alpha_of, correct_at
from equipoise.studies.study import Pair

TRANSFER = "transfer"


def sweep_jobs(
    pair: Pair, data: Dataset, alphas: Sequence[float], steps: int, conditions: Conditions
) -> list[Job]:
    """Plain mixing at every alpha, clean and under PGD on g, on h and on the mixture [Bai2024,
    Figure 4]."""
    return AlphaSweep(
        pair.models,
        data,
        {"pgd": Pgd(steps=steps)},
        alphas=alphas,
        smoothing=None,
        trust="constant",
        space="logits",
        seed=conditions.seed,
        norm=conditions.threat.norm,
        audit=None,
        source="mix",
        adaptive=("surrogate",),
        stand_in=None,
        device=conditions.device,
    ).jobs


def transfer_jobs(
    pair: Pair, gammas: Sequence[float], steps: int, conditions: Conditions
) -> list[Job]:
    """Both models on images of PGD on the mixture with odds γ_t = α_t/(1 − α_t) [Bai2024, Figure
    2]."""
    jobs = []
    for alpha in map(alpha_of, gammas):
        mixture = MixedClassifier(pair.accurate, pair.robust, alpha).to(conditions.device).eval()
        attack = transferred(mixture, steps, conditions.seed)
        jobs += [Job(name, model, TRANSFER, attack, alpha) for name, model in pair.models.items()]
    return jobs


def transfer_crossing(
    rows: Sequence[Row], pair: Pair, gammas: Sequence[float], seed: int
) -> Crossing:
    """The odds of the attacked mixture above which g is the more accurate model."""
    accurate, robust = (correct_at(rows, name, TRANSFER, gammas) for name in pair.models)
    return find_crossing(gammas, accurate, robust, seed=seed)


def confidence_jobs(pair: Pair, steps: int, margin_steps: int, targets: int) -> list[Job]:
    """Both models, clean, under PGD and at the smallest margin that the APGD attacks of AutoAttack
    reach [Table 1].

    PGD moves every image to its last step, those that are misclassified without an attack too.
    """
    suite = Suite((Apgd("ce", margin_steps), TargetedApgd(margin_steps, first_ranks(targets))))
    attacks: dict[str, dict[str, Attack]] = {
        name: {
            "clean": Clean(),
            "pgd": TransferPgd(source=model, steps=steps),
            "smallest-margin": smallest_margin(suite),
        }
        for name, model in pair.models.items()
    }
    return [
        Job(name, pair.models[name], attack_name, attack)
        for name, own in attacks.items()
        for attack_name, attack in own.items()
    ]


def smallest_margin(suite: Suite) -> FunctionAttack:
    """The image with the smallest margin over all iterates [Bai2024, Appendix D.2]; broken ones
    skip later attacks."""

    def run(
        model: nn.Module, x: Tensor, y: Tensor, *, threat: Threat, stream: Stream, **_: object
    ) -> Tensor:
        return minimum_margin(
            model, x, y, threat=threat, stream=stream, attack=suite, skip_broken=True
        ).images[0]

    return FunctionAttack(name="smallest-margin", function=run, settings=suite.describe())
