from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from equipoise.models.preact_resnet import PreActBlock
from equipoise.models.resnet import BasicBlock, resnet20, resnet110
from equipoise.models.wide_resnet import wide_resnet28_10


def silenced(block: nn.Module) -> nn.Module:
    """The block with its last convolution at zero, so that only the shortcut speaks."""
    conv = block.get_submodule("conv2")
    assert isinstance(conv, nn.Conv2d)
    nn.init.zeros_(conv.weight)
    return block.eval()


def signed(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def test_basic_block_passes_its_input_through_the_last_relu() -> None:
    x = signed(4, 6, 5, 7)
    torch.testing.assert_close(silenced(BasicBlock(6, 6, 1))(x), x.relu())


def test_preact_block_passes_its_input_untouched() -> None:
    x = signed(4, 6, 5, 7)
    assert torch.equal(silenced(PreActBlock(6, 6, 1))(x), x)


def test_preact_projection_sees_the_activated_input() -> None:
    block = silenced(PreActBlock(6, 8, 2))
    assert torch.equal(block(-signed(4, 6, 5, 7).abs() - 1), torch.zeros(4, 8, 3, 4))


@pytest.mark.parametrize("kind", [BasicBlock, PreActBlock])
def test_stride_rounds_up(kind: type[nn.Module]) -> None:
    assert kind(6, 8, 2)(signed(4, 6, 5, 7)).shape == (4, 8, 3, 4)


def convolutions(model: nn.Module) -> int:
    return sum(isinstance(sub, nn.Conv2d) and sub.kernel_size == (3, 3) for sub in model.modules())


def test_depth_is_in_the_name() -> None:
    with torch.device("meta"):
        assert convolutions(resnet20(num_classes=6, image_shape=(3, 8, 8))) + 1 == 20
        assert convolutions(resnet110(num_classes=6, image_shape=(3, 8, 8))) + 1 == 110
        # WRN counts the projections of its three stages too.
        assert convolutions(wide_resnet28_10(num_classes=6, image_shape=(3, 8, 8))) + 3 == 28
