"""Prepared networks: every copy is made once per attack, and none outlives it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from attack_models import ConvNet
from torch import Tensor, nn

from conftest import generator
from equipoise.attacks import Apgd, Square, Suite, TargetedApgd, attack_dataset, prepared
from equipoise.attacks.gradients import GradientSettings, GradientSource
from equipoise.attacks.prepared import PreparedNetworks
from equipoise.core.threat import Threat
from equipoise.data import Dataset
from equipoise.mixing import LogitMap, MixedClassifier


def _images(count: int = 8) -> Tensor:
    return torch.rand(count, 3, 5, 7, generator=generator(0))


def _network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return ConvNet().eval()


def _count_calls(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[tuple[str, str]]:
    calls: list[tuple[str, str]] = []

    def counted(name: str, make: Any) -> Any:
        def call(network: nn.Module, *others: Any) -> nn.Module:
            calls.append((name, type(network).__name__))
            made: nn.Module = make(network, *others)
            return made

        return call

    for name in names:
        monkeypatch.setattr(prepared, name, counted(name, getattr(prepared, name)))
    return calls


def test_all_attacks_on_a_mixture_share_the_copies_of_its_networks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three surrogates and the random search of one suite: the mixture and its bases are prepared
    once."""
    calls = _count_calls(monkeypatch, "fuse")
    mixture = MixedClassifier(
        _network(0), _network(1), 0.7, logit_map=LogitMap(3.0, 1.0, 0.0, "linear"), hard=True
    ).eval()
    images = (_images(4) * 255).byte()
    labels = mixture(images / 255).argmax(dim=1)
    data = Dataset("random", "test", images, labels, torch.arange(4), tuple("abcdef"))
    attacks = [
        Apgd(steps=2, surrogate=surrogate, follow="surrogate")
        for surrogate in (mixture.surrogate(), mixture.hinges(), mixture)
    ]
    suites = [Suite((attack,), name=str(number)) for number, attack in enumerate(attacks)]
    own = (TargetedApgd(2, (1,)), Square(queries=2))
    attack_dataset(Suite((*suites, *own)), mixture, data, threat=Threat("linf", 1e-6), seed=0)
    assert sorted(calls) == [
        ("fuse", "MixedClassifier"),
        ("fuse", "SharedBases"),
    ]


def test_copies_in_reduced_precision_are_made_when_they_are_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted: list[torch.dtype] = []
    monkeypatch.setattr(
        PreparedNetworks, "_reduce", lambda self, network, classes, dtype: wanted.append(dtype)
    )
    monkeypatch.setattr("equipoise.core.device.has_bf16", lambda kind: True)
    source = GradientSource(_network(0), GradientSettings(), "bf16", _images())
    GradientSource(source.model, GradientSettings(), "bf16", _images(), networks=source.networks)
    assert wanted == [torch.bfloat16] and not source.bf16_gradients
    source.margins()
    assert wanted == [torch.bfloat16], "half precision is for CUDA"


def test_new_weights_need_new_copies_and_copies_are_freed_with_their_owner() -> None:
    network, x = _network(0), _images()
    networks = PreparedNetworks("fp32", x)
    first = networks.fused(network, 6)
    assert first is networks.fused(network, 6) and first is not network
    with torch.no_grad():
        network.get_parameter("head.weight").mul_(-1)
    torch.testing.assert_close(
        PreparedNetworks("fp32", x).fused(network, 6)(x), network(x), rtol=1e-3, atol=1e-3
    )
    copy = weakref.ref(first)
    del first, networks
    gc.collect()
    assert copy() is None


class _Noisy(nn.Module):
    """Adds noise of its own generator in every pass, and counts its passes."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.passes = _network(0), 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        logits: Tensor = self.network(x)
        return logits + 0.01 * torch.randn(
            logits.shape, generator=torch.Generator().manual_seed(self.passes)
        )


def test_a_randomised_model_draws_as_many_numbers_as_alone() -> None:
    settings, alone, shared = GradientSettings(eot=2, repeats=2), _Noisy(), _Noisy()
    GradientSource(alone, settings, "fp32", _images())
    networks = PreparedNetworks("fp32", _images())
    networks.logits(shared)  # by another attack
    before = shared.passes
    GradientSource(shared, settings, "fp32", _images(), networks=networks)
    assert alone.passes > 0 and shared.passes - before == alone.passes
