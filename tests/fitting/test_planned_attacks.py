"""The progress of a fit: it plans the attacks that it makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from linear_pair import THREAT, make_attack, make_data, make_pair

from equipoise.core import progress, progress_display
from equipoise.fitting import FitSettings, cached_logits, fit
from equipoise.fitting.conformal import lose_at_most
from equipoise.fitting.pipeline import attacked_logits, fit_mixture
from equipoise.fitting.planned_attacks import planned_attacks

QUICK: dict[str, Any] = {"steps": 3, "targets": 2, "pool": 1}
LIKE = {"like": "published:cifar10"}


@pytest.fixture
def attacks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The titles of the attacks that fits make, in their order."""
    titles: list[str] = []
    task = progress.task

    def recorded(name: str, **more: Any) -> Any:
        titles.append(name)
        return task(name, **more)

    monkeypatch.setattr(progress, "task", recorded)
    return titles


@pytest.mark.parametrize(
    "settings",
    [
        {"rule": "paper", "rounds": 0},
        {"rule": "paper"},
        {"rule": "paper", **LIKE},
        {"rule": "nuts", "rounds": 2},
        {"rule": "nuts", "rounds": 0},
        {"rule": "switch"},
        {"rule": "auto"},
        {"rule": "auto", **LIKE},
        *({"rule": rule, "against": "pair"} for rule in ("nuts", "switch", "auto")),
    ],
    ids=str,
)
def test_a_fit_makes_the_attacks_that_it_plans(
    attacks: list[str], settings: dict[str, Any]
) -> None:
    options = {**QUICK, **settings}
    planned = planned_attacks(FitSettings(**options))
    fit(*make_pair(), make_data(), threat=THREAT, device="cpu", lose_at_most=10.0, **options)
    assert attacks == [title for title, _ in planned] and all(share > 0 for _, share in planned)


def test_a_cascade_ends_early_where_it_stays_the_same(attacks: list[str]) -> None:
    rounds, settings = 3, dict[str, Any](rule="cascade", views=2, **QUICK)
    planned = [title for title, _ in planned_attacks(FitSettings(rounds=rounds, **settings))]
    fit(
        *make_pair(),
        make_data(160),
        threat=THREAT,
        device="cpu",
        lose_at_most=12.0,
        rounds=rounds,
        **settings,
    )
    assert attacks == planned[: len(attacks)] and len(planned) - rounds <= len(attacks) <= len(
        planned
    )


def test_a_resumed_fit_plans_what_is_left(attacks: list[str], tmp_path: Path) -> None:
    settings = FitSettings(rule="auto", **QUICK)
    attack = make_attack(*make_pair(), settings=settings)
    attacked_logits(attack, tmp_path, [])
    assert (tmp_path / cached_logits.FILE).exists()
    attacks.clear()
    fit_mixture(attack, lose_at_most(10.0), tmp_path)
    assert attacks == [title for title, _ in planned_attacks(settings, is_resumed=True)] != []


@pytest.mark.parametrize("rule", ["paper", "cascade"])
def test_a_command_says_which_attack_of_how_many_runs(
    rule: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_display, "_SECONDS_BETWEEN_LINES", 0.0)
    with progress.display():
        fit(*make_pair(), make_data(160), threat=THREAT, device="cpu", rule=rule, **QUICK)
    lines = capsys.readouterr().err.splitlines()
    count = len(planned_attacks(FitSettings(rule=rule, **QUICK)))
    assert lines[0].startswith(f"[1/{count}] attacking the robust model: ")
    shares = [int(line.partition("; ")[2].partition(" %")[0]) for line in lines]
    assert shares == sorted(shares) and shares[-1] > shares[0]
