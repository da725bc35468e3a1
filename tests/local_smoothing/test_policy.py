"""The policy: its formula, gradients and mode."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from equipoise.local_smoothing.policy import MAX_BETA, AdaptiveSmoothing, Policy
from equipoise.local_smoothing.smoothing import SmoothedClassifier, log_strength
from equipoise.models import build

B, C, H, W, K = 4, 3, 9, 11, 6


def _images() -> Tensor:
    return torch.rand(B, C, H, W, generator=torch.Generator().manual_seed(2))


def _pair() -> tuple[nn.Module, nn.Module]:
    """Different architectures, so that widths and sizes of the maps differ."""
    return (
        build("resnet8", num_classes=K, image_shape=(C, H, W), seed=1).eval(),
        build("cnn_small", num_classes=K, image_shape=(C, H, W), seed=2).eval(),
    )


def _adaptive(trust: str = "top-ratio") -> AdaptiveSmoothing:
    g, h = _pair()
    return AdaptiveSmoothing(g, h, example=_images()[:1], width=8, trust=trust).eval()


@pytest.mark.parametrize("trust", ["constant", "ratio", "top-ratio"])
def test_the_classifier_is_the_rule_at_the_strength_of_the_policy(trust: str) -> None:
    model, x = _adaptive(trust), _images()
    nn.init.normal_(model.policy.fc.weight, std=3.0)
    logits, beta = model.logits_and_beta(x)
    assert beta.shape == (B,) and len(set(beta.tolist())) == B
    rule = SmoothedClassifier(model.rule.accurate, model.rule.oracle, 1.0, trust=trust)
    torch.testing.assert_close(logits, rule.forward_with_gate(x, beta))
    torch.testing.assert_close(model(x), logits)


def test_beta_is_clamped() -> None:
    policy = Policy(3, 4, width=5).eval()
    nn.init.constant_(policy.fc.bias, 100.0)
    assert policy(torch.rand(2, 3, 8, 8), torch.rand(2, 4, 4, 4)).tolist() == [MAX_BETA, MAX_BETA]


def test_an_attack_may_have_another_target_strength() -> None:
    model, x = _adaptive(), _images()
    nn.init.normal_(model.policy.fc.weight, std=3.0)
    gate, own = (
        log_strength(torch.tensor([0.0, 2.0, math.inf, 5.0])),
        torch.tensor([False, False, False, True]),
    )
    logits, beta = model.logits_and_beta(x, gate, own)
    torch.testing.assert_close(logits[0], model.rule.accurate(x)[0])
    torch.testing.assert_close(logits[2], model.rule.oracle(x)[2])
    torch.testing.assert_close(logits[3], model(x)[3])
    torch.testing.assert_close(logits[1], model.rule.forward_with_gate(x, gate)[1])
    torch.testing.assert_close(beta, model.logits_and_beta(x)[1])


def test_only_the_policy_has_gradients_and_changes_its_mode() -> None:
    model = _adaptive().train()
    assert model.policy.training and not any(sub.training for sub in model.rule.modules())
    before = {key: value.clone() for key, value in model.rule.state_dict().items()}
    nn.init.normal_(model.policy.fc.weight)
    model(_images()).square().sum().backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert trained == {name for name, _ in model.named_parameters() if name.startswith("policy.")}
    assert all(torch.equal(value, before[key]) for key, value in model.rule.state_dict().items())


def test_gradients_flow_through_the_policy_to_the_image() -> None:
    model, x = _adaptive(), _images().requires_grad_()
    nn.init.normal_(model.policy.fc.weight)
    assert torch.autograd.grad(model.logits_and_beta(x)[1].sum(), x)[0].abs().max() > 0


def test_the_seed_determines_the_policy() -> None:
    state = torch.random.get_rng_state()
    first, second = _adaptive(), _adaptive()
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )
    assert torch.equal(torch.random.get_rng_state(), state)
