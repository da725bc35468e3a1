"""Adaptive smoothing on any pair: a gate is trained, four kinds of mixtures are matched, and all are attacked.

The story of [Bai2024], sections 4 and 5.2, appendices C.2 and D.1, and one combination that the papers do not have: the
gate over the map of MixedNUTS. Parts can be told one at a time, repeated and resumed; the page shows those that are
there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from equipoise import reporting
from equipoise.attacks import pgd
from equipoise.core import checks, records, summary
from equipoise.core.records import Row, Run
from equipoise.core.threat import Threat
from equipoise.data import Dataset, pixels
from equipoise.evaluation import Conditions, Job, facts, untouched
from equipoise.evaluation.gate_adversaries import adversaries, joint, leads, witnessed
from equipoise.fitting.selection import shift_for
from equipoise.mixing import GatedClassifier, MixedClassifier, new_gate
from equipoise.mixing.gate import load_gate, save_gate
from equipoise.models import model_identity
from equipoise.studies.adaptive_choice import FIXED, GATED, KINDS, MixtureStore
from equipoise.studies.adaptive_size import BEST, SHIFTS, AdaptiveStudySize
from equipoise.studies.adaptive_size import SIZES as SIZES
from equipoise.studies.local_pair import Pair
from equipoise.training import TrainingPlan, train
from equipoise.training.objectives.gate import GateLoss

PARTS = ("train", "choose", "adversaries", "aimed", "trade-off", "settings", "ablation")
SETTING = "C"  # of the gate that is compared; the others are for the table of settings


class AdaptiveSmoothingStudy:
    """The parts of the story; each can be told again at no cost."""

    def __init__(self, run: Run, pair: Pair, size: AdaptiveStudySize, conditions: Conditions) -> None:
        self.run, self.out, self.pair = run, run.folder, pair
        self.size, self.conditions = size, conditions
        self.test = pair.test.slice(0, min(size.tested, len(pair.test)))
        for base in (pair.accurate, pair.robust):
            base.to(conditions.device).eval().requires_grad_(False)
        self.shelf = MixtureStore(self.out / "mixtures", pair, size, conditions)
        self.began = time.monotonic()

    def tell(self, parts: Sequence[str]) -> Path:
        """Do the parts, then write the page of all that is there."""
        for part in PARTS:
            if part in parts:
                getattr(self, f"_{part.replace('-', '_')}")()
        bases = {"accurate": self.pair.accurate, "robust": self.pair.robust}
        steep = partial(pgd, steps=self.size.pgd)
        self._measure(self.run, [Job(name, model, attack, how) for name, model in bases.items()
                                 for attack, how in (("clean", untouched), ("B", steep))], self.test)
        rows, threat = self.run.finish(), self.conditions.threat
        told: dict[str, Any] = {"bounds": _bounds(rows, threat), "joint": joint(rows, threat)}
        if found := self.shelf.told():
            told["matched"] = found
        if lined := self._lined():
            told["leads"] = leads([*rows, *lined], GATED, FIXED)
        pairs = [("gate", "plain"), ("gate", "MixedNUTS"), ("gate on MixedNUTS", "MixedNUTS"), ("gate", "robust")]
        self.run.summarise("reproduce", time.monotonic() - self.began, summary.results(rows, threat),
                           study="adaptive-smoothing", differences=summary.differences(rows, pairs, threat), **told)
        return reporting.write(self.out)

    def _measure(self, run: Run, subjects: Sequence[Job], data: Dataset) -> list[Row]:
        for subject in subjects:
            subject.model.to(self.conditions.device)
            witnessed(subject, data, run, self.conditions)
        return run.finish()

    def _part(self, name: str, subjects: Sequence[Job], **more: object) -> None:
        """A run folder of its own with these subjects."""
        began, data, threat = time.monotonic(), self.test, self.conditions.threat
        models = {subject.name: subject.model for subject in subjects}  # a digest each, not one for every attack
        identity = {"verb": "evaluate", "part": name, "seed": self.conditions.seed,
                    "models": {known: model_identity(model) for known, model in models.items()},
                    "attacks": sorted({str(subject) for subject in subjects}),
                    "data": data.facts(),
                    "threat": threat.facts()}
        run = Run(self.out / name, identity, facts(self.conditions))
        rows = self._measure(run, subjects, data)
        run.summarise("evaluate", time.monotonic() - began, summary.results(rows, threat),
                      bounds=_bounds(rows, threat), joint=joint(rows, threat), **more)

    def _train(self) -> None:
        """The gate, against the strongest training attacks."""
        self._learnt(SETTING, self.size.plan, "gates", GateLoss(adversary=SETTING, **self._threat()))

    def _threat(self) -> dict[str, Any]:
        threat = self.conditions.threat
        c_ce, c_bce, c_prod = BEST
        return {"norm": threat.norm, "eps": threat.eps, "steps": self.size.steps, "c_ce": c_ce, "c_bce": c_bce,
                "c_prod": c_prod}

    def _learnt(self, name: str, plan: TrainingPlan, shelf: str, objective: GateLoss) -> GatedClassifier:
        """A gate trained by this objective, now or in an earlier sitting, over all of (0, 1)."""
        pair, path = self.pair, self.out / shelf / f"{name}.safetensors"
        if not path.exists():
            model = self._fresh()
            train(model, objective, pair.remembered, plan, device=self.conditions.device,
                  out=self.out / f"{shelf}-{name}", facts={"arch": "gated"})
            path.parent.mkdir(exist_ok=True)
            save_gate(path, model.network, pair.accurate, pair.robust, {"objective": repr(objective)})
        gate = load_gate(path, pair.accurate, pair.robust)
        return GatedClassifier(pair.accurate, pair.robust, gate).to(self.conditions.device).eval()

    def _fresh(self) -> GatedClassifier:
        pair, size = self.pair, self.size
        example = pixels(pair.held_out.images[:2].to(self.conditions.device))
        gate = new_gate(pair.accurate, pair.robust, example, width=size.width, momentum=size.momentum,
                        seed=self.conditions.seed)
        return GatedClassifier(pair.accurate, pair.robust, gate).to(self.conditions.device)

    def _gate(self) -> GatedClassifier:
        if not (self.out / "gates" / f"{SETTING}.safetensors").exists():
            raise checks.InputError("`part` must come after the part train, which this study has not done yet")
        return self._learnt(SETTING, self.size.plan, "gates", GateLoss(adversary=SETTING, **self._threat()))

    def _choose(self) -> None:
        """The mixtures that are compared."""
        self.shelf.choose(self._gate, [self.size.keep])

    def _adversaries(self) -> None:
        """All four kinds and both bases under A to D and under transfer attacks."""
        stages = self.size.version()
        for name, model in {"accurate": self.pair.accurate, "robust": self.pair.robust}.items():
            self._measure(self.run, adversaries(name, model, stages, steps=self.size.pgd), self.test)
        for kind in KINDS:
            self._measure(self.run, adversaries(kind, self.shelf.kept(kind), stages, steps=self.size.pgd), self.test)

    def _aimed(self) -> None:
        """Attacks that ignore the gate and aim at one fixed alpha."""
        size = self.size
        listed = [adversaries(kind, self.shelf.kept(kind), (), steps=size.pgd, targets=size.targets) for kind in KINDS]
        self._part("aimed", [subject for some in listed for subject in some if subject.alpha is not None])

    def _trade_off(self) -> None:
        """Clean accuracy, C and D at several shares of h's robustness: lines of fixed mixtures, then more gates."""
        for name, kinds, shares in (("trade-off", FIXED, self.size.keeps),
                                    ("trade-off-gates", GATED, self.size.gate_keeps)):
            self.shelf.choose(self._gate, shares, kinds)
            listed = [adversaries(f"{kind}, {share:g}", self.shelf.kept(kind, share), self.size.version(),
                                  transfer=False) for kind in kinds for share in shares]
            subjects = [subject for some in listed for subject in some if subject.attack in ("clean", "C", "D")]
            if subjects:
                self._part(name, subjects)

    def _lined(self) -> list[Row]:
        """Rows of the fixed mixtures at other shares."""
        return records.read(self.out / "trade-off") if (self.out / "trade-off" / "summary.json").exists() else []

    def _settings(self) -> None:
        """Gates trained against A, B and C under all four adversaries [Bai2024, Tables 2 and 3], over all of (0, 1)."""
        subjects: list[Job] = []
        for setting in self.size.settings:
            model = self._learnt(setting, self.size.plan, "gates", GateLoss(adversary=setting, **self._threat()))
            subjects += adversaries(f"trained against {setting}", model, self.size.light(), steps=self.size.pgd,
                                    transfer=False)
        self._part("settings", subjects)

    def _ablation(self) -> None:
        """Loss weights [Bai2024, Table 6] and the scale before the sigmoid [Table 7], at one clean accuracy."""
        arena, pair = self.shelf.arena(), self.pair
        g, h, *fixed = [self.shelf.placed(MixedClassifier(pair.accurate, pair.robust, alpha))
                        for alpha in (0.0, 1.0, *self.size.plain)]
        seen = arena.look(g)

        def answered(model: MixedClassifier) -> float:
            return float(seen.right(model).float().mean())

        clean = (answered(g) + answered(h)) / 2
        made = {"constant": next((each for each in reversed(fixed) if answered(each) >= clean), fixed[0])}
        for weights in self.size.weights:
            name = "c_CE {:g}, c_BCE {:g}, c_prod {:g}".format(*weights)
            threat = self._threat() | dict(zip(("c_ce", "c_bce", "c_prod"), weights, strict=True))
            threat["steps"] = self.size.ablation_steps
            model = self._learnt("-".join(f"{w:g}" for w in weights), self.size.ablation, "ablation-gates",
                                 GateLoss(adversary="B", **threat))
            said = arena.look(model)
            made[name] = shift_for(model, said, clean, SHIFTS)
            if weights == BEST:
                for scale in self.size.scales:
                    scaled = model.with_range(0.0, 1.0, scale=scale)
                    made[f"scale {scale:g}"] = shift_for(scaled, said, clean, SHIFTS)
        steep = partial(pgd, steps=self.size.pgd)
        self._part("ablation", [Job(name, model, kind, how) for name, model in made.items()
                                for kind, how in (("clean", untouched), ("B", steep))], clean_target=clean)


def _bounds(rows: Sequence[Row], threat: Threat) -> list[Row]:
    """Results of a perfect gate on the very images that each result was measured on [Bai2024, Theorem 4.1]."""
    seen = [{**row, "correct": row["possible"]} for row in rows if "possible" in row]
    return [row for row in summary.results(seen, threat) if row["metric"] != "worst"]


Study = AdaptiveSmoothingStudy
