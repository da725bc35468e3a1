"""Several attacks in one run, models of equal weights, and failed sanity checks in the terminal."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import CONDITIONS, SmallNet, linear_model, random_images
from torch import Tensor, nn

from equipoise import reporting
from equipoise.attacks import Apgd, Attack, Pgd, Square, Suite, from_callable
from equipoise.core.checks import InputError
from equipoise.core.results import read_summary
from equipoise.core.rows import AttackRow
from equipoise.evaluation import Evaluation, evaluate
from equipoise.evaluation.duplicates import is_same_model
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


class CountedCalls(nn.Module):
    """Counts images, over all copies."""

    images = 0

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.base, self.scale = linear_model(1), scale

    def forward(self, x: Tensor) -> Tensor:
        CountedCalls.images += len(x)
        logits: Tensor = self.scale * self.base(x)
        return logits


def count(models: Any, attack: Any = "pgd", **settings: Any) -> tuple[int, Evaluation]:
    before = CountedCalls.images
    result = run(models, attack, **settings)
    return CountedCalls.images - before, result


@pytest.mark.parametrize("attack", ["pgd", "apgd"])
def test_equal_weights_are_attacked_once(attack: str, tmp_path: Path) -> None:
    alone, single = count({"h": CountedCalls()}, attack, steps=9)
    both, result = count(
        {"h": CountedCalls(), "again": CountedCalls()}, attack, steps=9, out=tmp_path / "run"
    )
    assert both - alone <= 2 * alone / 9, "at most a few passes to check the second"
    for row in single.rows:
        copies = [
            other for other in result.rows if (other.index, other.attack) == (row.index, row.attack)
        ]
        assert sorted(other.model for other in copies) == ["again", "h"]
        assert {getattr(other, "margin", None) for other in copies} == {
            getattr(row, "margin", None)
        }
    assert result.summary.copied == {"again, clean": "h, clean", f"again, {attack}": f"h, {attack}"}
    assert (
        f"again, {attack}: as h, {attack}, which has the same weights and was attacked once"
        in str(result)
    )
    checks = {check.model for check in result.summary.sanity_checks}
    assert (
        checks == {"h", "again"} and read_summary(tmp_path / "run").copied == result.summary.copied
    )
    assert (
        run(
            {"h": CountedCalls(), "again": CountedCalls()}, attack, steps=9, out=tmp_path / "run"
        ).results
        == result.results
    )


def test_a_base_of_a_mixture_that_is_also_named() -> None:
    mixture = MixedClassifier(linear_model(0), CountedCalls(), 0.8)
    result = run({"h": CountedCalls(), "M": mixture}, "pgd", steps=3)
    assert result.summary.copied == {"M robust, clean": "h, clean", "M robust, pgd": "h, pgd"}
    assert result.result("M robust", "pgd").value == result.result("h", "pgd").value


def hooked(model: nn.Module) -> nn.Module:
    model.register_forward_hook(lambda module, given, output: output.round())
    return model


def with_buffer(value: float) -> nn.Module:
    model = linear_model()
    model.register_buffer("temperature", torch.tensor(value), persistent=False)
    return model


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (linear_model(), linear_model(), True),
        (linear_model(0), linear_model(1), False),
        (linear_model(), copy.deepcopy(linear_model()).train(), True),
        (SmallNet(), SmallNet(), True),
        (linear_model(), hooked(linear_model()), False),
        (hooked(linear_model()), hooked(linear_model()), False),
        (CountedCalls(1.0), CountedCalls(2.0), False),
        (CountedCalls(), CountedCalls(), True),
        (with_buffer(1.0), with_buffer(2.0), False),
        (linear_model(), linear_model().double(), False),
        (nn.Sequential(nn.ReLU()), nn.Sequential(nn.Tanh()), False),
        (nn.Conv2d(1, 1, 1), nn.Conv2d(1, 1, 1), False),
        (nn.MaxPool2d(2), nn.MaxPool2d(3), False),
    ],
)
def test_same_weights_with_other_code_or_settings_are_another_model(
    first: nn.Module, second: nn.Module, same: bool
) -> None:
    assert is_same_model(first, second) is same and is_same_model(second, first) is same


class RoundedLogits(CountedCalls):
    """No gradient anywhere."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).round()


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
