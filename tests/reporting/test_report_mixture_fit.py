"""The sections of a fitted mixture, from arrays and a summary made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic_run

from equipoise import reporting
from equipoise.core import records
from equipoise.reporting import mixture_fit, style
from equipoise.reporting.view import RunView, view


@pytest.fixture
def run(tmp_path: Path) -> RunView:
    chance = np.random.default_rng(3)
    folder = synthetic_run.make(tmp_path / "run", n=20, sweep=False, arrays=False)
    held: dict[str, Any] = {
        f"nuts_{kind}_{when}": chance.random(50) for kind in ("clean", "attacked") for when in ("before", "after")}
    held |= {f"nuts_{kind}_right": chance.random(50) < 0.7 for kind in ("clean", "attacked")}
    held["nuts_clean_after"][:] = 0.25
    held |= {"nuts_q": np.array(0.3), "nuts_landscape": chance.random((8, 8, 8)),
             "nuts_landscape_usable": chance.random((8, 8, 8)) < 0.9, "nuts_axis_s": np.geomspace(0.05, 5, 8),
             "nuts_axis_p": np.linspace(1, 4, 8), "nuts_axis_c": np.linspace(-1.1, 0, 8),
             "nuts_kinds": np.array(["normed", "one number"]), "nuts_kinds_worth": np.array([-np.inf, 0.875]),
             "nuts_curve_nuts": np.array([[0.8, 0.5], [0.85, 0.48], [0.85, 0.47]]),
             "nuts_curve_plain": np.array([[0.8, 0.5], [0.82, 0.48]])}
    np.savez(folder / "arrays.npz", allow_pickle=False, **held)
    told = records.summary(folder)
    costs = [{"model": "accurate", "parameters": 2_000_000, "flops": 1.5e9},
             {"model": "mixed, gated", "parameters": 4_000_000, "flops": 1.75e9, "asked": 0.22}]
    records.Run(folder, view(folder).identity, {}).summarise(
        "fit", 1.0, told["results"], promise="loses at most 2 points", helped=True, cost=costs,
        fitted={"clean": 0.85, "robust_clean": 0.8}, rejected={"too <near>": 3}, notes=["round 1"])
    return view(folder)


def test_every_section_is_on_the_page(run: RunView) -> None:
    page = reporting.write(run.folder).read_text()
    for words in ("The mixture loses at most 2 points.", "Trade-off against plain mixing", "Landscape", "1.75 G",
                  "87.5 %", "on 22.0 % of the clean images", "Margins before and after the map", "too &lt;near&gt;",
                  "round 1"):
        assert words.replace(" %", "\u00a0%") in page.replace(" %", "\u00a0%"), words
    for name in ("nuts-margins", "nuts-landscape", "nuts-trade-off"):
        assert (run.folder / "figures" / f"{name}.svg").exists()


def test_the_landscape_of_the_papers_objective_is_no_accuracy(run: RunView) -> None:
    plain = mixture_fit.landscape(run)
    np.savez(run.folder / "arrays.npz", allow_pickle=False, **{**run.arrays, "nuts_objective": np.array("surrogate")})
    paper = mixture_fit.landscape(view(run.folder))
    assert plain is not None and paper is not None
    assert plain.prose[0].startswith("Clean accuracy") and plain.tables[0].head[1] == "clean"
    assert "clean errors on which the accurate model may speak" in paper.prose[0]
    assert paper.tables[0].head[1] == "errors passed on"


def test_medians_before_and_after(run: RunView) -> None:
    section = mixture_fit.mapped_margins(run)
    assert section is not None
    cells = {row[0].text: [cell.text for cell in row[1:]] for row in section.tables[0].body}
    right = run.arrays["nuts_clean_right"]
    assert cells["clean, right"] == [f"{np.median(run.arrays['nuts_clean_before'][right]):.3f}", "0.250"]


def test_figures_draw_what_they_were_given(run: RunView) -> None:
    curves = {"fitted map": run.arrays["nuts_curve_nuts"], "plain mixing": run.arrays["nuts_curve_plain"]}
    with style.styled(style.LIGHT):
        axes = mixture_fit.draw_trade_off(style.LIGHT, curves).axes[0]
        panels = mixture_fit.draw_landscape(style.LIGHT, run.arrays["nuts_landscape"], run.arrays["nuts_landscape_usable"],
                                     [run.arrays[f"nuts_axis_{name}"] for name in "spc"]).axes
    np.testing.assert_allclose(np.asarray(axes.lines[0].get_ydata(), dtype=float), [50, 48], err_msg="47 gains nothing")
    np.testing.assert_allclose(np.asarray(panels[2].images[0].get_array()), 100 * run.arrays["nuts_landscape"][2])


def test_a_fit_that_did_not_help(run: RunView) -> None:
    told = records.summary(run.folder)
    records.Run(run.folder, run.identity, {}).summarise("fit", 1.0, told["results"], helped=False,
                                                       promise="no mixture helps: too few images")
    section = mixture_fit.promise(view(run.folder))
    assert section is not None and section.prose == ["No mixture helps: too few images."]


def test_runs_without_a_fit_have_none_of_it(tmp_path: Path) -> None:
    plain = view(synthetic_run.make(tmp_path / "run", n=20))
    for make in (mixture_fit.promise, mixture_fit.mapped_margins, mixture_fit.landscape, mixture_fit.trade_off, mixture_fit.cost):
        assert make(plain) is None
