"""Copies with fused convolutions: the same logits and gradients, whatever the code of the network
looks like."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise import models
from equipoise.attacks import conv_relu
from equipoise.attacks.conv_relu import fuse_activations, fuse_activations_if
from equipoise.attacks.fused import fuse
from equipoise.attacks.fused_layers import ConvReLU, Projection
from equipoise.models.layers.tta import TTAClassifier


class Residual(nn.Module):
    """Every way to write a ReLU after a convolution, and sums that must not be fused."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (
            nn.Conv2d(3, 4, 3, padding=1),
            nn.Conv2d(4, 4, 3, 2),
            nn.Conv2d(4, 4, 1),
        )
        self.shared, self.read = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.activation, self.fc = nn.ReLU(), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.first(x))
        x = torch.relu(self.second(x) + x[:, :, 1:-1:2, 1:-1:2])
        x = (x + self.third(x)).relu()
        x = F.relu(self.shared(F.relu(self.shared(x))))  # one convolution, two calls
        features = self.read(x)  # read twice: before and after the activation
        x = F.relu(features) + features
        logits: Tensor = self.fc(
            F.relu(torch.add(self.third.weight.sum() * x, x, alpha=0.5)).mean(dim=(2, 3))
        )
        return logits


class Untraceable(nn.Module):
    """A module that branches on values around one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Residual()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.inner(x) if bool(x.mean() >= 0) else self.inner(-x)
        return logits


def _gradient(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(
        F.cross_entropy(model(x), torch.zeros(len(x), dtype=torch.long, device=x.device)), x
    )[0]


def _count(model: nn.Module) -> int:
    return sum(isinstance(module, ConvReLU) for module in model.modules())


@pytest.mark.parametrize("make", [Residual, Untraceable])
def test_a_fused_copy_has_the_same_logits_and_gradients(make: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = make().eval(), torch.rand(3, 3, 9, 9)
    copy = fuse_activations(model, torch.float32)
    assert (
        _count(copy) == 3
    )  # a convolution that is called twice or read elsewhere keeps its own activation
    assert _count(model) == 0
    torch.testing.assert_close(copy(x), model(x))
    torch.testing.assert_close(_gradient(copy, x), _gradient(model, x))


def test_every_convolution_of_a_resnet_is_fused_but_the_projections() -> None:
    torch.manual_seed(0)
    model = (
        models.build("resnet18", num_classes=10, image_shape=(3, 32, 32))
        .eval()
        .requires_grad_(False)
    )
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # which become biases, also of the projections
            nn.init.normal_(module.bias)
    copy = fuse_activations(fuse(model, torch.rand(4, 3, 32, 32)), torch.float32)
    projections = [module for module in copy.modules() if isinstance(module, Projection)]
    assert (_count(copy), len(projections)) == (17, 3)
    assert all(
        projection.bias is None for projection in projections
    )  # those of the convolutions beside them
    x = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(copy(x), model(x), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(_gradient(copy, x), _gradient(model, x), rtol=1e-2, atol=1e-4)


class Downsampled(nn.Module):
    """Projections with strides: one whose output is read twice, so that it keeps its bias, and odd
    image sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.shortcut = nn.Conv2d(3, 4, 3, (2, 3), padding=1), nn.Conv2d(3, 4, 1, (2, 3))
        self.fc = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = self.shortcut(x)
        logits: Tensor = self.fc((torch.relu(self.conv(x) + shortcut) + shortcut).mean(dim=(2, 3)))
        return logits


def test_a_projection_that_is_read_elsewhere_keeps_its_bias() -> None:
    torch.manual_seed(0)
    model, x = Downsampled().eval(), torch.rand(3, 3, 9, 10)
    copy = fuse_activations(model, torch.float32)
    assert isinstance(copy.shortcut, Projection) and _count(copy) == 1
    torch.testing.assert_close(copy(x), model(x))
    torch.testing.assert_close(_gradient(copy, x), _gradient(model, x))


def test_the_first_convolution_gets_eight_channels_in_bfloat16() -> None:
    torch.manual_seed(0)
    model, x = Residual().eval(), torch.rand(3, 3, 9, 9)
    copies = [fuse_activations(model, dtype) for dtype in (torch.float32, torch.bfloat16)]
    assert [copy.get_submodule("first").get_buffer("weight").shape[1] for copy in copies] == [3, 8]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(copies[1](x).float(), model(x).float(), rtol=0.02, atol=0.02)
        gradient = _gradient(copies[1], x)
    assert gradient.shape == x.shape
    assert F.cosine_similarity(gradient.flatten(), _gradient(model, x).flatten(), dim=0) > 0.98


