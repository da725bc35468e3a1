"""Alpha for a wanted clean accuracy, and the frontier over alpha and sigma."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from equipoise.certification import SmoothingPlan, mixture
from equipoise.core import records, summary
from equipoise.core.checks import InputError
from equipoise.data import Dataset
from equipoise.evaluation import alpha_selection
from equipoise.evaluation import certified as room
from equipoise.evaluation.alpha_selection import CHOOSE, CleanTarget, others
from equipoise.evaluation.certified import CertificationConditions, CertificationJob, certified

PLAN = SmoothingPlan(0.15, samples=200, n0=20, failure=0.01)
TERMS = CertificationConditions(PLAN, torch.device("cpu"), batch_size=200)


class Brightness(nn.Module):
    """Two classes by the mean of the image; `shift` moves the border, so that some images are answered wrongly."""

    def __init__(self, shift: float = 0.0) -> None:
        super().__init__()
        self.border = nn.Parameter(torch.tensor(0.5 + shift))

    def forward(self, x: Tensor) -> Tensor:
        above = 100 * (x.flatten(1).mean(dim=1) - self.border)
        return torch.stack((-above, above), dim=1)


def data(count: int = 40) -> Dataset:
    level = torch.arange(count) * 190 // count + 30
    images = level.view(-1, 1, 1, 1).expand(count, 1, 2, 3).to(torch.uint8)
    return Dataset("made", "test", images, (level > 127.5).long(), torch.arange(count), tuple("ab"))


def halves() -> tuple[Dataset, Dataset]:
    whole = data()
    images = whole.take(torch.arange(0, 40, 2))
    return images, others(whole, images)


def subjects() -> list[CertificationJob]:
    """The smoothed sides are wrong near the border, the accurate one is right everywhere."""
    return [CertificationJob(f"s{sigma}", Brightness(0.08), Brightness(), replace(PLAN, sigma=sigma)) for sigma in (0.1, 0.3)]


def test_others_are_other_images(monkeypatch: pytest.MonkeyPatch) -> None:
    images, rest = halves()
    monkeypatch.setattr(alpha_selection, "FEWEST", 5)
    assert rest.index.tolist() == list(range(1, 40, 2))
    assert others(data(), images.slice(0, 5)).index.tolist() == [1, 12, 19, 26, 33], "as many, evenly spread"
    with pytest.raises(InputError, match="`count` must leave images"):
        others(images, images)


def test_alpha_is_chosen_on_the_other_images(tmp_path: Path) -> None:
    images, rest = halves()
    results = certified(subjects(), images, TERMS, tmp_path / "run", choice=CleanTarget(0.95, rest))
    told = records.summary(tmp_path / "run")
    rows = records.read(tmp_path / "run")
    assert {row["index"] for row in rows if row["attack"] == CHOOSE} == set(rest.index.tolist())
    for row in told["chosen"]:
        own = [each for each in rows if each["model"] == row["model"]]
        base = mixture.Base.of_rows([each for each in own if each["attack"] == CHOOSE], row["sigma"])
        assert row["alpha"] == mixture.alpha_for(base, 0.95) and row["clean-estimate"] >= 0.95
        assert {each["alpha"] for each in own if each["attack"] == "certify"} == {row["alpha"]}
        assert {each["sigma"] for each in own} == {row["sigma"]}
        assert summary.value(results, row["model"], "clean-estimate") >= 0.9
    assert [row["sigma"] for row in told["chosen"]] == [0.1, 0.3] and told["chosen"][0]["alpha"] < 1
    best = told["frontier"]
    assert [row["radius"] for row in best] == [0.25 * i for i in range(len(best))]
    for row in best:
        metric = f"certified@{row['radius']:.2f}"
        found = [each["value"] for each in results if each["metric"] == metric]
        assert row["value"] == max(found)


def test_resumed_without_new_votes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, rest = halves()
    results = certified(subjects(), images, TERMS, tmp_path / "run", choice=CleanTarget(0.95, rest))
    monkeypatch.setattr(room, "rows_for", None)
    assert certified(subjects(), images, TERMS, tmp_path / "run", choice=CleanTarget(0.95, rest)) == results
    with pytest.raises(InputError, match=r"choice\.clean"):
        certified(subjects(), images, TERMS, tmp_path / "run", choice=CleanTarget(0.9, rest))


def test_out_of_reach(tmp_path: Path) -> None:
    """A base that cannot reach the accuracy is left out; if none can, that is one sentence."""
    images, rest = halves()
    lost = CertificationJob("lost", Brightness(0.3), Brightness(0.3))
    certified([*subjects(), lost], images, TERMS, tmp_path / "run", choice=CleanTarget(0.95, rest))
    told = records.summary(tmp_path / "run")
    assert [row["model"] for row in told["chosen"]] == ["s0.1", "s0.3"]
    assert not any(row["model"] == "lost" for row in told["results"])
    assert [(row["model"], row["n"]) for row in told["left-out"]] == [("lost", len(rest))]
    assert told["left-out"][0]["most"] < 0.95
    with pytest.raises(InputError, match="`clean` must be reachable"):
        certified([lost], images, TERMS, tmp_path / "none", choice=CleanTarget(0.95, rest))


def test_a_wish_is_judged_before_a_folder_is_made(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"`clean` must lie in \[0, 1\]"):
        CleanTarget(2.0, data(4))


def test_names_must_differ(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="`models` must be different"):
        certified([subjects()[0], subjects()[0]], data(4), TERMS, tmp_path / "run")


def test_a_model_of_another_kind_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="`odd` must"):
        certified([CertificationJob("odd", nn.Conv2d(3, 4, 1))], data(4), TERMS, tmp_path / "run")
