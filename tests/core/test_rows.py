from __future__ import annotations

import json

import pytest

from equipoise.core import rows
from equipoise.core.checks import InputError
from equipoise.core.rows import (
    AttackRow,
    EpochRow,
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
