"""What the explorer of a report carries: the columns are the rows of the run, and small."""

from __future__ import annotations

import base64
import io
import json
import zlib
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import explored_run
import numpy as np
import pytest
import synthetic_run
from hypothesis import given
from hypothesis import strategies as st
from parsed_report import ParsedReport

from equipoise.core import arrays
from equipoise.core.arrays import AttackedArrays, FrontierArrays, PictureArrays
from equipoise.core.results import Summary
from equipoise.core.rows import AttackRow
from equipoise.reporting import report
from equipoise.reporting.explorer import columns
from equipoise.reporting.explorer.data import NO_MARGIN, explorer
from equipoise.reporting.explorer.pictures import MIDDLE, sprites
from equipoise.reporting.section import RunView, read_run

NUMPY = {"Uint8Array": "<u1", "Uint16Array": "<u2", "Uint32Array": "<u4", "Int16Array": "<i2"}


def unpack(text: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    content = zlib.decompress(base64.b64decode(text))
    size = int.from_bytes(content[:4], "little")
    header = json.loads(content[4:4 + size])
    places = header.pop("columns")
    return header, {name: np.frombuffer(content, NUMPY[place["type"]], place["length"], 4 + size + place["offset"])
                    for name, place in places.items()}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunView:
    return explored_run.make(tmp_path_factory.mktemp("explored") / "run")


@pytest.fixture(scope="module")
def unpacked(run: RunView) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    section = explorer(run)
    assert section is not None and section.explorer is not None
    return unpack(section.explorer.columns)


def test_columns_are_the_rows_of_the_run(run: RunView, unpacked: tuple[dict[str, Any], dict[str, np.ndarray]]) -> None:
    header, own = unpacked
    rows = {(row.model, row.attack, row.index): row for row in run.rows if isinstance(row, AttackRow)}
    assert header["count"] == 200 and [model["symbol"] for model in header["models"]] == ["g", "h", "mixture"]
    for m, model in enumerate(explored_run.NAMES):
        for i, index in enumerate(own["index"].tolist()):
            clean, attacked = rows[model, "clean", index], rows[model, "fast", index]
            assert (own["label"][i], own[f"clean{m}"][i], own[f"attacked{m}"][i]) == (
                clean.label, clean.predicted, attacked.predicted)
            code = int(own[f"broken{m}"][i])
            expected = "stands" if attacked.correct else f"fast: {attacked.broken_by}" if clean.correct else "clean"
            assert ["stands", "clean", *header["attacks"]][code] == expected
            assert (own[f"margin{m}"][i] > 0) == attacked.correct
        shares = header["models"][m]["results"]
        assert shares["clean"]["value"] == np.mean(own[f"clean{m}"] == own["label"])
        assert shares["attacked"]["value"] == np.mean(own[f"broken{m}"] == 0)


def test_steps_of_the_slider_are_the_stored_mixtures(
        run: RunView, unpacked: tuple[dict[str, Any], dict[str, np.ndarray]]) -> None:
    header, own = unpacked
    frontier = FrontierArrays.load(run.folder)
    assert frontier is not None
    predicted = np.bitwise_xor.accumulate(own["stepPredicted"].reshape(-1, 200), axis=0)
    bits = np.bitwise_xor.accumulate(own["stepBits"].reshape(-1, 200), axis=0)
    assert (predicted == frontier.predicted).all()
    assert ((bits & 1) == frontier.by_accurate).all() and ((bits >> 1) == frontier.standing).all()
    for step, right, stands in zip(header["steps"], predicted == own["label"], frontier.standing, strict=True):
        assert step["clean"]["value"] == right.mean() and step["attacked"]["value"] == stands.mean()
        assert step["clean"]["low"] <= step["clean"]["value"] <= step["clean"]["high"]
    assert [step["lost"] for step in header["steps"]][:7] == list(explored_run.LOSSES)
    assert sum(step["evaluated"] for step in header["steps"]) == 1


@given(st.lists(st.floats(-1, 1).map(lambda value: round(value, 6)), min_size=1), st.integers(-10_000, 10_000))
def test_no_threshold_with_four_digits_sees_the_quantisation(values: list[float], threshold: int) -> None:
    exact = [round(value * 1_000_000) > threshold * 100 for value in values]
    assert (columns.margins(np.array(values)) > threshold).tolist() == exact


def test_a_row_without_a_margin_has_none(tmp_path: Path) -> None:
    rows = [AttackRow(index=i, model="m", attack=attack, label=0, predicted=0, correct=True)
            for i in range(3) for attack in ("clean", "pgd")]
    section = explorer(synthetic_run.write_run(tmp_path / "run", Summary(
        command="evaluate", seconds=1.0, results=()), rows))
    assert section is not None and section.explorer is not None
    assert unpack(section.explorer.columns)[1]["margin0"].tolist() == [NO_MARGIN] * 3


def test_images_that_a_model_was_not_measured_on_are_left_out(tmp_path: Path) -> None:
    rows = [AttackRow(index=i, model="m", attack=attack, label=0, predicted=0, correct=True, margin=0.5)
            for attack, count in (("clean", 5), ("pgd", 4), ("apgd", 3)) for i in range(count)]
    section = explorer(synthetic_run.write_run(tmp_path / "run", Summary(
        command="evaluate", seconds=1.0, results=()), rows))
    assert section is not None and section.explorer is not None
    assert unpack(section.explorer.columns)[1]["index"].tolist() == [0, 1, 2]


def test_a_frontier_of_other_images_is_not_shown(tmp_path: Path) -> None:
    run = explored_run.make(tmp_path / "run", n=50, pictures=5)
    known = FrontierArrays.load(run.folder)
    assert known is not None
    arrays.save(run.folder, replace(known, index=known.index + 1))
    section = explorer(run)
    assert section is not None and section.explorer is not None
    assert "steps" not in unpack(section.explorer.columns)[0]


def test_a_certificate_or_a_fit_has_no_explorer(tmp_path: Path) -> None:
    run = explored_run.make(tmp_path / "run", n=20, pictures=5)
    for command in ("fit", "certify", "train"):
        other = RunView(run.folder, run.identity, run.settings, Summary(
            command=command, seconds=1.0, results=()), run.rows)
        assert explorer(other) is None


def test_sprites_give_back_every_byte() -> None:
    from PIL import Image

    pictures = explored_run._pictures(np.random.default_rng(0), np.arange(30) % 10, 7, 5)
    shown = sprites(pictures)
    sheets = [np.asarray(Image.open(io.BytesIO(base64.b64decode(str(shown[name]).split(",")[1]))))
              for name in ("clean", "change")]
    per_row = int(shown["perRow"])
    for p in range(7):
        y, x = 5 * (p // per_row), 5 * (p % per_row)
        clean, change = (sheet[y:y + 5, x:x + 5].astype(int).transpose(2, 0, 1) for sheet in sheets)
        assert (clean == pictures.clean[p]).all()
        assert (clean + change - MIDDLE == pictures.attacked[p]).all()


REST = 60_000  # bytes of the text and the static tables of a report, which do not depend on the number of images


def test_ten_thousand_images_take_less_than_600_kilobytes(tmp_path: Path) -> None:
    """Columns with a frontier of 48 mixtures, script and style; nothing is written."""
    run, _, frontier = explored_run.in_memory(tmp_path, 10_000, pictures=5)
    arrays.save(tmp_path, frontier)
    section = explorer(run)
    assert section is not None and section.explorer is not None
    _, own = unpack(section.explorer.columns)
    assert sum(values.size == 10_000 for values in own.values()) >= 12
    assets = resources.files("equipoise.reporting.explorer")
    sizes = [len(assets.joinpath(f"explorer.{kind}").read_bytes()) for kind in ("js", "css")]
    assert len(section.explorer.columns) + sum(sizes) < 600_000 - REST


@pytest.mark.slow
def test_a_whole_report_of_ten_thousand_images_is_small(tmp_path: Path) -> None:
    page = report(explored_run.make(tmp_path / "run", n=10_000, pictures=5).folder)
    parsed = ParsedReport(page)
    pictures = sum(len(value) for name, value in parsed.attributes if name in ("src", "srcset"))
    pictures += len(parsed.data_blocks["explorer-pictures"])
    print(f"{page.stat().st_size} bytes, {pictures} of them pictures")
    assert page.stat().st_size - pictures < 600_000


def test_a_class_name_is_data_in_the_report(run: RunView) -> None:
    source = report(run.folder).read_text("utf-8")
    assert "<script>alert(1)</script>" not in source
    assert AttackedArrays.load(run.folder) is None and PictureArrays.load(run.folder) is not None
    assert read_run(run.folder).threat == explored_run.THREAT
