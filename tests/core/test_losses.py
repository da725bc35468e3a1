from __future__ import annotations

import torch

from equipoise.core import losses


def test_signed_margin_against_a_loop() -> None:
    z = torch.randn(9, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.arange(9) % 6
    margin = losses.signed_margin(z, y)
    for i in range(9):
        others = [float(z[i, j]) for j in range(6) if j != int(y[i])]
        assert float(margin[i]) == float(z[i, y[i]]) - max(others)
    assert torch.equal(margin > 0, z.argmax(1) == y)


def test_probability_margin_of_two_classes() -> None:
    z = torch.tensor([[0.0, 3.0**0.5]])
    # With two classes the margin is tanh of half the logit gap.
    torch.testing.assert_close(losses.probability_margin(z, torch.tensor([1])), torch.tanh(z[:, 1] / 2))


def test_cross_entropy_is_per_example() -> None:
    z = torch.zeros(4, 6)
    torch.testing.assert_close(losses.cross_entropy(z, torch.arange(4)), torch.full((4,), 6.0).log())


def test_ratios_ignore_scale_and_shift() -> None:
    z = torch.randn(9, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    y, target = torch.arange(9) % 6, (torch.arange(9) + 2) % 6
    torch.testing.assert_close(losses.dlr(3 * z + 5, y), losses.dlr(z, y))
    torch.testing.assert_close(losses.targeted_dlr(3 * z + 5, y, target), losses.targeted_dlr(z, y, target))
    assert torch.equal(losses.dlr(z, y) > 0, z.argmax(1) != y)
