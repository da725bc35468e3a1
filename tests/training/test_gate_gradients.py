"""Fast gradients of a mixture: the same numbers while the gate is trained, and no memory leak."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from equipoise.attacks.fused_layers import ConvReLU
from equipoise.core import device as devices
from equipoise.core import losses, rng
from equipoise.mixing import GatedClassifier, mix, new_gate
from equipoise.models import build
from equipoise.models.layers.tta import TTAClassifier
from equipoise.training.objectives.gate import GateLoss
from equipoise.training.objectives.gate_gradients import (
    LossAndGradient,
    fused_mixture,
    loss_and_gradient,
)

B, C, H, W, K = 4, 3, 9, 11, 6
DEVICES = ("cpu", *(["cuda"] if torch.cuda.is_available() else []))


def images(count: int = B, seed: int = 2) -> Tensor:
    return torch.rand(count, C, H, W, generator=torch.Generator().manual_seed(seed))


def gated() -> GatedClassifier:
    """In evaluation mode; the gate has the batch statistics of some images."""
    g, h = (
        build("resnet8", num_classes=K, image_shape=(C, H, W), seed=seed).eval() for seed in (1, 2)
    )
    model = GatedClassifier(g, h, new_gate(g, h, images(2), width=4, momentum=1.0)).train()
    with torch.no_grad():
        model(images(32, seed=3))
    return model.eval()


def example_loss(model: GatedClassifier, x: Tensor, y: Tensor) -> Tensor:
    g, h, z = model.log_probabilities_and_gate(x)
    return losses.cross_entropy(mix(g, h, z), y) + z


def expected(model: GatedClassifier, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    point = x.detach().requires_grad_()
    value = example_loss(model, point, y)
    return value.detach(), torch.autograd.grad(value.sum(), point)[0]


def example(device: str) -> tuple[GatedClassifier, Tensor, Tensor]:
    return gated().to(device), images().to(device), (torch.arange(B) % K).to(device)


def is_close(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> bool:
    return all(
        torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(first, second, strict=True)
    )


def fused(model: GatedClassifier, x: Tensor) -> LossAndGradient:
    return fused_mixture(model, x).loss_and_gradient(example_loss, "example")


def automatic(model: GatedClassifier, x: Tensor) -> LossAndGradient:
    return loss_and_gradient(model, x, example_loss, "example")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", [fused, automatic])
def test_values_and_gradients_while_the_gate_is_trained(
    make: Callable[..., LossAndGradient], device: str
) -> None:
    model, x, y = example(device)
    with devices.full_precision(
        torch.device(device)
    ):  # TF32 errors would be as large as those looked for
        evaluate, before = make(model, x), expected(model, x, y)
        assert all(is_close(evaluate(x, y), before) for _ in range(4))  # CUDA captures the third
        with torch.no_grad():
            for weight in model.network.parameters():
                weight.mul_(1.2)
            model.network.output.get_buffer("running_mean").add_(0.5)
        after = expected(model, x, y)
        assert not torch.allclose(after[0], before[0], rtol=1e-3, atol=1e-4)
        assert is_close(evaluate(x, y), after)


def test_batch_norms_of_the_base_classifiers_are_fused() -> None:
    model, x, _ = example("cpu")
    copy = fused_mixture(model, x).model
    norms = [
        sum(isinstance(layer, nn.BatchNorm2d) for layer in m.accurate.modules())
        for m in (model, copy)
    ]
    assert copy.network is model.network and norms[0] > 0 and norms[1] == 0


@pytest.mark.parametrize("views", [1, 2])
def test_activations_are_fused_where_precision_is_reduced(views: int) -> None:
    model, x, y = example("cpu")
    if views > 1:
        robust = TTAClassifier(model.robust, views)
        gate = new_gate(model.accurate, robust, x[:2], width=4)
        model = GatedClassifier(model.accurate, robust, gate).eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        copy = fused_mixture(model, x)
        before, after = expected(model, x, y), copy.loss_and_gradient(example_loss, "example")(x, y)
    kernels = [
        sum(isinstance(layer, ConvReLU) for layer in base.modules())
        for base in (copy.model.accurate, copy.model.robust)
    ]
    assert kernels == [7, 7] and copy.model.network is model.network
    torch.testing.assert_close(after[0], before[0], rtol=0.05, atol=0.05)
    assert torch.cosine_similarity(after[1].flatten(), before[1].flatten(), dim=0) > 0.9
    assert not any(isinstance(layer, ConvReLU) for layer in fused_mixture(model, x).model.modules())


def test_training_the_gate_keeps_the_copy() -> None:
    model, x, _ = example("cpu")
    first = fused_mixture(model, x)
    with torch.no_grad():
        next(model.network.parameters()).add_(1.0)
    assert fused_mixture(model, x) is first


def test_a_changed_base_classifier_makes_a_new_copy() -> None:
    model, x, _ = example("cpu")
    first = fused_mixture(model, x)
    with torch.no_grad():
        next(model.accurate.parameters()).add_(0.1)
    second = fused_mixture(model, x)
    assert second is not first
    torch.testing.assert_close(second.model(x), model(x), rtol=1e-3, atol=1e-3)


def test_moved_weights_make_a_new_copy() -> None:
    model, x, _ = example("cpu")
    first = fused_mixture(model, x)
    model.network.double().float()  # new memory, as after a move to another device
    assert fused_mixture(model, x) is not first


def test_the_copy_is_freed_with_its_mixture() -> None:
    model, x, _ = example("cpu")
    reference = weakref.ref(fused_mixture(model, x))
    assert reference() is not None
    del model
    gc.collect()
    assert reference() is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("adversary", ["A", "B", "C"])
@pytest.mark.parametrize("reduced", [False, True], ids=["fp32", "bf16"])
def test_training_attacks_on_cuda_are_as_strong_as_on_the_cpu(
    adversary: str, reduced: bool
) -> None:
    reached: dict[str, float] = {}
    for device in ("cpu", "cuda"):
        model, x = gated().to(device), images(64).to(device)
        objective = GateLoss(
            adversary=adversary, eps=0.03, steps=8, alpha_penalty=0.0, untargeted_share=1.0
        )
        y, stream = model(x).argmax(dim=1), rng.stream(0, "test", torch.arange(64, device=device))
        with torch.autocast(device, dtype=torch.bfloat16, enabled=reduced and device == "cuda"):
            for _ in range(3):
                x_adv = objective.attack(model, x, y, stream)
        with torch.no_grad():
            before, reached[device] = (
                float(losses.cross_entropy(model(point), y).mean()) for point in (x, x_adv)
            )
        assert reached[device] > before + 0.005
    assert reached["cuda"] == pytest.approx(reached["cpu"], rel=0.2 if reduced else 0.05)
