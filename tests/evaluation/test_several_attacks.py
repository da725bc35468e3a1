"""Several attacks in one run, models that are named twice, and failed sanity checks in the
terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_models import CONDITIONS, SmallNet, linear_model, random_images
from torch import Tensor, nn

from equipoise import reporting
from equipoise.attacks import Apgd, Attack, Pgd, Square, Suite, from_callable
from equipoise.core.checks import InputError
from equipoise.core.rows import AttackRow
from equipoise.evaluation import Evaluation, evaluate
from equipoise.mixing import MixedClassifier

THREAT = CONDITIONS.threat


def run(models: Any, attack: Any, out: Path | None = None, **settings: Any) -> Evaluation:
    return evaluate(
        models,
        random_images(),
        threat=THREAT,
        attack=attack,
        out=out,
        device="cpu",
        batch_size=4,
        **settings,
    )


@pytest.mark.parametrize(
    "attack", ["pgd,apgd", "pgd, apgd", ["pgd", "apgd"], [Pgd(steps=3), "apgd"]]
)
def test_each_attack_is_a_column_and_worst_is_over_all(attack: Any) -> None:
    result = run({"m": linear_model()}, attack, steps=3)
    assert [r.metric for r in result.results] == ["apgd", "clean", "pgd", "worst"]
    correct = {
        (row.attack, row.index): row.correct for row in result.rows if isinstance(row, AttackRow)
    }
    worst = sum(
        all(correct[name, index] for name in ("clean", "pgd", "apgd")) for index in range(50, 61)
    )
    assert result.result("m", "worst").count == worst


@pytest.mark.usefixtures("figures_once")
def test_the_rows_are_those_of_the_attacks_alone(tmp_path: Path) -> None:
    both = run({"m": SmallNet().eval()}, "pgd,apgd", tmp_path / "both", steps=3)
    for attack in ("pgd", "apgd"):
        alone = run({"m": SmallNet().eval()}, attack, steps=3)
        assert [row for row in both.rows if row.attack == attack] == [
            row for row in alone.rows if row.attack == attack
        ]
    assert "pgd" in reporting.report(tmp_path / "both").read_text(encoding="utf-8")


def test_settings_are_for_the_attacks_that_have_them() -> None:
    """`fast` and `standard` have no steps; `restarts` is a setting of pgd and square, not of
    fab."""
    described = {}
    for attack in ("square,pgd", "square", "pgd"):
        result = run({"m": linear_model()}, attack, steps=3, restarts=2)
        described[attack] = {row.attack: row for row in result.rows if row.index == 50}
    assert described["square,pgd"]["pgd"] == described["pgd"]["pgd"]
    assert run({"m": linear_model()}, "fab,square", steps=3, restarts=2).result("m", "fab").n == 11


def test_what_is_named_twice_is_measured_once() -> None:
    named = {"m": linear_model()}
    assert run(named, "pgd,pgd", steps=3).rows == run(named, "pgd", steps=3).rows
    model = linear_model()
    assert run([model, model], "pgd", steps=3).rows == run(model, "pgd", steps=3).rows


@pytest.mark.parametrize(
    ("attack", "settings", "message"),
    [
        (
            "fast,standard",
            {"steps": 3},
            "`steps` must be left out for the attacks fast, standard, none of which has such ",
        ),
        (
            "fab,targeted",
            {"restarts": 3},
            "`restarts` must be left out for the attacks fab, targeted",
        ),
        ([Pgd(), Square()], {"steps": 3}, "`steps` must be left out beside an attack object"),
        ([Pgd(), Pgd(steps=3)], {}, "`attack` must name every attack once"),
        ([Pgd(), "pgd"], {}, "name every attack once"),
        ("pgd,sqare", {}, r"did you mean 'square'\?"),
        ("pgd,", {}, "`attack` must be one of"),
        ([], {}, "`attack` must name at least one attack"),
        (["pgd", 5], {}, "`attack` must be the name of an attack"),
        (
            "pgd,square",
            {"audit": 3},
            "`audit` must be left out for the attacks pgd, square: only fast is audited",
        ),
    ],
)
def test_mistakes(attack: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run({"m": linear_model()}, attack, **settings)


def test_a_mixture_is_attacked_adaptively_by_each() -> None:
    attacks: list[Attack | str] = [Suite((Apgd(steps=3),), name="short"), "pgd"]
    result = run(
        MixedClassifier(linear_model(0), linear_model(1), 0.8, hard=True), attacks, steps=2
    )
    metrics = {r.metric for r in result.results if r.model == "mixed"}
    assert metrics == {"clean", "pgd", "adaptive-short", "adaptive-pgd", "worst"}
    mixture = MixedClassifier(linear_model(0), linear_model(1), 0.8, hard=True)
    result = run(mixture, attacks[:1], adaptive="surrogate,own-gradients")
    assert {r.metric for r in result.results if r.model == "mixed"} == {
        "clean",
        "short",
        "adaptive",
        "worst",
    }


def test_an_attack_without_gradients_is_run_on_a_mixture_that_hides_them() -> None:
    """A function gets the surrogate as its model in the adaptive version; only the plain one
    queries the mixture."""
    mixture, seen = MixedClassifier(linear_model(0), linear_model(1), 0.8, hard=True), list[str]()

    def query(model: nn.Module, x: Tensor, y: Tensor, **_: object) -> Tensor:
        seen.append(type(model).__name__)
        return x

    run(mixture, [from_callable(query, "query")])
    assert "MixedClassifier" in seen


def test_a_base_of_a_mixture_that_is_also_named() -> None:
    mixture = MixedClassifier(linear_model(0), linear_model(1), 0.8)
    result = run({"h": linear_model(1), "M": mixture}, "pgd", steps=3)
    assert result.result("M robust", "clean").value == result.result("h", "clean").value
    assert result.result("M robust", "pgd").n == result.result("h", "pgd").n == 11


class RoundedLogits(nn.Module):
    """No gradient anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.base = linear_model(1)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.base(x)
        return logits.round()


def test_failed_sanity_checks_are_printed_with_what_to_do() -> None:
    text = str(
        run({"bad": RoundedLogits().eval(), "good": linear_model().eval()}, "pgd,apgd", steps=2)
    )
    table, _, below = text.partition("Failed sanity checks")
    assert (
        table
        and "- vanishing gradients (bad, pgd, apgd): 1, share" in below
        and "--attack standard" in below
    )
    assert below.count("vanishing") == 1 and "good" not in below


def test_nothing_is_printed_where_no_check_fails() -> None:
    assert "Failed" not in str(run({"good": linear_model().eval()}, "pgd", steps=2))
