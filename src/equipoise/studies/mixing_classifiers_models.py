"""Models of the study of certified mixtures: an accurate one, several smoothed ones and an
empirically robust one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from equipoise.core import checks, format
from equipoise.evaluation import Conditions
from equipoise.mixing import load_model
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
from equipoise.training.objectives import Gaussian

EMPIRICAL = "empirical"
DIGITS_SIGMAS = (0.12, 0.25, 0.5)
DIGITS_EPOCHS = 20


@dataclass(frozen=True)
class SmoothedModel:
    """A network and the noise that it is smoothed with."""

    network: str  # name of the network alone
    model: nn.Module
    sigma: float

    @property
    def name(self) -> str:
        """The name in rows."""
        return f"{self.network} (sigma {self.sigma:g})"


@dataclass(frozen=True)
class CertifiedModels(Pair):
    """A pair whose robust side is any of several smoothed models; `robust` is the network of the
    first that was given."""

    smoothed: tuple[SmoothedModel, ...]  # in order of sigma
    empirical: nn.Module | None  # robust by training alone, without a certificate
    further_references: tuple[str, ...]  # of all models but the accurate one and `robust`

    @property
    def models(self) -> dict[str, nn.Module]:
        """All networks, without noise."""
        empirical = {} if self.empirical is None else {EMPIRICAL: self.empirical}
        return {
            "accurate": self.accurate,
            **{item.network: item.model for item in self.smoothed},
            **empirical,
        }

    @property
    def all_references(self) -> tuple[str, ...]:
        """Those of the smoothed models after that of the accurate one, and that of the empirically
        robust one."""
        return *self.references, *self.further_references


def load_models(settings: StudySettings) -> CertifiedModels:
    """The models that the settings name, with one sigma per smoothed model or several for the one
    model."""
    references, options = settings.robust_references, settings.load_options
    assert settings.accurate is not None
    pair = load_pair(
        settings.accurate,
        references[0],
        settings.data or "cifar10",
        settings.data_dir,
        options,
        settings.count or COUNT,
        settings.sample,
    )
    sigmas = [checks.positive("sigma", sigma) for sigma in settings.sigmas()]
    checks.require(
        len(references) in (1, len(sigmas)),
        "sigma",
        f"be one for each of the {len(references)} robust models",
        len(sigmas),
    )
    loaded = [pair.robust, *(load_model(reference, options) for reference in references[1:])]
    short = format.short_names(references)
    every = zip(
        references * (len(sigmas) // len(references)),
        loaded * (len(sigmas) // len(loaded)),
        sigmas,
        strict=True,
    )
    smoothed = [SmoothedModel(short[reference], model, sigma) for reference, model, sigma in every]
    names = [item.name for item in smoothed]
    checks.require(
        len(set(names)) == len(names),
        "robust",
        "be different models or have different sigmas",
        names,
    )
    empirical = None if settings.empirical is None else load_model(settings.empirical, options)
    further = (*references[1:], *([] if settings.empirical is None else [settings.empirical]))
    return CertifiedModels(
        pair.accurate,
        pair.robust,
        pair.references,
        pair.held_out,
        pair.test,
        pair.load_training,
        _ordered(smoothed),
        empirical,
        further,
    )


def train_digits_models(out: Path, conditions: Conditions) -> CertifiedModels:
    """Train small networks on 8×8 digits: standard, adversarial, and under noise of three sizes."""
    pair = train_digits_pair(out, conditions)
    smoothed, folders = [], [out / f"gaussian-{sigma:g}" for sigma in DIGITS_SIGMAS]
    for sigma, folder in zip(DIGITS_SIGMAS, folders, strict=True):
        model = train_small(
            folder,
            Gaussian(sigma=sigma),
            pair.training,
            conditions,
            epochs=DIGITS_EPOCHS,
            lr=5e-3,
            mean=DIGITS_MEAN,
            std=DIGITS_STD,
            seed=conditions.seed + 1,
        )
        smoothed.append(SmoothedModel(folder.name, model, sigma))
    first, *further = (str(folder / CHECKPOINT) for folder in folders)
    return CertifiedModels(
        pair.accurate,
        smoothed[0].model,
        (pair.references[0], first),
        pair.held_out,
        pair.test,
        pair.load_training,
        _ordered(smoothed),
        pair.robust,
        (*further, pair.references[1]),
    )


def _ordered(smoothed: list[SmoothedModel]) -> tuple[SmoothedModel, ...]:
    return tuple(sorted(smoothed, key=lambda item: item.sigma))
