"""The study of local smoothing [Bai2022; Bai2024, Figure 1] on any two models.

Every rule of the family is compared; then the strength at which the accuracies of both models cross
is found, and a policy is trained that selects a strength for every image.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn

from equipoise import models
from equipoise.attacks import Attack, Clean, Pgd, make_attack
from equipoise.core import aggregation, arrays, checks
from equipoise.core.records import Run
from equipoise.core.results import CrossingSummary
from equipoise.core.rows import Row
from equipoise.core.threat import Threat
from equipoise.data import Dataset
from equipoise.evaluation import Conditions, Job
from equipoise.local_smoothing.crossing import find_crossing
from equipoise.local_smoothing.jacobian import SoftplusSurrogate
from equipoise.local_smoothing.neighbours import Neighbours
from equipoise.local_smoothing.policy import TARGETS, AdaptiveSmoothing
from equipoise.local_smoothing.smoothing import SmoothedClassifier
from equipoise.models import checkpoint
from equipoise.studies import local_rules, theorem_radii
from equipoise.studies.overview import Requirements
from equipoise.studies.study import (
    ANY_DATA,
    GPU,
    PAIR,
    Pair,
    Study,
    jobs_for,
    require_part,
    smoke_requirements,
)
from equipoise.training import TrainingPlan, fit_model
from equipoise.training.objectives.gate import PolicyLoss
from equipoise.training.recorder import LAST

POLICY_PLAN = TrainingPlan(
    epochs=3,
    batch_size=250,
    optimizer="adamw",
    lr=1e-3,
    weight_decay=1e-4,
    held_out=0,
    compile="off",
)

SMOKE_POLICY_PLAN = TrainingPlan(
    epochs=4, batch_size=64, optimizer="adamw", lr=2e-3, weight_decay=1e-4, held_out=0
)
LOSSES = {
    "composite": "composite loss, Eq. (9)",
    "direct": "cross-entropy, Eq. (8)",
    "supervised": "supervised hinge",
}


@dataclass(frozen=True)
class LocalStudySize:
    """How much is computed; the defaults are the full size, as in the papers where they say."""

    neighbours: tuple[int, ...] = (1, 5, 20, 100)
    weighted_neighbours: tuple[int, ...] = (5, 20, 100)
    neighbour_gammas: tuple[float, ...] = (1e-4, 1e-3, 1e-2, 0.1, 10.0)
    weights: tuple[float, ...] = (0.4, 0.7, 0.9, 0.98)  # of the robust model at the median trust
    steps: int = 10
    policy_plan: TrainingPlan = POLICY_PLAN
    policy_images: int = 10_000  # training images at most
    policy_width: int = 64
    loss_plan: TrainingPlan = POLICY_PLAN  # of the policies that compare losses
    policy_trust: str = "top-ratio"  # the fast variant
    long_steps: tuple[int, ...] = (20, 100)
    eps_factors: tuple[float, ...] = (0.5, 0.75, 1.25, 1.5)
    theorem_neighbours: int = 5
    theorem_gammas: tuple[float, ...] = (0.01, 1.0, 100.0)
    theorem_factors: tuple[float, ...] = (
        1e-4,
        1e-3,
        1e-2,
        0.03,
        0.1,
        0.3,
        1.0,
    )  # radii to try, in units of eps
    theorem_images: int = 20
    suite: str = "standard"
    suite_images: int = 200
    batch_size: int = (
        500  # large: the Jacobian of all classes keeps a GPU busy only in large batches
    )


SMOKE = LocalStudySize(
    neighbours=(1, 5, 20),
    weighted_neighbours=(5, 20),
    neighbour_gammas=(1e-2, 0.1, 1.0, 100.0),
    weights=(0.4, 0.75, 0.95),
    policy_width=16,
    long_steps=(20,),
    eps_factors=(0.5, 1.5),
    suite="fast",
    suite_images=40,
    policy_plan=SMOKE_POLICY_PLAN,
    loss_plan=replace(SMOKE_POLICY_PLAN, epochs=2),
    theorem_images=12,
    theorem_gammas=(0.01, 1.0),
    theorem_factors=(1e-3, 1e-2, 0.1, 1.0),
    batch_size=128,
)


class LocalSmoothingStudy(Study):
    """Every rule of local smoothing, the crossing of both models, and the policy."""

    name = "local-smoothing"
    paper = (
        "Avoiding the accuracy-robustness trade-off of classifiers via local adaptive smoothing [Bai2022], and "
        "Figure 1 of [Bai2024]"
    )
    requirements: ClassVar = {
        "smoke": smoke_requirements("under 5 minutes"),
        "full": Requirements(
            data=ANY_DATA,
            models=PAIR,
            device=GPU,
            time="41 minutes for trust, policy, gradients, "
            "radii and auto on an H200; the other parts were not timed",
        ),
    }
    minutes: ClassVar = {"trust": 18, "policy": 7, "auto": 14}
    sizes: ClassVar = {"smoke": SMOKE, "full": LocalStudySize()}
    compared = (("adaptive", "robust"), ("adaptive", "accurate"))

    def __init__(
        self, main_run: Run, pair: Pair, size: LocalStudySize, conditions: Conditions
    ) -> None:
        super().__init__(main_run, pair, size, conditions)
        self.size = size
        self.rules = local_rules.RuleSet(pair, conditions, size.steps)
        self.identities = {name: models.identity(model) for name, model in pair.models.items()}

    def describe_jobs(self, jobs: Sequence[Job], data: Dataset) -> dict[str, Any]:
        """What makes two runs of a part the same; there are hundreds of rules, which are described
        without weights."""
        rules = {
            f"{job.name}@{job.alpha:g}": job.model.describe()
            for job in jobs
            if isinstance(job.model, SmoothedClassifier)
        }
        policy = {
            job.name: models.identity(job.model)
            for job in jobs
            if isinstance(job.model, AdaptiveSmoothing)
        }
        return {
            "command": "evaluate",
            "seed": self.conditions.seed,
            "models": {**self.identities, **policy},
            "rules": rules,
            "attacks": {str(job): job.attack.describe() for job in jobs},
            "data": data.describe(),
            "threat": self.conditions.threat.to_dict(),
        }

    def main_jobs(self) -> list[Job]:
        """Both models, and the adaptive classifier once it is trained [Bai2022, Table 1]."""
        attacks: dict[str, Attack] = {
            "clean": Clean(),
            **{f"pgd-{steps}": Pgd(steps=steps) for steps in self.size.long_steps},
        }
        jobs = jobs_for(self.pair.models, attacks)
        if self.is_finished("policy"):
            adaptive = self._load_policy()
            soft = Pgd(steps=self.size.long_steps[0], surrogate=SoftplusSurrogate(adaptive))
            jobs += jobs_for({"adaptive": adaptive}, {**attacks, "pgd-soft": soft})
        return jobs

    def main_sections(self, rows: Sequence[Row]) -> dict[str, Any]:
        """The crossing, once the policy is trained."""
        return {"crossing": self.measure_crossing() if self.is_finished("policy") else None}

    def compare_neighbours(self) -> None:
        """Eq. (2) with K nearest neighbours as the oracle, unweighted and weighted, against γ
        [Bai2022, Fig. 5, 9]."""
        training, rules, size = self.pair.training, self.rules, self.size
        oracles = [
            *((k, "plain") for k in size.neighbours),
            *((k, "distance") for k in size.weighted_neighbours),
        ]
        jobs = self._base_jobs()
        for k, weights in oracles:
            oracle = Neighbours(
                training.images, training.labels, training.num_classes, k=k, weights=weights
            )
            for gamma in (*size.neighbour_gammas, math.inf):
                attacks: dict[str, Attack] = {"clean": Clean(), "pgd-std": rules.on_accurate}
                if gamma < math.inf or weights == "distance":
                    # Unweighted votes are piecewise constant: without the accurate model they have
                    # no gradient.
                    attacks |= rules.attacks_through(oracle, gamma, "gradient")
                rule = rules.rule(oracle, gamma, "gradient")
                jobs += jobs_for(
                    {f"{k} neighbours, {weights}": rule}, attacks, local_rules.alpha_of(gamma)
                )
        self.measure_part("neighbours", jobs, neighbours=training.describe())

    def _base_jobs(self) -> list[Job]:
        """Both models alone: the ends of every curve."""
        return jobs_for(self.pair.models, {"clean": Clean(), "pgd": Pgd(steps=self.size.steps)})

    def compare_trust_terms(self) -> None:
        """The four trust terms over logits and probabilities [Bai2024, Figure 1]."""
        rules, jobs = self.rules, self._base_jobs()
        terms = ("constant", "gradient", "top-gradient", "ratio")
        for space, trust in itertools.product(("logits", "probabilities"), terms):
            scale = rules.trust_scale(trust, space)
            for gamma in (
                local_rules.gamma_for_weight(weight, scale) for weight in self.size.weights
            ):
                attacks: dict[str, Attack] = {
                    "clean": Clean(),
                    "pgd-std": rules.on_accurate,
                    "pgd-rob": rules.on_robust,
                    **rules.attacks_through(rules.sources["robust"], gamma, trust, space),
                }
                rule = rules.rule(self.pair.robust, gamma, trust, space)
                jobs += jobs_for({f"{trust}, {space}": rule}, attacks, local_rules.alpha_of(gamma))
        self.measure_part("trust", jobs)

    def measure_crossing(self) -> CrossingSummary:
        """γ_0, where the accuracies of both models cross on held-out images [Bai2022, Figure 4]."""
        rows = self._measure_target_strengths("crossing", self.pair.models, self.pair.held_out)
        accurate, robust = (local_rules.correct_at_targets(rows, name) for name in self.pair.models)
        point = find_crossing(TARGETS, accurate, robust, seed=self.conditions.seed)
        return CrossingSummary(gamma=point.gamma, low=point.low, high=point.high, met=point.exists)

    def _measure_target_strengths(
        self, part: str, evaluated: Mapping[str, nn.Module], data: Dataset
    ) -> list[Row]:
        start_time, sources = time.monotonic(), self.rules.sources
        rule = self.rules.rule(
            sources["robust"], 1.0, self.size.policy_trust, accurate=sources["accurate"]
        )
        run = self.open_part(
            part,
            [],
            data,
            rule=rule.describe(),
            steps=self.size.steps,
            targets=list(TARGETS),
            models={name: models.identity(model) for name, model in evaluated.items()},
        )
        local_rules.measure_target_strengths(
            run, rule, evaluated, data, self.conditions, self.size.steps
        )
        return self.write_summary(run, start_time)

    def train_policy(self) -> None:
        """Find the crossing, train the policy, and attack it at fixed target strengths [Bai2022,
        Figure 7]."""
        model = self._fit_policy("policy", "composite", self.size.policy_plan)
        self._measure_target_strengths(
            "targets", {**self.pair.models, "adaptive": model}, self.test
        )

    def _fit_policy(self, folder: str, loss: str, plan: TrainingPlan) -> AdaptiveSmoothing:
        model, threat = self._new_policy(), self.conditions.threat
        objective = PolicyLoss(
            norm=threat.norm,
            eps=threat.eps,
            gamma_0=self.measure_crossing().gamma,
            steps=self.size.steps,
            loss=loss,
        )
        images = self.pair.training.slice(0, min(self.size.policy_images, len(self.pair.training)))
        fit_model(
            model,
            objective,
            images,
            plan,
            device=self.conditions.device,
            out=self.folder / folder,
            metadata={"arch": "adaptive-smoothing", "rule": self.size.policy_trust},
        )
        return model

    def compare_losses(self) -> None:
        """Policies trained by the composite loss and by the two that it combines [Bai2022, Section
        5.3]."""
        trained = {
            text: self._fit_policy(f"policy-{loss}", loss, self.size.loss_plan).eval()
            for loss, text in LOSSES.items()
        }
        attacks: dict[str, Attack] = {
            "clean": Clean(),
            "pgd-std": self.rules.on_accurate,
            "pgd-rob": self.rules.on_robust,
            "pgd": Pgd(steps=self.size.long_steps[0]),
        }
        self.measure_part("losses", jobs_for(trained, attacks))

    def _new_policy(self) -> AdaptiveSmoothing:
        return AdaptiveSmoothing(
            self.pair.accurate,
            self.pair.robust,
            width=self.size.policy_width,
            example=self.rules.first_images(self.pair.held_out, 2),
            seed=self.conditions.seed,
            trust=self.size.policy_trust,
            norm=self.conditions.threat.norm,
        )

    def _load_policy(self) -> AdaptiveSmoothing:
        """The adaptive classifier with the trained policy."""
        require_part(self.is_finished("policy"), "policy")
        path, model = self.folder / "policy" / LAST, self._new_policy()
        weights = checkpoint.read_safetensors(path)[0]
        checks.require(
            weights.keys() == model.state_dict().keys(),
            str(path),
            "hold this classifier",
            len(weights),
        )
        model.load_state_dict(weights)
        return model.eval().to(self.conditions.device)

    def measure_radii(self) -> None:
        """Other radii than the one that the policy was trained for [Bai2022, Figure 8]."""
        start_time, threat, attack = (
            time.monotonic(),
            self.conditions.threat,
            Pgd(steps=self.size.long_steps[0]),
        )
        evaluated = {"robust": self.pair.robust, "adaptive": self._load_policy()}
        jobs = {
            factor: jobs_for(evaluated, {f"eps {threat.eps * factor:.4g}": attack})
            for factor in sorted({1.0, *self.size.eps_factors})
        }
        run = self.open_part("radii", [job for some in jobs.values() for job in some], self.test)
        for factor, some in jobs.items():
            conditions = replace(self.conditions, threat=Threat(threat.norm, threat.eps * factor))
            for job in some:
                self.measure(job, self.test, run, conditions)
        self.write_summary(
            run, start_time, results=tuple(aggregation.accuracies(run.finish(), None))
        )

    def measure_suite(self) -> None:
        """AutoAttack through the policy on a few images, which the paper did not run."""
        evaluated = {**self.pair.models, "adaptive": self._load_policy()}
        images = self.test.slice(0, min(self.size.suite_images, len(self.test)))
        jobs = jobs_for(evaluated, {"clean": Clean(), "auto": make_attack(self.size.suite)})
        # Autocast would not reach the gradients inside the rule.
        self.measure_part("auto", jobs, images, replace(self.conditions, precision="fp32"))

    def measure_gradients(self) -> None:
        """Norms of the gradients of both models, clean and attacked [Bai2022, Figures 2, 3 and
        10]."""
        arrays.save(
            self.folder, local_rules.gradient_norms(self.pair, self.conditions, self.size.steps)
        )

    def estimate_theorem_radii(self) -> None:
        """Radii of Theorem 1 (neighbours) and Theorem 2 (ratio of gradients), with constants found
        by search."""
        start_time, training, size = time.monotonic(), self.pair.training, self.size
        votes = Neighbours(
            training.images, training.labels, training.num_classes, k=size.theorem_neighbours
        )
        images = self.test.slice(0, min(size.theorem_images, len(self.test)))
        named = {
            f"{size.theorem_neighbours} neighbours, plain": (votes, "gradient"),
            "ratio, logits": (self.pair.robust, "ratio"),
        }
        rules = {
            f"{name}, γ = {gamma:g}": self.rules.rule(oracle, gamma, trust)
            for name, (oracle, trust) in named.items()
            for gamma in size.theorem_gammas
        }
        radii = [self.conditions.threat.eps * factor for factor in size.theorem_factors]
        run = self.open_part(
            "theorems",
            [],
            images,
            radii=radii,
            neighbours=training.describe(),
            rules={name: rule.describe() for name, rule in rules.items()},
        )
        results = theorem_radii.measure_estimates(run, rules, images, radii, self.conditions)
        self.write_summary(run, start_time, results=tuple(results))

    parts: ClassVar = {
        "neighbours": compare_neighbours,
        "trust": compare_trust_terms,
        "policy": train_policy,
        "losses": compare_losses,
        "radii": measure_radii,
        "auto": measure_suite,
        "gradients": measure_gradients,
        "theorems": estimate_theorem_radii,
    }
