"""The public function `fit`: the most accurate mixture that loses at most a given robust accuracy."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from equipoise import models
from equipoise.core import aggregation, arrays, checks, files, format, parallel, serialize
from equipoise.core.device import resolve
from equipoise.core.records import Run, nothing_left_on_refusal
from equipoise.core.results import FitSummary, SelectionSummary, Summary, read_summary
from equipoise.core.settings import split
from equipoise.core.threat import Threat
from equipoise.data import Dataset
from equipoise.evaluation import Conditions
from equipoise.evaluation.cost import costs
from equipoise.evaluation.job import MODEL, check_common, images_for
from equipoise.fitting import artifacts
from equipoise.fitting.cached_logits import MarginAttack
from equipoise.fitting.gated import select_range
from equipoise.fitting.pipeline import fit_mixture
from equipoise.fitting.settings import FitSettings
from equipoise.mixing import Gate, GatedClassifier, LogitMap, MixedClassifier, Provenance, load_gate, load_model
from equipoise.mixing.folder import GATE, NAME, load_mixture, save_mixture
from equipoise.mixing.provenance import Frontier
from equipoise.models import LoadOptions, Normalized, checkpoint

SIDES = ("accurate", "robust")


@dataclass(frozen=True, eq=False)
class Fit:
    """A fitted mixture; `str()` is what the command prints."""

    mixture: MixedClassifier
    summary: FitSummary | None = None  # None for plain mixing
    gated: MixedClassifier | None = None  # with the gate over the map, if one was given
    selection: SelectionSummary | None = None  # of the range of the gate

    @property
    def helped(self) -> bool:
        """Whether the mixture is more accurate than the robust model alone; False for plain mixing."""
        return self.summary is not None and self.summary.helped

    @property
    def promise(self) -> str:
        """The promised loss and on what it rests, or why no mixture helps."""
        return "promises nothing: plain mixing, nothing was fitted" if self.summary is None else self.summary.promise

    @property
    def frontier(self) -> Frontier:
        """Mixtures for other targets, of which none is better in both respects."""
        return self.mixture.frontier

    def to_dict(self) -> dict[str, Any]:
        """The outcome as plain values."""
        return {"mixture": self.mixture.describe(), "fit": serialize.to_plain(self.summary),
                "frontier": [serialize.to_plain(point) for point in self.frontier],
                "gate": serialize.to_plain(self.selection)}

    def __str__(self) -> str:
        if self.summary is None:
            return f"plain mixing with alpha {self.mixture.alpha:g}; nothing was fitted"
        lines = [f"note: {note}" for note in self.summary.notes]
        lines.append(f"the mixture {self.promise}" if self.helped else self.promise)
        robust = f"(robust model {format.percent(self.summary.robust_clean)})"
        if self.helped:
            lines.append(f"on images that did not select it: clean {format.percent(self.summary.clean)} {robust}; "
                         f"{self.mixture.logit_map}, alpha {self.mixture.alpha:.6g}")
        elif self.frontier:
            first = self.frontier[0]
            lines.append(f"a mixture that may lose {100 * first.lose_at_most:.3g} points helps: clean "
                         f"{format.percent(first.clean)} {robust}")
        if isinstance(self.gated, GatedClassifier) and self.selection is not None:
            low, high = self.gated.alpha_range
            lines.append(f"the gate, alpha in ({low:.3g}, {high:.3g}): clean {format.percent(self.selection.clean)}; "
                         f"it {self.selection.promise}")
        return "\n".join(lines)

    def frontier_table(self) -> str:
        """The mixtures for other targets as a table."""
        if not self.frontier:
            return "no target of the frontier gives a mixture that helps"
        table = format.new_table("Mixtures for other targets", "lose at most", "clean", "alpha")
        for point in self.frontier:
            table.add_row(format.percent(point.lose_at_most), format.percent(point.clean), f"{point.alpha:.6g}")
        return format.render(table)


@models.name_failing_model
def fit(accurate: str | nn.Module, robust: str | nn.Module, data: Any, *, threat: Threat,
        lose_at_most: float | None = None, beta: float | None = None, alpha: float | None = None,
        gate: Path | str | None = None, out: Path | str | None = None, device: str | torch.device = "auto",
        load_options: LoadOptions | None = None, command: str | None = None, **settings: Any) -> Fit:
    """Fit a mixture to a target on images that are never evaluated on.

    Args:
        accurate: g, a reference or a torch module: images in [0, 1] → logits, or classes.
        robust: h, a reference or a torch module: images → logits. Without gradients it is attacked by random search.
        data: at least 50 images, better 1000: a `Dataset`, tensors (images, labels), a torch dataset or a loader.
            Plain mixing needs none.
        threat: the perturbations that the attack may use.
        lose_at_most: points (of 100) of robust accuracy that may be lost; 1 if no target is given.
        beta: share of the robust model's attacked accuracy to keep, instead.
        alpha: plain mixing with this weight, instead; nothing is fitted.
        gate: a trained gate (file or folder), which gives every image its own alpha over the fitted map.
        out: run folder, which is then also `mixture:DIR`; the folder of the same fit is resumed. Without it nothing is
            kept.
        device: auto, cpu or cuda.
        load_options: how to load models given by reference, such as the architecture of a `.pt` file.
        command: recorded in `run.toml`.
        settings: further fields of :class:`FitSettings`.
    """
    parallel.require_one_process("fit")
    for side, base in zip(SIDES, (accurate, robust), strict=True):
        checks.instance(side, base, (str, nn.Module), MODEL)
    check_common(checks.instance("threat", threat, Threat, "be a Threat"), out, device, load_options, command)
    checks.path("gate", gate)
    target = {"lose_at_most": lose_at_most, "beta": beta, "alpha": alpha, "gate": None if gate is None else str(gate)}
    options: FitSettings = split({**target, **settings}, FitSettings)[0]
    folder, load_options = None if out is None else Path(out), load_options or LoadOptions()
    if alpha is not None:
        with nothing_left_on_refusal(folder):
            return _mix_plainly(*_load_bases(accurate, robust, load_options, folder), alpha, folder)
    images = images_for(data, robust)
    load_options = replace(load_options, num_classes=images.num_classes, image_shape=images.image_shape)
    bases = _load_bases(accurate, robust, load_options, folder)
    conditions = Conditions(threat, resolve(device), options.seed, options.batch_size)
    like = _map_of(options.like, LoadOptions(allow_code=load_options.allow_code))
    task = _Task(*bases, images, options, conditions, command, like)
    with nothing_left_on_refusal(folder):
        return task.fit_map(folder) if gate is None else task.fit_gate(Path(gate), folder)


def _load_bases(accurate: str | nn.Module, robust: str | nn.Module, options: LoadOptions,
                out: Path | None) -> tuple[nn.Module, nn.Module]:
    """Load models given by reference; to be written to `out`, modules must have a reference or be of the zoo."""
    bases = [models.load(model, options) if isinstance(model, str) else model for model in (accurate, robust)]
    for side, base in zip(SIDES, bases, strict=True):
        writable = out is None or models.reference_of(base) is not None or isinstance(base, Normalized)
        checks.require(writable, side, "be a reference, a model loaded by one, or a model of the zoo to be written to "
                       "`out`", type(base).__name__)
    return bases[0], bases[1]


def _save(folder: Path, mixture: MixedClassifier) -> None:
    """Write `mixture.toml`; a model without a reference is saved beside it."""
    references = {}
    for side in SIDES:
        base = getattr(mixture, side)
        if models.reference_of(base) is None:
            checkpoint.save(folder / f"{side}.safetensors", base)
            references[side] = f"file:{folder / side}.safetensors"
    save_mixture(folder, mixture, **references)


def _mix_plainly(accurate: nn.Module, robust: nn.Module, alpha: float, out: Path | None) -> Fit:
    mixture = MixedClassifier(accurate, robust, alpha).eval()
    if out is not None:
        checks.require(not out.exists() or out.is_dir(), "out", "be a folder", str(out))
        same = (out / NAME).exists() and models.identity(
            load_mixture(out, bases=(accurate, robust))) == models.identity(mixture)
        checks.require(same or not out.exists() or _is_unfinished(out, mixture), "out",
                       "be a new folder or hold the same mixture", str(out))
        out.mkdir(parents=True, exist_ok=True)
        _save(out, mixture)
    return Fit(mixture)


def _is_unfinished(folder: Path, mixture: MixedClassifier) -> bool:
    """Whether a folder is empty, or holds only what :func:`_save` writes first, by an interrupted call."""
    saved = {f"{side}.safetensors": getattr(mixture, side) for side in SIDES}
    return all(name in saved and models.weights_digest(checkpoint.load(folder / name)) == models.weights_digest(
        saved[name]) for name in files.names(folder))


@dataclass(frozen=True, eq=False)
class _Task:
    """A fit to be run, with or without a folder."""

    accurate: nn.Module
    robust: nn.Module
    data: Dataset
    settings: FitSettings
    conditions: Conditions
    command: str | None
    like: LogitMap | None  # the map of another mixture

    def __post_init__(self) -> None:
        different = models.identity(self.accurate) != models.identity(self.robust) or not list(self.robust.parameters())
        checks.require(different, "accurate and robust", "be different models", "equal weights")
        self.attack.check_inputs()  # before a folder is created

    @property
    def attack(self) -> MarginAttack:
        return MarginAttack(self.accurate, self.robust, self.data, self.conditions.threat, self.conditions.device,
                            self.settings)

    def open_run(self, out: Path, gate: Gate | None = None) -> Run:
        """Open the run folder of this fit, new or to be resumed."""
        target, bases = self.settings.target(), {"accurate": self.accurate, "robust": self.robust}
        search = {name: getattr(self.settings, name) for name in ("objective", "clamp", "rule", "against", "rounds")}
        search["like"] = None if self.like is None else self.like.describe()
        identity = {
            "command": "fit", "version": 1, "seed": self.settings.seed, "threat": self.conditions.threat.to_dict(),
            "target": {"share": target.share, "of": "robust images" if target.of_robust else "all images"},
            "search": search, "attack": self.attack.describe(),
            "models": {side: models.identity(base) for side, base in bases.items()}, "data": self.data.describe(),
            "gate": None if gate is None else models.identity(gate)}
        references = [models.reference_of(base) or type(base).__name__ for base in bases.values()]
        return Run(out, identity, {**self.conditions.environment(), "references": references, "command": self.command},
                   labels=self.data.labels_by_index())

    def fit_map(self, out: Path | None) -> Fit:
        """Fit a map and its threshold."""
        start = time.monotonic()
        if out is None:
            fitted = fit_mixture(self.attack, self.settings.target(), like=self.like)
            return Fit(fitted.mixture, fitted.summary)
        run = self.open_run(out)
        if not (out / "summary.json").exists():
            fitted = fit_mixture(self.attack, self.settings.target(), out, self.like)
            run.append(artifacts.rows(fitted))
            arrays.save(out, artifacts.arrays(fitted))
            cost = costs(fitted.mixture, self.data, self.conditions.device, self.settings.batch_size)
            self._write(run, start, fitted.mixture, costs=tuple(cost), fit=fitted.summary)
        return Fit(self._read(out), read_summary(out).fit)

    def fit_gate(self, gate: Path, out: Path | None) -> Fit:
        """Fit a map, put the gate over it (over plain mixing where no map helps), and select its range."""
        start = time.monotonic()
        network = load_gate(gate / GATE if gate.is_dir() else gate, self.accurate, self.robust)
        run = None if out is None else self.open_run(out, network)
        base = self.fit_map(None if out is None else out / "map")
        if out is None or not (out / "summary.json").exists():
            model = GatedClassifier(self.accurate, self.robust, network).to(self.conditions.device).eval()
            over = model if base.mixture.logit_map is None else model.with_settings_of(base.mixture)
            outcome = select_range(over, self.data, self.settings.target(), self.conditions,
                                   None if out is None else out / "pool")
            gated = outcome.selected.model
            gated.provenance = Provenance.of(self.data, outcome.promise)
            if run is None:
                return Fit(base.mixture, base.summary, gated, outcome.summary())
            run.append(outcome.rows(self.data))
            self._write(run, start, gated, gate=outcome.summary())
        assert out is not None
        return Fit(base.mixture, base.summary, self._read(out), read_summary(out).gate)

    def _write(self, run: Run, start: float, mixture: MixedClassifier, **sections: Any) -> None:
        """Write the mixture, and last the summary, which marks the fit as finished."""
        _save(run.folder, mixture)
        results = tuple(aggregation.accuracies(run.finish(), self.conditions.threat))
        run.write_summary(Summary(command="fit", seconds=time.monotonic() - start, results=results, **sections))

    def _read(self, folder: Path) -> MixedClassifier:
        return load_mixture(folder, bases=(self.accurate, self.robust)).to(self.conditions.device)


def _map_of(reference: str | None, options: LoadOptions) -> LogitMap | None:
    """The map of a mixture given by reference."""
    if reference is None:
        return None
    mixture = load_model(reference, options)
    logit_map = mixture.logit_map if isinstance(mixture, MixedClassifier) else None
    checks.require(logit_map is not None, "like", "name a mixture with a map", reference)
    return logit_map
