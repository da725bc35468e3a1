"""The classifiers of the SmoothMix study: rows of its tables and curves of its figures, with the
published ACRs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from equipoise.core import checks
from equipoise.data import Dataset
from equipoise.training import TrainingPlan
from equipoise.training.objectives import OBJECTIVES
from equipoise.training.recipe import Recipe
from equipoise.training.trainer import measure_channels

SIGMAS = (0.25, 0.5, 1.0)


@dataclass(frozen=True)
class Method:
    """A training method that users select."""

    label: str  # in tables
    recipe: str  # name of its recipes around the sigma
    changes: Mapping[str, Any] = field(default_factory=dict)  # settings that differ from the recipe
    optional: bool = False  # trained only where it is named


METHODS = {
    "gaussian": Method("Gaussian", "gaussian_{sigma}"),
    "stability": Method("Stability", "stability_{sigma}"),
    "smoothadv": Method("SmoothAdv", "smoothadv_{sigma}"),
    "smoothadv-ddn": Method(
        "SmoothAdv with DDN", "smoothadv_{sigma}", {"attack": "ddn"}, optional=True
    ),
    "macer": Method("MACER", "macer_{sigma}"),
    "consistency": Method("Consistency", "consistency_{sigma}"),
    "consistency-smoothadv": Method("Consistency + SmoothAdv", "consistency_{sigma}_smoothadv"),
    "smoothmix-eta1": Method("SmoothMix (η = 1)", "smoothmix_{sigma}_eta1"),
    "smoothmix-eta1-onestep": Method(
        "SmoothMix (η = 1), one-step adversary", "smoothmix_{sigma}_eta1_onestep"
    ),
    "smoothmix": Method("SmoothMix (η = 5)", "smoothmix_{sigma}"),
    "smoothmix-onestep": Method(
        "SmoothMix (η = 5), one-step adversary", "smoothmix_{sigma}_onestep"
    ),
}
FAST = (
    "gaussian",
    "smoothadv",
    "consistency",
    "smoothmix",
    "smoothmix-onestep",
)  # with a fast recipe on CIFAR-10
DEEP = (
    "gaussian",
    "stability",
    "smoothadv",
    "macer",
    "consistency",
    "smoothmix",
    "smoothmix-onestep",
)
TABLE_1, INTERPOLATION, TABLE_2, TABLE_3, RESNET110 = (
    "table-1",
    "figures-2-3",
    "table-2",
    "table-3",
    "resnet110",
)
ETA, STEPS, MAX_NORM, NOISES = "figure-6", "figure-7a", "figure-7b", "figure-7c"
ABLATIONS = (ETA, STEPS, MAX_NORM, NOISES)
FIGURE_7 = "figure-7"

# ACR in the paper, and the mean over the five runs in the released logs of the official code (whole
# test set), as `benchmarks/mnist_acr.py --logs` computes it; on CIFAR-10 there is one log each.
# Consistency + SmoothAdv is in the logs, not in the paper; SmoothAdv with DDN is in neither.
# Table 3 of the paper took SmoothAdv and MACER from checkpoints of their authors; there are no logs
# of these rows.
Published = tuple[float | None, float | None]
MNIST_ACR: dict[str, Sequence[Published]] = {
    "gaussian": ((0.911, 0.9108), (1.553, 1.5581), (1.620, 1.6184)),
    "stability": ((0.915, 0.9152), (1.570, 1.5719), (1.634, 1.6341)),
    "smoothadv": ((0.932, 0.9322), (1.687, 1.6872), (1.779, 1.7786)),
    "smoothadv-ddn": ((None, None), (None, None), (None, None)),
    "macer": ((0.920, 0.9201), (1.594, 1.5899), (1.598, 1.5950)),
    "consistency": ((0.928, 0.9282), (1.657, 1.6549), (1.740, 1.7376)),
    "consistency-smoothadv": ((None, 0.9323), (None, 1.6957), (None, 1.8163)),
    "smoothmix-eta1": ((0.931, 0.9296), (1.678, 1.6776), (1.788, 1.7867)),
    "smoothmix-eta1-onestep": ((0.933, 0.9330), (1.694, 1.6932), (1.816, 1.8169)),
    "smoothmix": ((0.932, 0.9317), (1.694, 1.6932), (1.820, 1.8185)),
    "smoothmix-onestep": ((0.933, 0.9332), (1.685, 1.6851), (1.823, 1.8212)),
}
CIFAR10_ACR: dict[
    str, Sequence[Published]
] = {  # ResNet-110; the paper's rows at sigma = 1 are in its appendix
    "gaussian": ((0.424, None), (0.525, None), (None, None)),
    "stability": ((0.421, None), (0.521, None), (None, None)),
    "smoothadv": ((0.544, None), (0.684, None), (None, None)),
    "macer": ((0.531, None), (0.691, None), (None, None)),
    "consistency": ((0.552, 0.5519), (0.720, 0.7195), (None, 0.7563)),
    "smoothmix": ((0.553, 0.5534), (0.715, 0.7124), (None, None)),
    "smoothmix-onestep": ((0.548, 0.5482), (0.737, 0.7356), (None, None)),
}
# MNIST, sigma = 1: name, what differs from SmoothMix (η = 1, T = 8, step 1, m = 4), and the ACR of
# the one log. A batch of 256 is split into m parts with m noise samples and a step each.
Variants = Mapping[str, Sequence[tuple[str, dict[str, Any], float | None]]]
VARIANTS: Variants = {
    ETA: [
        (f"η = {eta}", {"eta": float(eta)}, acr)
        for eta, acr in ((2, 1.8097), (4, 1.8196), (8, 1.8175), (16, 1.8122))
    ],
    STEPS: [
        (f"T = {steps}, step {8 // steps}", {"steps": steps, "step_size": 8.0 / steps}, acr)
        for steps, acr in ((4, 1.7900), (2, 1.7875), (1, 1.7854))
    ],
    MAX_NORM: [
        (f"ε = {norm}", {"max_norm": float(norm)}, acr)
        for norm, acr in ((2, 1.7232), (4, 1.7510), (6, 1.7783), (8, 1.7884))
    ],
    NOISES: [
        (f"m = {noises}", {"noises": noises, "batch_size": 256 // noises}, acr)
        for noises, acr in ((1, 1.7439), (2, 1.7763), (8, 1.7881))
    ],
}


@dataclass(frozen=True)
class StudyModel:
    """A classifier: how it is trained, in which parts of the study it is, and what others report
    for it."""

    recipe: Recipe  # its name is that of the folders
    method: str
    label: str
    sigma: float
    parts: tuple[str, ...]
    published: Published = (None, None)

    def is_in(self, part: str) -> bool:
        """Whether a part of the study shows it; Figure 7 has three panels."""
        return part in self.parts or (
            part == FIGURE_7 and not set(self.parts).isdisjoint((STEPS, MAX_NORM, NOISES))
        )

    def described(self, position: int) -> dict[str, Any]:
        """What the report needs to know, for `run.toml`."""
        paper, logs = self.published
        return {
            "parts": list(self.parts),
            "label": self.label,
            "position": position,
            "recipe": self.recipe.name,
            **({} if paper is None else {"paper_acr": paper}),
            **({} if logs is None else {"logs_acr": logs}),
        }


def full_models(configs: Path, seed: int) -> list[StudyModel]:
    """All classifiers of the paper's tables, figures and ablations, by the recipes in a folder."""

    def read(name: str) -> Recipe:
        return Recipe.read(configs / f"{name}.toml").changed(seed=seed)

    checks.require(
        configs.is_dir(),
        "configs",
        "be the folder of the recipes (clone the repository or pass --configs)",
        str(configs),
    )
    models = []
    for prefix, part, methods, published in (
        ("mnist_lenet", TABLE_2, tuple(METHODS), MNIST_ACR),
        ("cifar10_resnet18", TABLE_3, FAST, CIFAR10_ACR),
        ("cifar10_resnet110", RESNET110, DEEP, CIFAR10_ACR),
    ):
        for column, sigma in enumerate(SIGMAS):
            for method in methods:
                own = METHODS[method]
                recipe = read(
                    f"{prefix}_{own.recipe.format(sigma=f'sigma{round(100 * sigma):03d}')}"
                )
                recipe = recipe.changed(
                    "".join(f"_{value}" for value in own.changes.values()), **own.changes
                )
                models.append(
                    StudyModel(
                        recipe,
                        method,
                        own.label,
                        sigma,
                        _parts(part, method, sigma),
                        published[method][column],
                    )
                )
    base = next(
        model.recipe for model in models if ETA in model.parts and model.method == "smoothmix-eta1"
    )
    return [*models, *_variants(base, 1.0, VARIANTS)]


