"""The two classifiers of a study, and which image may be used for what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from torch import nn

from equipoise import data, models
from equipoise.core import checks
from equipoise.data import Dataset
from equipoise.evaluation import Conditions
from equipoise.training import Objective, TrainingPlan, train
from equipoise.training.objectives import Adversarial, Standard
from equipoise.training.recorder import LAST

EPS = 0.12  # of the digits, in [0, 1] pixels
HELD_OUT = 200  # digits of the train split that neither base sees
DIGITS = {"mean": (0.3,), "std": (0.37,)}
DIGITS_TESTED = 240  # so that the study stays under five minutes on two cores
TRAINED = 10_000  # images of a given pair's train split that the policy sees
TESTED = 1000


@dataclass(frozen=True)
class Pair:
    """Two bases with the images that the study may use; no image has two uses."""

    accurate: nn.Module
    robust: nn.Module
    references: tuple[str, str]  # of the accurate and of the robust base
    held_out: Dataset  # finds the crossing and the scale of the trust terms; unseen by both bases
    test: Dataset
    read: Callable[[], Dataset]  # all images that may be learnt from; called when a part wants them
    taught: int  # of these, the policy learns from the first

    @cached_property
    def remembered(self) -> Dataset:
        """All images that may be learnt from; the neighbours."""
        return self.read()

    @property
    def learnt(self) -> Dataset:
        """The images that the policy learns from."""
        return self.remembered.slice(0, min(self.taught, len(self.remembered)))


def asked(full: bool, accurate: str | None, robust: str | None, **more: object) -> None:
    """The full size is told its bases, and may be told `more`; the smoke size has its own of everything."""
    for name, value in (("accurate", accurate), ("robust", robust)):
        must = "be given for the full size" if full else "be left out for the smoke size, which trains its own"
        checks.require((value is not None) == full, name, must, value)
    for name, other in more.items():
        checks.require(full or other is None, name, "be left out for the smoke size, which has its own", other)


def digits(out: Path, conditions: Conditions) -> Pair:
    """Two small networks on 8×8 digits, learnt now or read from an earlier sitting."""
    train = data.load("digits", split="train")
    learnt, held_out = train.slice(0, len(train) - HELD_OUT), train.slice(len(train) - HELD_OUT, HELD_OUT)
    accurate = _base(out / "accurate", Standard(label_smoothing=0.1), learnt, conditions, epochs=30, lr=3e-3)
    # Few epochs: with more, on so few digits, the robust network is also the more accurate one, and no story is left.
    attack = Adversarial(norm=conditions.threat.norm, eps=conditions.threat.eps, steps=4)
    robust = _base(out / "robust", attack, learnt, conditions, epochs=4, lr=5e-3, shift=5)
    return Pair(accurate, robust, (str(out / "accurate" / LAST), str(out / "robust" / LAST)), held_out,
                data.load("digits", split="test", count=DIGITS_TESTED), lambda: learnt, len(learnt))


def _base(out: Path, objective: Objective, images: Dataset, conditions: Conditions, *, epochs: int, lr: float,
          shift: int = 0) -> nn.Module:
    model = models.build("cnn_small", num_classes=images.num_classes, image_shape=images.image_shape,
                         mean=DIGITS["mean"], std=DIGITS["std"], seed=conditions.seed + shift)
    plan = TrainingPlan(epochs=epochs, optimizer="adamw", lr=lr, weight_decay=1e-4, schedule="one-cycle", warmup=epochs / 5,
                held_out=0, seed=conditions.seed)
    return train(model, objective, images, plan, device=conditions.device, out=out, facts={"arch": "cnn_small"})


def given(accurate: str, robust: str, name: str, data_dir: Path | None) -> Pair:
    """Any two classifiers of any data set.

    The policy learns from train images; up to 1000 test images are counted, and as many from the end are held out.
    """
    test = data.load(name, split="test", data_dir=data_dir)
    count = min(TESTED, len(test) // 2)
    return Pair(models.load(accurate), models.load(robust), (accurate, robust), test.slice(len(test) - count, count),
                test.slice(0, count), partial(data.load, name, split="train", data_dir=data_dir), TRAINED)
