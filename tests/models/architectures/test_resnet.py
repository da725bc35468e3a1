from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from equipoise.models import ARCHITECTURES
from equipoise.models.architectures.resnet import BasicBlock, PreActBlock, wide_resnet


def zero_residual(block: nn.Module) -> nn.Module:
    """The block with its last convolution at zero, so that only the shortcut contributes."""
    conv = block.get_submodule("conv2")
    assert isinstance(conv, nn.Conv2d)
    nn.init.zeros_(conv.weight)
    return block.eval()


def random_features(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def test_basic_block_passes_its_input_through_the_last_relu() -> None:
    x = random_features(4, 6, 5, 7)
    torch.testing.assert_close(zero_residual(BasicBlock(6, 6, 1))(x), x.relu())


def test_preact_block_passes_its_input_untouched() -> None:
    x = random_features(4, 6, 5, 7)
    assert torch.equal(zero_residual(PreActBlock(6, 6, 1))(x), x)


def test_preact_projection_gets_the_activated_input() -> None:
    block = zero_residual(PreActBlock(6, 8, 2))
    assert torch.equal(block(-random_features(4, 6, 5, 7).abs() - 1), torch.zeros(4, 8, 3, 4))


@pytest.mark.parametrize("block", [BasicBlock, PreActBlock])
def test_stride_rounds_up(block: type[nn.Module]) -> None:
    assert block(6, 8, 2)(random_features(4, 6, 5, 7)).shape == (4, 8, 3, 4)


def convolutions(model: nn.Module) -> int:
    return sum(isinstance(sub, nn.Conv2d) and sub.kernel_size == (3, 3) for sub in model.modules())


def test_the_name_is_the_number_of_layers() -> None:
    with torch.device("meta"):
        assert (
            convolutions(ARCHITECTURES["resnet20"](num_classes=6, image_shape=(3, 8, 8))) + 1 == 20
        )
        assert (
            convolutions(ARCHITECTURES["resnet110"](num_classes=6, image_shape=(3, 8, 8))) + 1
            == 110
        )
        # WRN counts the projections of its three stages too.
        assert convolutions(wide_resnet(28, 10)(num_classes=6, image_shape=(3, 8, 8))) + 3 == 28
