"""Clean and attacked accuracy of models on the same images: the public function `evaluate`."""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from equipoise.attacks import ATTACKS, Attack, Clean, make_attack
from equipoise.core import aggregation, checks, format, parallel
from equipoise.core.device import PRECISIONS, resolve
from equipoise.core.records import Run, nothing_left_on_refusal
from equipoise.core.results import Cost, Result, Summary
from equipoise.core.rows import Row
from equipoise.core.settings import Settings, setting, split
from equipoise.core.threat import Threat
from equipoise.data import Dataset, pixels
from equipoise.evaluation.adaptive import KINDS, adaptive_attacks, with_logits
from equipoise.evaluation.cost import costs
from equipoise.evaluation.job import MODEL, Conditions, Job, check_common, check_models, images_for, open_run
from equipoise.evaluation.lipschitz_estimates import estimate_lipschitz
from equipoise.evaluation.measure import measure, remove_stage_logs
from equipoise.evaluation.sanity_checks import check_jobs
from equipoise.mixing import MixedClassifier, load_model
from equipoise.models import LoadOptions, name_failing_model, reference_of

SOURCES = {"std": "accurate", "rob": "robust", "mix": None}
Models = str | nn.Module | Sequence[str | nn.Module] | Mapping[str, str | nn.Module]


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings(Settings):
    """How models are evaluated; the fields are the options of `equipoise evaluate`."""

    attack: str = setting("pgd", f"Attack: {', '.join(ATTACKS.builtin)}, or one that an installed package adds.")
    steps: int | None = setting(None, "Gradient steps of the attack.", least=1)
    restarts: int | None = setting(None, "Random starts per image.", least=1, most=1000)
    source: str = setting("mix", "Model that gives the gradients of an attack on a mixture: std (the accurate base), "
                                 "rob (the robust base) or mix.", among=SOURCES)
    adaptive: str = setting("surrogate", "Further attacks on a mixture that hides its gradients: surrogate, through, "
                                         "both as surrogate,through, or none.")
    stand_in: str | None = setting(None, "Differentiable model in place of an accurate base without gradients.")
    estimate: bool = setting(False, "Also estimate local Lipschitz constants of the robust models in the ball, and the "
                                    "margins they leave to a mixture; estimates, not certificates.")
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

    def __str__(self) -> str:
        text = format.accuracy_table(self.results, str(self.threat))
        return f"{text}\n\n{_estimate_table(self.lipschitz, self.threat)}" if self.lipschitz else text


