"""The public function `compare_rules`: rules for mixing one pair, fitted to one target, attacked on
the same images."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from equipoise import fitting, models, reporting
from equipoise.core import checks, parallel, progress
from equipoise.core.aggregation import ROBUST, promise_checks
from equipoise.core.comparison import ComparedMethod
from equipoise.core.device import attack_batch_size, resolve
from equipoise.core.modes import outside_inference_mode
from equipoise.core.promises import Target
from equipoise.core.records import Run
from equipoise.core.results import Summary
from equipoise.core.settings import split as split_settings
from equipoise.core.threat import Threat, require_threat
from equipoise.data import Dataset, class_share_notes
from equipoise.evaluation import Conditions, Job
from equipoise.evaluation.adaptive import ADAPTIVE_VERSION
from equipoise.evaluation.cost import mean_passes
from equipoise.evaluation.evaluator import run_folder
from equipoise.evaluation.given_models import load_one
from equipoise.evaluation.job import MODEL, check_common, images_for
from equipoise.evaluation.plan import EvaluationPlan, select_attacks
from equipoise.fitting.gated import with_ranges
from equipoise.mixing import Gate, GatedClassifier, MixedClassifier, load_gate
from equipoise.mixing.folder import GATE
from equipoise.mixing.provenance import RULES, index_ranges
from equipoise.models import LoadOptions, require_used
from equipoise.models.layers.tta import TTAClassifier
from equipoise.studies.attack_list import folder_name, measure_list
from equipoise.studies.comparison_settings import AUTO, CASCADE, PLAIN, ComparisonSettings
from equipoise.studies.comparison_table import Comparison, describe, measured_as, summarize
from equipoise.studies.selector import MixtureSelector

SIDES = ("accurate", ROBUST)
SELECTING = "selecting a mixture"  # stage of its progress
PLAIN_ALPHAS = tuple(round(0.5 + 0.01 * step, 2) for step in range(50))


@models.name_failing_model
@outside_inference_mode
def compare_rules(
    accurate: str | nn.Module,
    robust: str | nn.Module,
    fit_data: Any,
    data: Any,
    *,
    threat: Threat,
    gates: Sequence[Path | str] = (),
    out: Path | str | None = None,
    export: Path | str | None = None,
    device: str | torch.device = "auto",
    load_options: LoadOptions | None = None,
    report: bool = True,
    command: str | None = None,
    **settings: Any,
) -> Comparison:
    """Fit rules for mixing one pair to one target, and evaluate all of them and both models on
    other images.

    Equal mixtures are attacked once, and so are the two models. Every mixture gets the attacks of :func:`~equipoise.evaluate`, adaptive ones
    included but without its audit; an image that one of them breaks is not attacked by the next. A
    gate is put over plain mixing and over fitted maps. Its range, like the alpha of plain mixing,
    is selected on the fitting images under `range_attack`.

    Args:
        accurate, robust: references or torch modules, as for :func:`~equipoise.fit`.
        fit_data: images to fit on: a `Dataset`, tensors (images, labels), a torch dataset or a
            loader.
        data: other images, to evaluate on; copies of fitting images among them are left out.
        threat: the perturbations that attacks may use.
        gates: gates of the pair, files or folders from `equipoise train gate`.
        out: run folder, with every mixture under `mixtures/`; the same comparison is resumed there,
            and rules or gates may be added to it. Without it nothing is kept.
        export: folder for the rows as small compressed files.
        device: auto, cpu or cuda.
        load_options: how to load models given by reference.
        report: whether to write a report into `out`.
        command: recorded in `run.toml`.
        settings: fields of :class:`ComparisonSettings`.
    """
    parallel.require_one_process("compare-rules")
    for side, base in (("accurate", accurate), ("robust", robust)):
        checks.instance(side, base, (str, nn.Module), MODEL)
    check_common(require_threat(threat), out, device, load_options, command)
    checks.path("export", export)
    checks.instance("gates", gates, (list, tuple), "be a list of files or folders")
    options: ComparisonSettings = split_settings(settings, ComparisonSettings)[0]
    images, fitting_images = images_for(data, robust), images_for(fit_data, robust)
    images, notes = without_fitting_images(images, fitting_images)
    load = replace(
        load_options or LoadOptions(),
        num_classes=images.num_classes,
        image_shape=images.image_shape,
    )
    bases = tuple(load_one(base, load).eval() for base in (accurate, robust))
    require_used(load, bases)
    checks.require(
        CASCADE not in options.listed("rules") or isinstance(bases[1], TTAClassifier),
        "robust",
        "have views, such as tta:6:REFERENCE, for the rule cascade",
        type(bases[1]).__name__,
    )
    where = resolve(device)
    batch_size = attack_batch_size(options.batch_size, where)
    conditions = Conditions(threat, where, options.seed, batch_size, options.precision)
    named_gates = name_gates(gates)
    with run_folder(out) as folder:
        task = _Comparison(
            Path(folder),
            (bases[0], bases[1]),
            fitting_images,
            images,
            options,
            conditions,
            command,
            keep=out is not None,
            notes=notes,
        )
        comparison = task.run(named_gates)
        if report and out is not None:
            reporting.report(folder)
    if export is not None:
        comparison.export(
            export,
            target=str(options.fit_settings("nuts").target()),
            data=images.describe(),
            fit_data=fitting_images.describe(),
            command=command,
        )
    return comparison if out is not None else replace(comparison, out=None)


def without_fitting_images(data: Dataset, fit_data: Dataset) -> tuple[Dataset, tuple[str, ...]]:
    """The images without copies of fitting images, and notes on the images.

    Data sets contain a few images twice. The same images of the same data, or copies alone, are
    refused.
    """
    is_copy = torch.from_numpy(np.isin(data.image_digests(), fit_data.image_digests()))
    shown = ", ".join(index_ranges(data.index.cpu()[is_copy])[:5])
    is_same = (data.name, data.split) == (fit_data.name, fit_data.split) and bool(
        torch.isin(data.index.cpu()[is_copy], fit_data.index.cpu()).any()
    )
    checks.require(
        not is_same and not bool(is_copy.all()),
        "data",
        "be other images than those that are fitted on",
        shown,
    )
    left_out = (
        [f"images {shown} are copies of images that are fitted on, and were left out"]
        if is_copy.any()
        else []
    )
    for note in left_out:
        warnings.warn(note, checks.EquipoiseWarning, stacklevel=3)
    data = data.take(~is_copy)
    shares = [
        *class_share_notes(data),
        *(f"fitting images: {note}" for note in class_share_notes(fit_data)),
    ]
    return data, (*left_out, *shares)


def name_gates(given: Sequence[Path | str]) -> dict[str, Path]:
    """The files of gates by short names: that of the folder for a `gate.safetensors`, else that of
    the file."""
    named: dict[str, Path] = {}
    for item in given:
        checks.path("gates", checks.instance("gates", item, (str, Path), "be files or folders"))
        path = Path(item)
        path = path / GATE if path.is_dir() else path
        checks.require(path.is_file(), "gate", "be a file or folder that exists", str(item))
        name = path.resolve().parent.name if path.name == GATE else path.stem
        checks.require(name not in named, "gates", "have different names", name)
        named[name] = path
    return named


@dataclass(frozen=True, eq=False)
class _Comparison:
    """A comparison in its run folder."""

    folder: Path
    bases: tuple[nn.Module, nn.Module]
    fit_data: Dataset
    data: Dataset
    settings: ComparisonSettings
    conditions: Conditions
    command: str | None
    keep: bool  # whether the folder outlives the comparison
    notes: tuple[str, ...]  # on the images
    promises: dict[str, str] = field(default_factory=dict)

    def run(self, gates: Mapping[str, Path]) -> Comparison:
        """Fit and select all mixtures, evaluate them, and write the summary."""
        start, run, threat = time.monotonic(), self._open_run(), self.conditions.threat
        with progress.plan({"fitting": 1, "attacking": 3}):
            with progress.stage("fitting"):
                methods, jobs, promised = self._plan(self._mixtures(gates))
            with (
                progress.stage("attacking"),
                progress.plan({name: len(own) for name, own in jobs.items()}),
            ):
                for name, own in jobs.items():
                    with progress.stage(name):
                        run.append(
                            measure_list(
                                own,
                                self.data,
                                self.folder / "attacks" / folder_name(name),
                                self.conditions,
                            )
                        )
        rows = [row for row in run.finish() if row.model in jobs]
        summary = Summary(
            command="compare-rules",
            seconds=time.monotonic() - start,
            notes=self.notes,
            promises=tuple(promise_checks(rows, promised, threat)),
            **summarize(rows, methods, threat),
        )
        run.write_summary(summary)
        return Comparison(summary, rows, self.folder, threat)

    def _mixtures(self, gates: Mapping[str, Path]) -> dict[str, tuple[str, MixedClassifier]]:
        """The family and the mixture of every rule, fitted or selected."""
        settings = self.settings
        networks = {name: load_gate(path, *self.bases) for name, path in gates.items()}
        wanted, over_rules = settings.listed("rules"), settings.listed("over") if gates else []
        rules = [rule for rule in dict.fromkeys([*wanted, *over_rules]) if rule != PLAIN]
        selections = (PLAIN in wanted) + len(over_rules) * len(gates)
        with progress.plan([*((rule, 1.0) for rule in rules), *[(SELECTING, 1.0)] * selections]):
            fitted = {rule: self._fit(rule) for rule in rules}
            return self._select(wanted, over_rules, networks, fitted)

    def _select(
        self,
        wanted: Sequence[str],
        over_rules: Sequence[str],
        networks: Mapping[str, Gate],
        fitted: Mapping[str, MixedClassifier],
    ) -> dict[str, tuple[str, MixedClassifier]]:
        """The mixtures of all rules: those fitted, the best plain one, and every gate over its best
        range."""
        mixtures = {rule: (RULES.get(rule, rule), fitted[rule]) for rule in wanted if rule != PLAIN}
        selector = self._selector()
        if PLAIN in wanted:
            plain = [
                MixedClassifier(*self.bases, alpha).to(self.conditions.device).eval()
                for alpha in PLAIN_ALPHAS
            ]
            with progress.stage(SELECTING):
                mixtures = {PLAIN: (RULES[PLAIN], selector.select(PLAIN, PLAIN, plain)), **mixtures}
        for over in over_rules:
            if over != PLAIN and fitted[over].logit_map is None:
                continue  # without a map it is the gate over plain mixing
            for name, network in networks.items():
                gated = GatedClassifier(*self.bases, network).to(self.conditions.device).eval()
                gated = gated if over == PLAIN else gated.with_settings_of(fitted[over])
                label = f"{gated.method} ({name})"  # also of the only gate: others may be added
                with progress.stage(SELECTING):
                    mixtures[label] = (
                        gated.method,
                        selector.select(label, gated.method, with_ranges(gated)),
                    )
        self.promises.update(selector.promises)
        return mixtures

    def _open_run(self) -> Run:
        conditions, settings = self.conditions, self.settings
        target = settings.fit_settings("nuts").target()
        attacks = select_attacks(settings.attack, conditions.threat.norm)
        identity = {
            "command": "compare-rules",
            "version": 1,
            "seed": conditions.seed,
            "precision": conditions.precision,
            "adaptive_attacks": ADAPTIVE_VERSION,
            "threat": conditions.threat.to_dict(),
            "data": self.data.describe(),
            "fit_data": self.fit_data.describe(),
            "models": {
                side: models.identity(base) for side, base in zip(SIDES, self.bases, strict=True)
            },
            "target": {
                "share": target.share,
                "of": "robust images" if target.of_robust else "all images",
                **({} if target.confidence is None else {"confidence": target.confidence}),
            },
            "attack_list": {name: attack.describe() for name, attack in attacks.items()},
            **{
                name: getattr(settings, name)
                for name in (
                    "candidates",
                    "margin_steps",
                    "margin_targets",
                    "range_count",
                    "range_attack",
                )
            },
        }
        recorded = {
            **conditions.environment(),
            "command": self.command,
            "references": [models.reference_of(base) or type(base).__name__ for base in self.bases],
        }
        return Run(self.folder, identity, recorded, labels=self.data.labels_by_index())

    def _fit(self, rule: str) -> MixedClassifier:
        """The mixture of one rule."""
        robust = self.bases[1]
        views = robust.count if isinstance(robust, TTAClassifier) else None
        options = self.settings.fit_settings(rule, views).to_dict()
        out = self.folder / "mixtures" / rule if self.keep else None
        with progress.stage(rule):
            fitted = fitting.fit(
                *self.bases,
                self.fit_data,
                threat=self.conditions.threat,
                out=out,
                device=self.conditions.device,
                **options,
            )
        self.promises[rule] = fitted.promise
        return fitted.mixture.to(self.conditions.device).eval()

    def _views(self, mixture: MixedClassifier) -> float | None:
        """Views of the robust model that a clean image needs, if it has several."""
        if mixture.views == 1:
            return None
        return mean_passes(mixture, self.data, self.conditions.device, self.conditions.batch_size)[
            0
        ]

    def _selector(self) -> MixtureSelector:
        count = self.settings.range_count
        images = self.fit_data if count is None else self.fit_data.slice(0, count)
        return MixtureSelector(
            self.folder,
            self.bases,
            images,
            self.conditions,
            self.settings.fit_settings("nuts").target(),
            self.settings.candidates,
            self.settings.range_attack,
            keep=self.keep,
        )

    def _plan(
        self, mixtures: Mapping[str, tuple[str, MixedClassifier]]
    ) -> tuple[list[ComparedMethod], dict[str, list[Job]], dict[tuple[str, str], Target]]:
        """The lines of the table, the jobs of both models and of every different mixture by its
        name, and promises."""
        methods = [
            ComparedMethod(name=side, family=side, mixture="", measured_as=side) for side in SIDES
        ]
        shown = {
            key: f"{AUTO} ({mixture.method})" if key == AUTO else RULES.get(key, key)
            for key, (_, mixture) in mixtures.items()
        }
        equal = measured_as({shown[key]: mixture for key, (_, mixture) in mixtures.items()})
        methods += [
            ComparedMethod(
                name=shown[key],
                family=family,
                mixture=describe(mixture),
                views=self._views(mixture),
                measured_as=equal[shown[key]],
                settings=mixture.extra_repr(),
                promise=self.promises[key],
            )
            for key, (family, mixture) in mixtures.items()
        ]
        different = {
            shown[key]: mixture
            for key, (_, mixture) in mixtures.items()
            if equal[shown[key]] == shown[key]
        }
        # With no mixture at all, the robust model alone stands in for one, so that both models are
        # measured.
        named = different or {"robust alone": MixedClassifier(*self.bases, 1.0).eval()}
        attacks = select_attacks(self.settings.attack, self.conditions.threat.norm)
        plan = EvaluationPlan(
            named,
            self.data,
            attacks,
            norm=self.conditions.threat.norm,
            audit=0,
            source="mix",
            adaptive=["surrogate"],
            stand_in=None,
            device=self.conditions.device,
            shared_bases=True,
        )
        jobs = {
            name: [job for job in plan.jobs if job.name == name] for name in (*SIDES, *different)
        }
        return methods, jobs, plan.promised(self.conditions.threat, ()) if different else {}
