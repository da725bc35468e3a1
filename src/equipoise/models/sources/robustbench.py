"""Checkpoints of RobustBench [Croce2021robustbench]: `robustbench:DATASET/THREAT/ID`, such as
`robustbench:cifar10/Linf/Carmon2019Unlabeled`.

The file lies where RobustBench's own `load_model` would have put it, `ROOT/DATASET/THREAT/ID.pt`.
ROOT is `$EQUIPOISE_ROBUSTBENCH`, else `models` in the current folder. `?weights=PATH` names the
file or another root. XCiT's files are also looked up in torch's cache (`$TORCH_HOME`). Nothing is
downloaded: the error for a missing file says from where and to where.
"""

from __future__ import annotations

import csv
import functools
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from equipoise.core import checks
from equipoise.core.checks import InputError
from equipoise.models import checkpoint
from equipoise.models.assembly import assemble
from equipoise.models.layers import resizing
from equipoise.models.layers.normalization import Normalized
from equipoise.models.loaded import LoadedModel, ModelInfo, describe_module, remember_info
from equipoise.models.options import LoadOptions, ModelSettings
from equipoise.models.sources import robustbench_timm
from equipoise.models.sources.robustbench_keys import NESTED, remove_prefixes, rename
from equipoise.models.torch_files import read_state_dict

if TYPE_CHECKING:
    from equipoise.models.reference import Reference

CATALOG = Path(__file__).with_suffix(".csv")
CATALOG_ORIGIN = "RobustBench's catalogue"
ROOT = "EQUIPOISE_ROBUSTBENCH"
CLASSES = {"cifar10": 10, "cifar100": 100, "imagenet": 1000}
SIDES = {"cifar10": 32, "cifar100": 32, "imagenet": 224}
MIXEDNUTS = "mixednuts"  # the "architecture" of a mixture: two files, accurate and robust
# Of MixedNUTS: architecture, mean and std of the accurate base. On ImageNet the released code
# defines a mean and a std but does not apply them.
ACCURATE_BASES = {
    "cifar10": ("bit_resnet152x2", (0.5,) * 3, (0.5,) * 3),
    "cifar100": ("bit_resnet152x2", (0.5,) * 3, (0.5,) * 3),
    "imagenet": ("timm:convnextv2_large", (0.0,) * 3, (1.0,) * 3),
}
ROBUST_BASES = {
    "cifar10": "cifar10/Linf/Peng2023Robust",
    "cifar100": "cifar100/Linf/Wang2023Better_WRN-70-16",
    "imagenet": "imagenet/Linf/Liu2023Comprehensive_Swin-L",
}


@dataclass(frozen=True)
class Entry:
    """One model of RobustBench.

    `arch` is of our zoo, `timm:NAME`, :data:`MIXEDNUTS`, or empty if the architecture is not
    implemented here. `preset` is the preprocessing of images of ImageNet, which RobustBench leaves
    to the data and we put into the model.
    """

    dataset: str
    threat: str
    id: str
    arch: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    preset: str
    sources: tuple[str, ...]  # one per file

    @property
    def key(self) -> str:
        """What follows `robustbench:`."""
        return f"{self.dataset}/{self.threat}/{self.id}"

    @property
    def files(self) -> tuple[str, ...]:
        """Paths below the root; an ensemble has several."""
        path = f"{self.key}.pt"
        return (
            (path,)
            if len(self.sources) == 1
            else tuple(f"{path}_m{n}.pt" for n in range(len(self.sources)))
        )


@functools.cache
def catalog() -> dict[str, Entry]:
    """All models of RobustBench by :attr:`Entry.key`, as of March 2025."""
    with CATALOG.open(encoding="utf-8", newline="") as file:
        entries = [
            Entry(
                row["dataset"],
                row["threat"],
                row["id"],
                row["arch"],
                _numbers(row["mean"]),
                _numbers(row["std"]),
                row["preset"],
                tuple(map(_address, row["source"].split())),
            )
            for row in csv.DictReader(file)
        ]
    return {entry.key: entry for entry in entries}


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split()))


def _address(source: str) -> str:
    return source if source.startswith("https:") else f"https://drive.google.com/uc?id={source}"


