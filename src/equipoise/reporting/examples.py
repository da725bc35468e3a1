"""Attacked images beside the clean ones, and what the three models say to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from equipoise.core import checks
from equipoise.reporting import style
from equipoise.reporting.section import Picture, Section
from equipoise.reporting.style import MODELS, Palette
from equipoise.reporting.view import RunView

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NEEDED = ("example_clean", "example_attacked", "example_label", "example_predicted")
SHOWN = 6


def examples(view: RunView) -> Section | None:
    """The first few examples that the run kept in `arrays.npz`."""
    if any(name not in view.arrays for name in NEEDED):
        return None
    clean, attacked, label, predicted = (view.arrays[name] for name in NEEDED)
    shape = clean.shape
    checks.require(clean.ndim == 4 and shape[1] in (1, 3), "example_clean", "have shape (n, 1 or 3, H, W)", shape)
    checks.require(attacked.shape == shape, "example_attacked", f"have shape {shape}", attacked.shape)
    checks.require(label.shape == shape[:1], "example_label", f"have shape {shape[:1]}", label.shape)
    checks.require(predicted.shape == (shape[0], 3), "example_predicted", f"have shape ({shape[0]}, 3)",
                   predicted.shape)
    if not len(clean):
        return None
    names = view.arrays.get("class_names")
    kept = slice(0, SHOWN)
    few = f"The {len(clean)} examples" if len(clean) <= SHOWN else f"{SHOWN} of the {len(clean)} examples"
    within = f" within {view.threat}" if view.threat else ""
    prose = [f"{few} that the run kept: the clean image, the image after an "
             f"attack{within}, and what each model says to the attacked one. The difference is enlarged "
             f"×{amplification(clean[kept], attacked[kept]):.0f} around mid-grey. Examples illustrate; they are no "
             f"estimate of how often this happens."]
    alt = "Clean images, attacked images, their difference enlarged, and the predictions of the three models"
    picture = Picture("examples", alt, lambda palette: draw(
        palette, clean[kept], attacked[kept], [_name(i, names) for i in label[kept]],
        [[_name(i, names) for i in row] for row in predicted[kept]]))
    return Section("Examples of attacked images", prose, pictures=[picture])


def amplification(clean: NDArray[Any], attacked: NDArray[Any]) -> float:
    """How far the differences can be enlarged without leaving the range of a pixel."""
    most = int(np.abs(attacked.astype(int) - clean.astype(int)).max())
    return max(1.0, 127 / most) if most else 1.0


def draw(palette: Palette, clean: NDArray[Any], attacked: NDArray[Any], labels: list[str],
         predictions: list[list[str]]) -> Figure:
    """One line per example; a wrong answer is marked by sign and colour."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(style.WIDTH, 0.28 + 1.1 * len(clean)))
    grid = figure.subplots(len(clean), 4, squeeze=False, width_ratios=[1, 1, 1, 1.9])
    larger = amplification(clean, attacked)
    change = np.clip(127.5 + larger * (attacked.astype(float) - clean), 0, 255).astype(np.uint8)
    for axes, title in zip(grid[0], ("clean", "attacked", f"difference ×{larger:.0f}", ""), strict=True):
        axes.set_title(title, color=palette.muted, fontsize=8)
    for line, label, said, *images in zip(grid, labels, predictions, clean, attacked, change, strict=True):
        for axes, image in zip(line[:3], images, strict=True):
            pixels = image.transpose(1, 2, 0)
            axes.imshow(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels, cmap="gray", vmin=0, vmax=255,
                        interpolation="none")
            axes.set_axis_off()
        _answers(line[3], palette, label, said)
    return figure


def _answers(axes: Axes, palette: Palette, label: str, said: list[str]) -> None:
    axes.set_axis_off()
    axes.text(0.04, 0.84, "truth", color=palette.muted, fontsize=8, va="center")
    axes.text(0.42, 0.84, label, fontsize=8, va="center")
    colours = palette.of(MODELS)
    for height, model, answer in zip((0.60, 0.38, 0.16), MODELS, said, strict=True):
        right = answer == label
        axes.text(0.04, height, model, color=colours[model], fontsize=8, va="center")
        axes.text(0.42, height, f"{'✓' if right else '✗'} {answer}", fontsize=8, va="center",
                  color=palette.ink if right else palette.wrong, fontweight="normal" if right else "bold")


def _name(number: int, names: NDArray[Any] | None) -> str:
    return str(names[number]) if names is not None and 0 <= number < len(names) else str(number)
