"""The twin that training attacks follow: the same numbers, a gate that goes on learning, and nothing kept too long."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from equipoise.core import device as devices
from equipoise.core import losses, rng
from equipoise.mixing import GatedClassifier, mix, new_gate
from equipoise.models import build
from equipoise.training.gate_gradients import slope, twin
from equipoise.training.objectives.gate import GateLoss

B, C, H, W, K = 4, 3, 9, 11, 6
DEVICES = ("cpu", *(["cuda"] if torch.cuda.is_available() else []))


def images(count: int = B, seed: int = 2) -> Tensor:
    return torch.rand(count, C, H, W, generator=torch.Generator().manual_seed(seed))


def gated() -> GatedClassifier:
    """In evaluation mode, its gate with the statistics of some images."""
    g, h = (build("resnet8", num_classes=K, image_shape=(C, H, W), seed=seed).eval() for seed in (1, 2))
    model = GatedClassifier(g, h, new_gate(g, h, images(2), width=4, momentum=1.0)).train()
    with torch.no_grad():
        model(images(32, seed=3))
    return model.eval()


def _loss(model: GatedClassifier, x: Tensor, y: Tensor) -> Tensor:
    g, h, z = model.parts(x)
    return losses.cross_entropy(mix(g, h, z), y) + z


def _expected(model: GatedClassifier, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    here = x.detach().requires_grad_()
    value = _loss(model, here, y)
    return value.detach(), torch.autograd.grad(value.sum(), here)[0]


def _placed(place: str) -> tuple[GatedClassifier, Tensor, Tensor]:
    return gated().to(place), images().to(place), (torch.arange(B) % K).to(place)


@pytest.mark.parametrize("place", DEVICES)
def test_it_gives_values_and_gradients_of_the_mixture_while_the_gate_learns(place: str) -> None:
    with devices.exactly(torch.device(place)):  # TF32 would hide a small mistake, and look like one
        _compared(*_placed(place))


def _compared(model: GatedClassifier, x: Tensor, y: Tensor) -> None:
    fast = twin(model, x)
    norms = [sum(isinstance(sub, nn.BatchNorm2d) for sub in each.accurate.modules()) for each in (model, fast.model)]
    assert fast.model.network is model.network and norms[0] > 0 == norms[1], norms
    for way in (fast.slope(_loss, "a loss"), slope(model, x, _loss, "a loss")):
        before = _expected(model, x, y)
        for _ in range(4):  # on CUDA the second call records, the others replay
            found = way(x, y)
            assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(found, before, strict=True))
        with torch.no_grad():
            for weight in model.network.parameters():
                weight.mul_(1.2)
            assert model.network.output.running_mean is not None
            model.network.output.running_mean.add_(0.5)
        after = _expected(model, x, y)
        assert not torch.allclose(after[0], before[0], rtol=1e-3, atol=1e-4)
        assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(way(x, y), after, strict=True))


def test_it_is_made_once_and_again_when_a_base_changes_or_the_mixture_moves() -> None:
    model, x, _ = _placed("cpu")
    first = twin(model, x)
    assert twin(model, x) is first
    with torch.no_grad():
        next(model.network.parameters()).add_(1.0)
    assert twin(model, x) is first, "the gate is shared, so that its lessons need no other twin"
    with torch.no_grad():
        next(model.accurate.parameters()).add_(0.1)
    second = twin(model, x)
    assert second is not first
    torch.testing.assert_close(second.model(x), model(x), rtol=1e-3, atol=1e-3)
    model.network.double().float()  # as a move to another device: the weights lie elsewhere
    assert twin(model, x) is not second


def test_it_is_forgotten_with_its_mixture() -> None:
    model, x, _ = _placed("cpu")
    kept = weakref.ref(twin(model, x))
    assert kept() is not None
    del model
    gc.collect()
    assert kept() is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_training_attacks_on_cuda_are_as_strong_as_on_the_cpu() -> None:
    reached: dict[str, float] = {}
    for place in ("cpu", "cuda"):
        model = gated().to(place)
        x, objective = images(64).to(place), GateLoss(eps=0.03, steps=8, term=0.0, untargeted=1.0)
        y, chance = model(x).argmax(dim=1), rng.stream(0, "test", torch.arange(64, device=place))
        for _ in range(3):
            x_adv = objective.attack(model, x, y, chance)
        with torch.no_grad():
            before, reached[place] = (float(losses.cross_entropy(model(at), y).mean()) for at in (x, x_adv))
        assert reached[place] > before + 0.005
    assert reached["cuda"] == pytest.approx(reached["cpu"], rel=0.05)