class ReadsWeights(nn.Module):
    """Code that reads the weights and biases of convolutions itself."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.shortcut, self.fc = (
            nn.Conv2d(3, 4, 3, 2, 1),
            nn.Conv2d(3, 4, 1, 2),
            nn.Linear(4, 5),
        )

    def forward(self, x: Tensor) -> Tensor:
        assert self.shortcut.bias is not None
        scale = self.shortcut.weight.mean() + self.conv.weight.mean() + self.shortcut.bias.sum()
        logits: Tensor = self.fc(torch.relu(self.conv(x) + self.shortcut(x)).mean(dim=(2, 3))) * (
            1 + scale
        )
        return logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_the_code_reads_are_those_of_the_network(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = ReadsWeights().eval(), torch.rand(3, 3, 9, 9)
    copy = fuse_activations(model, dtype)
    assert _count(copy) == 1 and isinstance(copy.shortcut, Projection)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype == torch.bfloat16):
        logits, gradient = copy(x).float(), _gradient(copy, x)
    torch.testing.assert_close(logits, model(x), rtol=0.02, atol=0.02)
    assert F.cosine_similarity(gradient.flatten(), _gradient(model, x).flatten(), dim=0) > 0.98


class SharedBlock(nn.Module):
    """One block under two parents that branch on values, and its shortcut alone."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Downsampled()
        self.light, self.dark = nn.Sequential(self.block), nn.Sequential(self.block, nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.light(x) if bool(x.mean() >= 0.4) else self.dark(x)
        return logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 0.1])
def test_a_block_with_two_parents_is_fused_for_both(dtype: torch.dtype, scale: float) -> None:
    torch.manual_seed(0)
    model, x = SharedBlock().eval(), scale * torch.rand(3, 3, 9, 10)
    copy = fuse_activations(model, dtype)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype == torch.bfloat16):
        torch.testing.assert_close(copy(x).float(), model(x).float(), rtol=0.02, atol=0.02)


def test_a_copy_that_fails_or_is_refused_is_not_used() -> None:
    def fail(copy: nn.Module) -> bool:
        raise RuntimeError("no such layer")

    model = Residual().eval()
    assert fuse_activations_if(lambda copy: _count(copy) == 3, model, torch.float32) is not None
    assert fuse_activations_if(lambda copy: False, model, torch.float32) is None
    assert fuse_activations_if(fail, model, torch.float32) is None


class FirstView(nn.Module):
    """A module that calls another method of a submodule than its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.views = TTAClassifier(Residual(), 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.views.first_view(x) if bool(x.mean() >= 0.4) else self.views(x)


@pytest.mark.parametrize("scale", [1.0, 0.1])
def test_the_views_of_test_time_augmentation_keep_their_methods(scale: float) -> None:
    torch.manual_seed(0)
    model, x = FirstView().eval(), scale * torch.rand(3, 3, 9, 9)
    copy = fuse_activations(model, torch.float32)
    assert _count(copy) == 3
    torch.testing.assert_close(copy(x), model(x))


def test_hooks_of_a_submodule_still_run() -> None:
    model, x, seen = Untraceable().eval(), torch.rand(2, 3, 9, 9), []
    model.inner.register_forward_hook(lambda module, inputs, output: seen.append(output))
    copy = fuse_activations(model, torch.float32)
    copy(x)
    assert len(seen) == 1


def _resnet() -> nn.Module:
    torch.manual_seed(0)
    model = (
        models.build("resnet18", num_classes=10, image_shape=(3, 32, 32))
        .eval()
        .requires_grad_(False)
    )
    return fuse(model, torch.rand(4, 3, 32, 32))


def test_activations_with_two_readers_have_an_output_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gradient(copy: nn.Module) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return _gradient(copy, x)

    model, x = _resnet(), torch.rand(2, 3, 32, 32)
    plain = fuse_activations(model, torch.bfloat16)
    monkeypatch.setattr(conv_relu, "masked_sum", lambda: torch.add)  # the CPU calls none
    split = fuse_activations(model, torch.bfloat16)
    assert [
        sum(layer.readers == 2 for layer in copy.modules() if isinstance(layer, ConvReLU))
        for copy in (plain, split)
    ] == [0, 8], "the stem and all blocks but the last"
    assert torch.equal(gradient(plain), gradient(split))
    half = fuse_activations(model, torch.float16)
    assert all(layer.readers == 1 for layer in half.modules() if isinstance(layer, ConvReLU)), (
        "without gradients"
    )


@pytest.mark.gpu
def test_gradients_summed_in_the_activation_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def gradient(copy: nn.Module) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return _gradient(copy, x)

    model, x = _resnet().cuda(), torch.rand(64, 3, 32, 32, device="cuda")
    split = fuse_activations(model, torch.bfloat16)
    assert sum(layer.readers == 2 for layer in split.modules() if isinstance(layer, ConvReLU)) == 8
    found = gradient(split)
    monkeypatch.setattr(conv_relu, "masked_sum", lambda: None)
    assert torch.equal(found, gradient(fuse_activations(model, torch.bfloat16)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_cudnn_kernels_agree_with_the_network(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = Residual().eval().cuda(), torch.rand(16, 3, 32, 32, device="cuda")
    copy = fuse_activations(model, dtype)
    with torch.autocast("cuda", dtype=dtype):
        logits = copy(x)
    torch.testing.assert_close(logits.float(), model(x), rtol=0.02, atol=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("make", [Residual, Downsampled])
def test_gradients_through_cudnn_kernels_point_the_same_way(make: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = make().eval().cuda(), torch.rand(16, 3, 32, 32, device="cuda")
    copy = fuse_activations(model, torch.bfloat16)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        gradient = _gradient(copy, x)
    assert F.cosine_similarity(gradient.flatten(), _gradient(model, x).flatten(), dim=0) > 0.98
