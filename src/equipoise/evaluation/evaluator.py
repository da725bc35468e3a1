"""Clean and attacked accuracy of models on the same images: the public function `evaluate`."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from equipoise.attacks import ATTACKS, EOT, MAX_PASSES, REPEATS, Attack, BatchAttack
from equipoise.core import aggregation, checks, format, parallel, progress
from equipoise.core.device import PRECISIONS, attack_batch_setting, attack_batch_size, resolve
from equipoise.core.modes import outside_inference_mode
from equipoise.core.notebook import NotebookResult
from equipoise.core.promises import Target
from equipoise.core.radius_curves import RadiusCurve
from equipoise.core.records import Run, nothing_left_on_refusal
from equipoise.core.results import BrokenCount, ClassAccuracy, Result, Summary
from equipoise.core.rows import Row
from equipoise.core.settings import Settings, setting, split
from equipoise.core.threat import Threat, require_threat
from equipoise.data import Dataset, class_share_notes
from equipoise.evaluation import adversarial, alpha_sweep
from equipoise.evaluation.adaptive import KINDS, OWN_GRADIENTS
from equipoise.evaluation.adversarial import AdversarialImages
from equipoise.evaluation.alpha_sweep import AlphaSweep
from equipoise.evaluation.audit import AUDITED, COUNT, audit_results
from equipoise.evaluation.given_models import Models, load_models, load_one
from equipoise.evaluation.job import (
    MODEL,
    Conditions,
    Job,
    check_common,
    check_models,
    images_for,
    open_run,
)
from equipoise.evaluation.lipschitz_estimates import estimate_lipschitz, estimate_table
from equipoise.evaluation.measure import measure
from equipoise.evaluation.plan import SOURCES, Attacks, EvaluationPlan, select_attacks
from equipoise.evaluation.random_search import random_search_notes
from equipoise.evaluation.sanity_checks import check_jobs
from equipoise.evaluation.stage_log import remove_stage_logs
from equipoise.local_smoothing.smoothing import SPACES, TRUSTS
from equipoise.models import LoadOptions, name_failing_model

ATTACK_SETTINGS = ("steps", "restarts", "eot", "repeats")


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings(Settings):
    """How models are evaluated; the fields are the options of `equipoise evaluate`."""

    attack: str = setting(
        "fast",
        f"Attack: {', '.join(ATTACKS.builtin)}, or one that an installed package adds; "
        "several with commas, such as fast,square. minimum-norm finds the smallest radius "
        "of every image, up to eps.",
    )
    steps: int | None = setting(None, "Gradient steps of the attack.", least=1)
    restarts: int | None = setting(None, "Random starts per image.", least=1, most=1000)
    eot: int | None = setting(
        None,
        f"Passes that each gradient is averaged over, for a randomised model; {EOT} for rand.",
        least=1,
        most=MAX_PASSES,
    )
    repeats: int | None = setting(
        None,
        "Passes over each attacked image, for a randomised model: its accuracy is the "
        f"mean share of correct passes; {REPEATS} for rand.",
        least=1,
        most=MAX_PASSES,
    )
    audit: int | None = setting(
        None,
        f"Images that survive the attack {AUDITED} and are then attacked by standard, "
        f"which bounds the difference between both; {COUNT} if not given, 0 for none.",
        least=0,
        most=1_000_000,
    )
    source: str = setting(
        "mix",
        "Model that gives the gradients of an attack on a mixture: std (the accurate base), "
        "rob (the robust base) or mix. Adaptive attacks come beside it, unless adaptive is "
        "none.",
        among=SOURCES,
    )
    adaptive: str = setting(
        "surrogate",
        "Adaptive attacks on a mixture: surrogate, through, "
        f"{OWN_GRADIENTS} (weak where they are hidden), several as "
        f"surrogate,{OWN_GRADIENTS}, or none, which is {OWN_GRADIENTS} alone.",
    )
    stand_in: str | None = setting(
        None, "Differentiable model in place of an accurate base without gradients."
    )
    alphas: str | tuple[float, ...] | None = setting(
        None,
        "Evaluate a mixture, or the accurate and the robust MODEL in this order, at each of these weights of the "
        "robust side, such as 0.5,0.6: under PGD on the accurate base (std), on the robust base (rob), and under "
        "the attack on the mixture itself (mix).",
    )
    smoothing: str | None = setting(
        None,
        "With alphas, a rule of local smoothing at strength alpha/(1 - alpha) in "
        "place of mixing probabilities: averaged (Eq. (3.2), (3.3) of the paper), added "
        "(3.1), or binary (2.1, for two classes).",
        among=alpha_sweep.SMOOTHINGS,
    )
    trust: str = setting("constant", f"Trust term of the rule: {', '.join(TRUSTS)}.", among=TRUSTS)
    space: str = setting("logits", "What the rule mixes: logits or probabilities.", among=SPACES)
    estimate: bool = setting(
        False,
        "Also estimate local Lipschitz constants of the robust models in the ball, and the "
        "margins they leave to a mixture; estimates, not certificates.",
    )
    save_adversarial: bool = setting(
        False,
        f"Also write the attacked images: {adversarial.FILE}, and for each model "
        "a .pt file as RobustBench asks for it.",
    )
    batch_size: int | None = attack_batch_setting()
    precision: str = setting("auto", "auto, fp32 or bf16.", among=PRECISIONS)
    seed: int = setting(0, "Random seed.", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        for kind in self.adaptive_kinds():
            checks.one_of("adaptive", kind, (*KINDS, OWN_GRADIENTS, "none"))
            checks.require(
                kind != "none", "adaptive", "be none alone, or without it", self.adaptive
            )
        if self.alphas is None:
            checks.require(
                self.smoothing is None, "smoothing", "come with `alphas`", self.smoothing
            )
        else:
            object.__setattr__(self, "alphas", alpha_sweep.parse_alphas(self.alphas))
            for name, default in (("source", "mix"), ("audit", None), ("save_adversarial", False)):
                value = getattr(self, name)
                checks.require(value == default, name, "be left out with `alphas`", value)
        has_rule = self.smoothing in ("averaged", "added")
        for name, default in (("trust", "constant"), ("space", "logits")):
            value = getattr(self, name)
            checks.require(
                has_rule or value == default,
                name,
                "come with `smoothing`, averaged or added",
                value,
            )

    def adaptive_kinds(self) -> list[str]:
        """The kinds of adaptive attacks."""
        return [] if self.adaptive == "none" else list(dict.fromkeys(self.adaptive.split(",")))


@dataclass(frozen=True)
class RunResults(NotebookResult):
    """Results of a run, its rows, and its folder if one was given."""

    summary: Summary
    rows: list[Row]
    out: Path | None

    @property
    def results(self) -> tuple[Result, ...]:
        """One result per model and metric."""
        return self.summary.results

    def result(self, model: str, metric: str) -> Result:
        """The result of one model and metric, such as ("mixed", "worst") or ("model", "acr")."""
        return self.summary.result(model, metric)

    def to_dict(self) -> dict[str, Any]:
        """As in `summary.json`."""
        return self.summary.to_dict()

    def notebook_content(self) -> tuple[Summary, list[Row], Path | None]:
        """What a notebook shows."""
        return self.summary, self.rows, self.out


@dataclass(frozen=True)
class Evaluation(RunResults):
    """Results of an evaluation; `str()` is the table that the command prints."""

    threat: Threat
    lipschitz: tuple[Result, ...] = ()

    @property
    def radius_curves(self) -> tuple[RadiusCurve, ...]:
        """Accuracy against the radius for every model, after an attack that looks for the smallest
        perturbations."""
        return self.summary.radius_curves

    @property
    def by_class(self) -> list[ClassAccuracy]:
        """Clean accuracy and that in the worst case, for every model and class."""
        return aggregation.by_class(self.rows)

    @property
    def broken_by(self) -> list[BrokenCount]:
        """How many images each stage of each attack broke."""
        return aggregation.broken_by(self.rows)

    def __str__(self) -> str:
        tables = [format.accuracy_table(self.results, str(self.threat))]
        if self.radius_curves:
            tables.append(format.radius_table(self.radius_curves))
        is_sweep = any(result.metric == alpha_sweep.STD for result in self.results)
        text = "\n".join(
            [*tables, *([alpha_sweep.COLUMNS] if is_sweep else []), *format.notes(self.summary)]
        )
        return (
            f"{text}\n\n{estimate_table(self.lipschitz, self.threat)}" if self.lipschitz else text
        )


@name_failing_model
@outside_inference_mode
def evaluate(
    models: Models,
    data: Any,
    *,
    threat: Threat,
    attack: Attacks = "fast",
    out: Path | str | None = None,
    device: str | torch.device = "auto",
    load_options: LoadOptions | None = None,
    stand_in: str | nn.Module | None = None,
    command: str | None = None,
    **settings: Any,
) -> Evaluation:
    """Clean and attacked accuracy of models on the same images.

    A mixture is evaluated beside its two bases, compared with them image by image, and attacked
    adaptively; its cost is measured, whether its promise was kept on these images is said, and
    images that it was fitted on are reported. Several mixtures of one pair come beside its two
    bases, which are measured once. Every attacked model gets sanity checks.

    With `alphas` one mixture, or the accurate and the robust model in this order, is evaluated at
    each of these weights instead: clean, under PGD on either base, whose images serve for all
    alphas, and under the attack on the mixture at this alpha. Rows and results are those of the
    model "mixed" with an alpha.

    Args:
        models: a model or several: torch modules (images in [0, 1] → logits), references such as
            `mixture:DIR`, or a mapping from names to either.
        data: images that no model was tuned on: a `Dataset`, tensors (images, labels), a torch
            dataset or a loader.
        threat: the perturbations that the attacks may use.
        attack: the name of an attack, an :class:`~equipoise.attacks.Attack`, or several of them, as
            a list or as text such as "fast,square"; the worst case is that over all of them.
        out: run folder; the folder of the same evaluation is resumed. Without it nothing is kept.
        device: auto, cpu or cuda.
        load_options: how to load models given by reference, such as the architecture of a `.pt`
            file.
        stand_in: a differentiable model in place of an accurate base without gradients.
        command: recorded in `run.toml`.
        settings: fields of :class:`EvaluationSettings`.
    """
    check_models(models)
    check_common(require_threat(threat), out, device, load_options, command)
    checks.optional("stand_in", stand_in, (str, nn.Module), MODEL)
    options: EvaluationSettings = split(settings, EvaluationSettings)[0]
    checks.require(
        out is not None or not options.save_adversarial, "save_adversarial", "come with `out`", True
    )
    attacks = select_attacks(
        attack, threat.norm, **{name: getattr(options, name) for name in ATTACK_SETTINGS}
    )
    images = images_for(data, models)
    where = resolve(device)
    conditions = Conditions(
        threat, where, options.seed, attack_batch_size(options.batch_size, where), options.precision
    )
    load = replace(
        load_options or LoadOptions(),
        num_classes=images.num_classes,
        image_shape=images.image_shape,
        seed=options.seed,
    )
    stand_in = options.stand_in if stand_in is None else stand_in
    differentiable = None if stand_in is None else load_one(stand_in, load).to(conditions.device)
    named = load_models(models, load, differentiable)
    common: dict[str, Any] = {
        "norm": threat.norm,
        "audit": options.audit,
        "source": options.source,
        "stand_in": differentiable,
        "adaptive": options.adaptive_kinds(),
        "device": conditions.device,
    }
    plan = (
        EvaluationPlan(named, images, attacks, **common)
        if options.alphas is None
        else AlphaSweep(
            named,
            images,
            attacks,
            alphas=alpha_sweep.parse_alphas(options.alphas),
            smoothing=options.smoothing,
            trust=options.trust,
            space=options.space,
            seed=options.seed,
            **common,
        )
    )
    recorded = {"references": list(named), **({} if command is None else {"command": command})}
    with parallel.process_group(conditions.device) as world, run_folder(out) as folder:
        run = open_run(folder, plan.jobs, images, conditions, recorded)
        kept = AdversarialImages(
            run,
            images.image_shape,
            None
            if options.save_adversarial
            else frozenset(images.index[: adversarial.PICTURES].tolist()),
            plan.points(run, conditions),
        )
        note_planned_passes(missing_jobs(plan.jobs, images, run), images)
        overlap, cost = (plan.overlap(), plan.cost(conditions)) if world.is_leader else ({}, [])
        summary = run_jobs(
            plan.jobs,
            images,
            conditions,
            run,
            plan.pairs,
            images=kept,
            overlap=overlap,
            methods=plan.methods(),
            costs=tuple(cost),
            promised=plan.promised(threat, overlap),
        )
        rows = run.finish()
        lipschitz = (
            estimate_lipschitz(plan.robust, images, conditions, folder, rows)
            if options.estimate
            else []
        )
    return Evaluation(summary, rows, None if out is None else Path(out), threat, tuple(lipschitz))


def run_jobs(
    jobs: Sequence[Job],
    data: Dataset,
    conditions: Conditions,
    run: Run,
    pairs: Sequence[tuple[str, str]] = (),
    *,
    command: str = "evaluate",
    start_time: float | None = None,
    images: AdversarialImages | None = None,
    promised: Mapping[tuple[str, str], Target] | None = None,
    **sections: Any,
) -> Summary:
    """Measure all jobs and write the summary; `pairs` of models are compared image by image.

    `promised` is what a fitted mixture may lose against its robust base, by their names. `images`
    keeps attacked images. `start_time` (by :func:`time.monotonic`) is that of a longer command that
    ends here; `sections` are further fields of the :class:`~equipoise.core.results.Summary`.
    """
    start = time.monotonic() if start_time is None else start_time
    run.note_resumed([job.key(index) for job in jobs for index in data.index.tolist()])
    audit_seconds: dict[str, float | None] = dict.fromkeys(map(str, jobs), 0.0)
    keep: dict[str, Any] = {} if images is None else images.callbacks()
    if images is not None and images.keep is None:
        images.check_complete(jobs)
    for job in jobs:
        audit_seconds[str(job)] = measure(job, data, run, conditions, **keep)
    rows = run.finish()
    remove_stage_logs(run)
    sanity_checks = check_jobs(jobs, data, conditions, run, rows)
    summary = Summary(
        command=command,
        seconds=time.monotonic() - start,
        results=tuple(aggregation.accuracies(rows, conditions.threat)),
        differences=tuple(aggregation.differences(rows, pairs, conditions.threat)),
        promises=tuple(aggregation.promise_checks(rows, promised or {}, conditions.threat)),
        sanity_checks=tuple(sanity_checks),
        audits=tuple(audit_results(jobs, rows, audit_seconds, run)),
        as_bytes=tuple(aggregation.as_bytes(rows, conditions.threat)),
        notes=(*class_share_notes(data), *random_search_notes(jobs)),
        radius_curves=tuple(aggregation.radius_curves(rows, conditions.threat.norm)),
        **sections,
    )
    if images is not None:
        adversarial.finish(images, jobs, data, rows, conditions.threat)
    run.write_summary(summary)
    return summary


def missing_jobs(jobs: Sequence[Job], data: Dataset, run: Run) -> list[Job]:
    """The jobs that still have to measure images."""
    indices = data.index.tolist()
    return [job for job in jobs if any(job.key(index) not in run.done for index in indices)]


def note_planned_passes(jobs: Sequence[Job], data: Dataset) -> None:
    """Show how many passes the attacks of these jobs make at most; images that break need fewer."""
    total = 0.0
    for job in jobs:
        total += len(data) * most_passes(job.attack)
        if job.audit is not None:
            total += min(job.audit.count, len(data)) * most_passes(job.audit.attack)
    if total > 0:
        progress.note(f"at most {total / len(data):.0f} passes per image for {len(data)} images")


def most_passes(attack: Attack) -> float:
    """The most network passes with a gradient that an attack makes for one image."""
    if isinstance(attack, BatchAttack) and hasattr(attack, "steps"):
        return float(attack.steps * getattr(attack, "restarts", 1) * (attack.eot or 1))
    return sum(stage.cost * (stage.gradients.eot or 1) for stage in attack.stages())


@contextmanager
def run_folder(out: Path | str | None) -> Iterator[str]:
    """The run folder, which a refusal does not leave behind, or a temporary one, which all
    processes share."""
    if out is not None:
        with nothing_left_on_refusal(out):
            yield str(out)
        return
    with tempfile.TemporaryDirectory() as own:
        yield parallel.gather(own)[0]
        parallel.barrier()
