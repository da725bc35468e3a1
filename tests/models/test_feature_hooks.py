"""Feature layers: found in any architecture, recorded in one forward pass, hooks removed
afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from equipoise.core.checks import InputError
from equipoise.models import Normalize, build
from equipoise.models.feature_hooks import (
    find_feature_layers,
    forward_with_features,
    forward_with_output,
    match_sizes,
)

C, K = 3, 6


class Block(nn.Module):
    """A block of a transformer, as far as shapes go."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mlp(x)
        return out


class Transformer(nn.Module):
    """Patches of 4 × 4, some tokens without a position before them, blocks, the mean."""

    def __init__(self, blocks: int = 8, prefix: int = 1) -> None:
        super().__init__()
        self.patches = nn.Conv2d(C, 5, 4, stride=4)
        self.prefix = nn.Parameter(torch.zeros(1, prefix, 5))
        self.blocks = nn.Sequential(*(Block(5) for _ in range(blocks)))
        self.head = nn.Linear(5, K)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = self.blocks(torch.cat((self.prefix.expand(len(x), -1, -1), tokens), dim=1))
        logits: Tensor = self.head(tokens.mean(dim=1))
        return logits


class Resizing(Transformer):
    """A transformer that first enlarges and normalises its images."""

    def __init__(self) -> None:
        super().__init__()
        self.enlarge, self.normalize = nn.Upsample(scale_factor=2), Normalize([0.5] * C, [0.5] * C)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.enlarge(self.normalize(x)))


def _convnext() -> nn.Module:
    """Stem, stages and downsampling in one sequence, as torchvision lays out ConvNeXt."""

    def stage(width: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.GELU())

    features = nn.Sequential(
        nn.Sequential(nn.Conv2d(C, 4, 2, stride=2), nn.GELU()),
        stage(4),
        nn.Sequential(nn.Conv2d(4, 6, 2, stride=2)),
        stage(6),
        nn.Sequential(nn.Conv2d(6, 8, 2, stride=2)),
        stage(8),
    )
    net = nn.Sequential()
    net.add_module("features", features)
    net.add_module("avgpool", nn.AdaptiveAvgPool2d(1))
    net.add_module("classifier", nn.Sequential(nn.Flatten(), nn.Linear(8, K)))
    return net


def _zoo(name: str) -> Callable[[], nn.Module]:
    return lambda: build(name, num_classes=K, image_shape=(C, 16, 24), seed=1).eval()


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (_zoo("resnet8"), ("layer1", "layer2")),
        (_zoo("resnet18"), ("layer1", "layer2")),
        (_zoo("preact_resnet18"), ("layer1", "layer2")),
        (_zoo("wide_resnet28_10"), ("layer1", "layer2")),
        (_zoo("cnn_small"), ("conv1", "conv2")),
        (_convnext, ("features.1", "features.3")),
        (Transformer, ("blocks.1", "blocks.3")),
        (Resizing, ("blocks.1", "blocks.3")),
        (
            lambda: nn.Sequential(Normalize([0.5] * 3, [0.5] * 3), _zoo("resnet8")()),
            ("1.layer1", "1.layer2"),
        ),
    ],
    ids=["resnet8", "resnet18", "preact", "wide", "cnn", "convnext", "vit", "resizing", "wrapped"],
)
def test_two_depths_are_selected(make: Callable[[], nn.Module], expected: tuple[str, str]) -> None:
    assert find_feature_layers(make(), torch.rand(1, C, 16, 24)) == expected


def test_a_model_without_feature_maps_is_an_error() -> None:
    flat = nn.Sequential(nn.Flatten(), nn.Linear(C * 8 * 8, 5), nn.Linear(5, K))
    with pytest.raises(InputError, match=r"`feature_layers` must be given for Sequential"):
        find_feature_layers(flat, torch.rand(2, C, 8, 8))
    with pytest.raises(
        InputError, match=r"`feature layer 1` must output features with a position in the image"
    ):
        forward_with_features(flat, ("1", "2"), torch.rand(2, C, 8, 8))


