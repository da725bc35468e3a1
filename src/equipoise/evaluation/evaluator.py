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

from equipoise.attacks import ATTACKS, EOT, MAX_PASSES, REPEATS
from equipoise.core import aggregation, checks, format, parallel, progress
from equipoise.core.device import PRECISIONS, resolve
from equipoise.core.records import Run, nothing_left_on_refusal
from equipoise.core.results import BrokenCount, ClassAccuracy, Result, Summary
from equipoise.core.rows import Row
from equipoise.core.settings import Settings, setting, split
from equipoise.core.threat import Threat
from equipoise.data import Dataset
from equipoise.evaluation import adversarial
from equipoise.evaluation.adaptive import KINDS
from equipoise.evaluation.adversarial import AdversarialImages
from equipoise.evaluation.audit import AUDITED, COUNT, audit_results
from equipoise.evaluation.duplicates import copy_rows, find_duplicates
from equipoise.evaluation.job import MODEL, Conditions, Job, check_common, check_models, images_for, open_run
from equipoise.evaluation.lipschitz_estimates import estimate_lipschitz, estimate_table
from equipoise.evaluation.measure import measure, remove_stage_logs
from equipoise.evaluation.plan import SOURCES, Attacks, EvaluationPlan, select_attacks
from equipoise.evaluation.sanity_checks import check_jobs
from equipoise.evaluation.time_estimate import estimate_time
from equipoise.mixing import load_model
from equipoise.models import LoadOptions, name_failing_model, reference_of

