"""The study of adaptive smoothing [Bai2024, Sections 4 and 5.2, Appendices C.2 and D.1] on any two
models.

A gate is trained, four mixtures are selected to be equally robust, and all are attacked. The
confidence switch, and the gate on it, are not in the papers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import nn

from equipoise.attacks import Apgd, Clean, Pgd, Suite, TargetedApgd, fast
from equipoise.core import aggregation, records
from equipoise.core.records import Run
from equipoise.core.results import CrossingSummary
from equipoise.core.rows import AttackRow, Row
from equipoise.data import Dataset, pixels
from equipoise.evaluation import Conditions, Job
from equipoise.evaluation.adaptive import ADAPTIVE_VERSION
from equipoise.evaluation.gate_adversaries import (
    adversaries,
    joint_results,
    leads,
    measure_with_alpha,
)
from equipoise.fitting.gated import CANDIDATE_ATTACK
from equipoise.fitting.selection import shift_for
from equipoise.mixing import GatedClassifier, MixedClassifier, load_gate, new_gate, save_gate
from equipoise.studies import fixed_alpha
from equipoise.studies.adaptive_mixtures import (
    FIXED,
    GATED,
    MIXTURES,
    SWITCH,
    MixtureStore,
    SelectionSize,
)
from equipoise.studies.overview import Requirements
from equipoise.studies.settings import StudySettings
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
from equipoise.training.objectives.gate import ADVERSARIES, GATE_PLAN, GateLoss

COMPARED = "C"  # training adversary of the gate that is compared
BEST_WEIGHTS = (0.0, 1.5, 0.2)  # c_CE, c_BCE, c_prod [Bai2024, Table 6]
FULL_PLAN = replace(GATE_PLAN, flip=True, save_seconds=60, precision="bf16")
SMOKE_PLAN = TrainingPlan(
    epochs=4,
    batch_size=64,
    optimizer="adamw",
    lr=5e-3,
    weight_decay=1e-5,
    warmup=0.3,
    ema=0.8,
    clip=10.0,
    held_out=0,
)


@dataclass(frozen=True)
class AdaptiveStudySize:
    """How much is computed; the defaults are the full size."""

    gate_plan: TrainingPlan = FULL_PLAN
    gate_width: int = 96
    gate_momentum: float = 0.05
    gate_steps: int = 15  # of the training attacks; the paper has 75
    training_adversaries: tuple[str, ...] = ADVERSARIES
    selection: SelectionSize = field(default_factory=SelectionSize)
    fixed_keeps: tuple[float, ...] = (
        0.8,
        0.87,
        0.97,
    )  # further shares, for the trade-off of mixtures without a gate
    gate_keeps: tuple[float, ...] = (0.97,)  # and of those with one
    suite: Suite = field(default_factory=fast)  # adversaries C and D
    short_suite: Suite = CANDIDATE_ATTACK  # C and D on gates trained against other adversaries
    pgd_steps: int = 20
    target_alphas: tuple[float, ...] = (0.0, 0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
    ablation_plan: TrainingPlan = field(default_factory=lambda: replace(FULL_PLAN, epochs=1))
    ablation_steps: int = 8
    ablation_weights: tuple[tuple[float, float, float], ...] = tuple(
        (c_ce, round(1.5 - c_ce, 1), c_prod)
        for c_prod in (0.0, 0.1, 0.2)
        for c_ce in (0.0, 0.5, 1.0, 1.5)
    )
    ablation_scales: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    ablation_shifts: tuple[float, ...] = tuple(round(-8 + 0.1 * step, 1) for step in range(161))
    sweep_alphas: tuple[float, ...] = (
        0.0,
        0.2,
        0.4,
        0.45,
        0.5,
        0.55,
        0.6,
        0.7,
        0.8,
        0.9,
        0.95,
        1.0,
    )
    transfer_gammas: tuple[float, ...] = (
        0.0,
        0.1,
        1.0,
        3.0,
        10.0,
        30.0,
        100.0,
        300.0,
        1000.0,
        3000.0,
        math.inf,
    )
    margin_steps: int = 100  # of the APGD attacks that look for the smallest margin
    margin_targets: int = 9
    test_images: int = 1000
    batch_size: int = 500


SMOKE = AdaptiveStudySize(
    gate_plan=SMOKE_PLAN,
    gate_width=8,
    gate_momentum=0.1,
    gate_steps=8,
    fixed_keeps=(0.8,),
    gate_keeps=(),
    selection=SelectionSize(
        keep=0.95,
        plain_alphas=tuple(round(0.5 + 0.02 * step, 2) for step in range(25)),
        switch_thresholds=tuple(round(0.05 * step, 2) for step in range(1, 20)),
        gate_thresholds=(0.0, 0.1, 0.25, 0.5, 0.75, 0.95),
        rounds=3,
        map_steps=10,
        map_targets=3,
        attack=Suite(attacks=(Apgd(loss="margin", steps=10), TargetedApgd(steps=8, ranks=(1, 2)))),
    ),
    target_alphas=(0.0, 0.5, 0.8, 0.95, 1.0),
    ablation_plan=replace(SMOKE_PLAN, epochs=2),
    ablation_steps=4,
    sweep_alphas=(0.0, 0.3, 0.5, 0.6, 0.8, 1.0),
    transfer_gammas=(0.0, 0.1, 1.0, 10.0, 100.0, math.inf),
    margin_steps=20,
    margin_targets=3,
    test_images=120,
    batch_size=240,
)


class AdaptiveSmoothingStudy(Study):
    """A gate against mixtures with one alpha, under every adversary."""

    name = "adaptive-smoothing"
    paper = (
        "Improving the accuracy-robustness trade-off of classifiers via adaptive smoothing [Bai2024]: sections 4 "
        "and 5, appendices C.2 and D.1"
    )
    requirements: ClassVar = {
        "smoke": smoke_requirements("6 minutes"),
        "full": Requirements(
            data=ANY_DATA,
            models=PAIR,
            device=GPU,
            time="by part below, on an H200; settings "
            "with --gate-epochs 2, and like ablation beside another job",
        ),
    }
    minutes: ClassVar = {
        "train": 6.2,
        "choose": 4.8,
        "adversaries": 4.1,
        "settings": 6.1,
        "ablation": 5.9,
    }
    own_settings = ("gate_epochs",)
    sizes: ClassVar = {"smoke": SMOKE, "full": AdaptiveStudySize()}
    compared = (("gate", "plain"), ("gate", SWITCH), (GATED[1], SWITCH), ("gate", "robust"))

    def __init__(
        self, main_run: Run, pair: Pair, size: AdaptiveStudySize, conditions: Conditions
    ) -> None:
        super().__init__(main_run, pair, size, conditions)
        self.size = size
        self.test = pair.test.slice(0, min(size.test_images, len(pair.test)))
        self.mixtures = MixtureStore(
            self.folder / "mixtures", pair, size.selection, conditions, self._compared_gate
        )

    @classmethod
    def size_for(cls, settings: StudySettings) -> AdaptiveStudySize:
        """The size, with the epochs of a gate that were given."""
        size: AdaptiveStudySize = super().size_for(settings)
        return replace(
            size,
            gate_plan=replace(size.gate_plan, epochs=settings.gate_epochs or size.gate_plan.epochs),
        )

    @classmethod
    def identity(cls, settings: StudySettings) -> dict[str, Any]:
        """That of any study, the version of the lists that C and D are, and the epochs of a gate if
        given."""
        given = {} if settings.gate_epochs is None else {"gate_epochs": settings.gate_epochs}
        return {**super().identity(settings), "adaptive_attacks": ADAPTIVE_VERSION, **given}

    def measure(self, job: Job, data: Dataset, run: Run, conditions: Conditions) -> None:
        """Attack every image that the run has no row for; rows also hold alpha and the result of an
        oracle gate."""
        measure_with_alpha(job, data, run, conditions)

    def main_jobs(self) -> list[Job]:
        """Both models, clean and under adversary B; the part `adversaries` adds the others."""
        return self._pgd_jobs(self.pair.models)

    def _pgd_jobs(self, models: Mapping[str, nn.Module]) -> list[Job]:
        return jobs_for(models, {"clean": Clean(), "B": Pgd(steps=self.size.pgd_steps)})

    def sections(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Accuracies of an oracle gate on the attacked images [Bai2024, Theorem 4.1], and under C
        and D together."""
        oracle = [
            replace(row, correct=row.oracle_correct)
            for row in rows
            if isinstance(row, AttackRow) and row.oracle_correct is not None
        ]
        bounds = aggregation.accuracies(oracle, self.conditions.threat)
        return {
            "oracle_gate": tuple(result for result in bounds if result.metric != aggregation.WORST),
            "joint": tuple(joint_results(rows, self.conditions.threat)),
        }

    def main_sections(self, rows: Sequence[Row]) -> dict[str, Any]:
        """The selected mixtures, and the lead of those with a gate."""
        trade_off = (
            records.read_rows(self.folder / "trade-off") if self.is_finished("trade-off") else []
        )
        return {
            "selections": self.mixtures.selections(),
            "leads": tuple(leads([*rows, *trade_off], GATED, FIXED)) if trade_off else (),
        }

    def _compared_gate(self) -> GatedClassifier:
        require_part((self.folder / "gates" / f"{COMPARED}.safetensors").exists(), "train")
        return self.train_gate()

    def train_gate(self, adversary: str = COMPARED) -> GatedClassifier:
        """Train a gate against an adversary, by default the one with the strongest attacks."""
        return self._fit_gate(
            "gates", adversary, self.size.gate_plan, adversary, self.size.gate_steps, BEST_WEIGHTS
        )

    def _fit_gate(
        self,
        group: str,
        name: str,
        plan: TrainingPlan,
        adversary: str,
        steps: int,
        weights: tuple[float, float, float],
    ) -> GatedClassifier:
        """A gate trained against an adversary, now or in an earlier run, with alpha in all of (0,
        1)."""
        pair, size, device, threat = (
            self.pair,
            self.size,
            self.conditions.device,
            self.conditions.threat,
        )
        path = self.folder / group / f"{name}.safetensors"
        if not path.exists():
            objective = GateLoss(
                adversary=adversary,
                norm=threat.norm,
                eps=threat.eps,
                steps=steps,
                c_ce=weights[0],
                c_bce=weights[1],
                c_prod=weights[2],
            )
            gate = new_gate(
                pair.accurate,
                pair.robust,
                pixels(pair.held_out.images[:2].to(device)),
                width=size.gate_width,
                momentum=size.gate_momentum,
                seed=self.conditions.seed,
            )
            model = GatedClassifier(pair.accurate, pair.robust, gate).to(device)
            fit_model(
                model,
                objective,
                pair.training,
                replace(plan, seed=self.conditions.seed),
                device=device,
                out=self.folder / f"{group}-{name}",
                metadata={"arch": "gated"},
            )
            path.parent.mkdir(exist_ok=True)
            save_gate(
                path, model.network, pair.accurate, pair.robust, {"objective": repr(objective)}
            )
        gate = load_gate(path, pair.accurate, pair.robust)
        return GatedClassifier(pair.accurate, pair.robust, gate).to(device).eval()

    def select_mixtures(self) -> None:
        """Select the mixtures that are compared."""
        self.mixtures.select([self.size.selection.keep])

    def measure_adversaries(self) -> None:
        """Both models and all mixtures under adversaries A to D and under transferred attacks."""
        models = {**self.pair.models, **{name: self.mixtures.load(name) for name in MIXTURES}}
        for name, model in models.items():
            for job in adversaries(name, model, self.size.suite, steps=self.size.pgd_steps):
                self.measure(job, self.test, self.main_run, self.conditions)

    def measure_target_alphas(self) -> None:
        """Attack all mixtures at fixed target alphas, without the gate."""
        jobs = [
            job
            for name in MIXTURES
            for job in adversaries(
                name,
                self.mixtures.load(name),
                self.size.suite,
                steps=self.size.pgd_steps,
                targets=self.size.target_alphas,
            )
        ]
        self.measure_part("aimed", [job for job in jobs if job.alpha is not None])

    def measure_trade_off(self) -> None:
        """Clean accuracy, C and D at several shares of the robust model's accuracy, without and
        with a gate."""
        for part, names, shares in (
            ("trade-off", FIXED, self.size.fixed_keeps),
            ("trade-off-gates", GATED, self.size.gate_keeps),
        ):
            self.mixtures.select(shares, names)
            jobs = [
                job
                for name in names
                for share in shares
                for job in adversaries(
                    f"{name}, {share:g}",
                    self.mixtures.load(name, share),
                    self.size.suite,
                    transfer=False,
                )
                if job.attack_name in ("clean", "C", "D")
            ]
            if jobs:
                self.measure_part(part, jobs)

    def compare_training_adversaries(self) -> None:
        """Gates trained against A, B and C under all four adversaries [Bai2024, Tables 2 and 3]."""
        self.measure_part(
            "settings",
            [
                job
                for adversary in self.size.training_adversaries
                for job in adversaries(
                    f"trained against {adversary}",
                    self.train_gate(adversary),
                    self.size.short_suite,
                    steps=self.size.pgd_steps,
                    transfer=False,
                )
            ],
        )

    def measure_ablation(self) -> None:
        """Loss weights [Bai2024, Table 6] and the scale before the sigmoid [Table 7], at one clean
        accuracy.

        The clean accuracy is the mean of those of both models on held-out images; `constant` is the
        plain mixture with the largest alpha that reaches it.
        """
        size, store = self.size, self.mixtures
        accurate, robust, *plain = (
            store.mixture(alpha) for alpha in (0.0, 1.0, *size.selection.plain_alphas)
        )
        logits = store.evaluator.clean(accurate)

        def accuracy(model: MixedClassifier) -> float:
            return float(logits.correct(model).float().mean())

        target = (accuracy(accurate) + accuracy(robust)) / 2
        models = {
            "constant": next(
                (model for model in reversed(plain) if accuracy(model) >= target), plain[0]
            )
        }
        for weights in size.ablation_weights:
            gate = self._fit_gate(
                "ablation-gates",
                "-".join(f"{weight:g}" for weight in weights),
                size.ablation_plan,
                "B",
                size.ablation_steps,
                weights,
            )
            outputs = store.evaluator.clean(gate)
            gates = {"c_CE {:g}, c_BCE {:g}, c_prod {:g}".format(*weights): gate}
            if weights == BEST_WEIGHTS:
                gates |= {
                    f"scale {scale:g}": gate.with_range(0.0, 1.0, scale=scale)
                    for scale in size.ablation_scales
                }
            models |= {
                name: shift_for(gate, outputs, target, size.ablation_shifts)
                for name, gate in gates.items()
            }
        self.measure_part("ablation", self._pgd_jobs(models), clean_target=target)

    def measure_alphas(self) -> None:
        """Plain mixing at every alpha, clean and under attacks on either model and on the mixture
        [Figure 4]."""
        self.measure_part(
            "alphas",
            fixed_alpha.sweep_jobs(
                self.pair, self.test, self.size.sweep_alphas, self.size.pgd_steps, self.conditions
            ),
        )

    def measure_transfer(self) -> None:
        """Both models on images of attacks on the mixture at several target alphas [Figure 2]."""
        start_time, gammas = time.monotonic(), self.size.transfer_gammas
        jobs = fixed_alpha.transfer_jobs(self.pair, gammas, self.size.pgd_steps, self.conditions)
        run = self.open_part("transfer", jobs, self.test)
        for job in jobs:
            self.measure(job, self.test, run, self.conditions)
        point = fixed_alpha.transfer_crossing(run.finish(), self.pair, gammas, self.conditions.seed)
        self.write_summary(
            run,
            start_time,
            crossing=CrossingSummary(
                gamma=point.gamma, low=point.low, high=point.high, met=point.exists
            ),
        )

    def measure_confidence(self) -> None:
        """Gaps between the first two probabilities of both models, of correct and of wrong
        predictions [Table 1]."""
        self.measure_part(
            "confidence",
            fixed_alpha.confidence_jobs(
                self.pair, self.size.pgd_steps, self.size.margin_steps, self.size.margin_targets
            ),
        )

    parts: ClassVar = {
        "alphas": measure_alphas,
        "transfer": measure_transfer,
        "confidence": measure_confidence,
        "train": train_gate,
        "choose": select_mixtures,
        "adversaries": measure_adversaries,
        "aimed": measure_target_alphas,
        "trade-off": measure_trade_off,
        "settings": compare_training_adversaries,
        "ablation": measure_ablation,
    }