@name_failing_model
def evaluate(models: Models, data: Any, *, threat: Threat, attack: str | Attack = "pgd", out: Path | str | None = None,
             device: str | torch.device = "auto", load_options: LoadOptions | None = None,
             stand_in: str | nn.Module | None = None, command: str | None = None, **settings: Any) -> Evaluation:
    """Clean and attacked accuracy of models on the same images.

    A mixture is evaluated beside its two bases, compared with them image by image, and also attacked adaptively; its
    cost is measured, and images that it was fitted on are reported. Every attacked model gets sanity checks.

    Args:
        models: a model or several: torch modules (images in [0, 1] → logits), references such as `mixture:DIR`, or a
            mapping from names to either.
        data: images that no model was tuned on: a `Dataset`, tensors (images, labels), a torch dataset or a loader.
        threat: the perturbations that the attacks may use.
        attack: the name of an attack, or an :class:`~equipoise.attacks.Attack`.
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
    checks.instance("attack", attack, (str, Attack), "be the name of an attack or an Attack")
    attack_name = attack if isinstance(attack, str) else attack.name
    options: EvaluationSettings = split({"attack": attack_name, **settings}, EvaluationSettings)[0]
    if isinstance(attack, str):
        attack = make_attack(attack, steps=options.steps, restarts=options.restarts)
    else:
        for name, value in (("steps", options.steps), ("restarts", options.restarts)):
            checks.require(value is None, name, "be left out beside an attack object, which has its own", value)
    images = images_for(data, models)
    conditions = Conditions(threat, resolve(device), options.seed, options.batch_size, options.precision)
    load = replace(load_options or LoadOptions(), num_classes=images.num_classes, image_shape=images.image_shape,
                   seed=options.seed)
    stand_in = options.stand_in if stand_in is None else stand_in
    differentiable = None if stand_in is None else load_one(stand_in, load).to(conditions.device)
    named = load_models(models, load)
    plan = _Plan(named, images, options, attack_name, attack, differentiable, conditions.device)
    recorded = {"references": list(named), **({} if command is None else {"command": command})}
    with parallel.process_group(conditions.device) as world, run_folder(out) as folder:
        run = open_run(folder, plan.jobs, images, conditions, recorded)
        overlap, cost = (plan.overlap(), plan.cost(conditions)) if world.is_leader else ({}, [])
        summary = run_jobs(plan.jobs, images, conditions, run, plan.pairs, overlap=overlap, costs=tuple(cost))
        rows = run.finish()
        lipschitz = estimate_lipschitz(plan.robust, images, conditions, folder, rows) if options.estimate else []
    return Evaluation(summary, rows, None if out is None else Path(out), threat, tuple(lipschitz))


def run_jobs(jobs: Sequence[Job], data: Dataset, conditions: Conditions, run: Run,
             pairs: Sequence[tuple[str, str]] = (), *, command: str = "evaluate", start_time: float | None = None,
             **sections: Any) -> Summary:
    """Measure all jobs and write the summary; `pairs` of models are compared image by image.

    `start_time` (by :func:`time.monotonic`) is that of a longer command that ends here; `sections` are further fields
    of the :class:`~equipoise.core.results.Summary`.
    """
    start = time.monotonic() if start_time is None else start_time
    run.note_resumed([job.key(index) for job in jobs for index in data.index.tolist()])
    for job in jobs:
        measure(job, data, run, conditions)
    rows = run.finish()
    remove_stage_logs(run)
    summary = Summary(command=command, seconds=time.monotonic() - start,
                      results=tuple(aggregation.accuracies(rows, conditions.threat)),
                      differences=tuple(aggregation.differences(rows, pairs, conditions.threat)),
                      sanity_checks=tuple(check_jobs(jobs, data, conditions, run, rows)), **sections)
    run.write_summary(summary)
    return summary


class _Plan:
    """Which models are evaluated under which attacks; a mixture comes with its two bases."""

    def __init__(self, named: Mapping[str, nn.Module], data: Dataset, options: EvaluationSettings, attack_name: str,
                 attack: Attack, stand_in: nn.Module | None, device: torch.device) -> None:
        self.data, self.options, self.stand_in, self.device = data, options, stand_in, device
        self.attack_name, self.attack = attack_name, attack
        self.jobs: list[Job] = []
        self.pairs: list[tuple[str, str]] = []
        self.mixtures: dict[str, MixedClassifier] = {}
        self.robust: dict[str, nn.Module] = {}
        for name, model in named.items():
            if isinstance(model, MixedClassifier):
                self._add_mixture("" if len(named) == 1 else f"{name} ", model)
            else:
                self.robust[name] = model
                self._add_jobs(name, model, {attack_name: attack})
        checks.require(options.source == "mix" or bool(self.pairs), "source", "be mix where no model is a mixture",
                       options.source)

    def _add_mixture(self, prefix: str, model: MixedClassifier) -> None:
        accurate, robust, mixed = (f"{prefix}{side}" for side in ("accurate", "robust", "mixed"))
        self.pairs += [(mixed, robust), (mixed, accurate)]
        self.mixtures[mixed], self.robust[robust] = model, model.robust
        image = pixels(self.data.images[:1].to(self.device))
        for name, base in ((accurate, model.accurate), (robust, model.robust)):
            with_scores = with_logits(name, base, self.data.num_classes, image)
            # A model that returns classes has no gradients: they come from a stand-in or from the robust model.
            surrogate = None if with_scores is base else self.stand_in or model.robust
            self._add_jobs(name, with_scores, {self.attack_name: replace(self.attack, surrogate=surrogate)})
        side = SOURCES[self.options.source]
        source = None if side is None else getattr(model, side)
        adaptive = adaptive_attacks(model, self.attack, self.options.adaptive_kinds(), self.stand_in)
        self._add_jobs(mixed, model, {self.attack_name: replace(self.attack, surrogate=source), **adaptive})

    def _add_jobs(self, name: str, model: nn.Module, attacks: Mapping[str, Attack]) -> None:
        self.jobs += [Job(name, model, attack_name, attack)
                      for attack_name, attack in {aggregation.CLEAN: Clean(), **attacks}.items()]

    def overlap(self) -> dict[str, tuple[str, ...]]:
        """Images that a mixture was fitted on, with a warning: its accuracy on them is overstated."""
        shared = {name: both for name, mixture in self.mixtures.items()
                  if mixture.provenance is not None and (both := tuple(mixture.provenance.overlap(self.data)))}
        for name, both in shared.items():
            warnings.warn(f"{name} was fitted on images {', '.join(both[:5])}{' …' * (len(both) > 5)} of these, so its "
                          "accuracy on them is overstated", checks.EquipoiseWarning, stacklevel=4)
        return shared

    def cost(self, conditions: Conditions) -> list[Cost]:
        """Cost of a prediction, if there is one mixture."""
        if len(self.mixtures) != 1:
            return []
        mixture = next(iter(self.mixtures.values())).to(conditions.device)
        return costs(mixture, self.data, conditions.device, conditions.batch_size)


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


def _estimate_table(results: Sequence[Result], threat: Threat) -> str:
    """The local Lipschitz constant of every model, and the share of images that a mixture would keep per alpha."""
    by_name = {(result.model, result.metric): result for result in results}
    table = format.new_table(f"Estimates, not certificates, {threat}", "model", "constant", "alpha", "kept",
                             "kept at attacked images")
    names, previous = format.short_names(result.model for result in results), ""
    for (model, metric), result in by_name.items():
        if metric.startswith("kept@"):
            attacked = by_name.get((model, f"attacked-{metric}"))
            first = ["", ""] if model == previous else [names[model], f"{by_name[model, 'lipschitz'].value:.2f}"]
            table.add_row(*first, metric.removeprefix("kept@"), format.percent(result.value),
                          format.percent(attacked.value) if attacked else "")
            previous = model
    return format.render(table)
