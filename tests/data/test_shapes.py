from __future__ import annotations

import pytest
import torch
from torch import Tensor

from equipoise.core.checks import InputError
from equipoise.core.rng import stream
from equipoise.data import pixels, shapes


@pytest.fixture(scope="module")
def images() -> Tensor:
    return pixels(shapes.draw("test").images)


def test_a_split_is_complete_balanced_and_always_the_same() -> None:
    for split, size in shapes.SIZES.items():
        first, second = shapes.draw(split), shapes.draw(split)
        assert (first.name, first.split, first.classes) == ("shapes", split, shapes.CLASSES)
        assert first.images.shape == (size, 3, shapes.SIDE, shapes.SIDE)
        assert first.labels.bincount().tolist() == [size // 8] * 8
        assert first.digest() == second.digest()


def test_an_image_depends_on_its_number_alone() -> None:
    whole = shapes.draw("test")
    rows = torch.tensor([1999, 3, 700])
    alone = shapes.render(whole.labels[rows], stream(0, "shapes", rows).at("test"))
    assert torch.equal(alone, whole.images[rows])


def test_no_image_is_in_both_splits() -> None:
    distinct = {
        image.numpy().tobytes() for split in shapes.SIZES for image in shapes.draw(split).images
    }
    assert len(distinct) == sum(shapes.SIZES.values())


def test_an_unknown_split_is_an_error() -> None:
    with pytest.raises(InputError, match="`split` must be one of test, train, got 'tests'"):
        shapes.draw("tests")


def test_few_pixels_are_clipped(images: Tensor) -> None:
    assert (images == 0).float().mean() < 1e-3
    assert (images == 1).float().mean() < 1e-3


def test_the_texture_alone_determines_the_class(images: Tensor) -> None:
    """The grating with the most energy, in any phase, is that of the class."""
    labels = torch.arange(8)
    waves = torch.stack([_wave(labels, phase) for phase in (0.0, torch.pi / 2)])  # (2, 8, pixels)
    ripple = images.mean(1) - torch.nn.functional.avg_pool2d(
        images.mean(1), 3, 1, 1, count_include_pad=False
    )
    faint = images.mean(1).flatten(1).std(1) < 0.04
    energy = (ripple.flatten(1) @ waves.transpose(1, 2)).square().sum(0)  # (N, 8)
    correct = energy.argmax(1) == torch.arange(len(images)) % 8
    assert correct[faint].float().mean() > 0.97
    assert shapes.TEXTURE < shapes.EPS


def test_the_texture_of_another_class_fits_within_eps() -> None:
    labels = torch.arange(64) % 8
    random_stream = stream(0, "shapes", torch.arange(64))
    own, other = (
        shapes.grating(k, random_stream.at("texture")) for k in (labels, (labels + 3) % 8)
    )
    rest = shapes.EPS - shapes.TEXTURE
    change = rest * other - shapes.TEXTURE * own
    assert change.abs().max() <= shapes.EPS
    assert rest > 0.5 * shapes.TEXTURE  # the replacement is clearly visible


def test_the_contrast_of_most_shapes_is_a_multiple_of_eps(images: Tensor) -> None:
    labels = torch.arange(len(images)) % 8
    random_stream = stream(0, "shapes", torch.arange(len(images))).at("test")
    cover = shapes.coverage(labels, random_stream.at("shape"))
    inside, outside = (cover == 1).float(), (cover == 0).float()
    bright, dark = ((images * part).sum((2, 3)) / part.sum((2, 3)) for part in (inside, outside))
    step = bright - dark
    faint = step.mean(1) < shapes.HAZE + 0.02
    assert abs(float(faint.float().mean()) - shapes.FAINT) < 0.03
    assert float(step[~faint].min()) > 4 * shapes.EPS


def test_every_shape_is_far_from_every_other() -> None:
    """At one position and size, two shapes differ in at least a sixth of the area that either
    covers."""
    still = stream(0, "shapes", torch.zeros(8, dtype=torch.int64))
    cover = shapes.coverage(torch.arange(8), still).flatten(1)
    apart = (cover[:, None] - cover[None]).abs().sum(2) / torch.maximum(
        cover[:, None], cover[None]
    ).sum(2)
    assert float(apart[~torch.eye(8, dtype=torch.bool)].min()) > 1 / 6


def _wave(labels: Tensor, phase: float) -> Tensor:
    angle = (labels * (torch.pi / 8)).view(-1, 1, 1)
    line = torch.arange(shapes.SIDE) - (shapes.SIDE - 1) / 2
    position = angle.cos() * line + angle.sin() * line.unsqueeze(1)
    return torch.cos(2 * torch.pi * shapes.FREQUENCY * position + phase).flatten(1)