ATTACK_SETTINGS = ("steps", "restarts", "eot", "repeats")
Models = str | nn.Module | Sequence[str | nn.Module] | Mapping[str, str | nn.Module]


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings(Settings):
    """How models are evaluated; the fields are the options of `equipoise evaluate`."""

    attack: str = setting("fast", f"Attack: {', '.join(ATTACKS.builtin)}, or one that an installed package adds; "
                                  "several with commas, such as fast,square.")
    steps: int | None = setting(None, "Gradient steps of the attack.", least=1)
    restarts: int | None = setting(None, "Random starts per image.", least=1, most=1000)
    eot: int | None = setting(None, "Passes that each gradient is averaged over, for a randomised model; "
                              f"{EOT} for rand.", least=1, most=MAX_PASSES)
    repeats: int | None = setting(None, "Passes over each attacked image, for a randomised model: its accuracy is the "
                                  f"mean share of correct passes; {REPEATS} for rand.", least=1, most=MAX_PASSES)
    audit: int | None = setting(None, f"Images that survive the attack {AUDITED} and are then attacked by standard, "
                                f"which bounds the difference between both; {COUNT} if not given, 0 for none.",
                                least=0, most=1_000_000)
    source: str = setting("mix", "Model that gives the gradients of an attack on a mixture: std (the accurate base), "
                                 "rob (the robust base) or mix.", among=SOURCES)
    adaptive: str = setting("surrogate", "Further attacks on a mixture that hides its gradients: surrogate, through, "
                                         "both as surrogate,through, or none.")
    stand_in: str | None = setting(None, "Differentiable model in place of an accurate base without gradients.")
    estimate: bool = setting(False, "Also estimate local Lipschitz constants of the robust models in the ball, and the "
                                    "margins they leave to a mixture; estimates, not certificates.")
    save_adversarial: bool = setting(False, f"Also write the attacked images: {adversarial.FILE}, and for each model "
                                            "a .pt file as RobustBench asks for it.")
    batch_size: int = setting(128, "Images per batch; halved when memory runs out.", least=1)
    precision: str = setting("auto", "auto, fp32 or bf16.", among=PRECISIONS)
    seed: int = setting(0, "Random seed.", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        for kind in self.adaptive_kinds():
            checks.one_of("adaptive", kind, (*KINDS, "none"))

    def adaptive_kinds(self) -> list[str]:
        """The kinds of adaptive attacks."""
        return [] if self.adaptive == "none" else list(dict.fromkeys(self.adaptive.split(",")))


@dataclass(frozen=True)
class RunResults:
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


@dataclass(frozen=True)
class Evaluation(RunResults):
    """Results of an evaluation; `str()` is the table that the command prints."""

    threat: Threat
    lipschitz: tuple[Result, ...] = ()

    @property
    def by_class(self) -> list[ClassAccuracy]:
        """Clean accuracy and that in the worst case, for every model and class."""
        return aggregation.by_class(self.rows)

    @property
    def broken_by(self) -> list[BrokenCount]:
        """How many images each stage of each attack broke."""
        return aggregation.broken_by(self.rows)

    def __str__(self) -> str:
        text = "\n".join([format.accuracy_table(self.results, str(self.threat)), *format.notes(self.summary)])
        return f"{text}\n\n{estimate_table(self.lipschitz, self.threat)}" if self.lipschitz else text


@name_failing_model
def evaluate(models: Models, data: Any, *, threat: Threat, attack: Attacks = "fast", out: Path | str | None = None,
             device: str | torch.device = "auto", load_options: LoadOptions | None = None,
             stand_in: str | nn.Module | None = None, command: str | None = None, **settings: Any) -> Evaluation:
    """Clean and attacked accuracy of models on the same images.

    A mixture is evaluated beside its two bases, compared with them image by image, and also attacked adaptively; its
    cost is measured, and images that it was fitted on are reported. Every attacked model gets sanity checks. Models of
    the same weights are attacked once, however often they are named.

    Args:
        models: a model or several: torch modules (images in [0, 1] → logits), references such as `mixture:DIR`, or a
            mapping from names to either.
        data: images that no model was tuned on: a `Dataset`, tensors (images, labels), a torch dataset or a loader.
        threat: the perturbations that the attacks may use.
        attack: the name of an attack, an :class:`~equipoise.attacks.Attack`, or several of them, as a list or as text
            such as "fast,square"; the worst case is that over all of them.
        out: run folder; the folder of the same evaluation is resumed. Without it nothing is kept.
        device: auto, cpu or cuda.
        load_options: how to load models given by reference, such as the architecture of a `.pt` file.
        stand_in: a differentiable model in place of an accurate base without gradients.
        command: recorded in `run.toml`.
        settings: fields of :class:`EvaluationSettings`.
    """
    check_models(models)
    check_common(checks.instance("threat", threat, Threat, "be a Threat"), out, device, load_options, command)
    checks.optional("stand_in", stand_in, (str, nn.Module), MODEL)
    options: EvaluationSettings = split(settings, EvaluationSettings)[0]
    checks.require(out is not None or not options.save_adversarial, "save_adversarial", "come with `out`", True)
    attacks = select_attacks(attack, threat.norm, **{name: getattr(options, name) for name in ATTACK_SETTINGS})
    images = images_for(data, models)
    conditions = Conditions(threat, resolve(device), options.seed, options.batch_size, options.precision)
    load = replace(load_options or LoadOptions(), num_classes=images.num_classes, image_shape=images.image_shape,
                   seed=options.seed)
    stand_in = options.stand_in if stand_in is None else stand_in
    differentiable = None if stand_in is None else load_one(stand_in, load).to(conditions.device)
    named = load_models(models, load)
    plan = EvaluationPlan(named, images, attacks, norm=threat.norm, audit=options.audit, source=options.source,
                          adaptive=options.adaptive_kinds(), stand_in=differentiable, device=conditions.device)
    recorded = {"references": list(named), **({} if command is None else {"command": command})}
    with parallel.process_group(conditions.device) as world, run_folder(out) as folder:
        run = open_run(folder, plan.jobs, images, conditions, recorded)
        kept = AdversarialImages(run, images.image_shape, None if options.save_adversarial else frozenset(
            images.index[: adversarial.PICTURES].tolist()))
        if world.is_leader and (estimate := estimate_time(missing_jobs(plan.jobs, images, run), images, conditions)):
            progress.note(str(estimate))
        overlap, cost = (plan.overlap(), plan.cost(conditions)) if world.is_leader else ({}, [])
        summary = run_jobs(plan.jobs, images, conditions, run, plan.pairs, images=kept, overlap=overlap,
                           costs=tuple(cost))
        rows = run.finish()
        lipschitz = estimate_lipschitz(plan.robust, images, conditions, folder, rows) if options.estimate else []
    return Evaluation(summary, rows, None if out is None else Path(out), threat, tuple(lipschitz))


def run_jobs(jobs: Sequence[Job], data: Dataset, conditions: Conditions, run: Run,
             pairs: Sequence[tuple[str, str]] = (), *, command: str = "evaluate", start_time: float | None = None,
             images: AdversarialImages | None = None, **sections: Any) -> Summary:
    """Measure all jobs and write the summary; `pairs` of models are compared image by image.

    `images` keeps attacked images. `start_time` (by :func:`time.monotonic`) is that of a longer command that ends
    here; `sections` are further fields of the :class:`~equipoise.core.results.Summary`.
    """
    start = time.monotonic() if start_time is None else start_time
    run.note_resumed([job.key(index) for job in jobs for index in data.index.tolist()])
    audit_seconds, duplicates = dict.fromkeys(map(str, jobs), 0.0), find_duplicates(jobs)
    keep: dict[str, Any] = {} if images is None else {"keep": images.write}
    if images is not None and images.keep is None:
        images.check_complete(jobs, duplicates)
    for job in jobs:
        if (original := duplicates.get(str(job))) is None:
            audit_seconds[str(job)] = measure(job, data, run, conditions, **keep)
        else:
            copy_rows(job, original, run)
    rows = run.finish()
    remove_stage_logs(run)
    summary = Summary(command=command, seconds=time.monotonic() - start,
                      results=tuple(aggregation.accuracies(rows, conditions.threat)),
                      differences=tuple(aggregation.differences(rows, pairs, conditions.threat)),
                      sanity_checks=tuple(check_jobs(jobs, data, conditions, run, rows, duplicates)),
                      audits=tuple(audit_results(jobs, rows, audit_seconds, run)),
                      as_bytes=tuple(aggregation.as_bytes(rows, conditions.threat)),
                      copied={name: str(original) for name, original in duplicates.items()}, **sections)
    if images is not None:
        adversarial.finish(images, jobs, data, rows, conditions.threat, duplicates)
    run.write_summary(summary)
    return summary


def missing_jobs(jobs: Sequence[Job], data: Dataset, run: Run) -> list[Job]:
    """The jobs that still have to measure images; duplicates of others do not."""
    duplicates = find_duplicates(jobs)
    return [job for job in jobs if str(job) not in duplicates
            and any(job.key(index) not in run.done for index in data.index.tolist())]


def load_models(given: Models, options: LoadOptions) -> dict[str, nn.Module]:
    """Models by their name in the rows: as given, else their reference, else "model"; references are loaded."""
    if isinstance(given, Mapping):
        named = dict(given)
    else:
        listed, named = [given] if isinstance(given, str | nn.Module) else list(given), {}
        for number, model in enumerate(listed, start=1):
            name = model if isinstance(model, str) else reference_of(model)
            named[name or ("model" if len(listed) == 1 else f"model {number}")] = model
        checks.require(len(named) == len(listed), "models", "be different", [str(name) for name in named])
    return {name: load_one(model, options) for name, model in named.items()}


def load_one(model: str | nn.Module, options: LoadOptions) -> nn.Module:
    """The model of a reference, or the given one."""
    return load_model(model, options) if isinstance(model, str) else model


@contextmanager
def run_folder(out: Path | str | None) -> Iterator[str]:
    """The run folder, which a refusal does not leave behind, or a temporary one, which all processes share."""
    if out is not None:
        with nothing_left_on_refusal(out):
            yield str(out)
        return
    with tempfile.TemporaryDirectory() as own:
        yield parallel.gather(own)[0]
        parallel.barrier()
