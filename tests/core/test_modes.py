from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from equipoise.core.modes import inference, outside_inference_mode


def _pair() -> tuple[nn.Sequential, nn.Module]:
    base = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval()
    base.requires_grad_(False)
    whole = nn.Sequential(base, nn.Dropout(), nn.Linear(3, 2))
    whole.training = True
    return whole, base


def test_every_flag_comes_back() -> None:
    whole, base = _pair()
    flags = (
        [module.training for module in whole.modules()],
        [p.requires_grad for p in whole.parameters()],
    )
    assert (
        flags[0].count(True)
        and flags[0].count(False)
        and flags[1].count(True)
        and flags[1].count(False)
    )
    with inference(whole, None):
        assert not any(module.training for module in whole.modules())
        assert not any(p.requires_grad for p in whole.parameters())
    assert flags == (
        [m.training for m in whole.modules()],
        [p.requires_grad for p in whole.parameters()],
    )
    assert not base.training


def test_flags_come_back_after_an_error() -> None:
    whole, _ = _pair()
    before = [module.training for module in whole.modules()]
    with pytest.raises(RuntimeError), inference(whole):
        raise RuntimeError
    assert [module.training for module in whole.modules()] == before


def test_a_function_leaves_inference_mode() -> None:
    @outside_inference_mode
    def gradient(x: Tensor) -> Tensor:
        assert not torch.is_inference_mode_enabled()
        x = x.clone().requires_grad_()
        return torch.autograd.grad(x.square().sum(), x)[0]

    x = torch.tensor([1.0, 2.0])
    with torch.inference_mode():
        assert gradient(x + 1).tolist() == [4.0, 6.0] and torch.is_inference_mode_enabled()
    with torch.no_grad():
        assert not outside_inference_mode(torch.is_grad_enabled)(), (
            "other modes are the caller's own"
        )
