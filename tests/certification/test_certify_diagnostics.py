from __future__ import annotations

from itertools import pairwise

import torch
from closed_form import Bins, chance, images
from torch import Tensor

from equipoise.certification import Engine, SmoothingPlan, diagnostics

TWO = Bins((0.0, 1.0))
PLAN = SmoothingPlan(0.2, samples=2000, n0=10)
FAST = Engine(batch_size=1 << 15)


def towards_the_other(x: Tensor, y: Tensor, radius: float) -> Tensor:
    step = torch.where(y == 1, -radius, radius).view(-1, 1, 1, 1)
    return (x + step).clamp(0, 1)


def test_confidence_falls_as_the_attack_grows() -> None:
    x = images(20)
    y = (x.flatten() > 0.5).long()
    found = diagnostics.confidences(TWO, x, y, attack=towards_the_other, at=(0.0, 0.1, 0.4), plan=PLAN,
                                    stream=chance(20), engine=FAST)
    assert [one.radius for one in found] == [0.0, 0.1, 0.4]
    expected = TWO.smoothed(x, 0.2)[torch.arange(20), y]
    assert (found[0].true - torch.from_numpy(expected)).abs().max() < 0.05
    for less, more in pairwise(found):
        assert (more.true < less.true + 0.02).all() and torch.allclose(more.true + more.off, torch.ones(20))


def test_ratio_where_the_line_crosses_the_boundary() -> None:
    x = torch.tensor([0.6, 0.9, 0.2, 0.7]).view(4, 1, 1, 1)
    x_adv = torch.tensor([0.0, 0.1, 0.0, 0.6]).view(4, 1, 1, 1)
    ratio = diagnostics.mixing_ratios(TWO, x, x_adv, torch.ones(4, dtype=torch.int64), plan=PLAN, stream=chance(4),
                                      engine=FAST)
    assert abs(ratio[0] - 1 / 6) < 0.03 and abs(ratio[1] - 0.5) < 0.03
    assert ratio[2] == 0 and ratio[3].isnan()
