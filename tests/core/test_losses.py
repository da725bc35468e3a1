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
    torch.testing.assert_close(
        losses.probability_margin(z, torch.tensor([1])), torch.tanh(z[:, 1] / 2)
    )


def test_cross_entropy_is_per_example() -> None:
    z = torch.zeros(4, 6)
    torch.testing.assert_close(
        losses.cross_entropy(z, torch.arange(4)), torch.full((4,), 6.0).log()
    )


def test_ratios_ignore_scale_and_shift() -> None:
    z = torch.randn(9, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    y, target = torch.arange(9) % 6, (torch.arange(9) + 2) % 6
    torch.testing.assert_close(losses.dlr(3 * z + 5, y), losses.dlr(z, y))
    torch.testing.assert_close(
        losses.targeted_dlr(3 * z + 5, y, target), losses.targeted_dlr(z, y, target)
    )
    assert torch.equal(losses.dlr(z, y) > 0, z.argmax(1) != y)


def test_relative_losses_ignore_scale_and_are_those_of_a_deviation_of_three() -> None:
    z = torch.randn(9, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    z, y = 3 * z / z.std(dim=1, keepdim=True), torch.arange(9) % 6
    for name in ("ce", "margin"):
        loss = losses.LOSSES[f"relative-{name}"]
        torch.testing.assert_close(loss(z, y), losses.LOSSES[name](z, y))
        torch.testing.assert_close(loss(z * 1e4, y), loss(z, y))
        torch.testing.assert_close(loss((z * 1e-8).float(), y), loss(z, y).float())
        hard = z.clone()
        hard[:, 0] = -torch.inf
        assert bool(loss(hard, torch.full_like(y, 3)).isfinite().all())
        torch.testing.assert_close(loss(z[:, :2], y % 2), -losses.signed_margin(z[:, :2], y % 2))
        assert not bool(loss(torch.zeros(2, 6), y[:2]).isnan().any())


def test_relative_losses_have_finite_gradients_beside_excluded_classes() -> None:
    z = torch.tensor([[1.0, 2.0, 0.5, -torch.inf], [0.0, -torch.inf, 0.3, 0.1]], requires_grad=True)
    for name in ("relative-ce", "relative-margin"):
        value = losses.LOSSES[name](z, torch.tensor([1, 2]))
        gradient = torch.autograd.grad(value.sum(), z)[0]
        assert bool(gradient.isfinite().all()) and float(gradient[0, 0]) > 0 > float(gradient[0, 1])