def find_entry(body: str) -> Entry:
    """The model that a reference names."""
    checks.require(
        body.count("/") == 2,
        "model",
        "read robustbench:DATASET/THREAT/ID, such as robustbench:cifar10/Linf/Carmon2019Unlabeled",
        f"robustbench:{body}",
    )
    dataset, threat, _ = body.split("/")
    known = [key for key in catalog() if key.startswith(f"{dataset}/{threat}/")]
    if not known:
        checks.one_of(
            "data set and threat of RobustBench",
            f"{dataset}/{threat}",
            {key.rpartition("/")[0] for key in catalog()},
        )
    entry = catalog()[checks.one_of("model of RobustBench", body, known)]
    checks.require(
        bool(entry.arch),
        "model",
        "have an architecture that Equipoise implements; load it in Python with "
        "the package robustbench and pass the module",
        f"robustbench:{body}",
    )
    return entry


def find_files(entry: Entry, weights: str | None = None) -> tuple[Path, ...]:
    """The files of a model; `weights` is its file or the folder that holds RobustBench's
    folders."""
    given = None if weights is None else Path(weights).expanduser()
    if given is not None and not given.is_dir():
        checks.require(
            len(entry.files) == 1,
            "weights",
            f"be a folder, because {entry.key} has {len(entry.files)} files",
            weights,
        )
        return (given,)
    root = given or Path(os.environ.get(ROOT) or "models").expanduser()
    paths = []
    for name, source in zip(entry.files, entry.sources, strict=True):
        path, published = (
            root / name,
            source.rpartition("/")[2],
        )  # timm and torch keep the published name
        places = (
            path,
            path.with_name(published),
            Path(torch.hub.get_dir()) / "checkpoints" / published,
        )
        existing = next((place for place in places if place.is_file()), None)
        if existing is None:
            raise InputError(
                f"`model` must have its file at {path} (the root is set by ?weights=DIR or ${ROOT}); "
                f"download {source} to there, got no such file"
            )
        paths.append(existing)
    return tuple(paths)


def find_weights(body: str, weights: str | None) -> str:
    """The absolute path of the one file of a model."""
    return str(find_files(find_entry(body), weights)[0].absolute())


def load_reference(reference: Reference, options: LoadOptions) -> LoadedModel:
    """The loader of `robustbench:`."""
    entry = find_entry(reference.body)
    checks.require(
        entry.arch != MIXEDNUTS,
        "model",
        "be a single network here; this one is a mixture, which stands on its own",
        reference.text,
    )
    return load_file(entry, find_files(entry, options.weights)[0])


def load_file(entry: Entry, path: Path) -> LoadedModel:
    """The network of an entry with the weights of this file."""
    classes, side = CLASSES[entry.dataset], SIDES[entry.dataset]
    state = remove_prefixes(read_state_dict(path, NESTED))
    if entry.arch.startswith("timm:"):
        name = entry.arch.removeprefix("timm:")
        sizes = resizing.preset(entry.preset) if entry.preset else resizing.Preprocessing()
        return LoadedModel(
            robustbench_timm.load(path, state, name, classes=classes, side=side),
            ModelInfo(f"{entry.id}, {name} of timm", classes, (3, side, side), origin=str(path)),
            preprocessing=replace(sizes, mean=entry.mean, std=entry.std, origin=CATALOG_ORIGIN),
        )
    renamed = rename(state, entry.arch)
    in_file = (
        "mean" in renamed and "std" in renamed
    )  # what the file says is what it was trained with
    model = checkpoint.from_state(
        path,
        renamed,
        entry.arch,
        num_classes=classes,
        image_shape=(3, side, side),
        mean=None if in_file else entry.mean,
        std=None if in_file else entry.std,
    )
    return LoadedModel(
        model, _describe(model, entry, path, "in the file" if in_file else CATALOG_ORIGIN)
    )


def _describe(model: Normalized, entry: Entry, path: Path, origin: str) -> ModelInfo:
    own = describe_module(model)
    return replace(
        own,
        architecture=f"{entry.id}, {own.architecture}",
        origin=str(path),
        of_zoo=False,
        normalization=own.normalization.replace("in the model", origin),
    )


def load_mixednuts_bases(entry: Entry, settings: ModelSettings) -> tuple[nn.Module, nn.Module]:
    """The accurate and the robust model of MixedNUTS, in evaluation mode."""
    arch, mean, std = ACCURATE_BASES[entry.dataset]
    entries = replace(entry, arch=arch, mean=mean, std=std), catalog()[ROBUST_BASES[entry.dataset]]
    bases = []
    for base, path in zip(entries, find_files(entry, settings.weights), strict=True):
        model, info = assemble(
            load_file(base, path), f"robustbench:{entry.key}", settings, LoadOptions()
        )
        remember_info(model, info)
        bases.append(model.eval())
    return bases[0], bases[1]
