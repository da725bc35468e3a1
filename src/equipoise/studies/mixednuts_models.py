"""Models of the study of MixedNUTS: an accurate one, a robust one, and further robust ones of other
kinds of training."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from equipoise.core import checks, format
from equipoise.core.text import slug
from equipoise.evaluation import Conditions
from equipoise.mixing import load_model
from equipoise.models import LoadOptions
from equipoise.studies.settings import COUNT, StudySettings
from equipoise.studies.study import (
    CHECKPOINT,
    DIGITS_MEAN,
    DIGITS_STD,
    Pair,
    load_pair,
    train_digits_pair,
    train_small,
)
from equipoise.training.objectives import IAAT, TRADES

TRADES_BETAS = (1.0, 6.0)
SMOKE_IMAGES = 100  # so that the study stays under eight minutes on two cores


@dataclass(frozen=True)
class RobustModel:
    """A robust model by its name in rows, and the reference that fits load it by."""

    name: str
    model: nn.Module
    reference: str


@dataclass(frozen=True)
class RobustModels(Pair):
    """A pair with further robust models, such as those of other training methods."""

    further: tuple[RobustModel, ...] = ()
    load_options: LoadOptions = field(default_factory=LoadOptions)

    @property
    def bases(self) -> dict[str, nn.Module]:
        """The two models of the pair by their names in rows."""
        return super().models

    @property
    def models(self) -> dict[str, nn.Module]:
        """Those of the pair and the further ones, by their names in rows."""
        return {**self.bases, **{item.name: item.model for item in self.further}}

    @property
    def all_robust(self) -> tuple[RobustModel, ...]:
        """All robust models, first that of the pair."""
        return RobustModel("robust", self.robust, self.references[1]), *self.further

    @property
    def all_references(self) -> tuple[str, ...]:
        """Those of the pair and of the further models."""
        return *self.references, *(item.reference for item in self.further)


def load_models(settings: StudySettings) -> RobustModels:
    """The models that the settings name; the first robust one is that of the pair."""
    references, options = settings.robust_references, settings.load_options
    assert settings.accurate is not None
    checks.require(
        len(set(references)) == len(references), "robust", "be different models", list(references)
    )
    pair = load_pair(
        settings.accurate,
        references[0],
        settings.data or "cifar10",
        settings.data_dir,
        options,
        settings.count or COUNT,
        settings.sample,
    )
    names = model_names(references)
    further = tuple(
        RobustModel(names[reference], load_model(reference, options), reference)
        for reference in references[1:]
    )
    return RobustModels(
        pair.accurate,
        pair.robust,
        pair.references,
        pair.held_out,
        pair.test,
        pair.load_training,
        further,
        options,
    )


def model_names(references: Sequence[str]) -> dict[str, str]:
    """Short names of models by their references; a checkpoint of a training run has the name of its
    folder.

    >>> model_names(["runs/AT/best.safetensors", "file:IAAT/best.safetensors", "zoo:cnn_small"])
    {'runs/AT/best.safetensors': 'AT', 'file:IAAT/best.safetensors': 'IAAT', 'zoo:cnn_small':
    'zoo:cnn_small'}
    """
    folders = {
        reference: re.sub(r"/(best|last)\.safetensors$", "", reference).removeprefix("file:")
        for reference in references
    }
    if len(set(folders.values())) < len(folders):
        return format.short_names(references)
    short = format.short_names(folders.values())
    return {reference: short[folder] for reference, folder in folders.items()}


def train_digits_models(out: Path, conditions: Conditions) -> RobustModels:
    """Small networks on digits: standard and adversarial training, TRADES with several weights,
    IAAT."""
    pair, threat = train_digits_pair(out, conditions), conditions.threat
    objectives = {
        **{
            f"TRADES, weight {beta:g}": TRADES(
                norm=threat.norm, eps=threat.eps, beta=beta, steps=4, step_size=0.6 * threat.eps
            )
            for beta in TRADES_BETAS
        },
        "IAAT": IAAT(norm=threat.norm, eps=threat.eps, steps=4, warmup_epochs=2, growth=0.02),
    }
    further = []
    for name, objective in objectives.items():
        model = train_small(
            out / slug(name),
            objective,
            pair.training,
            conditions,
            epochs=4,
            lr=5e-3,
            mean=DIGITS_MEAN,
            std=DIGITS_STD,
            seed=conditions.seed + 5,
        )
        further.append(RobustModel(name, model, str(out / slug(name) / CHECKPOINT)))
    return RobustModels(
        pair.accurate,
        pair.robust,
        pair.references,
        pair.held_out,
        pair.test.slice(0, SMOKE_IMAGES),
        pair.load_training,
        tuple(further),
    )
