"""The images of an evaluation as the page gets them: equal to the rows and arrays."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import explored_run
import numpy as np
import pytest
from PIL import Image
from synthetic_run import shown

from equipoise.core.arrays import PictureArrays
from equipoise.core.rows import AttackRow
from equipoise.reporting import gallery
from equipoise.reporting.run_view import RunView, read_run


@pytest.fixture
def run(tmp_path: Path) -> RunView:
    return explored_run.make(tmp_path / "run", n=40, pictures=7)


def test_columns_are_the_rows(run: RunView) -> None:
    content = shown(gallery.gallery(run)).gallery
    assert content is not None and content["index"] == list(range(40))
    rows = {
        (row.model, row.attack, row.index): row for row in run.rows if isinstance(row, AttackRow)
    }
    for name, model in zip(explored_run.NAMES, content["models"], strict=True):
        for i in range(40):
            clean, attacked = rows[name, "clean", i], rows[name, "fast", i]
            assert content["label"][i] == clean.label
            assert model["clean"][i] == clean.predicted
            assert model["attacked"][i] == attacked.predicted
            assert model["margin"][i] == pytest.approx(attacked.margin, abs=1e-3)
            stage = content["broken"][model["brokenBy"][i]]
            expected = "" if attacked.correct else f"fast: {attacked.broken_by}"
            assert stage == ("clean" if not clean.correct else expected)


def test_pictures_are_those_of_the_arrays(run: RunView) -> None:
    content = shown(gallery.gallery(run)).gallery
    stored = PictureArrays.load(run.folder)
    assert content is not None and stored is not None
    pictures = content["pictures"]
    assert [content["index"][place] for place in pictures["places"]] == stored.index.tolist()
    for name, images in (("clean", stored.clean), ("attacked", stored.attacked)):
        png = base64.b64decode(pictures[name].partition(",")[2])
        sheet = np.asarray(Image.open(io.BytesIO(png)))
        for number, image in enumerate(images):
            y = number // pictures["perRow"] * pictures["height"]
            x = number % pictures["perRow"] * pictures["width"]
            part = sheet[y : y + pictures["height"], x : x + pictures["width"]]
            assert (part == image.transpose(1, 2, 0)).all()


def test_pictures_are_few_enough_for_a_page(run: RunView, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gallery, "MOST_BYTES", 2 * 3 * 16 * 16 * 3)
    content = shown(gallery.gallery(run)).gallery
    assert content is not None and len(content["pictures"]["places"]) == 3


def test_without_pictures_or_attacks(run: RunView, tmp_path: Path) -> None:
    (run.folder / "arrays.npz").unlink()
    content = shown(gallery.gallery(read_run(run.folder))).gallery
    assert content is not None and "pictures" not in content and content["classes"][3] == "class 3"
    clean = [row for row in run.rows if row.attack == "clean"]
    run.rows[:] = clean
    run.__dict__.pop("attacked_images", None)
    assert gallery.gallery(run) is None
