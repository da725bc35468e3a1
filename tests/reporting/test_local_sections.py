"""What the page says of local smoothing, from numbers that were written down by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from equipoise.core import config
from equipoise.reporting import local_policy, local_smoothing
from equipoise.reporting.local_curves import gamma_of, part, place, with_ends
from equipoise.reporting.view import RunView, view


def _result(model: str, metric: str, value: float, alpha: float | None = None, half: float = 0.02) -> dict[str, Any]:
    row = {"model": model, "metric": metric, "value": value, "low": value - half, "high": value + half, "n": 50}
    return row if alpha is None else {**row, "alpha": alpha}


def _folder(path: Path, results: list[dict[str, Any]], **more: Any) -> None:
    path.mkdir(parents=True)
    identity = {"study": "local-smoothing"}
    (path / "run.toml").write_text(config.dumps({"schema": 1, "identity": identity, "settings": {}}))
    (path / "summary.json").write_text(json.dumps({"schema": 1, "verb": "reproduce", "results": results, **more}))


def _trust(tmp_path: Path, others: list[tuple[float, float]]) -> RunView:
    _folder(tmp_path / "run", [])
    results = [_result("accurate", "clean", 0.95), _result("accurate", "worst", 0.0),
               _result("robust", "clean", 0.80), _result("robust", "worst", 0.50)]
    for alpha, clean, worst in ((0.5, 0.94, 0.20), (0.9, 0.88, 0.46)):
        results += [_result("constant, probabilities", "clean", clean, alpha),
                    _result("constant, probabilities", "worst", worst, alpha)]
    for number, (clean, worst) in enumerate(others):
        alpha = 0.2 + 0.1 * number
        results += [_result("ratio, logits", metric, value, alpha)
                    for metric, value in (("clean", clean), ("worst", worst), ("pgd", worst))]
    _folder(tmp_path / "run" / "trust", results)
    return view(tmp_path / "run")


def test_the_envelope_is_claimed_only_where_it_is_one(tmp_path: Path) -> None:
    below = _trust(tmp_path / "a", [(0.94, 0.19), (0.91, 0.30)])
    section = local_smoothing.trust(below)
    assert section is not None and "is the upper envelope" in section.prose[0]
    slightly = local_smoothing.trust(_trust(tmp_path / "b", [(0.94, 0.21)]))
    assert slightly is not None and "not the upper envelope everywhere: of other rules 1 point" in slightly.prose[0]
    assert "None by more" in slightly.prose[0]
    clearly = local_smoothing.trust(_trust(tmp_path / "c", [(0.94, 0.40)]))
    assert clearly is not None and "By more than the half-width" in clearly.prose[0]
    assert "ratio, logits at γ = 0.25" in clearly.prose[0]


def test_a_curve_begins_and_ends_with_the_bases(tmp_path: Path) -> None:
    found = _part(_trust(tmp_path, [(0.94, 0.19), (0.91, 0.30)]))
    clean = with_ends(found, "ratio, logits", "clean")
    assert [(row["alpha"], row["value"]) for row in clean] == [
        (0.0, 0.95), (0.2, 0.94), (pytest.approx(0.3), 0.91), (1.0, 0.80)]
    assert [row["alpha"] for row in with_ends(found, "ratio, logits", "pgd")] == [0.2, pytest.approx(0.3)]
    assert with_ends(found, "ratio, logits", "pgd-rob") == []  # never measured: no lone end


def test_between_two_points_the_line_counts(tmp_path: Path) -> None:
    # Half way between (0.94, 0.20) and (0.88, 0.46): 0.33.
    assert "is the upper" in local_smoothing.envelope(_part(_trust(tmp_path / "a", [(0.91, 0.32)])))
    assert "not the upper" in local_smoothing.envelope(_part(_trust(tmp_path / "b", [(0.91, 0.34)])))


def test_past_the_end_of_the_line_every_image_kept_under_attack_counts(tmp_path: Path) -> None:
    # More accurate than the accurate model itself, 0.95: what counts is what it keeps under attack.
    assert "is the upper" in local_smoothing.envelope(_part(_trust(tmp_path / "a", [(0.96, 0.0)])))
    told = local_smoothing.envelope(_part(_trust(tmp_path / "b", [(0.96, 0.3)])))
    assert "by +30.0 points (ratio, logits at γ = 0.25, past its accurate end)" in told


def _part(found: RunView) -> RunView:
    own = part(found, "trust")
    assert own is not None
    return own


def test_the_crossing_is_told_with_its_interval_or_that_there_is_none(tmp_path: Path) -> None:
    results = [_result(model, "aimed", value, alpha) for alpha in (0.0, 0.5, 0.9, 1.0)
               for model, value in (("accurate", alpha), ("robust", 0.6))]
    for name, met, said in (("a", True, "They cross at γ₀ = 3.2 (95 % of resampled image sets: 1.1 to 9)"),
                            ("b", False, "They do not cross")):
        _folder(tmp_path / name, [], crossing={"gamma": 3.2, "low": 1.1, "high": 9.0, "met": met})
        _folder(tmp_path / name / "crossing", results)
        section = local_policy.crossing(view(tmp_path / name))
        assert section is not None and said in section.prose[0]


def test_autoattack_is_told_apart_from_the_attacks_at_the_top(tmp_path: Path) -> None:
    _folder(tmp_path / "run", [])
    _folder(tmp_path / "run" / "auto", [_result(model, "auto", value) for model, value in
                                        (("accurate", 0.0), ("robust", 0.42), ("adaptive", 0.19))])
    section = local_policy.auto(view(tmp_path / "run"))
    assert section is not None and "Of the adaptive classifier it leaves 19.0 %" in section.prose[1]
    assert "of the robust model 42.0 %" in section.prose[1]


def test_other_runs_have_none_of_these_sections(tmp_path: Path) -> None:
    _folder(tmp_path / "run", [])
    (tmp_path / "run" / "run.toml").write_text(config.dumps({"schema": 1, "identity": {}, "settings": {}}))
    _folder(tmp_path / "run" / "trust", [])
    found = view(tmp_path / "run")
    for make in (local_smoothing.trust, local_smoothing.fixed, local_smoothing.neighbours, local_policy.crossing,
                 local_policy.targets, local_policy.radii, local_policy.auto, local_policy.gradients):
        assert make(found) is None


def test_strengths_have_places_on_the_axis() -> None:
    assert gamma_of(1.0) == math.inf and gamma_of(0.75) == pytest.approx(3)
    where = place([0.0, 0.1, 100.0, math.inf])
    assert list(where.values()) == pytest.approx([-2, -1, 2, 3])
