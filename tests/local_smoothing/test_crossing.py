"""Aimed attacks and the strength at which the bases change places."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.core import geometry
from equipoise.core.checks import InputError
from equipoise.core.threat import Threat
from equipoise.local_smoothing.crossing import aimed, crossing
from equipoise.local_smoothing.policy import TARGETS
from equipoise.local_smoothing.smoothing import SmoothedClassifier
from equipoise.models import build

B, C, H, W, K = 4, 3, 5, 7, 6


def _images() -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(2)
    return torch.rand(B, C, H, W, generator=chance), torch.randint(0, K, (B,), generator=chance)


def _pair() -> tuple[nn.Module, nn.Module]:
    first, second = (build("cnn_small", num_classes=K, image_shape=(C, H, W), seed=seed).eval() for seed in (1, 2))
    return first, second


def _plain(model: nn.Module, x: Tensor, y: Tensor, threat: Threat, steps: int) -> Tensor:
    """PGD from the image, as one would write it."""
    at = x
    for _ in range(steps):
        point = at.clone().requires_grad_()
        slope = torch.autograd.grad(F.cross_entropy(model(point), y, reduction="sum"), point)[0]
        at = geometry.project(at + 2.5 * threat.eps / steps * geometry.steepest(slope, threat.norm), x, threat)
    return at


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("batch_size", [None, 5])
def test_a_whole_range_of_targets_in_one_call(norm: str, batch_size: int | None) -> None:
    (x, y), (g, h), threat = _images(), _pair(), Threat(norm, 0.1)
    rule = SmoothedClassifier(g, h, 1.0, trust="top-ratio", norm=norm)
    found = aimed(rule, x, y, TARGETS, threat=threat, steps=3, batch_size=batch_size)
    assert found.shape == (len(TARGETS), B, C, H, W) and not found.requires_grad
    # The ends are attacks on g and on h.
    torch.testing.assert_close(found[0], _plain(g, x, y, threat, 3), rtol=0, atol=1e-5)
    torch.testing.assert_close(found[-1], _plain(h, x, y, threat, 3), rtol=0, atol=1e-5)
    alone = aimed(rule, x, y, [TARGETS[4]], threat=threat, steps=3)
    torch.testing.assert_close(found[4:5], alone, rtol=0, atol=1e-5)
    assert all(p.requires_grad and p.grad is None for p in g.parameters())


def _verdicts(shares: list[float], n: int = 200) -> Tensor:
    return torch.stack([torch.arange(n) < round(share * n) for share in shares])


def test_the_crossing_lies_where_the_lines_meet() -> None:
    gammas = [0.0, 1.0, 10.0, 100.0, math.inf]
    g = _verdicts([0.0, 0.1, 0.3, 0.7, 0.8])
    h = _verdicts([0.9, 0.8, 0.6, 0.5, 0.5])
    found = crossing(gammas, g, h)
    # Differences −0.3 at 10 and +0.2 at 100: the line meets zero at 0.6 of the way, in log γ.
    assert found.met and found.gamma == pytest.approx(10 * 10**0.6)
    assert found.beta == pytest.approx(math.log(found.gamma))
    assert found.low < found.gamma < found.high
    assert found == crossing(gammas, g, h)


def test_lines_that_do_not_meet_say_so() -> None:
    gammas = [0.0, 1.0, 10.0, math.inf]
    low, high = _verdicts([0.1] * 4), _verdicts([0.8] * 4)
    below, above = crossing(gammas, low, high), crossing(gammas, high, low)
    assert not below.met and below.gamma == pytest.approx(100)  # beyond all targets: h is always better
    assert not above.met and above.gamma == pytest.approx(0.1)
    with pytest.raises(InputError, match="gammas"):
        crossing([0.0, math.inf], low[:2], high[:2])