def _parts(table: str, method: str, sigma: float) -> tuple[str, ...]:
    """A table, and the figures that show the same classifier."""
    if table == TABLE_2 and sigma == 1 and method in ("gaussian", "smoothmix-eta1"):
        return (table, *ABLATIONS)
    if table == TABLE_3 and sigma == 0.5 and method == "gaussian":
        return table, TABLE_1
    return (
        (table, INTERPOLATION)
        if table == TABLE_3 and sigma == 0.25 and method in ("gaussian", "smoothmix")
        else (table,)
    )


def _variants(base: Recipe, sigma: float, variants: Variants) -> Iterable[StudyModel]:
    for part, changes in variants.items():
        for label, settings, acr in changes:
            suffix = "".join(
                f"_{name}{value:g}" for name, value in settings.items() if name != "batch_size"
            )
            yield StudyModel(
                base.changed(suffix, **settings),
                "smoothmix-eta1",
                label,
                sigma,
                (part,),
                (None, acr),
            )


def smoke_models(images: Dataset, seed: int) -> list[StudyModel]:
    """Every method once, on few images of MNIST or on 8 × 8 digits, with short attacks; no figure
    is comparable."""
    is_small = images.image_shape[1] < 16
    sigma, scale, epochs = (0.25, 0.25, 12) if is_small else (0.5, 1.0, 5)
    mean, std = measure_channels(images)
    plan = TrainingPlan(
        epochs=epochs,
        batch_size=64,
        optimizer="adamw",
        lr=3e-3,
        weight_decay=1e-4,
        held_out=0,
        schedule="one-cycle",
        save_seconds=60,
        seed=seed,
    )
    mixed: dict[str, Any] = {"noises": 2, "steps": 2, "step_size": 2 * scale, "warmup_epochs": 2}
    attacked: dict[str, Any] = {"noises": 2, "steps": 4, "eps": scale, "warmup_epochs": 2}
    settings: dict[str, dict[str, Any]] = {
        "gaussian": {},
        "stability": {},
        "consistency": {},
        "macer": {"noises": 4, "defer": epochs // 3},
        "smoothadv": attacked,
        "smoothadv-ddn": attacked,
        "consistency-smoothadv": attacked,
        "smoothmix-eta1": {**mixed, "eta": 1.0},
        "smoothmix-eta1-onestep": {**mixed, "eta": 1.0, "one_step": True},
        "smoothmix": mixed,
        "smoothmix-onestep": {**mixed, "one_step": True},
    }
    models = []
    for method, own in settings.items():
        cls: Any = OBJECTIVES[method.partition("-")[0]]
        recipe = Recipe(
            f"{images.name}_{method}",
            images.name,
            "cnn_small" if is_small else "lenet",
            tuple(mean),
            tuple(std),
            cls(sigma=sigma, **own, **METHODS[method].changes),
            plan,
        )
        parts = {
            "gaussian": (TABLE_2, TABLE_1, INTERPOLATION, *ABLATIONS),
            "smoothmix": (TABLE_2, INTERPOLATION),
            "smoothmix-eta1": (TABLE_2, *ABLATIONS),
        }.get(method, (TABLE_2,))
        models.append(StudyModel(recipe, method, METHODS[method].label, sigma, parts))
    base = next(model.recipe for model in models if model.method == "smoothmix-eta1")
    few: Variants = {
        ETA: [("η = 4", {"eta": 4.0}, None)],
        NOISES: [("m = 1", {"noises": 1}, None)],
        STEPS: [("T = 1, twice the step", {"steps": 1, "step_size": 4 * scale}, None)],
        MAX_NORM: [(f"ε = {scale:g}", {"max_norm": scale}, None)],
    }
    return [*models, *_variants(base, sigma, few)]
