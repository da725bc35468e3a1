"""The images of an evaluation with what every model says of them, to be filtered in the page.

The script of the page gets one list for each column, in image order, and two sheets of pictures.
"""

from __future__ import annotations

import base64
import io
import math
from collections import Counter
from typing import Any

import numpy as np

from equipoise.core.aggregation import worst_row
from equipoise.core.arrays import Array, AttackedArrays, PictureArrays
from equipoise.core.rows import AttackRow
from equipoise.reporting.accuracy import class_labels
from equipoise.reporting.attacks import stage_of
from equipoise.reporting.run_view import RunView
from equipoise.reporting.section import Section

MOST_MODELS = 6
MOST_BYTES = 400_000  # of the pictures in a page
RIGHT, WRONG_CLEAN = "", "clean"


def gallery(run: RunView) -> Section | None:
    """Which images are right, which are broken, and by what?"""
    models = list(run.attacked_images.items())[:MOST_MODELS]
    if not models:
        return None
    index = sorted(set.intersection(*(set(images) for _, images in models)))
    if not index:
        return None
    stages = _stages(models)
    columns = []
    for model, images in models:
        columns.append(_columns(run, model, [images[image] for image in index], stages))
    labels = [models[0][1][image][0].label for image in index]
    largest = max(labels)
    for own in columns:
        largest = max(largest, *own["clean"], *own["attacked"])
    content: dict[str, Any] = {
        "models": columns,
        "index": index,
        "label": labels,
        "classes": class_labels(run, range(largest + 1)),
        "broken": stages,
    }
    text = [
        "Every image: the answer for the clean image → at the worst point of the attacks, and the margin there."
    ]
    pictures = _pictures(run, index)
    if pictures:
        content["pictures"] = pictures
        text.append(
            f"Pictures are clean on the left and attacked ({pictures['model']}) on the right; "
            f"{len(pictures['places'])} of n = {len(index)} images have one."
        )
    return Section("Images", text, gallery=content)


def _columns(
    run: RunView, model: str, images: list[list[AttackRow]], stages: list[str]
) -> dict[str, Any]:
    """What one model says of every image; −1 is an answer that is not known."""
    name = run.name(model)
    columns: dict[str, Any] = {"name": name, "colour": run.colours[name]}
    columns |= {"clean": [], "attacked": [], "margin": [], "brokenBy": []}
    for rows in images:
        worst = worst_row(rows)
        columns["clean"].append(_answer(rows[0]))
        columns["attacked"].append(_answer(worst))
        columns["margin"].append(None if worst.margin is None else round(worst.margin, 3))
        columns["brokenBy"].append(stages.index(_broken_by(rows)))
    return columns


def _broken_by(rows: list[AttackRow]) -> str:
    """The stage that broke an image; WRONG_CLEAN if it is wrong without an attack."""
    worst = worst_row(rows)
    if worst.correct:
        return RIGHT
    if not rows[0].correct:
        return WRONG_CLEAN
    return stage_of(worst)


def _answer(row: AttackRow) -> int:
    """The predicted class; of a row without one the label, where that is right."""
    if row.predicted is not None:
        return row.predicted
    return row.label if row.correct else -1


def _stages(models: list[tuple[str, dict[int, list[AttackRow]]]]) -> list[str]:
    """What broke images, most first, after "nothing" and "wrong without an attack"."""
    counts: Counter[str] = Counter()
    for _, images in models:
        for rows in images.values():
            counts[_broken_by(rows)] += 1
    del counts[RIGHT], counts[WRONG_CLEAN]
    return [RIGHT, WRONG_CLEAN, *(stage for stage, _ in counts.most_common())]


def _pictures(run: RunView, index: list[int]) -> dict[str, Any] | None:
    """Clean and attacked pictures of some images, and their places in the columns."""
    arrays = PictureArrays.load(run.folder) or AttackedArrays.load(run.folder)
    if arrays is None:
        return None
    known = np.flatnonzero(np.isin(arrays.index, index))
    known = known[: max(1, MOST_BYTES // (2 * arrays.clean[0].size))]
    if not len(known):
        return None
    return {
        "model": run.name(arrays.model),
        "places": np.searchsorted(index, arrays.index[known]).tolist(),
        "height": arrays.clean.shape[2],
        "width": arrays.clean.shape[3],
        "perRow": _per_row(len(known)),
        "clean": _sheet(arrays.clean[known]),
        "attacked": _sheet(arrays.attacked[known]),
    }


def _per_row(count: int) -> int:
    return math.ceil(math.sqrt(count))


def _sheet(images: Array) -> str:
    """All pictures on one sheet, as the data URL of a PNG."""
    from PIL import Image

    if images.dtype.kind == "f":
        images = np.round(np.clip(images, 0, 1) * 255).astype(np.uint8)
    count, channels, height, width = images.shape
    columns = _per_row(count)
    rows = math.ceil(count / columns)
    sheet = np.zeros((rows * columns, channels, height, width), dtype=np.uint8)
    sheet[:count] = images
    pixels = sheet.reshape(rows, columns, channels, height, width).transpose(0, 3, 1, 4, 2)
    pixels = pixels.reshape(rows * height, columns * width, channels)
    buffer = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
