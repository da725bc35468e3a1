"""Local smoothing on any pair: every rule of the family side by side, the crossing, and the policy.

The story of [Bai2022] and of Figure 1 of [Bai2024]. Each part is a run folder of its own inside `out`, so that parts
can be told one at a time, repeated and resumed; the page shows those that are there.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from torch import nn

from equipoise import reporting
from equipoise.attacks import Suite, pgd
from equipoise.attacks.auto import VERSIONS
from equipoise.core import checks, summary
from equipoise.core.records import Row, Run
from equipoise.core.threat import Threat
from equipoise.data import Dataset
from equipoise.evaluation import Attack, Conditions, Job, attacked, facts, untouched
from equipoise.local_smoothing.crossing import Crossing, crossing
from equipoise.local_smoothing.jacobian import Softened
from equipoise.local_smoothing.neighbours import Neighbours
from equipoise.local_smoothing.policy import TARGETS, AdaptiveSmoothing
from equipoise.models import weights_digest
from equipoise.studies import local_figures
from equipoise.studies.local_figures import alpha_of
from equipoise.studies.local_pair import Pair
from equipoise.studies.local_rules import RuleSet
from equipoise.studies.local_size import SIZES as SIZES
from equipoise.studies.local_size import LocalStudySize
from equipoise.training import train
from equipoise.training.objectives.policy import PolicyLoss

PARTS = ("neighbours", "trust", "policy", "radii", "auto", "gradients")
COMPARED = ("constant", "gradient", "top-gradient", "ratio")
SPACES = ("logits", "probabilities")


class LocalSmoothingStudy:
    """The parts of the story; each can be told again at no cost."""

    def __init__(self, run: Run, pair: Pair, size: LocalStudySize, conditions: Conditions) -> None:
        self.run, self.out, self.pair, self.size, self.conditions = run, run.folder, pair, size, conditions
        for base in (pair.accurate, pair.robust):
            base.to(conditions.device).eval().requires_grad_(False)
        self.rules = RuleSet(pair, size, conditions)
        self.digests = {"accurate": weights_digest(pair.accurate), "robust": weights_digest(pair.robust)}
        self.began = time.monotonic()

    def tell(self, parts: Sequence[str]) -> Path:
        """Do the parts, then write the page of all that is there."""
        for part in PARTS:
            if part in parts:
                getattr(self, f"_{part}")()
        adaptive = self._kept_policy()
        subjects = self._subjects(adaptive)
        more = {}
        if adaptive is not None:
            more = {"crossing": local_figures.told(self._crossing())}
        rows = self._measure(self.run, subjects, self.pair.test)
        threat = self.conditions.threat
        differences = summary.differences(rows, [("adaptive", "robust"), ("adaptive", "accurate")], threat)
        self.run.summarise("reproduce", time.monotonic() - self.began, summary.results(rows, threat),
                           study="local-smoothing", differences=differences, **more)
        return reporting.write(self.out)

    def _subjects(self, adaptive: AdaptiveSmoothing | None) -> list[Job]:
        """The row of Table 1: both bases, and the adaptive classifier once there is one."""
        long = [(f"pgd-{steps}", partial(pgd, steps=steps)) for steps in self.size.long]
        found = []
        for name, model in (("accurate", self.pair.accurate), ("robust", self.pair.robust), ("adaptive", adaptive)):
            if model is not None:
                attacks: dict[str, Attack] = {"clean": untouched, **dict(long)}
                if name == "adaptive":
                    attacks["pgd-soft"] = partial(pgd, steps=self.size.long[0], surrogate=Softened(model))
                found += [Job(name, model, attack, run) for attack, run in attacks.items()]
        return found

    def _measure(self, run: Run, subjects: Sequence[Job], data: Dataset,
                 conditions: Conditions | None = None) -> list[Row]:
        for subject in subjects:
            subject.model.to(self.conditions.device)
            attacked(subject, data, run, conditions or self.conditions)
        return run.finish()

    def _part(self, name: str, subjects: Sequence[Job], data: Dataset,
              conditions: Conditions | None = None) -> list[Row]:
        """A run folder of its own with these subjects."""
        began = time.monotonic()
        run = self._open(name, subjects, data)
        rows = self._measure(run, subjects, data, conditions)
        run.summarise("evaluate", time.monotonic() - began, summary.results(rows, self.conditions.threat))
        return rows

    def _open(self, name: str, subjects: Sequence[Job], data: Dataset) -> Run:
        # The weights of both bases once, not with every subject: there are hundreds.
        policy = next((subject.model for subject in subjects if subject.name == "adaptive"), None)
        models = self.digests if policy is None else {**self.digests, "adaptive": weights_digest(policy)}
        identity = {"verb": "evaluate", "part": name, "seed": self.conditions.seed,
                    "attacks": sorted({str(subject) for subject in subjects}), "models": models,
                    "remembered": self.pair.remembered.digest() if name == "neighbours" else "",
                    "data": data.facts(),
                    "threat": self.conditions.threat.facts()}
        return Run(self.out / name, identity, facts(self.conditions))

    def _neighbours(self) -> None:
        """Eq. (2) with K-NN, plain and weighted, against γ [Bai2022, Figures 5 and 9]."""
        kept, rules, subjects = self.pair.remembered, self.rules, []
        oracles = [(k, "plain") for k in self.size.neighbours] + [(k, "distance") for k in self.size.weighted]
        for k, weights in oracles:
            oracle = Neighbours(kept.images, kept.labels, kept.num_classes, k=k, weights=weights)
            for gamma in (*self.size.neighbour_gammas, math.inf):
                attacks: dict[str, Attack] = {"clean": untouched, "pgd-std": rules.on_accurate}
                if gamma < math.inf or weights == "distance":
                    # Plain votes are steps without a slope; alone, nothing but g shows a way.
                    attacks |= rules.through(oracle, gamma, "gradient")
                subjects += self._named(f"{k} neighbours, {weights}", rules.rule(oracle, gamma, "gradient"), attacks,
                                        gamma)
        self._part("neighbours", [*self._alone(), *subjects], self.pair.test)

    def _alone(self) -> list[Job]:
        """Both bases by themselves, where every curve begins and ends."""
        bases = {"accurate": self.pair.accurate, "robust": self.pair.robust}
        return [Job(name, model, attack, run) for name, model in bases.items()
                for attack, run in {"clean": untouched, "pgd": self.rules.pgd(model)}.items()]

    def _trust(self) -> None:
        """The four trust terms over logits and probabilities [Bai2024, Figure 1]."""
        rules, subjects = self.rules, []
        for space in SPACES:
            for trust in COMPARED:
                scale = rules.scale(trust, space)
                for weight in self.size.weights:
                    gamma = local_figures.strength(weight, scale)
                    attacks: dict[str, Attack] = {
                        "clean": untouched, "pgd-std": rules.on_accurate, "pgd-rob": rules.on_robust,
                        **rules.through(rules.sources[1], gamma, trust, space)}
                    subjects += self._named(f"{trust}, {space}", rules.rule(self.pair.robust, gamma, trust, space),
                                            attacks, gamma)
        self._part("trust", [*self._alone(), *subjects], self.pair.test)

    @staticmethod
    def _named(name: str, model: nn.Module, attacks: dict[str, Attack], gamma: float) -> list[Job]:
        return [Job(name, model, attack, run, alpha_of(gamma)) for attack, run in attacks.items()]

    def _crossing(self) -> Crossing:
        """γ_0 on held-out images [Bai2022, Figure 4]."""
        bases = {"accurate": self.pair.accurate, "robust": self.pair.robust}
        rows = local_figures.aimed_rows(self.out / "crossing", self.rules.aim(), bases, self.pair.held_out,
                                        self.conditions, self.size.steps)
        accurate, robust = (local_figures.verdicts(rows, name) for name in bases)
        return crossing(TARGETS, accurate, robust, seed=self.conditions.seed)

    def _policy(self) -> None:
        """Find the crossing, learn the policy, and attack it at every fixed γ_t [Bai2022, Figure 7]."""
        model, threat = self._fresh_policy(), self.conditions.threat
        objective = PolicyLoss(norm=threat.norm, eps=threat.eps, gamma_0=self._crossing().gamma, steps=self.size.steps)
        train(model, objective, self.pair.learnt, self.size.policy, device=self.conditions.device,
              out=self.out / "policy", facts={"arch": "adaptive-smoothing", "rule": self.size.trust})
        judged = {"accurate": self.pair.accurate, "robust": self.pair.robust, "adaptive": model}
        local_figures.aimed_rows(self.out / "targets", self.rules.aim(), judged, self.pair.test, self.conditions,
                                 self.size.steps)

    def _fresh_policy(self) -> AdaptiveSmoothing:
        pair, size = self.pair, self.size
        return AdaptiveSmoothing(pair.accurate, pair.robust, example=self.rules.few(pair.held_out, 2), width=size.width,
                                 seed=self.conditions.seed, trust=size.trust, norm=self.conditions.threat.norm)

    def _kept_policy(self) -> AdaptiveSmoothing | None:
        """The policy of this study, if it has been learnt."""
        folder = self.out / "policy"
        if not (folder / "summary.json").exists():
            return None
        return local_figures.with_weights(self._fresh_policy(), folder / "last.safetensors").to(self.conditions.device)

    def _learnt(self) -> AdaptiveSmoothing:
        model = self._kept_policy()
        if model is None:
            raise checks.InputError("`part` must come after the part policy, which this study has not done yet")
        return model

    def _radii(self) -> None:
        """Other radii than the one it was trained for [Bai2022, Figure 8]."""
        judged, threat = {"robust": self.pair.robust, "adaptive": self._learnt()}, self.conditions.threat
        attack: Attack = partial(pgd, steps=self.size.long[0])
        subjects = {factor: [Job(name, model, f"eps {threat.eps * factor:.4g}", attack)
                             for name, model in judged.items()] for factor in sorted({1.0, *self.size.eps_factors})}
        began = time.monotonic()
        run = self._open("radii", [subject for some in subjects.values() for subject in some], self.pair.test)
        rows: list[Row] = []
        for factor, some in subjects.items():
            wider = dataclasses.replace(self.conditions, threat=Threat(threat.norm, threat.eps * factor))
            rows = self._measure(run, some, self.pair.test, wider)
        run.summarise("evaluate", time.monotonic() - began, summary.results(rows, None))

    def _auto(self) -> None:
        """AutoAttack through the policy on a few images, which the paper did not run."""
        judged = {"accurate": self.pair.accurate, "robust": self.pair.robust, "adaptive": self._learnt()}
        few = self.pair.test.slice(0, min(self.size.auto, len(self.pair.test)))
        auto = Suite(tuple(VERSIONS[self.size.version]()))
        attacks: dict[str, Attack] = {"clean": untouched, "auto": auto}
        # Casts on the fly would not reach the gradients that the rule itself is made of.
        exact = dataclasses.replace(self.conditions, precision="fp32")
        self._part("auto", [Job(name, model, attack, run) for name, model in judged.items()
                            for attack, run in attacks.items()], few, exact)

    def _gradients(self) -> None:
        """‖∇g_i‖ and ‖∇h_i‖, clean and attacked [Bai2022, Figures 2, 3, 10]."""
        local_figures.gradients(self.out / "arrays.npz", self.pair.accurate, self.pair.robust, self.pair.test,
                                self.conditions, self.size.steps)


Study = LocalSmoothingStudy
