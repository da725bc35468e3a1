"""Jobs of an evaluation: models under attacks, and the conditions they share."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from equipoise import __version__, models
from equipoise.attacks import Attack
from equipoise.core import checks, device, rng
from equipoise.core.records import Run
from equipoise.core.rows import RowKey
from equipoise.core.threat import Threat, require_threat
from equipoise.data import Dataset, as_dataset, pixels, warn_of_class_shares
from equipoise.models import probe


@dataclass(frozen=True)
class AuditPlan:
    """A stronger attack for a random sample of the images that survive the attack of a job."""

    name: str  # of the stronger attack
    attack: Attack
    count: int  # images in the sample

    def sample(self, survivors: Iterable[int], seed: int) -> list[int]:
        """The indices of the sampled images: those whose random numbers, keyed by seed and index,
        are smallest.

        Every set of so many survivors is equally likely, whatever process attacks which image and
        in whatever order.
        """
        index = torch.tensor(sorted(survivors), dtype=torch.int64)
        keys = rng.stream(seed, "audit", index).words(2).tolist()
        return [image for _, image in sorted(zip(keys, index.tolist(), strict=True))[: self.count]]

    def describe(self) -> dict[str, Any]:
        """For the identity of a run."""
        return {"count": self.count, **self.attack.describe()}


@dataclass(frozen=True)
class Job:
    """A model, or a mixture at one alpha of several, under one attack; the names are those of rows
    and reports."""

    name: str
    model: nn.Module  # images (B, C, H, W) in [0, 1] → logits (B, K)
    attack_name: str
    attack: Attack
    alpha: float | None = None  # distinguishes several mixtures or target weights of one name
    audit: AuditPlan | None = None  # of a suite

    def describe(self) -> dict[str, Any]:
        """The attack and its audit, for the identity of a run."""
        return {
            **self.attack.describe(),
            **({} if self.audit is None else {"audit": self.audit.describe()}),
        }

    def key(self, index: int) -> RowKey:
        """The key of the row of one image."""
        return index, self.name, self.attack_name, self.alpha

    def __str__(self) -> str:
        return f"{self.name}{'' if self.alpha is None else f' (alpha {self.alpha:g})'}, {self.attack_name}"


@dataclass(frozen=True)
class Conditions:
    """What all jobs of an evaluation share."""

    threat: Threat
    device: torch.device = field(default_factory=lambda: device.resolve("auto"))
    seed: int = 0
    batch_size: int = 128
    precision: str = "auto"

    def __post_init__(self) -> None:
        require_threat(self.threat)
        checks.seed(self.seed)
        checks.whole("batch_size", self.batch_size, least=1)
        device.check_precision(self.precision, self.device)

    def environment(self) -> dict[str, Any]:
        """What may differ between two starts of the same run, for the settings of `run.toml`."""
        return {
            "batch_size": self.batch_size,
            "device": str(self.device),
            "equipoise": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }


def open_run(
    folder: Path | str,
    jobs: Sequence[Job],
    data: Dataset,
    conditions: Conditions,
    settings: Mapping[str, Any] | None = None,
) -> Run:
    """Open the run folder of these jobs, new or to be resumed; unusable models are refused before
    it is created."""
    distinct = len(data.index.unique())
    checks.require(
        distinct == len(data),
        "images",
        "have an index each",
        f"{len(data)} images with {distinct} indices",
    )
    for name, model in {job.name: job.model for job in jobs}.items():
        check_model(name, model.to(conditions.device), data, conditions.device)
    run = Run(
        folder,
        identity(jobs, data, conditions),
        {**conditions.environment(), **(settings or {})},
        labels=data.labels_by_index(),
    )
    note_loaded(
        {job.name: job.model for job in jobs}, data, conditions.device, conditions.batch_size
    )
    return run


def note_loaded(
    named: Mapping[str, nn.Module],
    data: Dataset,
    where: torch.device,
    batch_size: int | None = None,
) -> None:
    """Show what was loaded from elsewhere in one line each, and warn of what looks wrong on the
    first images."""
    models.note_loaded(named)
    for name, model in named.items():
        info = models.info_of(model)
        own = () if info is None else info.class_names
        if own != data.classes and sorted(own) == sorted(data.classes):
            order = ",".join(str(own.index(label)) for label in data.classes)
            warnings.warn(
                f"{name}: its classes are those of {data.name} in another order; ?labels={order} is that of "
                "the data",
                checks.EquipoiseWarning,
                stacklevel=3,
            )
    first = slice(0, probe.IMAGES)
    probe.warn_of_findings(
        named,
        pixels(data.images[first].to(where)),
        data.labels[first].to(where),
        batch_size or probe.BATCH,
    )


MODULE = "be a torch module"
MODEL = f"{MODULE} or a model reference"


def check_common(
    threat: Any = None,
    out: Any = None,
    device: Any = "auto",
    load_options: Any = None,
    command: Any = None,
) -> None:
    """Check the types of arguments that several public functions share; None is "not given"."""
    if threat is not None:
        require_threat(threat)
    checks.path("out", out)
    checks.instance("device", device, (str, torch.device), "be auto, cpu or cuda")
    checks.optional("load_options", load_options, models.LoadOptions, "be LoadOptions")
    checks.optional("command", command, str, "be text")


def check_models(given: Any) -> None:
    """A model or several: modules, references, or a mapping from names to either."""
    checks.instance(
        "models",
        given,
        (str, nn.Module, Mapping, list, tuple),
        "be a model, several, or a mapping from names to models",
    )
    named = (
        given
        if isinstance(given, Mapping)
        else dict(enumerate([given] if isinstance(given, str | nn.Module) else given))
    )
    checks.require(len(named) > 0, "models", "name at least one model", [])
    for name, model in named.items():
        if isinstance(given, Mapping):
            checks.instance("models", name, str, "have text as names")
        checks.instance(name if isinstance(name, str) else "models", model, (str, nn.Module), MODEL)


def images_for(data: Any, given: Any) -> Dataset:
    """The data as a `Dataset`, with a warning if its class shares are not those of its split.

    Labels alone may miss the last classes, which then come from the first module.
    """
    images = warn_of_class_shares(as_dataset(data))
    listed = (
        given.values()
        if isinstance(given, Mapping)
        else [given]
        if isinstance(given, str | nn.Module)
        else given
    )
    model = next((model for model in listed or () if isinstance(model, nn.Module)), None)
    if isinstance(data, Dataset) or model is None:
        return images
    model = models.as_classifier(model, images.image_shape)
    device = next(model.parameters(), images.labels).device
    output = models.check_forward("model", model, pixels(images.images[:1].to(device)))
    classes = output.shape[1] if output.dim() == 2 else 0
    return (
        images
        if classes <= images.num_classes
        else replace(images, classes=tuple(map(str, range(classes))))
    )


def check_model(name: str, model: nn.Module, data: Dataset, device: torch.device) -> None:
    """Run one image through a model, so that an incompatible one is one sentence now and not a
    traceback later."""
    output = models.check_forward(name, model, pixels(data.images[:1].to(device)))
    logits = checks.logits(output, len(output), name=f"logits of {name}")
    checks.require(
        logits.shape[1] == data.num_classes,
        name,
        f"have as many classes as {data.name}, {data.num_classes}",
        logits.shape[1],
    )


def identity(jobs: Sequence[Job], data: Dataset, conditions: Conditions) -> dict[str, Any]:
    """What makes two evaluations the same run: models, images, threat, attacks, seed and
    precision."""
    named: dict[str, nn.Module] = {}
    attacks: dict[str, dict[str, Any]] = {}
    for job in jobs:
        name = job.name if job.alpha is None else f"{job.name}@{job.alpha!r}"
        named[name] = job.model
        attacks.setdefault(name, {})[job.attack_name] = job.describe()
    with (
        ThreadPoolExecutor() as pool
    ):  # digests of weights take long, and leave the interpreter to other threads
        identities = dict(zip(named, pool.map(models.identity, named.values()), strict=True))
    return {
        "command": "evaluate",
        "seed": conditions.seed,
        "precision": conditions.precision,
        "data": data.describe(),
        "threat": conditions.threat.to_dict(),
        "models": identities,
        "attacks": attacks,
    }
