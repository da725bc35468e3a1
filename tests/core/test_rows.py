from __future__ import annotations

import json

import pytest

from equipoise.core import rows
from equipoise.core.checks import InputError
from equipoise.core.rows import (
    AttackRow,
    CertificateRow,
    ConfidenceRow,
    EpochRow,
    LipschitzRow,
    MixingRatioRow,
)

COMMON = {"index": 7, "model": "m", "label": 1, "correct": True}


def test_a_row_is_one_line_without_empty_fields() -> None:
    row = AttackRow(index=7, model="m", attack="pgd", label=1, correct=True, margin=0.5)
    line = row.to_json()
    assert json.loads(line) == {"kind": "attack", "attack": "pgd", "margin": 0.5, **COMMON}
    assert rows.parse(line, "line 1") == row


@pytest.mark.parametrize(
    "row",
    [
        EpochRow(
            index=0,
            model="trained",
            attack="epoch",
            loss=1.0,
            accuracy=0.5,
            lr=0.1,
            seconds=2.0,
            images_per_second=9.0,
            validation={"clean": 0.7},
        ),
        MixingRatioRow(index=1, model="m", attack="mixing-ratio", label=0, correct=False),
    ],
)
def test_every_kind_is_read_back(row: rows.Row) -> None:
    assert rows.parse(row.to_json(), "line 1") == row


@pytest.mark.parametrize(
    ("old", "expected"),
    [
        (
            {"attack": "pgd", "weight": 0.3, "possible": True},
            AttackRow(**COMMON, attack="pgd", image_alpha=0.3, oracle_correct=True),  # type: ignore[arg-type]
        ),
        ({"attack": "clean", "half": "choose"}, AttackRow(**COMMON, attack="clean", half="search")),  # type: ignore[arg-type]
        (
            {"attack": "confidence@0.25", "true": 0.5, "off": 0.1},
            ConfidenceRow(**COMMON, attack="confidence@0.25", true=0.5, off=0.1),  # type: ignore[arg-type]
        ),
        (
            {"attack": "local-lipschitz", "predicted": 1, "lipschitz": 2.0, "margin": 0.1},
            LipschitzRow(
                **COMMON,  # type: ignore[arg-type]
                attack="local-lipschitz",
                predicted=1,
                lipschitz=2.0,
                margin=0.1,
            ),
        ),
        (
            {
                "attack": "certify",
                "predicted": 1,
                "radius": 0.1,
                "lower": 0.9,
                "samples": 10,
                "top": 1,
                "answer": 1,
                "sigma": 0.5,
            },
            CertificateRow(
                **COMMON,  # type: ignore[arg-type]
                attack="certify",
                predicted=1,
                radius=0.1,
                lower=0.9,
                samples=10,
                top=1,
                answer=1,
                sigma=0.5,
            ),
        ),
    ],
)
def test_rows_of_schema_1(old: dict[str, object], expected: rows.Row) -> None:
    assert rows.parse(json.dumps({**COMMON, **old}), "line 1") == expected


def test_epochs_of_schema_1_keep_their_validation() -> None:
    old = {
        "index": 2,
        "model": "trained",
        "attack": "epoch",
        "loss": 1.0,
        "accuracy": 0.5,
        "lr": 0.1,
        "seconds": 1.0,
        "images_per_second": 5.0,
        "clean": 0.6,
        "attacked": 0.4,
    }
    row = rows.parse(json.dumps(old), "line 1")
    assert isinstance(row, EpochRow) and row.validation == {"clean": 0.6, "attacked": 0.4}


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "[]",
        '{"kind": "unknown"}',
        '{"kind": "attack", "index": 1}',
        '{"index": 1, "model": "m"}',
    ],
)
def test_anything_else_is_refused(line: str) -> None:
    with pytest.raises(InputError, match="line 3 must be a row of a run"):
        rows.parse(line, "line 3")
