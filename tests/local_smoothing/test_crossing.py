"""Attacks with target strengths, and the strength at which the accuracies of the bases cross."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.core import geometry
from equipoise.core.checks import InputError
from equipoise.core.threat import Threat
from equipoise.local_smoothing.crossing import attack_at_strengths, find_crossing
from equipoise.local_smoothing.policy import TARGETS
from equipoise.local_smoothing.smoothing import SmoothedClassifier
from equipoise.models import build

B, C, H, W, K = 4, 3, 5, 7, 6


def _images() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.rand(B, C, H, W, generator=generator), torch.randint(
        0, K, (B,), generator=generator
    )


def _pair() -> tuple[nn.Module, nn.Module]:
    first, second = (
        build("cnn_small", num_classes=K, image_shape=(C, H, W), seed=seed).eval()
        for seed in (1, 2)
    )
    return first, second


def _plain(model: nn.Module, x: Tensor, y: Tensor, threat: Threat, steps: int) -> Tensor:
    """PGD from the image, written out."""
    at = x
    for _ in range(steps):
        point = at.clone().requires_grad_()
        gradient = torch.autograd.grad(F.cross_entropy(model(point), y, reduction="sum"), point)[0]
        at = geometry.project(
            at + 2.5 * threat.eps / steps * geometry.steepest(gradient, threat.norm), x, threat
        )
    return at


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("batch_size", [None, 5])
def test_a_whole_range_of_targets_in_one_call(norm: str, batch_size: int | None) -> None:
    (x, y), (g, h), threat = _images(), _pair(), Threat(norm, 0.1)
    rule = SmoothedClassifier(g, h, 1.0, trust="top-ratio", norm=norm)
    results = attack_at_strengths(
        rule, x, y, TARGETS, threat=threat, steps=3, batch_size=batch_size
    )
    assert results.shape == (len(TARGETS), B, C, H, W) and not results.requires_grad
    # The ends are attacks on g and on h.
    torch.testing.assert_close(results[0], _plain(g, x, y, threat, 3), rtol=0, atol=1e-5)
    torch.testing.assert_close(results[-1], _plain(h, x, y, threat, 3), rtol=0, atol=1e-5)
    alone = attack_at_strengths(rule, x, y, [TARGETS[4]], threat=threat, steps=3)
    torch.testing.assert_close(results[4:5], alone, rtol=0, atol=1e-5)
    assert all(p.requires_grad and p.grad is None for p in g.parameters())


def _correct(shares: list[float], n: int = 200) -> Tensor:
    return torch.stack([torch.arange(n) < round(share * n) for share in shares])


def test_the_crossing_is_interpolated() -> None:
    gammas = [0.0, 1.0, 10.0, 100.0, math.inf]
    g = _correct([0.0, 0.1, 0.3, 0.7, 0.8])
    h = _correct([0.9, 0.8, 0.6, 0.5, 0.5])
    result = find_crossing(gammas, g, h)
    # Differences −0.3 at 10 and +0.2 at 100: the line crosses zero at 0.6 of the distance, in log
    # γ.
    assert result.exists and result.gamma == pytest.approx(10 * 10**0.6)
    assert result.low < result.gamma < result.high
    assert result == find_crossing(gammas, g, h)


def test_accuracies_that_do_not_cross() -> None:
    gammas = [0.0, 1.0, 10.0, math.inf]
    low, high = _correct([0.1] * 4), _correct([0.8] * 4)
    below, above = find_crossing(gammas, low, high), find_crossing(gammas, high, low)
    assert not below.exists and below.gamma == pytest.approx(
        100
    )  # beyond all targets: h is always better
    assert not above.exists and above.gamma == pytest.approx(0.1)
    with pytest.raises(InputError, match="gammas"):
        find_crossing([0.0, math.inf], low[:2], high[:2])
