"""Mixtures of one pair at several alphas, under attacks on either base and on the mixture [Bai2024,
Figures 1, 4]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from equipoise.attacks import Attack, Clean, Pgd, TransferPgd, cached
from equipoise.core import aggregation, checks
from equipoise.core.records import Run
from equipoise.core.results import Cost
from equipoise.data import Dataset, pixels
from equipoise.evaluation.adaptive import KINDS, OWN_GRADIENTS, adaptive_attacks, with_logits
from equipoise.evaluation.job import Conditions, Job
from equipoise.evaluation.plan import EvaluationPlan
from equipoise.local_smoothing import BinarySmoothing, SmoothedClassifier
from equipoise.local_smoothing.jacobian import SoftplusSurrogate
from equipoise.mixing import GatedClassifier, MixedClassifier

# PGD on the accurate base, PGD on the robust base, the attack on the mixture
STD, ROB, MIX = "std", "rob", "mix"
COLUMNS = (
    "std, rob, mix: under attacks on the accurate model, on the robust model and on the mixture"
)
STEPS = 20  # of std and rob [Bai2024, Figure 4]
MAX_ALPHAS = 1000
# [Bai2024]: Eq. (3.2) and (3.3), (3.1), and (2.1) for two classes
SMOOTHINGS = "averaged", "added", "binary"
MIXTURE_OR_PAIR = "be one mixture without a gate, or the accurate and the robust model in this order, for `alphas`"


def parse_alphas(given: Any) -> tuple[float, ...]:
    """Different weights in [0, 1] in rising order, from text such as "0.5,0.6" or a sequence."""
    alphas = [
        checks.within("alphas", alpha, 0, 1)
        for alpha in checks.fractions("alphas", given, most=MAX_ALPHAS)
    ]
    checks.require(len(set(alphas)) == len(alphas), "alphas", "be different", given)
    return tuple(sorted(alphas))


def transferred(source: nn.Module, steps: int, seed: int) -> Attack:
    """PGD on `source` alone; the last step of every image, computed once, is used against every
    model."""
    return cached(TransferPgd(source=source, steps=steps), seed)


class AlphaSweep(EvaluationPlan):
    """Jobs of `evaluate --alphas`: at every alpha the clean images, `std`, `rob` and `mix`.

    The images of `std` and `rob` (PGD with as many steps as the attack `pgd` has, else 20) do not
    depend on alpha, so each is computed once. `mix` is the given attack on the mixture itself, as
    strong as in any other evaluation: in its adaptive version where there is one, and once more
    with softened ReLUs (`mix-soft`) where a trust term depends on gradients. Sanity checks and
    audits are left out.

    Args:
        named: a mixture, whose map stays as it is, or the two bases.
        alphas: the weights of the robust side.
        smoothing: one of :data:`SMOOTHINGS` with γ = α/(1 − α) in place of mixing probabilities
            (3.4).
        trust, space: of the rule; see
            :class:`~equipoise.local_smoothing.smoothing.SmoothedClassifier`.
        seed: of `std` and `rob`.
        plan: the other arguments of :class:`~equipoise.evaluation.plan.EvaluationPlan`.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Module],
        data: Dataset,
        attacks: Mapping[str, Attack],
        *,
        alphas: Sequence[float],
        smoothing: str | None,
        trust: str,
        space: str,
        seed: int,
        **plan: Any,
    ) -> None:
        super().__init__({}, data, attacks, **plan)
        self.mixture = self._mixture_of(list(named.values()))
        self.mixtures["mixed"], self.robust["robust"] = self.mixture, self.mixture.robust
        checks.require(
            smoothing is None or self.mixture.differentiable,
            "smoothing",
            "be left out for a mixture with a logit map or hard labels",
            smoothing,
        )
        self.smoothing, self.trust, self.space = smoothing, trust, space
        steps = next(
            (attack.steps for attack in attacks.values() if isinstance(attack, Pgd)), STEPS
        )
        repeats = max(
            (attack.repeats for attack in attacks.values() if attack.repeats is not None),
            default=None,
        )
        shared: dict[str, Attack] = {aggregation.CLEAN: Clean(repeats=repeats)} | {
            name: replace(transferred(source, steps, seed), repeats=repeats)
            for name, source in ((STD, self._accurate_source()), (ROB, self.mixture.robust))
        }
        for alpha in alphas:
            model = self._at(alpha)
            self.jobs += [
                Job("mixed", model, name, attack, alpha)
                for name, attack in {**shared, **self._attacks_on(model)}.items()
            ]

    def points(self, run: Run, conditions: Conditions) -> None:
        """None: attacked points of several mixtures are not shown."""

    def cost(self, conditions: Conditions) -> list[Cost]:
        """None: how often the accurate model runs depends on alpha."""
        return []

    @staticmethod
    def _mixture_of(models: Sequence[nn.Module]) -> MixedClassifier:
        mixtures = [model for model in models if isinstance(model, MixedClassifier)]
        is_pair, is_mixture = (
            (len(models), len(mixtures)) == (2, 0),
            len(models) == len(mixtures) == 1,
        )
        gated = any(isinstance(model, GatedClassifier) for model in models)
        checks.require(
            (is_pair or is_mixture) and not gated,
            "models",
            MIXTURE_OR_PAIR,
            [type(model).__name__ for model in models],
        )
        return mixtures[0] if is_mixture else MixedClassifier(models[0], models[1], 0.5)

    def _accurate_source(self) -> nn.Module:
        base = self.mixture.accurate
        has_logits = (
            with_logits(
                "accurate",
                base,
                self.data.num_classes,
                pixels(self.data.images[:1].to(self.device)),
            )
            is base
        )
        checks.require(
            has_logits or self.stand_in is not None,
            "stand_in",
            "be given for `alphas` where the accurate model returns classes",
            None,
        )
        return base if self.stand_in is None else self.stand_in

    def _at(self, alpha: float) -> nn.Module:
        own = self.mixture
        if self.smoothing is None:
            model: nn.Module = MixedClassifier(
                own.accurate,
                own.robust,
                alpha,
                logit_map=own.logit_map,
                hard=own.hard,
                accurate_temperature=own.accurate_temperature,
                surrogate_alpha=own.surrogate_alpha,
                provenance=own.provenance,
            )
        else:
            averaged = self.smoothing == "averaged"
            checks.require(
                alpha < 1 or averaged,
                "alphas",
                f"be less than 1 for the rule {self.smoothing}, whose "
                "strength alpha/(1 − alpha) must be finite",
                alpha,
            )
            gamma = float("inf") if alpha == 1 else alpha / (1 - alpha)
            model = (
                BinarySmoothing(own.accurate, own.robust, gamma, norm=self.norm)
                if self.smoothing == "binary"
                else SmoothedClassifier(
                    own.accurate,
                    own.robust,
                    gamma,
                    rule=self.smoothing,
                    trust=self.trust,
                    space=self.space,
                    norm=self.norm,
                )
            )
        return model.to(self.device).eval()

    def _attacks_on(self, model: nn.Module) -> dict[str, Attack]:
        attacks: dict[str, Attack] = {}
        for name, attack in self.attacks.items():
            mark = f"-{name}" if len(self.attacks) > 1 else ""
            if isinstance(model, MixedClassifier):
                kinds = [kind for kind in self.adaptive if kind in KINDS]
                adaptive = adaptive_attacks(model, attack, kinds, self.stand_in)
                own = {key.replace("adaptive", MIX): version for key, version in adaptive.items()}
                if not own or OWN_GRADIENTS in self.adaptive:
                    own[f"{MIX}-{OWN_GRADIENTS}" if own else MIX] = attack
            else:
                own = {MIX: attack}
                if isinstance(model, BinarySmoothing) or self.trust != "constant":
                    own[f"{MIX}-soft"] = replace(attack, surrogate=SoftplusSurrogate(model))
            attacks |= {f"{key}{mark}": version for key, version in own.items()}
        return attacks
