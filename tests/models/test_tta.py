from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from equipoise.core.checks import InputError
from equipoise.models import TTAClassifier
from equipoise.models.tta import SHIFTS, shifted


class Pixels(nn.Module):
    """Every pixel is a logit, so that one sees what the looks are."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)


@pytest.mark.parametrize("count", SHIFTS)
def test_the_mean_of_so_many_looks(count: int) -> None:
    x = torch.rand(4, 3, 7, 9, generator=torch.Generator().manual_seed(2))
    looks = [look for by in SHIFTS[count] for look in (shifted(x, *by), shifted(x, *by).flip(3))]
    assert len(looks) == count
    torch.testing.assert_close(TTAClassifier(Pixels(), count)(x), torch.stack(looks).mean(dim=0).flatten(1))


@pytest.mark.parametrize("count", SHIFTS)
def test_looks_are_balanced(count: int) -> None:
    assert all(sum(axis) == 0 for axis in zip(*SHIFTS[count], strict=True))
    # A bright spot in the middle stays there on average.
    x = torch.zeros(1, 1, 9, 9)
    x[0, 0, 4, 4] = 1
    seen = TTAClassifier(Pixels(), count)(x).view(9, 9)
    place = torch.arange(9.0)
    assert (seen.sum(dim=1) @ place, seen.sum(dim=0) @ place) == (pytest.approx(4), pytest.approx(4))


def test_shifts_by_hand() -> None:
    x = torch.arange(1.0, 7).view(1, 1, 2, 3)
    assert shifted(x, 0, 1)[0, 0].tolist() == [[0, 1, 2], [0, 4, 5]]
    assert shifted(x, -1, -2)[0, 0].tolist() == [[6, 0, 0], [0, 0, 0]]


def test_an_adversary_sees_through_all_looks() -> None:
    x = torch.rand(2, 1, 7, 7, generator=torch.Generator().manual_seed(3)).requires_grad_()
    (slope,) = torch.autograd.grad(TTAClassifier(Pixels(), 6)(x).view(2, 7, 7)[:, 3, 2].sum(), x)
    assert int((slope != 0).sum()) == 2 * 6 and float(slope.sum()) == pytest.approx(2)


def test_how_often() -> None:
    with pytest.raises(InputError, match="looks"):
        TTAClassifier(Pixels(), 3)
