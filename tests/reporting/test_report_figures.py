from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic_run
from matplotlib.colors import to_hex

from equipoise.core import checks, records
from equipoise.reporting import alpha, examples, margins, sanity_checks, style
from equipoise.reporting.view import view


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic_run.make(tmp_path_factory.mktemp("figures") / "run", n=40)


@pytest.mark.parametrize("palette", [style.LIGHT, style.DARK])
def test_alpha_figure_draws_the_rows(folder: Path, palette: style.Palette) -> None:
    sweep = view(folder / "sweep")
    with style.styled(palette):
        axes = alpha.draw(palette, alpha.curves(sweep.results), 0.75).axes[0]
    lines = {line.get_label(): line for line in axes.lines}
    assert lines["_chosen"].get_xdata() == [0.75, 0.75]
    for metric, attacks in {"clean": {"clean"}, "worst": {"clean", "pgd"}}.items():
        shares = []
        for weight in synthetic_run.ALPHAS:
            right: dict[int, bool] = {}
            for row in records.read(folder / "sweep"):
                if row["alpha"] == weight and row["attack"] in attacks:
                    right[row["index"]] = right.get(row["index"], True) and row["correct"]
            shares.append(100 * sum(right.values()) / len(right))
        np.testing.assert_array_equal(np.asarray(lines[metric].get_xdata(), dtype=float), synthetic_run.ALPHAS)
        np.testing.assert_allclose(np.asarray(lines[metric].get_ydata(), dtype=float), shares)
        assert to_hex(lines[metric].get_color()) == palette.mixed
    bands = [np.asarray(band.get_paths()[0].vertices, dtype=float)[:, 1] for band in axes.collections]
    assert [(band.min(), band.max()) for band in bands] == [
        (100 * min(r["low"] for r in rows), 100 * max(r["high"] for r in rows))
        for rows in alpha.curves(sweep.results).values()]


def test_chosen_alpha_was_asked_for_or_told(tmp_path: Path) -> None:
    cases: list[tuple[str, dict[str, Any], dict[str, Any], float | None]] = [
        ("a", {"verb": "v", "attack": {"alpha": 0.5}}, {"alpha": 0.25}, 0.5),
        ("b", {"verb": "v"}, {"alpha": 0.25}, 0.25), ("c", {"verb": "v", "attack": {"steps": 3}}, {}, None),
    ]
    for name, identity, told, expected in cases:
        records.Run(tmp_path / name, identity, {}).summarise("v", 0.0, [], **told)
        assert alpha.chosen_alpha(view(tmp_path / name)) == expected


def test_margins_are_the_smallest_over_the_attacks(folder: Path) -> None:
    found = margins.collect(view(folder))
    assert list(found) == ["accurate", "robust", "mixed"]
    rows = [row for row in records.read(folder) if row["model"] == "robust"]
    smallest = [min(row["margin"] for row in rows if row["index"] == i) for i in range(40)]
    assert found["robust"]["attacked"] == smallest
    assert found["robust"]["clean"] == [row["margin"] for row in rows if row["attack"] == "clean"]


def test_margin_bars_count_every_image(folder: Path) -> None:
    found = margins.collect(view(folder))
    found["other"] = {"clean": [-3.5, 0.5], "attacked": [-4.0, 4.0]}
    with style.styled(style.LIGHT):
        panels = margins.draw(style.LIGHT, found).axes
    bars = [sum(bar.get_height() for bar in axes.containers[0]) for axes in panels]
    assert bars == [40, 40, 40, 2]


@pytest.mark.parametrize(("change", "expected"), [(8, 127 / 8), (0, 1.0), (200, 1.0)])
def test_amplification_stays_in_range(change: int, expected: float) -> None:
    clean = np.zeros((2, 1, 3, 4), dtype=np.uint8)
    attacked = clean.copy()
    attacked[1, 0, 2, 3] = change
    assert examples.amplification(clean, attacked) == expected
    assert examples.amplification(attacked, clean) == expected


@pytest.mark.parametrize("channels", [1, 3])
def test_example_answers_are_marked_right_and_wrong(channels: int) -> None:
    images = np.full((2, channels, 5, 7), 100, dtype=np.uint8)
    with style.styled(style.LIGHT):
        figure = examples.draw(style.LIGHT, images, images + 8, ["cat", "dog"],
                               [["dog", "cat", "cat"], ["dog", "dog", "cat"]])
    said = [(text.get_text(), to_hex(text.get_color())) for axes in figure.axes[3::4] for text in axes.texts
            if text.get_text()[0] in "✓✗"]
    ink, wrong = style.LIGHT.ink, style.LIGHT.wrong
    assert said == [("✗ dog", wrong), ("✓ cat", ink), ("✓ cat", ink), ("✓ dog", ink), ("✓ dog", ink), ("✗ cat", wrong)]
    shown = [np.asarray(axes.images[0].get_array()) for axes in figure.axes[:3]]
    assert [int(image.flat[0]) for image in shown] == [100, 108, 254]


def test_examples_of_the_wrong_shape_are_refused(tmp_path: Path) -> None:
    made = synthetic_run.make(tmp_path / "run", n=6)
    with np.load(made / "arrays.npz") as held:
        arrays = dict(held)
    arrays["example_predicted"] = arrays["example_predicted"][:, :2]
    np.savez(made / "arrays.npz", **arrays)
    with pytest.raises(checks.InputError, match="`example_predicted` must have shape"):
        examples.examples(view(made))


def test_models_keep_their_colours_and_strangers_take_turns() -> None:
    for palette in (style.LIGHT, style.DARK):
        colours = palette.of(["x", "mixed", "y", "accurate"])
        assert colours["mixed"] == palette.mixed and colours["accurate"] == palette.accurate
        assert len(set(colours.values())) == 4


def test_symptoms_are_told_alarms_first(tmp_path: Path) -> None:
    seen = [{"model": "m", "attack": "fast", "name": name, "value": value, "alarm": alarm, "says": "what it is"}
            for name, value, alarm in (("randomness", 0.0, False), ("vanishing gradients", 0.4, True))]
    records.Run(tmp_path / "run", {"verb": "v"}, {}).summarise("v", 0.0, [], symptoms=seen)
    section = sanity_checks.symptoms(view(tmp_path / "run"))
    assert section is not None and "vanishing gradients (m, fast)" in section.prose[1] and len(section.prose) == 2
    assert [(row[0].text, table.folded) for table in section.tables for row in table.body] == [
        ("vanishing gradients", False), ("randomness", True)]
    calm = {**seen[1], "attack": "adaptive", "alarm": False}
    records.Run(tmp_path / "both", {"verb": "v"}, {}).summarise("v", 0.0, [], symptoms=[*seen, calm])
    section = sanity_checks.symptoms(view(tmp_path / "both"))
    assert section is not None and "What alarms in m is why" in section.prose[2]
    records.Run(tmp_path / "none", {"verb": "v"}, {}).summarise("v", 0.0, [])
    assert sanity_checks.symptoms(view(tmp_path / "none")) is None
