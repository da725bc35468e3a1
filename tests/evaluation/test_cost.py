from __future__ import annotations

import pytest
import torch
from torch import nn

from equipoise.data import Dataset
from equipoise.evaluation import cost
from equipoise.mixing import HardLabels, MixedClassifier


def _base(width: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.Flatten(), nn.Linear(width * 35, 6))


def _data() -> Dataset:
    images = torch.randint(0, 256, (20, 3, 5, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return Dataset("random", "test", images, torch.zeros(20, dtype=torch.int64), torch.arange(20), tuple("abcdef"))


def test_operations_in_closed_form() -> None:
    # Each of the 35 pixels of each output channel sums 27 products; the last layer has 35·width·6 of them.
    assert cost.flops(_base(4), (3, 5, 7)) == 2 * (35 * 4 * 27 + 35 * 4 * 6)
    assert cost.parameters(_base(4)) == 4 * 27 + 35 * 4 * 6 + 6


def test_a_shared_module_counts_once() -> None:
    base = _base(4)
    assert cost.parameters(base, base) == cost.parameters(base)


def test_costs_of_a_mixture() -> None:
    mixture = MixedClassifier(_base(4), _base(2), 0.9, hard=True).eval()
    found = {entry.model: entry for entry in cost.costs(mixture, _data())}
    g, h = found["accurate"], found["robust"]
    assert g.flops and h.flops and g.parameters and h.parameters
    assert found["mixed"].flops == g.flops + h.flops and found["mixed"].parameters == g.parameters + h.parameters
    gated = found["mixed, gated"]
    assert gated.accurate_share is not None and gated.flops == pytest.approx(h.flops + gated.accurate_share * g.flops)
    x = _data().images.float() / 255
    with torch.no_grad():
        share = float(mixture.needs_accurate(mixture.map_robust(mixture.robust(x))).float().mean())
    assert gated.accurate_share == pytest.approx(share) and g.accurate_share is None


def test_the_cost_of_what_runs_outside_of_torch_is_unknown() -> None:
    service = HardLabels(lambda x: [0] * len(x))
    found = cost.costs(MixedClassifier(service, _base(2), 0.9, hard=True).eval(), _data())
    assert [entry.model for entry in found if entry.flops is not None] == ["robust"]
    assert [entry.model for entry in found if entry.parameters is not None] == ["robust"]
    assert found[-1].accurate_share is not None


@pytest.mark.parametrize(("alpha", "share"), [(0.0, 1.0), (1.0, 0.0)])
def test_the_accurate_model_runs_never_or_always_at_the_ends(alpha: float, share: float) -> None:
    assert cost.accurate_share(MixedClassifier(_base(4), _base(2), alpha), _data(), batch_size=7) == share
