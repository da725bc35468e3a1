"""Certified radii of smoothed classifiers and of mixtures with them: the public function
`certify`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from equipoise.attacks import ATTACKS, make_attack
from equipoise.certification import CERTIFICATES, SamplingSettings, SmoothingPlan
from equipoise.certification.certificate import MAX_SIGMAS
from equipoise.core import checks, format, parallel
from equipoise.core.device import PRECISIONS, resolve
from equipoise.core.modes import outside_inference_mode
from equipoise.core.records import Run
from equipoise.core.results import Summary
from equipoise.core.rows import Row
from equipoise.core.settings import setting, split
from equipoise.core.threat import MAX_EPS
from equipoise.data import Dataset, as_dataset, class_share_notes
from equipoise.evaluation import certificates
from equipoise.evaluation.alpha_sweep import parse_alphas
from equipoise.evaluation.certificate_checks import CertificateAttack
from equipoise.evaluation.certificates import (
    CertificationConditions,
    CertificationJob,
    CleanTarget,
    other_images,
)
from equipoise.evaluation.certification_text import alphas_table, results_table, selection_text
from equipoise.evaluation.diagnosis import Diagnosis
from equipoise.evaluation.evaluator import RunResults, run_folder
from equipoise.evaluation.given_models import Models, load_models, load_one
from equipoise.evaluation.job import (
    MODEL,
    check_common,
    check_model,
    check_models,
    images_for,
    note_loaded,
)
from equipoise.models import LoadOptions, identity, name_failing_model

_MAX_DIAGNOSED = 20  # radii
COMPILE_FROM = 3_000_000  # samples: fewer are drawn in less time than compilation takes


@dataclass(frozen=True, kw_only=True)
class CertificationSettings(SamplingSettings):
    """How models are certified; the fields are the options of `equipoise certify`."""

    sigma: str = setting(
        dataclasses.MISSING,
        "Standard deviation of the Gaussian noise, in [0, 1] pixels, as are all "
        "radii; several by commas: one per model, or all for the one model.",
    )
    accurate: str | None = setting(
        None,
        "Model mixed with the smoothed one by its hard prediction; needs alpha, alphas or clean.",
    )
    alpha: float | None = setting(None, "Weight of the smoothed model in the mixture, in [0.5, 1].")
    alphas: str | tuple[float, ...] | None = setting(
        None, "Instead of alpha: several weights, such as 0.5,0.6, certified from the same votes."
    )
    clean: float | None = setting(
        None,
        "Instead of alpha: the largest alpha with this estimated clean accuracy, e.g. "
        "0.9, selected per model and sigma on other images of the split; shows the frontier "
        "over them.",
        share=True,
    )
    soft: bool = setting(
        False, "Short for --certificate soft: mean probabilities instead of votes."
    )
    attack: str | None = setting(
        None,
        "Attack every certified image inside its radius with this attack: "
        f"{', '.join(ATTACKS.builtin)}, or one that an installed package adds.",
    )
    diagnose: bool = setting(
        False, "Measure confidences under attacks of growing radius, and mixing ratios."
    )
    diagnose_radii: str = setting(
        ",".join(f"{radius:g}" for radius in Diagnosis.at),
        "For diagnose: ℓ2 radii of the "
        "attacks, separated by commas, at most 20; the SmoothMix paper has 0,1,2,3,4,5.",
    )
    norm: str = setting("l2", "Norm of the radii: Gaussian smoothing certifies l2.")
    batch_size: int | None = setting(
        None,
        "Noisy images per batch, 64 or on CUDA 4096 if not given; halved when memory runs out.",
        least=1,
    )
    precision: str = setting("auto", "auto, fp32 or bf16.", among=PRECISIONS)
    seed: int = setting(0, "Random seed.", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.require(
            self.norm == "l2",
            "norm",
            "be l2, the only norm that Gaussian smoothing certifies",
            self.norm,
        )
        checks.require(
            self.alpha is None or self.clean is None,
            "clean",
            "be left out beside `alpha`",
            self.clean,
        )
        if self.alphas is not None:
            checks.require(
                self.alpha is None and self.clean is None,
                "alphas",
                "be left out beside `alpha` or `clean`",
                self.alphas,
            )
            object.__setattr__(self, "alphas", parse_alphas(self.alphas))
        checks.require(
            not self.soft or self.certificate in ("votes", "soft"),
            "soft",
            f"be left out with the certificate {self.certificate}",
            self.soft,
        )
        CERTIFICATES.get_entry(self.certificate)
        self.diagnosis()

    def diagnosis(self) -> Diagnosis | None:
        """What `diagnose` measures, if it is asked for."""
        radii = checks.fractions("diagnose_radii", self.diagnose_radii, most=_MAX_DIAGNOSED)
        most = MAX_EPS["l2"]
        checks.require(
            max(radii) <= most, "diagnose_radii", f"be at most {most:g}", self.diagnose_radii
        )
        checks.require(
            min(radii) >= 0 and len({f"{radius:.2f}" for radius in radii}) == len(radii),
            "diagnose_radii",
            "not be negative, and differ in their first two decimals",
            self.diagnose_radii,
        )
        return Diagnosis(at=tuple(radii)) if self.diagnose else None

    def plan(self, sigma: float) -> SmoothingPlan:
        """The plan for one sigma."""
        values = {name: getattr(self, name) for name in SamplingSettings.names()}
        alphas = () if self.alphas is None else parse_alphas(self.alphas)
        return SmoothingPlan(
            sigma,
            max(alphas, default=1.0 if self.alpha is None else self.alpha),
            alphas,
            **{**values, "certificate": "soft" if self.soft else self.certificate},
        )


@dataclass(frozen=True)
class Certification(RunResults):
    """Results of a certification: `acr`, `certified@R`, `abstained`, `clean`, `samples` and others
    of every model.

    With `decide_radius`, only the `certified@R` that was decided, and `samples`.

    `str()` are the tables that the command prints.
    """

    failure: float

    def __str__(self) -> str:
        has_alphas = len({(item.model, item.alpha) for item in self.summary.theorems}) > len(
            {item.model for item in self.summary.theorems}
        )
        tables = [alphas_table(self.summary, self.failure)] if has_alphas else []
        others = [
            item for item in self.results if not has_alphas or item.sigma is None
        ]  # under attacks there is none
        tables += [results_table(others, self.failure)] if others else []
        text = "\n".join([*tables, *format.data_notes(self.summary)])
        return f"{text}\n\n{selection_text(self.summary)}" if self.summary.selected_alphas else text


@name_failing_model
@outside_inference_mode
def certify(
    models: Models,
    data: Any,
    *,
    sigma: float | str | Sequence[float],
    accurate: str | nn.Module | None = None,
    selection_images: Any = None,
    out: Path | str | None = None,
    device: str = "auto",
    load_options: LoadOptions | None = None,
    command: str | None = None,
    **settings: Any,
) -> Certification:
    """Certified ℓ2 radii by randomized smoothing, of models or of their mixtures with an accurate
    model.

    Arguments not listed here are as for :func:`~equipoise.evaluation.evaluate`.

    Args:
        models: the base classifiers to be smoothed.
        data: the images.
        sigma: standard deviation of the noise, in [0, 1] pixels; several: one per model, or all for
            the one model.
        accurate: model mixed with the smoothed ones by its hard prediction, with the setting
            `alpha`, `alphas` or `clean`.
        selection_images: for `clean`, images to select alpha on; those in `data` are left out.
        settings: fields of :class:`CertificationSettings`.
    """
    check_models(models)
    check_common(None, out, device, load_options, command)
    checks.optional("accurate", accurate, (str, nn.Module), MODEL)
    sigmas = checks.fractions("sigma", sigma, most=MAX_SIGMAS)
    options: CertificationSettings = split(
        {"sigma": ",".join(map(str, sigmas)), **settings}, CertificationSettings
    )[0]
    weight = next(
        (name for name in ("alpha", "alphas", "clean") if getattr(options, name) is not None), None
    )
    checks.require(
        weight is None or accurate is not None,
        "accurate",
        f"be given together with `{weight}`",
        None,
    )
    checks.require(
        weight is not None or accurate is None,
        "alpha",
        "be given together with `accurate`, or `alphas` or `clean` in its place",
        None,
    )
    plans = [options.plan(value) for value in sigmas]
    images, where = images_for(data, models), resolve(device)
    conditions = CertificationConditions(
        where,
        options.seed,
        options.batch_size,
        options.precision,
        where.type == "cuda" and len(images) * options.samples >= COMPILE_FROM,
    )
    load = replace(
        load_options or LoadOptions(),
        num_classes=images.num_classes,
        image_shape=images.image_shape,
    )
    other = None if accurate is None else load_one(accurate, load)
    named = load_models(models, load, other)
    jobs = [
        CertificationJob(name, model, plan, other)
        for name, model, plan in _with_plans(named, plans)
    ]
    target = None
    if options.clean is not None:
        checks.require(
            selection_images is not None, "selection_images", "be given with `clean`", None
        )
        target = CleanTarget(options.clean, other_images(as_dataset(selection_images), images))
    attack = (
        None
        if options.attack is None
        else CertificateAttack(make_attack(options.attack), options.attack)
    )
    recorded = {"references": list(named), **({} if command is None else {"command": command})}
    with parallel.process_group(where), run_folder(out) as folder:
        summary, rows = run_certification(
            jobs,
            images,
            conditions,
            folder,
            target=target,
            attack=attack,
            diagnosis=options.diagnosis(),
            settings=recorded,
        )
    return Certification(summary, rows, None if out is None else Path(out), options.failure)


def run_certification(
    jobs: Sequence[CertificationJob],
    data: Dataset,
    conditions: CertificationConditions,
    out: Path | str,
    *,
    target: CleanTarget | None = None,
    attack: CertificateAttack | None = None,
    diagnosis: Diagnosis | None = None,
    settings: Mapping[str, Any] | None = None,
) -> tuple[Summary, list[Row]]:
    """Certify every image of `data` for every job; the folder of the same certification is resumed.

    The plans of the jobs may differ in sigma only. A `target` selects the alpha of every mixture
    first, on other images; `attack` and `diagnosis` may be added to a finished run; `settings` are
    recorded in `run.toml`.
    """
    start = time.monotonic()
    names = [job.name for job in jobs]
    checks.require(
        len(set(names)) == len(names), "models", "be different, or have different sigmas", names
    )
    for job in jobs:
        check_model(job.name, job.model.to(conditions.device), data, conditions.device)
        if job.accurate is not None:
            check_model("accurate", job.accurate.to(conditions.device), data, conditions.device)
    labels = {
        **(target.images.labels_by_index() if target is not None else {}),
        **data.labels_by_index(),
    }
    run = Run(
        out,
        _identity(jobs, data, conditions, target),
        {**conditions.environment(), **(settings or {})},
        labels=labels,
    )
    note_loaded(
        {job.name: job.model for job in jobs}, data, conditions.device, conditions.batch_size
    )
    if target is not None:
        jobs = target.select(jobs, run, conditions)
    run.note_resumed(
        [key for job in jobs for index in data.index.tolist() for key in job.keys(index)]
    )
    further = [measurement for measurement in (attack, diagnosis) if measurement is not None]
    for job in jobs:
        certificates.certify_images(job, data, run, conditions)
    rows, plan = run.finish(), jobs[0].plan
    results = certificates.results(rows, plan)
    for measurement in further:
        for job in jobs:
            measurement.measure(job, data, rows, run, conditions)
        results += measurement.results(rows := run.finish(), plan)
    summary = Summary(
        command="certify",
        seconds=time.monotonic() - start,
        results=tuple(results),
        notes=class_share_notes(data),
        theorems=certificates.theorem_results(rows, plan),
    )
    if target is not None:
        summary = replace(
            summary,
            selected_alphas=target.selected(jobs, rows),
            excluded=target.excluded(jobs, rows),
            frontier=certificates.frontier_points(jobs, rows),
        )
    run.write_summary(summary)
    return summary, rows


def _identity(
    jobs: Sequence[CertificationJob],
    data: Dataset,
    conditions: CertificationConditions,
    target: CleanTarget | None,
) -> dict[str, Any]:
    """What makes two certifications the same run; attack and diagnosis may be added later."""
    sigmas = {job.name: job.plan.sigma for job in jobs}
    return {
        "command": "certify",
        "seed": conditions.seed,
        "precision": conditions.precision,
        "norm": "l2",
        "models": {job.name: identity(job.model) for job in jobs},
        "accurate": {job.name: identity(job.accurate) for job in jobs if job.accurate is not None},
        "plan": jobs[0].plan.describe(),
        "data": data.describe(),
        **({"sigma": sigmas} if len(set(sigmas.values())) > 1 else {}),
        **({} if target is None else {"clean_target": target.describe()}),
    }


def _with_plans(
    named: Mapping[str, nn.Module], plans: Sequence[SmoothingPlan]
) -> list[tuple[str, nn.Module, SmoothingPlan]]:
    """Name, model and plan of every job; with several sigmas the name includes the sigma."""
    if len(plans) == 1:
        return [(name, model, plans[0]) for name, model in named.items()]
    checks.require(
        len(named) in (1, len(plans)),
        "sigma",
        f"be one, or one for each of the {len(named)} models",
        len(plans),
    )
    pairs = zip(list(named.items()) * (len(plans) // len(named)), plans, strict=True)
    return [(f"{name} (sigma {plan.sigma:g})", model, plan) for (name, model), plan in pairs]
