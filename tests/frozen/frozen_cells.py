"""The table of frozen cells, and how a cell is measured: with the public functions and the rows on disk alone."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import equipoise as eq

HERE = Path(__file__).parent
VERDICTS = HERE / "verdicts"
DATA = {"resnet8": "cifar10", "resnet18": "cifar10", "digits": "digits", "shapes": "shapes"}
STORED_WEIGHTS = {
    "resnet8": ("cifar10_resnet8_standard", "cifar10_resnet8_pgd_at_linf8"),
    "resnet18": ("cifar10_resnet18_standard", "cifar10_resnet18_pgd_at_linf8"),
}
BASES = ("accurate", "robust")


@dataclass(frozen=True)
class Run:
    """One call of `eq.evaluate`. Each of its `cells` is a model of it, and has a file in `verdicts`.

    Args:
        pair: a key of `DATA`.
        model: accurate, robust, or a folder of `mixtures/PAIR`, which is evaluated beside its bases.
        norm, eps: the threat.
        attack: its name.
        count: the first so many test images.
        cells: whose verdicts are frozen; by default those of `model` alone.
        settings: of the evaluation.
        device: cpu or cuda.
        differ: images of a cell that may survive where they did not, or the other way round.
        more: how many more images of a cell may survive.
        radius_factor: of minimum-norm: by how much the radius of an image may grow.
        margin: by how much the mean margin may grow over images that survived and still do.
    """

    pair: str
    model: str
    norm: str
    eps: str
    attack: str
    count: int
    cells: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    differ: int = 0
    more: int = 0
    radius_factor: float = 1.02
    margin: float = 0.05

    @property
    def models(self) -> tuple[str, ...]:
        """The models whose verdicts are frozen."""
        return self.cells or (self.model,)

    def cell(self, model: str) -> str:
        """The name of a cell, which is that of its file."""
        return f"{self.pair}-{self.norm}-{self.attack.replace(',', '+')}-{model}"

    def __str__(self) -> str:
        return self.cell(self.model)


# The threats of every pair: the robust model keeps 20 to 80 % of the images.
EPS = {
    "resnet8": {"linf": "8/255", "l2": "0.5", "l1": "12"},
    "digits": {"linf": "0.2", "l2": "0.6", "l1": "1"},
    "shapes": {"linf": "20/255", "l2": "1", "l1": "8"},
    "resnet18": {"linf": "8/255"},
}


def cell(
    pair: str, norm: str, attack: str, model: str, count: int, *cells: str, **more: Any
) -> Run:
    """A run under the threat of its pair; further `cells` are bases whose verdicts are frozen, too."""
    fields = {
        name: more.pop(name)
        for name in ("device", "differ", "more", "radius_factor", "margin")
        if name in more
    }
    names = (*cells, model) if cells else ()
    return Run(pair, model, norm, EPS[pair][norm], attack, count, names, settings=more, **fields)


RUNS = (
    cell("resnet8", "linf", "fast", "plain", 128, *BASES),
    cell("resnet8", "linf", "fast", "switch", 128),
    cell("resnet8", "linf", "fast", "nuts", 32),
    cell("resnet8", "linf", "fast", "paper", 32),
    cell("resnet8", "linf", "fast", "cascade", 24),
    cell("resnet8", "linf", "fast", "gate", 16),
    cell("resnet8", "linf", "fast,square", "blackbox", 24, steps=500),
    cell("resnet8", "l2", "fast", "switch", 32, "robust"),
    cell("resnet8", "l2", "fast", "plain", 24),
    cell("resnet8", "l1", "fast", "paper", 16, "robust"),
    cell("resnet8", "linf", "standard", "robust", 32),
    cell("resnet8", "l2", "standard", "robust", 12),
    cell("resnet8", "linf", "standard", "switch", 8),
    cell("resnet8", "linf", "rand", "robust", 12, eot=2, repeats=2, steps=50),
    cell("resnet8", "linf", "minimum-norm", "robust", 16),
    cell("resnet8", "l2", "minimum-norm", "accurate", 16),
    cell("resnet8", "l1", "minimum-norm", "robust", 8),
    cell("resnet8", "linf", "pgd", "robust", 128),
    cell("resnet8", "linf", "pgd", "switch", 32),
    cell("digits", "linf", "fast", "plain", 128, *BASES),
    cell("digits", "linf", "fast", "nuts", 128),
    cell("digits", "linf", "fast", "paper", 128),
    cell("digits", "linf", "fast", "switch", 96),
    cell("digits", "linf", "fast", "cascade", 48),
    cell("digits", "linf", "fast", "gate", 24),
    cell("digits", "linf", "fast,square", "blackbox", 48, steps=500),
    cell("digits", "l2", "fast", "nuts", 64, "robust"),
    cell("digits", "l1", "fast", "cascade", 24, "robust"),
    cell("digits", "linf", "standard", "switch", 16, "robust"),
    cell("digits", "l1", "standard", "robust", 32),
    cell("digits", "l2", "rand", "switch", 32, eot=2, repeats=2, steps=50),
    cell("digits", "linf", "minimum-norm", "robust", 64),
    cell("digits", "l2", "minimum-norm", "plain", 32),
    cell("digits", "l1", "minimum-norm", "accurate", 32),
    cell("digits", "linf", "pgd", "gate", 64),
    cell("digits", "l1", "pgd", "plain", 96),
    cell("shapes", "linf", "fast", "switch", 96, *BASES),
    cell("shapes", "linf", "fast", "plain", 64),
    cell("shapes", "linf", "fast", "gate", 24),
    cell("shapes", "linf", "fast", "cascade", 24),
    cell("shapes", "linf", "fast,square", "blackbox", 32, steps=500),
    cell("shapes", "l2", "fast", "paper", 32, "robust"),
    cell("shapes", "l1", "fast", "switch", 24, "robust"),
    cell("shapes", "l2", "standard", "plain", 12),
    cell("shapes", "l1", "standard", "robust", 16),
    cell("shapes", "linf", "rand", "robust", 24, eot=2, repeats=2, steps=50),
    cell("shapes", "l2", "minimum-norm", "robust", 32),
    cell("shapes", "l1", "minimum-norm", "robust", 24),
    cell("shapes", "l2", "pgd", "switch", 64),
    cell("shapes", "l1", "pgd", "robust", 96),
)
GPU_RUNS = (
    cell("resnet18", "linf", "fast", "switch", 1000, *BASES, device="cuda", differ=2),
    cell("resnet18", "linf", "fast", "plain", 1000, device="cuda", differ=2),
    cell("resnet18", "linf", "standard", "accurate", 1000, device="cuda", differ=2),
    cell("resnet18", "linf", "standard", "robust", 1000, device="cuda", differ=2),
)


@dataclass(frozen=True)
class Verdicts:
    """What the images of a cell came to; every list has one entry per image.

    `survives`: correct on the clean image and under every attack of the run. `predicted` and `margin`: the class and
    the probability margin at the point that broke the image, or else at that of the smallest margin. For information:
    `broken_by`, the number of the stage in `stages`, and `passes`, the network passes with a gradient. `radius`: norm
    of the smallest perturbation that minimum-norm found, 0 where the clean image is misclassified.
    """

    index: list[int]
    label: list[int]
    survives: list[int]
    predicted: list[int]
    margin: list[float]
    stages: list[str]
    broken_by: list[int | None]
    passes: list[int]
    radius: list[float | None] | None = None

    @classmethod
    def of_rows(cls, rows: Sequence[Mapping[str, Any]]) -> Verdicts:
        """The worst of the rows of every image: those of one model, clean and under every attack of a run."""
        by_image: dict[int, list[Mapping[str, Any]]] = {}
        for row in rows:
            by_image.setdefault(row["index"], []).append(row)
        index = sorted(by_image)
        worst = [
            min(by_image[image], key=lambda row: (row["correct"], row["margin"])) for image in index
        ]
        names = [None if row["correct"] else _stage(row) for row in worst]
        stages = sorted({name for name in names if name is not None})
        radius = None
        if any("max_radius" in row for row in rows):
            radius = [_radius(by_image[image]) for image in index]
        return cls(
            index=index,
            label=[row["label"] for row in worst],
            survives=[int(row["correct"]) for row in worst],
            predicted=[row["predicted"] for row in worst],
            margin=[row["margin"] for row in worst],
            stages=stages,
            broken_by=[None if name is None else stages.index(name) for name in names],
            passes=[sum(row.get("attack_passes", 0) for row in by_image[image]) for image in index],
            radius=radius,
        )

    def write(self, path: Path) -> None:
        """One list per line."""
        content = {name: values for name, values in asdict(self).items() if values is not None}
        lines = [f" {json.dumps(name)}: {json.dumps(values)}" for name, values in content.items()]
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")

    @classmethod
    def read(cls, path: Path) -> Verdicts:
        """The verdicts of a file."""
        return cls(**json.loads(path.read_text()))


def _stage(row: Mapping[str, Any]) -> str:
    stage = row.get("broken_by")
    return str(row["attack"] if stage is None else f"{row['attack']}: {stage}")


def _radius(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """The smallest radius among the rows of one image."""
    if any(row["attack"] == "clean" and not row["correct"] for row in rows):
        return 0.0
    found = [row["radius"] for row in rows if row.get("radius") is not None]
    return min(found) if found else None


def lay_out(root: Path) -> None:
    """Put mixtures, networks and the stored weights side by side, as the references in the mixtures expect them."""
    for name in ("mixtures", "networks"):
        shutil.copytree(HERE / name, root / name)
    if weights := os.environ.get("EQUIPOISE_WEIGHTS"):
        (root / "weights").symlink_to(Path(weights).resolve())


def base(pair: str, side: str, root: Path) -> Path:
    """The checkpoint of a base, in a folder that was laid out."""
    if pair in STORED_WEIGHTS:
        return root / "weights" / f"{STORED_WEIGHTS[pair][BASES.index(side)]}.safetensors"
    return root / "networks" / f"{pair}-{side}.safetensors"


def load(run: Run, root: Path) -> Any:
    """The model of a run, from a folder that was laid out."""
    if run.model in BASES:
        return eq.load_model(base(run.pair, run.model, root))
    return eq.load_model(f"mixture:{root}/mixtures/{run.pair}/{run.model}", allow_code=True)


def evaluate(
    run: Run, data: eq.Dataset, root: Path, out: Path, **settings: Any
) -> dict[str, Verdicts]:
    """The verdicts of every model of a run, by the names of the models; `settings` replace those of the run."""
    eq.evaluate(
        {run.model: load(run, root)},
        data,
        threat=eq.Threat(run.norm, run.eps),
        device=run.device,
        out=out,
        **{"attack": run.attack, "audit": 0, **run.settings, **settings},
    )
    lines = (out / "rows.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["kind"] == "attack"]
    verdicts = {}
    for name in sorted({row["model"] for row in rows}):
        model = run.model if name == "mixed" else name
        verdicts[model] = Verdicts.of_rows([row for row in rows if row["model"] == name])
    return verdicts
