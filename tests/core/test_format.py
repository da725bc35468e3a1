from __future__ import annotations

import pytest

from equipoise.core import format
from equipoise.core.audits import Audit
from equipoise.core.results import Result, Summary


def _result(metric: str, value: float) -> Result:
    return Result(
        model="mixed", metric=metric, value=value, low=value - 0.025, high=value + 0.025, n=1000
    )


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.826, "82.6 %"),
        (0.0, "0.0 %"),
        (1, "100.0 %"),
        (-0.0001, "0.0 %"),
        (-0.0312, "−3.1 %"),
    ],
)
def test_percent(value: float, expected: str) -> None:
    assert format.percent(value) == expected


def test_intervals_have_a_minus_sign() -> None:
    assert format.interval(-0.051, 0.849) == "[−5.1, 84.9]"


def test_shares_are_in_percent_and_other_metrics_are_not() -> None:
    assert format.estimate(_result("clean", 0.826)) == "82.6 % [80.1, 85.1], n = 1000"
    assert format.estimate(_result("acr", 0.826)) == "0.826 [0.801, 0.851], n = 1000"


@pytest.mark.parametrize(
    ("value", "expected"), [(0.097, "+9.7"), (-0.016, "−1.6"), (-0.0001, "0.0"), (0.0, "0.0")]
)
def test_points_have_a_sign(value: float, expected: str) -> None:
    assert format.points(value) == expected


def test_a_label_has_the_alpha_of_a_sweep() -> None:
    assert (
        format.label("mixed", None) == "mixed"
        and format.label("mixed", 0.81234) == "mixed (alpha 0.8123)"
    )


@pytest.mark.parametrize(
    ("numbers", "expected"), [([5], "5"), ([5, 5], "5"), ([9, 8, 9], "8 to 9")]
)
def test_counts(numbers: list[int], expected: str) -> None:
    assert format.counts(numbers) == expected


def test_short_names_distinguish_models() -> None:
    assert format.short_names(["file:/a/best.pth", "file:/a/last.pt (sigma 0.1)", "robust"]) == {
        "file:/a/best.pth": "best",
        "file:/a/last.pt (sigma 0.1)": "last (sigma 0.1)",
        "robust": "robust",
    }


def test_settings_are_no_part_of_a_path() -> None:
    """Only where one path comes with several settings do they belong to the name."""
    references = ["onnx:a/net.onnx?std=1/255,1/255,1/255", "b/net.pt?arch=cnn&labels=./x.txt"]
    assert list(format.short_names(references).values()) == ["net.onnx", "net"]
    assert list(format.short_names(["a/net.pt?arch=cnn", "a/net.pt?arch=lenet"]).values()) == [
        "net?arch=cnn",
        "net?arch=lenet",
    ]


HOSTILE = [
    "[red]x[/red]",
    "[link=https://example.org]x[/link]",
    "[/]",
    ":smile:",
    "\x1b[31mx\x1b[0m",
    "\x1b]0;t\x07",
    "a\rb",
    "a\nb",
    "a\u202eb",
    "a\udcffb",
    "a\x9b31mb",
    "a\u2028b",
    "{x}",
    "\\[bold]",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_shown_literally_in_tables(name: str) -> None:
    shown = format.literal(name)
    assert shown.isprintable() and format.literal(shown) == shown
    text = accuracy_table_of(name)
    assert shown in text and text.replace("\n", "").isprintable()
    table = format.new_table(f"title {shown}", "model", shown)
    table.add_row("first", name)  # a cell may have several lines
    text = format.render(table)
    assert f"title {shown}" in text and text.count(shown) == (2 if "\n" in name else 3)
    assert text.replace("\n", "").isprintable()


@pytest.mark.parametrize("name", [name for name in HOSTILE if "/" not in name])
def test_short_names_are_literal(name: str) -> None:
    assert format.short_names([name]) == {name: format.literal(name)}


def accuracy_table_of(name: str) -> str:
    return format.accuracy_table(
        [Result(model=name, metric="clean", value=0.5, low=0.4, high=0.6, n=8)], "linf"
    )


def test_ordinary_names_are_not_changed() -> None:
    for name in ("file:/a/b c.safetensors", "Größe 猫 🐈", "x\u00a0%", "C:\\new\\table"):
        assert format.literal(name) == name
    assert format.literal("a\nb\x1b", keep="\n") == "a\nb\\x1b"


def test_an_evaluation_has_short_names_in_its_table_and_notes() -> None:
    names = [
        "/somewhere/weights/standard_resnet8.safetensors",
        "/somewhere/weights/robust_resnet8.safetensors",
    ]
    own = [Result(model=name, metric="clean", value=0.5, low=0.4, high=0.6, n=8) for name in names]
    assert "\n standard_resnet8 " in format.accuracy_table(own, "linf")
    summary = Summary(
        command="evaluate",
        seconds=1.0,
        results=tuple(own),
        methods={names[0]: "a rule"},
        as_bytes=(Result(model=names[1], metric="pgd", value=0.5, low=0.1, high=0.9, n=8),),
        overlap={names[0]: ("0-7",)},
    )
    notes = format.notes(summary)
    assert len(notes) == 3 and "standard_resnet8: a rule" in notes
    assert not any("/" in note for note in notes)


def test_a_fixed_number_of_samples_has_no_interval() -> None:
    fixed, mean = (
        Result(model="m", metric="samples", value=300, low=low, high=300, n=6) for low in (300, 280)
    )
    assert (format.bounds(fixed), format.bounds(mean)) == ("", "[280, 300]")


def test_an_audit_without_survivors_needs_no_note() -> None:
    audits = [
        Audit(
            model="m",
            attack=attack,
            stronger="standard",
            n=8,
            survivors=left,
            audited=left,
            broken=0,
            excess=0.0,
            passes=5,
            seconds=1.0,
        )
        for attack, left in (("fast", 0), ("adaptive", 2))
    ]
    notes = format.notes(Summary(command="evaluate", seconds=1.0, audits=tuple(audits)))
    assert notes == [
        "m: adaptive 25.0 %; standard was run on all 2 survivors, 0 broken (5 passes, 1 s)"
    ]
