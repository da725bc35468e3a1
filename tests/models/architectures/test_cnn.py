from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from equipoise.models import build
from equipoise.models.architectures.cnn import LeNet, PatchConv2d


@pytest.mark.parametrize(("channels", "kernel"), [(1, 5), (3, 5), (2, (3, 2))])
def test_a_product_over_patches_is_the_convolution(
    channels: int, kernel: int | tuple[int, int]
) -> None:
    conv = PatchConv2d(channels, 4, kernel).double()
    x = torch.rand(2, channels, 9, 7, dtype=torch.float64, requires_grad=True)
    ours, theirs = conv(x), F.conv2d(x, conv.weight, conv.bias)
    torch.testing.assert_close(ours, theirs)
    inputs = (x, *conv.parameters())
    weight = torch.rand_like(ours)
    for mine, known in zip(
        torch.autograd.grad((weight * ours).sum(), inputs),
        torch.autograd.grad((weight * theirs).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(mine, known)


def test_pooling_before_relu_equals_pooling_after_it() -> None:
    model = build("lenet", num_classes=10, image_shape=(1, 28, 28), seed=3)
    assert isinstance(model, LeNet)
    x = torch.rand(4, 1, 28, 28, requires_grad=True)
    out = F.max_pool2d(
        F.relu(F.conv2d(model.normalize(x), model.conv1.weight, model.conv1.bias)), 2
    )
    out = F.max_pool2d(F.relu(model.conv2(out)), 2)
    known = model.fc(F.relu(model.fc1(out.flatten(1))))
    logits = model(x)
    torch.testing.assert_close(logits, known)
    ours, theirs = (torch.autograd.grad(z[:, 2].sum(), x)[0] for z in (logits, known))
    torch.testing.assert_close(ours, theirs)
