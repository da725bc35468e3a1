from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from equipoise.core.checks import InputError
from equipoise.models import TTAClassifier
from equipoise.models.layers.tta import SHIFTS, shift


class Pixels(nn.Module):
    """Every pixel is a logit, which shows the augmented copies."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)


@pytest.mark.parametrize("count", SHIFTS)
def test_logits_are_the_mean_over_all_copies(count: int) -> None:
    x = torch.rand(4, 3, 7, 9, generator=torch.Generator().manual_seed(2))
    copies = [copy for by in SHIFTS[count] for copy in (shift(x, *by), shift(x, *by).flip(3))]
    assert len(copies) == count
    torch.testing.assert_close(
        TTAClassifier(Pixels(), count)(x), torch.stack(copies).mean(dim=0).flatten(1)
    )


@pytest.mark.parametrize("count", SHIFTS)
def test_shifts_are_balanced(count: int) -> None:
    assert all(sum(axis) == 0 for axis in zip(*SHIFTS[count], strict=True))
    # A bright spot in the middle stays there on average.
    x = torch.zeros(1, 1, 9, 9)
    x[0, 0, 4, 4] = 1
    mean = TTAClassifier(Pixels(), count)(x).view(9, 9)
    position = torch.arange(9.0)
    assert (mean.sum(dim=1) @ position, mean.sum(dim=0) @ position) == (
        pytest.approx(4),
        pytest.approx(4),
    )


def test_shifts_by_hand() -> None:
    x = torch.arange(1.0, 7).view(1, 1, 2, 3)
    assert shift(x, 0, 1)[0, 0].tolist() == [[0, 1, 2], [0, 4, 5]]
    assert shift(x, -1, -2)[0, 0].tolist() == [[6, 0, 0], [0, 0, 0]]


def test_gradients_flow_through_all_copies() -> None:
    x = torch.rand(2, 1, 7, 7, generator=torch.Generator().manual_seed(3)).requires_grad_()
    (gradient,) = torch.autograd.grad(TTAClassifier(Pixels(), 6)(x).view(2, 7, 7)[:, 3, 2].sum(), x)
    assert int((gradient != 0).sum()) == 2 * 6 and float(gradient.sum()) == pytest.approx(2)


def test_an_unknown_number_of_copies_is_an_error() -> None:
    with pytest.raises(InputError, match="`count` must be one of 2, 6, 10"):
        TTAClassifier(Pixels(), 3)
