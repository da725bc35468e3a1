"""The public function `fit`: the most accurate mixture that loses at most a given robust
accuracy."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from equipoise import models
from equipoise.core import aggregation, arrays, checks, files, parallel
from equipoise.core.device import attack_batch_size, resolve
from equipoise.core.modes import outside_inference_mode
from equipoise.core.records import Run, nothing_left_on_refusal, read_rows
from equipoise.core.results import Summary, read_summary
from equipoise.core.rows import SEARCH, AttackRow
from equipoise.core.settings import split
from equipoise.core.threat import Threat, require_threat
from equipoise.data import Dataset, class_share_notes
from equipoise.evaluation import Conditions
from equipoise.evaluation.adaptive import ADAPTIVE_VERSION
from equipoise.evaluation.cost import costs
from equipoise.evaluation.job import MODEL, check_common, images_for, note_loaded
from equipoise.fitting import artifacts
from equipoise.fitting.cascade import fit_cascade
from equipoise.fitting.conformal import Target
from equipoise.fitting.gated import select_range
from equipoise.fitting.margin_attack import MarginAttack
from equipoise.fitting.paper import PUBLISHED
from equipoise.fitting.paper_fit import PaperFit, fit_paper
from equipoise.fitting.pipeline import CalibratedMixture, ReusedMap, fit_mixture
from equipoise.fitting.result import Fit
from equipoise.fitting.settings import FitSettings
from equipoise.mixing import (
    Gate,
    GatedClassifier,
    MixedClassifier,
    Provenance,
    load_gate,
    load_model,
)
from equipoise.mixing.folder import GATE, NAME, is_bundle, load_mixture, save_mixture
from equipoise.mixing.mixednuts import released_provenance
from equipoise.mixing.provenance import halves
from equipoise.models import LoadOptions, Normalized, checkpoint
from equipoise.models.layers.tta import TTAClassifier
from equipoise.models.loaded import remember_reference

SIDES = ("accurate", "robust")
FitRule = Callable[
    [MarginAttack, Target, Path | None, ReusedMap | None], CalibratedMixture | PaperFit
]
FIT_RULES: dict[str, FitRule] = {"paper": fit_paper, "cascade": fit_cascade}


@models.name_failing_model
@outside_inference_mode
def fit(
    accurate: str | nn.Module,
    robust: str | nn.Module,
    data: Any,
    *,
    threat: Threat,
    lose_at_most: float | None = None,
    beta: float | None = None,
    alpha: float | None = None,
    gate: Path | str | None = None,
    out: Path | str | None = None,
    device: str | torch.device = "auto",
    load_options: LoadOptions | None = None,
    command: str | None = None,
    **settings: Any,
) -> Fit:
    """Fit a mixture to a target on images that are never evaluated on.

    Args:
        accurate: g, a reference or a torch module: images in [0, 1] → logits, or classes.
        robust: h, a reference or a torch module: images → logits. Without gradients it is attacked
            by random search.
        data: at least 50 images, better 1000: a `Dataset`, tensors (images, labels), a torch
            dataset or a loader. Plain mixing and published numbers need none.
        threat: the perturbations that the attack may use.
        lose_at_most: points (of 100) of robust accuracy that may be lost; 1 if no target is given.
        beta: share of the robust model's attacked accuracy to keep, instead; for MixedNUTS the
            paper's if no target is given.
        alpha: plain mixing with this weight, instead; nothing is fitted.
        gate: a trained gate (file or folder), which gives every image its own alpha over the fitted
            map.
        out: run folder, which is then also `mixture:DIR`; the folder of the same fit is resumed.
            Without it nothing is kept.
        device: auto, cpu or cuda.
        load_options: how to load models given by reference, such as the architecture of a `.pt`
            file.
        command: recorded in `run.toml`.
        settings: further fields of :class:`FitSettings`.
    """
    parallel.require_one_process("fit")
    for side, base in zip(SIDES, (accurate, robust), strict=True):
        checks.instance(side, base, (str, nn.Module), MODEL)
    check_common(require_threat(threat), out, device, load_options, command)
    checks.path("gate", gate)
    target = {
        "lose_at_most": lose_at_most,
        "beta": beta,
        "alpha": alpha,
        "gate": None if gate is None else str(gate),
    }
    options: FitSettings = split({**target, **settings}, FitSettings)[0]
    folder, load_options = None if out is None else Path(out), load_options or LoadOptions()
    if alpha is not None or options.published is not None:
        with nothing_left_on_refusal(folder):
            bases = _load_bases(accurate, robust, load_options, folder, options.bundle)
            return _mix_unfitted(_unfitted(*bases, options), folder, options.bundle)
    images = images_for(data, robust)
    load_options = replace(
        load_options, num_classes=images.num_classes, image_shape=images.image_shape
    )
    bases = _load_bases(
        accurate, robust, load_options, folder, options.bundle, options.cascade_views
    )
    where = resolve(device)
    conditions = Conditions(
        threat, where, options.seed, attack_batch_size(options.batch_size, where)
    )
    like = _map_of(options.like, LoadOptions(allow_code=load_options.allow_code))
    task = _Task(*bases, images, options, conditions, command, like)
    with nothing_left_on_refusal(folder):
        return task.fit_map(folder) if gate is None else task.fit_gate(Path(gate), folder)


def _load_bases(
    accurate: str | nn.Module,
    robust: str | nn.Module,
    options: LoadOptions,
    out: Path | None,
    bundle: bool,
    views: int | None = None,
) -> tuple[nn.Module, nn.Module]:
    """Load models given by reference; to be written to `out`, modules must have a reference or be
    of the zoo.

    A bundle may hold any network that torch can trace. With `views` the robust model gets so many
    of them.
    """
    checks.require(out is not None or not bundle, "out", "be given for a bundle", None)
    bases = [
        models.load(model, options)
        if isinstance(model, str)
        else models.as_classifier(model, options.image_shape)
        for model in (accurate, robust)
    ]
    models.require_used(options, bases)
    for side, base in zip(SIDES, bases, strict=True):
        writable = (
            out is None
            or bundle
            or models.reference_of(base) is not None
            or isinstance(base, Normalized)
        )
        checks.require(
            writable,
            side,
            "be a reference, a model loaded by one, or a model of the zoo to be written to `out`",
            type(base).__name__,
        )
    return bases[0], bases[1] if views is None else _with_views(bases[1], views)


def _with_views(robust: nn.Module, views: int) -> nn.Module:
    """The robust model with so many views; one that has views already must have as many."""
    if isinstance(robust, TTAClassifier):
        checks.require(
            robust.count == views, "views", f"be {robust.count}, those of the robust model", views
        )
        return robust
    model, reference = TTAClassifier(robust, views).eval(), models.full_reference_of(robust)
    if reference is not None:
        remember_reference(model, f"tta:{views}:{reference}")
    return model


def _unfitted(accurate: nn.Module, robust: nn.Module, options: FitSettings) -> MixedClassifier:
    """Plain mixing, or MixedNUTS with published numbers [Bai2024nuts, D.5]."""
    if options.published is None:
        assert options.alpha is not None
        return MixedClassifier(accurate, robust, options.alpha, **options.accurate_side).eval()
    own = PUBLISHED[options.published]
    alpha = float(f"{own.alpha:.15g}")  # as a folder stores it
    return MixedClassifier(
        accurate,
        robust,
        alpha,
        logit_map=own.logit_map(),
        surrogate_alpha=own.surrogate_alpha,
        provenance=released_provenance(options.published),
        **options.accurate_side,
    ).eval()


def _mix_unfitted(mixture: MixedClassifier, out: Path | None, bundle: bool) -> Fit:
    if out is not None:
        checks.require(not out.exists() or out.is_dir(), "out", "be a folder", str(out))
        same = (out / NAME).exists() and models.identity(
            load_mixture(out, bases=(mixture.accurate, mixture.robust))
        ) == models.identity(mixture)
        checks.require(
            same or not out.exists() or _is_unfinished(out, mixture),
            "out",
            "be a new folder or hold the same mixture",
            str(out),
        )
        out.mkdir(parents=True, exist_ok=True)
        save_mixture(out, mixture, bundle=bundle)
    return Fit(mixture, out=out)


def _is_unfinished(folder: Path, mixture: MixedClassifier) -> bool:
    """Whether a folder is empty, or holds only what :func:`save_mixture` writes first, by an
    interrupted call."""
    saved = {f"{side}.safetensors": getattr(mixture, side) for side in SIDES}
    return all(
        name in saved
        and models.weights_digest(checkpoint.load(folder / name))
        == models.weights_digest(saved[name])
        for name in files.names(folder)
    )


@dataclass(frozen=True, eq=False)
class _Task:
    """A fit to be run, with or without a folder."""

    accurate: nn.Module
    robust: nn.Module
    data: Dataset
    settings: FitSettings
    conditions: Conditions
    command: str | None
    like: ReusedMap | None  # the map of another mixture

    def __post_init__(self) -> None:
        accurate, robust = self.attack.identities
        different = accurate != robust or not list(self.robust.parameters())
        checks.require(different, "accurate and robust", "be different models", "equal weights")
        checks.require(
            models.has_gradients(self.robust) or self.settings.gradient_free,
            "gradient_free",
            "be set (--gradient-free) for a robust model without gradients",
            False,
        )
        self.attack.check_inputs()  # before a folder is created

    @property
    def target(self) -> Target:
        return self.settings.target(self.data.num_classes)

    @cached_property
    def attack(self) -> MarginAttack:
        return MarginAttack(
            self.accurate,
            self.robust,
            self.data,
            self.conditions.threat,
            self.conditions.device,
            self.settings,
        )

    def open_run(self, out: Path, gate: Gate | None = None) -> Run:
        """Open the run folder of this fit, new or to be resumed."""
        target, bases = self.target, {"accurate": self.accurate, "robust": self.robust}
        search = {
            "objective": self.settings.search_objective,
            "clamp": self.settings.search_clamp,
            **{name: getattr(self.settings, name) for name in ("rule", "against", "rounds")},
        }
        if self.settings.accurate_temperature is not None:
            search["accurate_temperature"] = self.settings.accurate_temperature
        if self.settings.cascade_views is not None:
            search["passes"] = self.settings.pass_budget
        search["like"] = None if self.like is None else self.like.logit_map.describe()
        identity = {
            "command": "fit",
            "version": 1,
            "seed": self.settings.seed,
            "threat": self.conditions.threat.to_dict(),
            "target": {
                "share": target.share,
                "of": "robust images" if target.of_robust else "all images",
                "confidence": target.confidence,
            },
            "search": search,
            "attack": self.attack.describe(),
            "models": dict(zip(SIDES, self.attack.identities, strict=True)),
            "data": self.data.describe(),
            "gate": None if gate is None else models.identity(gate),
        }
        if gate is not None:
            identity |= {
                "range_attack": self.settings.range_attack,
                "adaptive_attacks": ADAPTIVE_VERSION,
            }
        references = [models.reference_of(base) or type(base).__name__ for base in bases.values()]
        run = Run(
            out,
            identity,
            {**self.conditions.environment(), "references": references, "command": self.command},
            labels=self.data.labels_by_index(),
        )
        note_loaded(
            {
                reference: base.to(self.conditions.device)
                for reference, base in zip(references, bases.values(), strict=True)
            },
            self.data,
            self.conditions.device,
            self.conditions.batch_size,
        )
        return run

    def fit_map(self, out: Path | None) -> Fit:
        """Fit a map and its threshold."""
        start = time.monotonic()
        if out is None:
            fitted = self._fit_rule(None)
            return Fit(fitted.mixture, fitted.summary)
        run = self.open_run(out)
        if not (out / "summary.json").exists():
            fitted = self._fit_rule(out)
            run.append(artifacts.rows(fitted))
            arrays.save(out, artifacts.arrays(fitted))
            # Passes of a cascade are those of the images that did not select it, as in the summary
            # of the fit.
            data = (
                self.data
                if fitted.summary.passes is None
                else self.data.take(halves(self.data.index, self.settings.seed)[1])
            )
            cost = costs(fitted.mixture, data, self.conditions.device, self.conditions.batch_size)
            self._write(run, start, fitted.mixture, costs=tuple(cost), fit=fitted.summary)
        return Fit(self._read(out), read_summary(out).fit, out=out)

    def _fit_rule(self, out: Path | None) -> CalibratedMixture | PaperFit:
        fit_rule = FIT_RULES.get(self.settings.rule, fit_mixture)
        return fit_rule(self.attack, self.target, out, self.like)

    def fit_gate(self, gate: Path, out: Path | None) -> Fit:
        """Fit a map, put the gate over it (over plain mixing where no map helps), and select its
        range."""
        start = time.monotonic()
        network = load_gate(gate / GATE if gate.is_dir() else gate, self.accurate, self.robust)
        run = None if out is None else self.open_run(out, network)
        base = self.fit_map(None if out is None else out / "map")
        return self._fit_range(network, base, run, start)

    def _fit_range(self, network: Gate, base: Fit, run: Run | None, start: float) -> Fit:
        """Put the gate over the map of `base` and select its range, unless the run has finished."""
        out = None if run is None else run.folder
        if out is None or not (out / "summary.json").exists():
            model = (
                GatedClassifier(self.accurate, self.robust, network)
                .to(self.conditions.device)
                .eval()
            )
            over = model if base.mixture.logit_map is None else model.with_settings_of(base.mixture)
            outcome = select_range(
                over,
                self.data,
                self.target,
                self.conditions,
                None if out is None else out / "pool",
                self.settings.range_attack,
            )
            gated = outcome.selected.model
            gated.provenance = Provenance.of(
                self.data,
                outcome.promise,
                over.rule if over is model else base.mixture.rule,
                like=None if self.like is None else self.like.provenance,
            )
            if run is None:
                return Fit(base.mixture, base.summary, gated, outcome.summary())
            # Selecting a range does not run the accurate model alone; fitting the map did.
            accurate = [
                replace(row, half=None)
                for row in read_rows(run.folder / "map")
                if isinstance(row, AttackRow) and row.model == "accurate"
            ]
            run.append([*accurate, *outcome.rows(self.data)])
            self._write(run, start, gated, gate=outcome.summary())
        assert out is not None
        return Fit(base.mixture, base.summary, self._read(out), read_summary(out).gate, out)

    def _write(self, run: Run, start: float, mixture: MixedClassifier, **sections: Any) -> None:
        """Write the mixture, and last the summary, which marks the fit as finished."""
        save_mixture(
            run.folder, mixture, bundle=self.settings.bundle, image_shape=self.data.image_shape
        )
        # Accuracies on the images that selected the map would be optimistic.
        rows = [row for row in run.finish() if getattr(row, "half", None) != SEARCH]
        results = tuple(aggregation.accuracies(rows, self.conditions.threat))
        run.write_summary(
            Summary(
                command="fit",
                seconds=time.monotonic() - start,
                results=results,
                notes=class_share_notes(self.data),
                **sections,
            )
        )

    def _read(self, folder: Path) -> MixedClassifier:
        """The mixture of a finished fit; a bundle of a fit that was run without `bundle` is made
        now."""
        mixture = load_mixture(folder, bases=(self.accurate, self.robust))
        if self.settings.bundle and not is_bundle(folder):
            save_mixture(folder, mixture, bundle=True, image_shape=self.data.image_shape)
        return mixture.to(self.conditions.device)


def _map_of(reference: str | None, options: LoadOptions) -> ReusedMap | None:
    """The map of a mixture given by reference, or a published one."""
    if reference is None:
        return None
    if reference.startswith("published:"):
        name = checks.one_of("like", reference.removeprefix("published:"), PUBLISHED)
        return ReusedMap(PUBLISHED[name].logit_map(), released_provenance(name))
    mixture = load_model(reference, options)
    if not isinstance(mixture, MixedClassifier) or mixture.logit_map is None:
        raise checks.InputError(f"`like` must name a mixture with a map, got {reference!r}")
    return ReusedMap(mixture.logit_map, mixture.provenance)
