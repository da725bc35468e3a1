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

from equipoise.core import format
from equipoise.core.aggregation import worst_row
from equipoise.core.arrays import Array, AttackedArrays, PictureArrays
from equipoise.core.rows import AttackRow
from equipoise.reporting.accuracy import class_names
from equipoise.reporting.attacks import stage_of
from equipoise.reporting.run_view import RunView
from equipoise.reporting.section import Section

MOST_MODELS = 6
MOST_BYTES = 400_000  # of the pictures in a page
RIGHT, WRONG_CLEAN = "", "clean"


def gallery(run: RunView) -> Section | None:
    """Which images are right, which are broken, and by what?"""
    models = list(run.attacked_images)[:MOST_MODELS]
    common = (
        set.intersection(*(set(run.attacked_images[model]) for model in models))
        if models
        else set()
    )
    index = sorted(common)
    if not index:
        return None
    columns = [_columns(run, model, index) for model in models]
    names = class_names(run)
    labels = [run.attacked_images[models[0]][image][0].label for image in index]
    largest = max(labels + [max(own["clean"] + own["attacked"]) for own in columns])
    content: dict[str, Any] = {
        "models": columns,
        "index": index,
        "label": labels,
        "classes": [format.class_name(names, label) for label in range(largest + 1)],
        "broken": _stages(columns),
    }
    pictures = _pictures(run, index)
    text = [
        "Every image: the answer for the clean image → at the worst point of the attacks, and the margin there."
    ]
    if pictures:
        content["pictures"] = pictures
        text.append(
            f"Pictures are clean on the left and attacked ({pictures['model']}) on the right; "
            f"{len(pictures['places'])} of n = {len(index)} images have one."
        )
    return Section("Images", text, gallery=content)


def _columns(run: RunView, model: str, index: list[int]) -> dict[str, Any]:
    """What one model says of every image; −1 is an answer that is not known."""
    clean, attacked, margin, broken_by = [], [], [], []
    for image in index:
        rows = run.attacked_images[model][image]
        first, worst = rows[0], worst_row(rows)
        clean.append(_answer(first))
        attacked.append(_answer(worst))
        margin.append(None if worst.margin is None else round(worst.margin, 3))
        if worst.correct:
            broken_by.append(RIGHT)
        else:
            broken_by.append(format.literal(stage_of(worst)) if first.correct else WRONG_CLEAN)
    name = run.name(model)
    return {
        "name": name,
        "colour": run.colours[name],
        "clean": clean,
        "attacked": attacked,
        "margin": margin,
        "brokenBy": broken_by,
    }


def _answer(row: AttackRow) -> int:
    """The predicted class; of a row without one the label, where that is right."""
    if row.predicted is not None:
        return row.predicted
    return row.label if row.correct else -1


def _stages(columns: list[dict[str, Any]]) -> list[str]:
    """What broke images, most first; in the columns each is replaced by its number, 0 for nothing."""
    counts: Counter[str] = Counter()
    for own in columns:
        counts.update(own["brokenBy"])
    stages = [stage for stage, _ in counts.most_common() if stage not in (RIGHT, WRONG_CLEAN)]
    listed = [RIGHT, WRONG_CLEAN, *stages]
    numbers = {stage: number for number, stage in enumerate(listed)}
    for own in columns:
        own["brokenBy"] = [numbers[stage] for stage in own["brokenBy"]]
    return listed


def _pictures(run: RunView, index: list[int]) -> dict[str, Any] | None:
    """Clean and attacked pictures of some images, and their places in the columns."""
    arrays = PictureArrays.load(run.folder) or AttackedArrays.load(run.folder)
    if arrays is None:
        return None
    place = {image: position for position, image in enumerate(index)}
    known = [number for number, image in enumerate(arrays.index.tolist()) if image in place]
    known = known[: max(1, MOST_BYTES // (2 * arrays.clean[0].size))]
    if not known:
        return None
    return {
        "model": run.name(arrays.model),
        "places": [place[image] for image in arrays.index[known].tolist()],
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
