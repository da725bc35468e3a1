"""Local Lipschitz estimates as rows and results."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from equipoise import models
from equipoise.certification.radii import lemma_margin
from equipoise.core.checks import InputError
from equipoise.core.records import read_rows
from equipoise.core.results import find
from equipoise.core.rows import AttackRow, LipschitzRow
from equipoise.core.threat import Threat
from equipoise.data import Dataset
from equipoise.evaluation.job import Conditions
from equipoise.evaluation.lipschitz_estimates import ALPHAS, _margins, estimate_lipschitz


def images(count: int = 7) -> Dataset:
    pixels = torch.randint(
        0, 256, (count, 3, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    return Dataset(
        "random", "test", pixels, torch.arange(count) % 4, torch.arange(count) + 30, tuple("abcd")
    )


def conditions(eps: float = 0.01) -> Conditions:
    return Conditions(Threat("linf", eps), torch.device("cpu"), batch_size=4)


class CountingModel(nn.Module):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.model = models.build("cnn_small", num_classes=4, image_shape=(3, 8, 8), seed=1).eval()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        logits: Tensor = self.model(x)
        return logits


def test_rows_and_results(tmp_path: Path) -> None:
    results = estimate_lipschitz({"m": CountingModel()}, images(), conditions(), tmp_path)
    rows = [row for row in read_rows(tmp_path / "estimate") if isinstance(row, LipschitzRow)]
    assert [row.index for row in rows] == list(range(30, 37)) and all(
        row.lipschitz > 0 for row in rows
    )
    kept = [find(results, "m", f"kept@{alpha:g}").value for alpha in ALPHAS]
    assert kept == sorted(kept)
    assert all(result.low <= result.value <= result.high for result in results)
    assert not any(result.metric.startswith("attacked-") for result in results)


def test_margins_at_attacked_images_are_reported_beside_the_estimates(tmp_path: Path) -> None:
    attacked = [
        AttackRow(index=index, model="m", attack=attack, label=0, correct=True, margin=margin)
        for index in range(30, 37)
        for attack, margin in (("clean", 0.9), ("pgd", 0.3))
    ]
    results = estimate_lipschitz({"m": CountingModel()}, images(), conditions(), tmp_path, attacked)
    assert find(results, "m", "attacked-margin").value == pytest.approx(0.3)
    assert [find(results, "m", f"attacked-kept@{alpha:g}").value for alpha in ALPHAS] == [
        0,
        0,
        1,
        1,
        1,
    ]


def test_the_estimated_margin_is_below_that_of_any_point_in_the_ball(tmp_path: Path) -> None:
    model, data = CountingModel(), images()
    estimate_lipschitz({"m": model}, data, conditions(), tmp_path)
    noise = torch.randn(data.images.shape, generator=torch.Generator().manual_seed(1)).sign()
    x = (data.images / 255 + 0.01 * noise).clamp(0, 1)
    top = torch.softmax(model(x), dim=1).topk(2, dim=1).values
    for row, margin in zip(
        read_rows(tmp_path / "estimate"), (top[:, 0] - top[:, 1]).tolist(), strict=True
    ):
        assert isinstance(row, LipschitzRow) and row.margin <= margin + 0.01


def test_a_finished_estimate_is_not_repeated(tmp_path: Path) -> None:
    first = estimate_lipschitz({"m": CountingModel()}, images(), conditions(), tmp_path)
    resumed = CountingModel()
    assert (
        estimate_lipschitz({"m": resumed}, images(), conditions(), tmp_path) == first
        and resumed.calls == 0
    )


def test_another_threat_is_another_run(tmp_path: Path) -> None:
    estimate_lipschitz({"m": CountingModel()}, images(), conditions(), tmp_path)
    with pytest.raises(InputError, match="`out` must be a new folder"):
        estimate_lipschitz({"m": CountingModel()}, images(), conditions(0.02), tmp_path)


def test_a_tie_is_not_kept() -> None:
    """With a margin of exactly (1 − α)/α, the class of an accurate classifier may win."""
    margins = [lemma_margin(0.6), lemma_margin(1.0), 0.9]
    kept = _margins("", margins)
    assert kept["kept@0.6"].value == pytest.approx(1 / 3) and kept["kept@1"].value == pytest.approx(
        2 / 3
    )