@pytest.mark.parametrize(
    ("height", "width", "prefix"), [(16, 16, 0), (16, 16, 1), (16, 24, 5), (8, 24, 1)]
)
def test_tokens_become_maps_at_their_positions(height: int, width: int, prefix: int) -> None:
    model = Transformer(blocks=2, prefix=prefix)
    x = torch.rand(2, C, height, width)
    for weight in model.blocks.parameters():
        nn.init.zeros_(weight)
    maps = forward_with_features(model, ("blocks.0", "blocks.1"), x)[1]
    torch.testing.assert_close(maps[0], model.patches(x))  # the blocks change nothing
    assert maps[1].shape == (2, 5, height // 4, width // 4)


def test_one_pass_gives_logits_and_maps_and_changes_nothing() -> None:
    model = build("resnet8", num_classes=K, image_shape=(C, 8, 8), seed=1).eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    passes: list[int] = []
    counter = model.register_forward_hook(lambda module, inputs, output: passes.append(1))
    x = torch.rand(2, C, 8, 8)
    logits, maps = forward_with_features(model, ("layer1", "layer2"), x)
    assert len(passes) == 1 and torch.equal(logits, model(x)) and len(passes) == 2
    counter.remove()
    assert [tuple(m.shape) for m in maps] == [(2, 16, 8, 8), (2, 32, 4, 4)]
    assert all(not sub._forward_hooks for sub in model.modules())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_hooks_are_removed_when_the_pass_fails() -> None:
    model = build("resnet8", num_classes=K, image_shape=(C, 8, 8), seed=1).eval()
    with pytest.raises(InputError, match="channels"):
        forward_with_features(model, ("layer1", "layer2"), torch.rand(2, 1, 8, 8))
    assert all(not sub._forward_hooks for sub in model.modules())


def test_the_error_for_an_unknown_layer_names_the_nearest_ones() -> None:
    model = build("resnet8", num_classes=K, image_shape=(C, 8, 8), seed=1).eval()
    with pytest.raises(InputError, match=r"got 'layr2' \(near: layer2, .*\)"):
        forward_with_features(model, ("layer1", "layr2"), torch.rand(2, C, 8, 8))
    with pytest.raises(InputError, match=r"there are conv1, bn1, "):
        forward_with_features(model, ("zzz", "layer2"), torch.rand(2, C, 8, 8))
    with pytest.raises(InputError, match=r"got '' \(there are"):
        forward_with_features(model, ("layer1", ""), torch.rand(2, C, 8, 8))
    assert all(not sub._forward_hooks for sub in model.modules())


def test_maps_are_pooled_to_the_smaller_size() -> None:
    small, large = torch.rand(2, 3, 4, 5), torch.rand(2, 1, 8, 10)
    pooled = match_sizes([small, large])
    assert torch.equal(pooled[0], small) and pooled[1].shape == (2, 1, 4, 5)
    torch.testing.assert_close(pooled[1][0, 0, 0, 0], large[0, 0, :2, :2].mean())


@pytest.mark.parametrize("repeats", [0, 1, 2])
def test_the_output_of_a_part_comes_from_the_same_pass_if_it_runs_once(repeats: int) -> None:
    passes: list[int] = []

    class Counted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            passes.append(len(x))
            output: Tensor = super().forward(x)
            return output

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Counted(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x, *(self.part(x) for _ in range(repeats))], dim=1)

    model, x = Whole(), torch.rand(5, 4)
    logits, own = forward_with_output(model, model.part, x)
    assert len(passes) == (1 if repeats == 1 else repeats + 1)
    expected = nn.functional.linear(x, model.part.weight, model.part.bias)
    assert torch.equal(own, expected) and torch.equal(
        logits, torch.cat([x, *[expected] * repeats], dim=1)
    )
    assert not model.part._forward_hooks, "the hook is removed"


def test_a_model_is_a_part_of_itself_but_not_for_some_of_the_images() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.part(x[:2]), x[2:, :2]])

    model, x = Halves(), torch.rand(5, 4)
    assert torch.equal(*forward_with_output(model, model, x))
    assert torch.equal(forward_with_output(model, model.part, x)[1], model.part(x))


def test_a_part_that_gets_other_images_has_a_pass_of_its_own() -> None:
    class Rounds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rounded: torch.Tensor = self.part(x.round())
            return rounded

    model, x = Rounds(), torch.rand(5, 4)
    logits, own = forward_with_output(model, model.part, x)
    assert torch.equal(own, model.part(x)) and torch.equal(logits, model.part(x.round()))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_part_has_a_pass_of_its_own() -> None:
    part, x = nn.Linear(4, 2), torch.rand(5, 4)
    scripted = torch.jit.script(part)
    logits, own = forward_with_output(nn.Sequential(scripted, nn.Softplus()), scripted, x)
    assert torch.equal(own, part(x)) and torch.equal(logits, nn.functional.softplus(part(x)))


def test_passes_of_other_threads_are_not_recorded() -> None:
    model, other = nn.Linear(4, 2), torch.ones(5, 4)

    class Whole(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            thread = threading.Thread(target=model, args=(other,))
            thread.start()
            thread.join()
            logits: Tensor = model(x)
            return logits

    x = torch.rand(5, 4)
    assert torch.equal(forward_with_output(Whole(), model, x)[1], model(x))
