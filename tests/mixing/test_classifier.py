from __future__ import annotations

import pytest
import torch
from torch import nn

from equipoise.core.checks import InputError
from equipoise.mixing import MixedClassifier


def _base(classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(105, classes), nn.BatchNorm1d(classes))


def _images(count: int) -> torch.Tensor:
    return torch.rand(count, 3, 5, 7, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_logits_of_the_formula(count: int, alpha: float) -> None:
    mixture = MixedClassifier(_base(6), _base(6), alpha).eval()
    x = _images(count)
    expected = (1 - alpha) * mixture.accurate(x).softmax(1) + alpha * mixture.robust(x).softmax(1)
    torch.testing.assert_close(mixture(x).exp(), expected)
    assert mixture.alpha == pytest.approx(alpha)


def test_mode_never_changes_the_formula() -> None:
    mixture = MixedClassifier(nn.Sequential(nn.Flatten(), nn.Linear(105, 6)), nn.Sequential(nn.Flatten(),
                              nn.Linear(105, 6)), 0.7)
    x = _images(4)
    assert torch.equal(mixture.train()(x), mixture.eval()(x))


def test_saved_and_moved_like_any_module() -> None:
    mixture = MixedClassifier(_base(6), _base(6), 0.3).eval()
    other = MixedClassifier(_base(6), _base(6), 0.9).eval()
    other.load_state_dict(mixture.state_dict())
    assert torch.equal(other(_images(4)), mixture(_images(4)))
    assert mixture.double()(_images(4).double()).dtype == torch.float64


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan")])
def test_alpha_outside(alpha: float) -> None:
    with pytest.raises(InputError, match=r"`alpha` must lie in \[0, 1\]"):
        MixedClassifier(_base(6), _base(6), alpha)


def test_class_counts_that_differ() -> None:
    with pytest.raises(InputError, match="equal numbers of classes"):
        MixedClassifier(_base(6), _base(5), 0.5).eval()(_images(4))
