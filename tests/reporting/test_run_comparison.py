"""Several runs on one page: paired differences, overlaid figures, settings that differ, and what is
not fair."""

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

from equipoise.core import format, stats
from equipoise.core.arrays import FitArrays
from equipoise.core.checks import InputError
from equipoise.core.radius_curves import radius_curve
from equipoise.core.results import FitSummary, SanityCheck
from equipoise.core.threat import Threat
from equipoise.reporting import compare, report
from equipoise.reporting.charts import Chart, Line, Panel
from equipoise.reporting.differing_settings import concerns, settings
from equipoise.reporting.overlays import certified, radii, trade_off
from equipoise.reporting.overlays import training as training_curves
from equipoise.reporting.paired_runs import NamedRun, common_images, differences, shared_models
from equipoise.reporting.section import Section, read_run


@pytest.fixture
def drawn() -> None:
    """Asked for by tests that need the figures themselves."""


@pytest.fixture(autouse=True)
def placeholders(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures take most of the time; elsewhere they are described, not drawn."""
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(
            "equipoise.reporting.page._encode_both",
            lambda *_: {"light": "data:,", "dark": "data:,"},
        )


def named(*folders: Path) -> list[NamedRun]:
    return [
        NamedRun(folder.name, read_run(folder), number) for number, folder in enumerate(folders)
    ]


def chart_of(section: Section | None) -> Chart:
    assert section is not None
    (chart,) = section.pictures
    assert isinstance(chart, Chart)
    return chart


def lines_of(panel: Panel) -> list[Line]:
    return [mark for mark in panel.marks if isinstance(mark, Line)]


def page_of(*folders: Path) -> ParsedReport:
    return ParsedReport(compare(folders, folders[0].parent / "comparison.html"))


def test_differences_are_those_of_the_images(tmp_path: Path) -> None:
    page = page_of(evaluation(tmp_path / "a"), evaluation(tmp_path / "b", SECOND))
    assert page.titles == [
        "Results",
        "Is the comparison fair?",
        "Runs",
        "Trade-off",
        "Settings that differ",
    ]
    results, paired = page.tables[:2]
    assert results[0] == ["run and model", "clean", "worst", "pgd", "n"]
    assert [row[0] for row in results[1:]] == ["a mixed", "b mixed"]
    assert results[2][1].startswith("87.5 % [") and results[2][-1] == "8"
    assert paired[0] == ["run and model", "clean", "worst", "common images"]
    for cell, estimate in zip(
        paired[1][1:3],
        (stats.paired_difference(2, 1, 8), stats.paired_difference(0, 3, 8)),
        strict=True,
    ):
        assert cell == f"{format.points(estimate.value)} {format.bounds(estimate)}"
    assert "8 images of b are also images of a: both runs have the same data" in page.text
    assert "Compared with the mixture of a on the same images, the mixture of b" in page.text


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
    unknown = NamedRun("x", replace(c.run, identity={}), 2)
    assert not common_images(c, unknown).positions


def test_models_of_other_names_are_paired_when_no_name_is_common(tmp_path: Path) -> None:
    renamed = {"robust.pt": SECOND["mixed"]}
    page = page_of(evaluation(tmp_path / "a"), evaluation(tmp_path / "b", renamed))
    assert page.tables[1][1][0] == "b robust − the mixture of a"


def test_another_threat_is_said_and_not_subtracted(tmp_path: Path) -> None:
    page = page_of(
        evaluation(tmp_path / "a"),
        evaluation(tmp_path / "b", SECOND, threat=Threat("linf", 4 / 255)),
    )
    assert page.tables[1][0] == ["run and model", "clean", "common images"]
    assert "Other threats: ℓ∞ ≤ 8/255 in a; ℓ∞ ≤ 4/255 in b." in page.text
    assert "heights of different colours cannot be compared" in page.text
    assert ["threat", "ℓ∞ ≤ 8/255", "ℓ∞ ≤ 4/255"] in page.tables[-1]


def test_a_fair_comparison_has_no_concern(tmp_path: Path) -> None:
    page = page_of(evaluation(tmp_path / "a"), evaluation(tmp_path / "b", SECOND))
    assert "Nothing that the runs record makes it unfair" in page.text and "limit" not in page.text
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
            "Other attacks: pgd in a; apgd in b.",
        ),
        ({"steps": 20}, "Other settings of pgd"),
        ({"digest": "e"}, "Other images: digits test, n = 8, digest d0 in a;"),
        ({"finished": False}, "b is not finished"),
        ({"overlap": {"mixed": ("0 to 3",)}}, "b: mixed was fitted on images 0 to 3 of these"),
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
            "b: attacked accuracies of mixed may be overstated",
        ),
    ],
)
def test_what_is_not_fair_is_said(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    runs = named(evaluation(tmp_path / "a"), evaluation(tmp_path / "b", **change))
    common = {"b": common_images(*runs)}
    assert any(words in text for text in concerns(runs, common)), concerns(runs, common)
    assert not any(
        words in text for text in concerns([runs[0], replace(runs[0], name="b")], common)
    )


def test_only_differing_settings_are_listed(tmp_path: Path) -> None:
    runs = named(evaluation(tmp_path / "a"), evaluation(tmp_path / "b", steps=20, seed=1))
    changed = replace(
        runs[1].run, identity={**runs[1].run.identity, "models": {"mixed": {"weights": "f" * 64}}}
    )
    (table,) = settings([runs[0], replace(runs[1], run=changed)]).tables
    shown = {row[0].text: [cell.text for cell in row[1:]] for row in table.body}
    assert shown == {
        "attacks.pgd.steps": ["10", "20"],
        "models.mixed.weights": ["000000000000…", "ffffffffffff…"],
        "seed": ["0", "1"],
    }
    assert (
        next(row[0].note for row in table.body if row[0].text == "attacks.pgd.steps") == "of mixed"
    )


def test_attacks_with_other_settings_are_shown_where_models_have_other_names(
    tmp_path: Path,
) -> None:
    """Paths in one run, "robust" in the other, with the same weights; only the first has a second
    attack."""
    path = "/weights/long/net.safetensors"
    attacked = {path: {**FIRST["mixed"], "square": FIRST["mixed"]["pgd"]}}
    a = evaluation(tmp_path / "a", attacked, steps=5)
    page = page_of(a, evaluation(tmp_path / "b", {"robust": FIRST["mixed"]}, steps=4))
    assert "Other settings of pgd: steps 5 in a, 4 in b." in page.text
    assert page.tables[-1][1:] == [
        ["attacks.pgd.steps of net", "5", "4"],
        ["attacks.square of net", "square", "–"],
        ["models.net.name", "net", "robust"],
        ["references", "net", "robust"],
    ]


def test_models_are_listed_by_name_first_and_then_by_weights(tmp_path: Path) -> None:
    """Names that were swapped are other models; of two copies one is listed under its own name."""
    swapped = named(
        evaluation(tmp_path / "a", {"g": FIRST["mixed"], "h": FIRST["mixed"]}),
        evaluation(tmp_path / "b", {"h": FIRST["mixed"], "g": FIRST["mixed"]}),
    )
    assert shared_models(swapped) == [{"g": "g", "h": "h"}, {"h": "h", "g": "g"}]
    rows = settings(swapped).tables[0].body
    assert [row[0].text for row in rows] == ["models.g.weights", "models.h.weights", "references"]
    copies = {name: {"weights": "0" * 64} for name in ("x", "y")}
    renamed = replace(swapped[1].run, identity={**swapped[1].run.identity, "models": copies})
    assert shared_models([swapped[0], replace(swapped[1], run=renamed)])[1] == {"x": "g", "y": "y"}


def test_settings_of_one_attack_may_depend_on_the_model(tmp_path: Path) -> None:
    runs = named(
        *(evaluation(tmp_path / name, {"g": FIRST["mixed"], "h": FIRST["mixed"]}) for name in "ab")
    )
    attacks = {
        model: {"pgd": {"attack": "pgd", "steps": steps, "surrogate": model}}
        for model, steps in (("g", 10), ("h", 30))
    }
    runs[1] = replace(
        runs[1], run=replace(runs[1].run, identity={**runs[1].run.identity, "attacks": attacks})
    )
    shown = {row[0].text: [cell.text for cell in row[1:]] for row in settings(runs).tables[0].body}
    assert shown == {
        "attacks.clean": ["clean", "–"],
        "attacks.pgd.steps": ["10", "10 for g; 30 for h"],
        "attacks.pgd.surrogate": ["not set", "g for g; h for h"],
    }
    sentence = next(
        text for text in concerns(runs, {"b": common_images(*runs)}) if "settings of pgd" in text
    )
    assert "steps 10 in a, 10 for g; 30 for h in b." in sentence and "surrogate" not in sentence


def test_one_attack_of_all_models_is_a_setting_like_others(tmp_path: Path) -> None:
    """Described as a whole, not by model."""
    runs = [
        replace(
            item,
            run=replace(
                item.run,
                identity={
                    **item.run.identity,
                    "attacks": {
                        "attack": "suite",
                        "attacks": [{"attack": "pgd", "steps": 10 + item.number}],
                    },
                },
            ),
        )
        for item in named(evaluation(tmp_path / "a"), evaluation(tmp_path / "b"))
    ]
    (row,) = settings(runs).tables[0].body
    assert row[0].text == "attacks.attacks" and "10" in row[1].text and "11" in row[2].text


def test_long_values_and_tables_that_a_run_lacks_are_short(tmp_path: Path) -> None:
    """Two long values that differ in the middle only are still told apart."""
    runs = named(evaluation(tmp_path / "a"), evaluation(tmp_path / "b"))
    for number, middle in enumerate("xy"):
        part = {} if number else {"part": {"first": 1, "second": {"third": 2}}}
        identity = {**runs[number].run.identity, "text": "a" * 300 + middle + "b" * 300, **part}
        runs[number] = replace(runs[number], run=replace(runs[number].run, identity=identity))
    shown = {row[0].text: [cell.text for cell in row[1:]] for row in settings(runs).tables[0].body}
    assert shown["part"] == ["first, second", "–"]
    assert shown["text"][0] != shown["text"][1] and all(len(text) < 200 for text in shown["text"])


def test_the_heading_says_what_was_done_on_which_data(tmp_path: Path) -> None:
    """Not the names of the folders, which say nothing to others."""
    a, same = evaluation(tmp_path / "a"), evaluation(tmp_path / "same")
    b = evaluation(
        tmp_path / "b", {"net": FIRST["mixed"]}, data="cifar10", threat=Threat("linf", 4 / 255)
    )
    page = page_of(a, same)
    date = read_run(a).settings["date"]
    assert "<h1>Evaluation of mixed: 2 runs compared</h1>" in page.source
    assert f"2 runs (evaluation) · digits test · n = 8 · ℓ∞ ≤ 8/255 · {date}" in page.text.replace(
        "\xa0", " "
    )
    page = page_of(a, same, b)
    assert "<h1>Evaluation of mixed compared with net</h1>" in page.source
    assert (
        "digits test and cifar10 test · n = 8 · ℓ∞ ≤ 8/255 and ℓ∞ ≤ 4/255 · "
        in page.text.replace("\xa0", " ")
    )
    many = {f"{'x' * 30}{number}": FIRST["mixed"] for number in range(3)}
    others = {f"{name}y": own for name, own in many.items()}
    page = page_of(evaluation(tmp_path / "c", many), evaluation(tmp_path / "d", others))
    heading = re.search("<h1>(.*)</h1>", page.source)
    assert (
        heading is not None
        and heading[1].endswith(" compared with another run")
        and "xy" not in heading[1]
    )


def test_certificates(tmp_path: Path) -> None:
    """Radii with a known mean difference: 0.05 on average; three more images are certified at
    0.5."""
    first, second = [0.3, 0.3, 0.6, -0.2], [0.5, 0.5, 0.5, 0.5]
    a, b = (
        certification(tmp_path / "a", first),
        certification(tmp_path / "b", second, sigma=0.5, samples=200),
    )
    page = page_of(a, b)
    assert page.tables[0][0] == [
        "run and model",
        "average radius",
        "certified at 0.25",
        "certified at 0.50",
        "n",
    ]
    row = page.tables[1][1]
    assert (
        row[1].startswith("+0.200 [")
        and row[2].startswith("+25.0 [")
        and row[3].startswith("+75.0 [")
    )
    mean = stats.mean([0.2, 0.2, -0.1, 0.5])
    assert row[1] == f"+0.200 [{f'{mean.low:.3f}'.replace('-', '−')}, {mean.high:.3f}]"
    assert (
        "is 0.200 larger than that of base of a on the same images, which is no clear difference"
        in page.text
    )
    assert "Other numbers of noisy samples: 100 in a; 200 in b." in page.text
    lines = lines_of(chart_of(certified(named(a, b))).panels[0])
    assert [line.label for line in lines] == ["a, base", "b, base"] and len(
        {line.color for line in lines}
    ) == 2
    assert lines[0].y[0] == 75.0 and lines[1].y[0] == 100.0


def test_trainings(tmp_path: Path) -> None:
    a, b = training(tmp_path / "a", [2.0, 1.0, 0.5]), training(tmp_path / "b", [3.0, 2.0], "trades")
    page = page_of(a, b)
    assert "has no rows of single images" in page.text and "common" not in page.text
    assert ["objective.name", "standard", "trades"] in page.tables[-1]
    loss, *accuracies = chart_of(training_curves(named(a, b))).panels
    assert [list(line.y) for line in lines_of(loss)] == [[2.0, 1.0, 0.5], [3.0, 2.0]]
    assert [list(line.x) for line in lines_of(loss)] == [[1, 2, 3], [1, 2]]
    assert [panel.title for panel in accuracies] == ["training", "held out, clean"]


def test_the_trade_off_has_every_model_with_both_intervals(tmp_path: Path) -> None:
    runs = named(evaluation(tmp_path / "a"), evaluation(tmp_path / "b", SECOND))
    (panel,) = chart_of(trade_off(runs)).panels
    lines = lines_of(panel)
    points = [line for line in lines if line.label]
    assert [(line.label, list(line.x), list(line.y)) for line in points] == [
        ("a, mixed", [75.0], [50.0]),
        ("b, mixed", [87.5], [12.5]),
    ]
    assert len(points[0].low) == 1 and len({line.marker for line in points}) == 1
    clean = stats.clopper_pearson(6, 8)
    assert (list(points[0].x_low), list(points[0].x_high)) == (
        [100 * clean.low],
        [100 * clean.high],
    )
    assert (
        panel.x_range is not None and panel.x_range[0] < 100 * clean.low
    )  # every interval is seen


def test_radius_curves_of_one_norm_are_overlaid(tmp_path: Path) -> None:
    curves = {
        norm: (radius_curve("mixed", norm, {0: 0.0, 1: 0.02, 2: float("inf")}, 0.05),)
        for norm in ("linf", "l2")
    }
    runs = named(
        *(
            evaluation(tmp_path / name, radius_curves=curves[norm])
            for name, norm in (("a", "linf"), ("b", "linf"), ("c", "l2"))
        )
    )
    overlaid, refused = radii(runs[:2]), radii(runs)
    assert [line.label for line in lines_of(chart_of(overlaid).panels[0])] == [
        "a, mixed",
        "b, mixed",
    ]
    assert refused is not None and not refused.pictures and "different norms" in refused.prose[0]


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
        for file in ("run.toml", "summary.json"):
            text = (
                (folder / file)
                .read_text("utf-8")
                .replace('command = "evaluate"', 'command = "fit"')
            )
            (folder / file).write_text(
                text.replace('"command": "evaluate"', '"command": "fit"'), "utf-8"
            )
        runs.append(folder)
    curve = np.array([[0.8, 0.5], [0.7, 0.45], [0.9, 0.4]])  # the second gains nothing
    monkeypatch.setattr(FitArrays, "load", lambda folder: type("Arrays", (), {"map_curve": curve}))
    page = page_of(*runs)
    assert page.tables[3][1] == ["a", "NUTS map", "0.75", "loses at most 1 point"]
    assert "All points are of fitting images" in page.text and "optimistic" in page.text
    frontier = next(
        line
        for line in lines_of(chart_of(trade_off(named(*runs))).panels[0])
        if line.label == "a, fitted frontier"
    )
    assert list(frontier.x) == [80.0, 90.0] and list(frontier.y) == [50.0, 40.0]


def test_the_same_runs_give_the_same_bytes_and_stay_as_they_are(
    tmp_path: Path, drawn: None
) -> None:
    runs = [evaluation(tmp_path / "runs" / "a"), evaluation(tmp_path / "runs" / "b", SECOND)]
    report(runs[0])
    before, out = contents(*runs), tmp_path / "out.html"
    first = compare(runs, out).read_bytes()
    assert (
        compare([str(run) for run in runs], str(out)).read_bytes() == first
        and contents(*runs) == before
    )
    page = ParsedReport(out)
    assert ("href", "runs/a/report.html") in page.attributes
    assert "b" in [row[0] for row in page.tables[2]]  # without a report it has no link
    assert [value for name, value in page.attributes if name == "href"] == ["runs/a/report.html"]
    assert "default-src 'none'; script-src 'sha256-" in page.source and "unsafe" not in page.source


def test_names_are_text(tmp_path: Path) -> None:
    """Of folders, whose slash makes it two, of models, data and attacks."""
    models = {HOSTILE: {"clean": [True] * 4, HOSTILE: [True, False] * 2}}
    runs = [
        evaluation(tmp_path / name / HOSTILE, models, data=f"npz:{HOSTILE}")
        for name in ("a", "b&amp;")
    ]
    page = ParsedReport(compare(runs, tmp_path / "out.html"))
    assert HOSTILE in page.text and "<script>alert" not in page.source
    assert len(page.scripts) == 1 and "b&amp;" in page.text


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([], "`folders` must be at least two run folders, got []"),
        (["a"], "at least two run folders, got ['"),
        (["a", "a"], "different run folders"),
        (["a", "link"], "different run folders"),
        (["a", "."], "run.toml"),
        (["a", "missing"], "missing must be a run folder, got no such folder"),
        (["a", "train"], "`folders` must hold runs of one kind, got evaluation in "),
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


def test_contradicting_files_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise KeyError("x")

    monkeypatch.setattr("equipoise.reporting.overlays.trade_off", fail)
    with pytest.raises(InputError, match=r"a or .*b must hold a run whose files agree"):
        compare([evaluation(tmp_path / "a"), evaluation(tmp_path / "b")], tmp_path / "out.html")


def test_names_differ_even_where_an_ending_is_left_out(tmp_path: Path) -> None:
    page = page_of(evaluation(tmp_path / "run"), evaluation(tmp_path / "run.pt", SECOND))
    assert len({row[0] for row in page.tables[0][1:]}) == 2


def test_many_runs_have_distinct_lines(tmp_path: Path) -> None:
    runs = named(*(several_runs.evaluation(tmp_path / str(number)) for number in range(13)))
    assert len({(item.color, item.linestyle) for item in runs}) == 13
