"""Typed rows of `rows.jsonl`: one per image (or epoch) and measurement."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from equipoise.core import checks, config, serialize
from equipoise.core.checks import InputError
from equipoise.core.serialize import Count, NonNegative, Share

Mixture = tuple[str, float | None]  # name of a model, and its alpha
RowKey = tuple[int, str, str, float | None]
CERTIFY, SELECT_ALPHA, LIPSCHITZ, MIXING_RATIO, EPOCH = (
    "certify",
    "choose",
    "local-lipschitz",
    "mixing-ratio",
    "epoch",
)
AUDIT = "audit/"  # before the stage of an audit that broke an image
# Halves of fitting images: for the map, and for its threshold
SEARCH, CALIBRATION = "search", "calibration"


@dataclass(frozen=True, kw_only=True)
class Row:
    """What every row holds: which image, which model, and under which attack or measurement."""

    kind: ClassVar[str]

    index: Count
    model: str
    attack: str
    alpha: float | None = None

    @property
    def key(self) -> RowKey:
        """What makes the row unique in its run."""
        return self.index, self.model, self.attack, self.alpha

    def to_json(self) -> str:
        """One line of `rows.jsonl`; fields without a value are left out."""
        values = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return json.dumps(
            {"kind": self.kind, **{name: value for name, value in values if value is not None}}
        )


@dataclass(frozen=True, kw_only=True)
class ImageRow(Row):
    """A measurement of one image, and whether it is classified correctly."""

    label: Count
    correct: bool


@dataclass(frozen=True, kw_only=True)
class AttackRow(ImageRow):
    """One image under one attack; `clean` is the attack that changes nothing."""

    kind = "attack"
    predicted: int | None = None
    margin: float | None = None  # signed probability margin of the true class
    # Of the passes of a randomised model; `predicted` is the most frequent class
    share_correct: Share | None = None
    # Behind that share; as many others, independent of them, are behind the margin
    passes: int | None = None
    # The stage of a suite that broke the image, after AUDIT if only the audit did
    broken_by: str | None = None
    # Network passes with a gradient until it was broken, or of all stages; of a suite
    attack_passes: int | None = None
    # Of a misclassified attacked image: still so after rounding to 8 bits
    broken_as_bytes: bool | None = None
    # Network passes with a gradient of the audit, if the image was in its sample
    audit_passes: int | None = None
    radius: NonNegative | None = None  # norm of the smallest perturbation that was misclassified
    max_radius: NonNegative | None = None  # of a search for it: the largest that was allowed
    half: str | None = None  # for fitting images: SEARCH or CALIBRATION

    @property
    def only_audit_broke(self) -> bool:
        """Whether the image survived the attack and was broken by its audit."""
        return (self.broken_by or "").startswith(AUDIT)


@dataclass(frozen=True, kw_only=True)
class CertificateRow(ImageRow):
    """One image certified by randomized smoothing."""

    kind = "certificate"
    predicted: int
    radius: float
    lower: float  # lower bound on the probability of `top`
    # Of certificates from both sides: upper bound on that of every other class
    upper: float | None = None
    samples: int
    top: int
    answer: int  # what PREDICT returns
    sigma: float
    accurate: int | None = None  # class of the accurate model, in a mixture
    gap: float | None = None


@dataclass(frozen=True, kw_only=True)
class CertificateAttackRow(ImageRow):
    """An attack on a certified image within its own radius."""

    kind = "certificate-attack"
    predicted: int
    radius: float
    apparent: bool  # whether the first few votes suggested a break
    distance: float


@dataclass(frozen=True, kw_only=True)
class ConfidenceRow(ImageRow):
    """Vote shares of the true class and of the best other one at an adversarial image."""

    kind = "confidence"
    true: float
    off: float


@dataclass(frozen=True, kw_only=True)
class MixingRatioRow(ImageRow):
    """The mixing ratio at which the true class and the adversary's class are equally confident."""

    kind = "mixing-ratio"
    ratio: float | None = None


@dataclass(frozen=True, kw_only=True)
class LipschitzRow(ImageRow):
    """Local Lipschitz estimate of a model around one image."""

    kind = "lipschitz"
    predicted: int
    lipschitz: float
    margin: float


@dataclass(frozen=True, kw_only=True)
class EpochRow(Row):
    """One epoch of training; `index` is its number, `validation` the accuracies on held-out
    images."""

    kind = "epoch"
    loss: float
    accuracy: Share
    lr: float
    seconds: NonNegative
    images_per_second: NonNegative
    validation: dict[str, Share] = dataclasses.field(default_factory=dict)


ROW_TYPES: dict[str, type[Row]] = {
    cls.kind: cls
    for cls in (
        AttackRow,
        CertificateRow,
        CertificateAttackRow,
        ConfidenceRow,
        MixingRatioRow,
        LipschitzRow,
        EpochRow,
    )
}


def parse(line: str, where: str) -> Row:
    """Read one line of `rows.jsonl`."""
    try:
        values = config.parse_json(line, "it")
        row: Row = serialize.from_plain(ROW_TYPES[values.pop("kind")], values, "the row")
        if isinstance(row, AttackRow) and row.predicted is not None:
            checks.require(
                row.correct == (row.predicted == row.label),
                "correct",
                "say whether label and prediction are equal",
                row.correct,
            )
        return row
    except InputError as error:
        raise InputError(f"{where} must be a row of a run: {error}") from None
    except (TypeError, KeyError, AttributeError):  # no table, or not one of a row
        raise InputError(f"{where} must be a row of a run, got {checks.shown(line)}") from None


def certificates(
    rows: Iterable[Row], model: str | None = None, measurement: str = CERTIFY
) -> list[CertificateRow]:
    """The certificate rows among `rows`, of one model or of all."""
    return [
        row
        for row in rows
        if isinstance(row, CertificateRow)
        and row.attack == measurement
        and model in (None, row.model)
    ]


def by_mixture(rows: Iterable[Row]) -> dict[Mixture, list[CertificateRow]]:
    """The certificates of every model, and of a mixture at every alpha."""
    groups: dict[Mixture, list[CertificateRow]] = {}
    for row in certificates(rows):
        groups.setdefault((row.model, row.alpha), []).append(row)
    return groups
