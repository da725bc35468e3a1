"""Several runs on one page: paired differences, figures of all runs, settings that differ, and what
is not fair."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import several_runs
from parsed_report import ParsedReport
from several_runs import FIRST, HOSTILE, SECOND, certification, contents, evaluation, training
from synthetic_run import texts, values

from equipoise.core import format, stats
from equipoise.core.arrays import FitArrays
from equipoise.core.checks import InputError
from equipoise.core.radius_curves import radius_curve
from equipoise.core.results import FitSummary, SanityCheck
from equipoise.core.threat import Threat
from equipoise.reporting import compare, comparison, report
from equipoise.reporting.comparison import concerns, settings
from equipoise.reporting.paired_runs import COLOURS, NamedRun, common_images, differences
from equipoise.reporting.run_view import read_run
from equipoise.reporting.section import Figure


def named(*folders: Path) -> list[NamedRun]:
    return [
        NamedRun(folder.name, read_run(folder), COLOURS[number % len(COLOURS)])
        for number, folder in enumerate(folders)
    ]


def one(figures: list[Figure], name: str) -> Figure:
    (found,) = [own for own in figures if own.name == name]
    return found


def differing(*runs: NamedRun) -> dict[str, list[str]]:
    (table,) = settings(runs).tables
    return {row[0]: row[1:] for row in texts(table)}


def found(*runs: NamedRun) -> str:
    return " ".join(f"{what} {meaning}" for what, meaning in concerns(runs))


def page_of(*folders: Path) -> ParsedReport:
    return ParsedReport(compare(folders, folders[0].parent / "comparison.html"))


def test_differences_are_those_of_the_images(tmp_path: Path) -> None:
    page = page_of(evaluation(tmp_path / "a"), evaluation(tmp_path / "b", SECOND))
    assert page.titles == ["Results", "Is the comparison fair?", "Settings that differ", "Runs"]
    results, paired = page.tables[:2]
    assert [row[0] for row in results[1:]] == ["a mixture", "b mixture"]
    assert results[2][1].startswith("87.5 % [") and results[2][-1] == "8"
    expected = (stats.paired_difference(2, 1, 8), stats.paired_difference(0, 3, 8))
    for cell, estimate in zip(paired[1][1:3], expected, strict=True):
        assert cell == f"{format.points(estimate.value)} {format.bounds(estimate)}"
    assert "8 images of b are also images of a: both runs have the same data" in page.text
    assert "Compared with the mixture of a, the mixture of b has" in page.text


def test_images_are_matched_by_position_and_never_by_row(tmp_path: Path) -> None:
    """The second run starts three images later, so that its first row is the fourth of the first
    run."""
    first, later = (
        evaluation(tmp_path / "a"),
        evaluation(tmp_path / "b", SECOND, start=3, digest="other"),
    )
    a, b = named(first, later)
    common = common_images(a, b)
    assert common.positions == {3, 4, 5, 6, 7} and "positions in digits" in common.reason
    ((clean, worst),) = differences(a, b, common).values()
    theirs, ours = FIRST["mixed"]["clean"][3:], SECOND["mixed"]["clean"][:5]
    assert (clean.metric, clean.n) == ("clean", 5)
    assert clean.value == pytest.approx((sum(ours) - sum(theirs)) / 5)
    assert worst.value == pytest.approx((1 - 1) / 5)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"data": "cifar10"}, "other data sets"),
        ({"start": 100}, "other parts"),
        ({"labels": 4}, "labels at the same"),
        ({"data": "images"}, "no data set by name"),
    ],
)
def test_other_images_are_not_matched(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    a = evaluation(tmp_path / "a", data="images" if change == {"data": "images"} else "digits")
    b = evaluation(tmp_path / "b", digest="other", **change)
    page = page_of(a, b)
    assert "No image of b is known to be an image of a: " in page.text and reason in page.text
    assert "Paired differences" not in page.text and "no known image in common" in page.text


def test_own_images_of_one_path_match_and_those_in_memory_only_by_digest(tmp_path: Path) -> None:
    a, b = named(
        evaluation(tmp_path / "a", data="npz:x.npz"),
        evaluation(tmp_path / "b", data="npz:x.npz", digest="e"),
    )
    assert (
        len(common_images(a, b).positions) == 8 and "has not changed" in common_images(a, b).reason
    )
    c, d = named(
        evaluation(tmp_path / "c", data="images"), evaluation(tmp_path / "d", data="images")
    )
    assert len(common_images(c, d).positions) == 8
    unknown = NamedRun("x", replace(c.run, identity={}), "mixed")
    assert not common_images(c, unknown).positions


def test_models_of_other_names_are_paired_when_no_name_is_common(tmp_path: Path) -> None:
    renamed = {"robust.pt": SECOND["mixed"]}
    page = page_of(evaluation(tmp_path / "a"), evaluation(tmp_path / "b", renamed))
    assert page.tables[1][1][0] == "b robust − the mixture of a"


def test_another_threat_is_said_and_not_subtracted(tmp_path: Path) -> None:
    a = evaluation(tmp_path / "a")
    page = page_of(a, evaluation(tmp_path / "b", SECOND, threat=Threat("linf", 4 / 255)))
    assert page.tables[1][0] == ["run and model", "clean accuracy", "common images"]
    assert "ℓ∞ ≤ 8/255 in a, ℓ∞ ≤ 4/255 in b" in page.text
    assert "different threats cannot be compared" in page.text
    assert ["threat", "ℓ∞ ≤ 8/255", "ℓ∞ ≤ 4/255"] in page.tables[-2]


def test_a_fair_comparison_has_no_concern(tmp_path: Path) -> None:
    page = page_of(evaluation(tmp_path / "a"), evaluation(tmp_path / "b", SECOND))
    assert "Nothing that the runs record makes it unfair" in page.text
    assert "All settings of these runs are the same." in page.text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {
                "correct": {
                    "mixed": {"clean": FIRST["mixed"]["clean"], "apgd": FIRST["mixed"]["pgd"]}
                }
            },
            "attacks.apgd.attack: – in a, apgd in b",
        ),
        ({"steps": 20}, "attacks.pgd.steps: 10 in a, 20 in b"),
        ({"digest": "e"}, "data.digest: d0 in a, e in b"),
        ({"finished": False}, "b: This run is not finished"),
        ({"overlap": {"mixed": ("0 to 3",)}}, "b: mixture was fitted on images 0 to 3 of these"),
        (
            {
                "sanity_checks": (
                    SanityCheck(
                        name="x",
                        value=1.0,
                        alarm=True,
                        explanation="y",
                        model="mixed",
                        attack="pgd",
                    ),
                )
            },
            "b: Sanity check “x” (mixture, pgd: 1): y.",
        ),
    ],
)
def test_what_is_not_fair_is_said(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    runs = named(evaluation(tmp_path / "a"), evaluation(tmp_path / "b", **change))
    assert words in found(*runs)
    assert words not in found(runs[0], replace(runs[0], name="b"))


def test_only_differing_settings_are_listed(tmp_path: Path) -> None:
    runs = named(evaluation(tmp_path / "a"), evaluation(tmp_path / "b", steps=20, seed=1))
    models = {"mixed": {"weights": "f" * 64}}
    changed = replace(runs[1].run, identity={**runs[1].run.identity, "models": models})
    assert differing(runs[0], replace(runs[1], run=changed)) == {
        "attacks.pgd.steps": ["10", "20"],
        "models.mixed.weights": ["000000000000…", "ffffffffffff…"],
        "seed": ["0", "1"],
    }


def test_attacks_are_compared_whatever_the_models_are_called(tmp_path: Path) -> None:
    attacked = {"net": {**FIRST["mixed"], "square": FIRST["mixed"]["pgd"]}}
    a = evaluation(tmp_path / "a", attacked, steps=5)
    runs = named(a, evaluation(tmp_path / "b", {"robust": FIRST["mixed"]}, steps=4))
    shown_settings = differing(*runs)
    assert shown_settings["attacks.pgd.steps"] == ["5", "4"]
    assert shown_settings["attacks.square.attack"] == ["square", "–"]
    assert "attacks.pgd.steps: 5 in a, 4 in b" in found(*runs)


def test_settings_of_one_attack_may_depend_on_the_model(tmp_path: Path) -> None:
    runs = named(evaluation(tmp_path / "a"), evaluation(tmp_path / "b"))
    attacks = {}
    for model, steps in (("g", 10), ("h", 30)):
        attacks[model] = {"pgd": {"attack": "pgd", "steps": steps, "surrogate": model}}
    other = replace(runs[1].run, identity={**runs[1].run.identity, "attacks": attacks})
    runs[1] = replace(runs[1], run=other)
    assert differing(*runs)["attacks.pgd.steps"] == ["10", "10; 30"]
    assert differing(*runs)["attacks.pgd.surrogate"] == ["–", "g; h"]
    assert "steps" in found(*runs) and "surrogate" not in found(*runs)


def test_long_values_are_short_and_still_told_apart(tmp_path: Path) -> None:
    """Also two that differ in the middle only."""
    runs = named(evaluation(tmp_path / "a"), evaluation(tmp_path / "b"))
    for number, middle in enumerate("xy"):
        identity = {**runs[number].run.identity, "text": "a" * 300 + middle + "b" * 300}
        runs[number] = replace(runs[number], run=replace(runs[number].run, identity=identity))
    first, second = differing(*runs)["text"]
    assert first != second and len(first) < 200


def test_the_heading_says_what_was_done_on_which_data(tmp_path: Path) -> None:
    b = evaluation(
        tmp_path / "b", {"net": FIRST["mixed"]}, data="cifar10", threat=Threat("linf", 4 / 255)
    )
    page = page_of(evaluation(tmp_path / "a"), b)
    assert "<h1>Evaluation of mixed: 2 runs compared</h1>" in page.source
    assert "digits test · ℓ∞ ≤ 8/255 · cifar10 test · ℓ∞ ≤ 4/255" in page.text


def test_certificates(tmp_path: Path) -> None:
    """Radii with a known mean difference; three more images are certified at 0.5."""
    a = certification(tmp_path / "a", [0.3, 0.3, 0.6, -0.2])
    b = certification(tmp_path / "b", [0.5, 0.5, 0.5, 0.5], sigma=0.5, samples=200)
    page = page_of(a, b)
    row = page.tables[1][1]
    mean = stats.mean([0.2, 0.2, -0.1, 0.5])
    low, high = format.number(mean.low, 3), format.number(mean.high, 3)
    assert row[1] == f"+0.200 [{low}, {high}]"
    assert row[2].startswith("+25.0 [") and row[3].startswith("+75.0 [")
    assert "no clear difference" in page.text and "plan.samples: 100 in a, 200 in b" in page.text
    drawn = one(comparison.certified(named(a, b)), "certified")
    assert values(drawn, "a: base", "y")[0] == (0.75,) and values(drawn, "b: base", "y")[0] == (
        1.0,
    )


def test_trainings(tmp_path: Path) -> None:
    a = training(tmp_path / "a", [2.0, 1.0, 0.5])
    b = training(tmp_path / "b", [3.0, 2.0], "trades")
    page = page_of(a, b)
    assert "no rows of single images" in page.text
    assert ["objective.name", "standard", "trades"] in page.tables[-2]
    drawn = comparison.epochs(named(a, b))
    loss = one(drawn, "training-loss")
    assert values(loss, "a", "x", "y") == [(1, 2.0), (2, 1.0), (3, 0.5)]
    assert values(loss, "b", "y") == [(3.0,), (2.0,)]
    assert values(one(drawn, "training-clean"), "b", "y") == [(0.5,), (0.55,)]


def test_the_trade_off_has_every_model_with_both_intervals(tmp_path: Path) -> None:
    runs = named(evaluation(tmp_path / "a"), evaluation(tmp_path / "b", SECOND))
    (drawn,) = comparison._trade_off(runs)
    assert values(drawn, "b: mixture", "clean", "robust") == [(0.875, 0.125)]
    clean = stats.clopper_pearson(6, 8)
    assert values(drawn, "a: mixture", "clean_low", "clean_high") == [
        pytest.approx((clean.low, clean.high), abs=1e-5)
    ]


def test_radius_curves_of_one_norm_are_in_one_figure(tmp_path: Path) -> None:
    folders = []
    for name, norm in (("a", "linf"), ("b", "linf"), ("c", "l2")):
        curve = radius_curve("mixed", norm, {0: 0.0, 1: 0.02, 2: float("inf")}, 0.05)
        folders.append(evaluation(tmp_path / name, radius_curves=(curve,)))
    runs = named(*folders)
    drawn = one(comparison.radii(runs[:2]), "radius-curves")
    assert {record["model"] for record in drawn.records} == {"a: mixture", "b: mixture"}
    assert comparison.radii(runs) == [], "radii in other norms are not drawn together"


def test_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit = FitSummary(
        helped=True,
        promise="loses at most 1 point",
        clean=0.9,
        robust_clean=0.8,
        robust_attacked=0.5,
        q=0.1,
        alpha=0.75,
        method="NUTS map",
    )
    runs = []
    for name in "ab":
        folder = evaluation(tmp_path / name, fit=fit)
        for file, old in (
            ("run.toml", 'command = "evaluate"'),
            ("summary.json", '"command": "evaluate"'),
        ):
            text = (folder / file).read_text("utf-8")
            (folder / file).write_text(text.replace(old, old.replace("evaluate", "fit")), "utf-8")
        runs.append(folder)
    curve = np.array([[0.8, 0.5], [0.7, 0.45], [0.9, 0.4]])  # the second gains nothing
    stored = type("Arrays", (), {"map_curve": curve, "plain_curve": None})
    monkeypatch.setattr(FitArrays, "load", lambda folder: stored)
    page = page_of(*runs)
    promise = "The mixture loses at most 1 point."
    assert [row[2] for row in page.tables[-1][1:]] == [promise, promise]
    assert "optimistic" in page.text
    (drawn,) = comparison._trade_off(named(*runs))
    frontier = values(drawn, "a: frontier on fitting images", "clean", "robust")
    assert frontier == [(0.8, 0.5), (0.9, 0.4)]


def test_the_same_runs_give_the_same_bytes_and_stay_as_they_are(
    tmp_path: Path,
) -> None:
    runs = [evaluation(tmp_path / "runs" / "a"), evaluation(tmp_path / "runs" / "b", SECOND)]
    report(runs[0])
    before, out = contents(*runs), tmp_path / "out.html"
    first = compare(runs, out).read_bytes()
    assert (
        compare([str(run) for run in runs], str(out)).read_bytes() == first
        and contents(*runs) == before
    )
    links = [value for name, value in ParsedReport(out).attributes if name == "href"]
    assert [link for link in links if not link.startswith("#")] == ["runs/a/report.html"]


def test_names_are_text(tmp_path: Path) -> None:
    """Of folders, whose slash makes it two, of models, data and attacks."""
    models = {HOSTILE: {"clean": [True] * 4, HOSTILE: [True, False] * 2}}
    runs = [
        evaluation(tmp_path / name / HOSTILE, models, data=f"npz:{HOSTILE}")
        for name in ("a", "b&amp;")
    ]
    page = ParsedReport(compare(runs, tmp_path / "out.html"))
    assert HOSTILE in page.text and "<script>alert" not in page.source
    assert len(page.scripts) == 2 and "b&amp;" in page.text


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([], "`folders` must be at least two run folders, got []"),
        (["a"], "at least two run folders, got ['"),
        (["a", "a"], "different run folders"),
        (["a", "link"], "different run folders"),
        (["a", "."], "run.toml"),
        (["a", "missing"], "missing must be a run folder, got no such folder"),
        (["a", "train"], "`folders` must hold runs of one kind"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path: Path, names: list[str], words: str) -> None:
    evaluation(tmp_path / "a")
    training(tmp_path / "train", [1.0])
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(InputError, match=re.escape(words)):
        compare([tmp_path / name for name in names], tmp_path / "out.html")
    assert not (tmp_path / "out.html").exists()


@pytest.mark.parametrize("folders", [None, 5, "ab", [5, 6], {"a": 1}, ["a\0", "b"], [None, None]])
def test_wrong_types_are_refused(folders: Any) -> None:
    with pytest.raises(InputError, match="`folders` must"):
        compare(folders)


@pytest.mark.parametrize("out", [None, 5, ["a"], "a\0b"])
def test_wrong_types_of_the_file_are_refused(out: Any) -> None:
    with pytest.raises(InputError, match="`out` must"):
        compare(["a", "b"], out=out)


def test_foreign_files_and_runs_are_not_written_into(tmp_path: Path) -> None:
    runs = [evaluation(tmp_path / "a"), evaluation(tmp_path / "b")]
    foreign = tmp_path / "notes.html"
    foreign.write_text("mine")
    report(runs[0])
    for out, words in (
        (foreign, "something else"),
        (runs[0] / "report.html", "outside of runs"),
        (runs[0] / "new.html", "outside of runs"),
        (tmp_path, "not a folder"),
        (tmp_path / "none" / "x.html", "in a folder that exists"),
    ):
        with pytest.raises(InputError, match=words):
            compare(runs, out)
    assert foreign.read_text() == "mine" and not (runs[0] / "new.html").exists()


def test_names_differ_even_where_an_ending_is_left_out(tmp_path: Path) -> None:
    page = page_of(evaluation(tmp_path / "run"), evaluation(tmp_path / "run.pt", SECOND))
    assert len({row[0] for row in page.tables[0][1:]}) == 2


def test_many_runs_have_a_colour_each(tmp_path: Path) -> None:
    folders = [several_runs.evaluation(tmp_path / str(number)) for number in range(9)]
    runs = comparison.read_runs(folders)
    assert len({item.colour for item in runs}) == len({item.name for item in runs}) == 9
