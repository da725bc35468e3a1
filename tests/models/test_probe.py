from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from equipoise.models import Normalize
from equipoise.models.probe import NORMALISATIONS, Finding, are_probabilities, probe

IMAGENET = NORMALISATIONS["ImageNet"]
TEXTS = {
    "missing": "its normalisation seems to be missing (mean 0.485,0.456,0.406",
    "twice": "its images seem to be normalised twice (mean 0.485,0.456,0.406",
    "bytes": "pixels from 0 to 255",
}


class Brightness(nn.Module):
    """Classifies normalised images by their brightness, in steps of `width`."""

    def __init__(self, width: float = 0.5, classes: int = 8) -> None:
        super().__init__()
        self.register_buffer("centres", (torch.arange(classes) - (classes - 1) / 2) * width)

    def forward(self, x: Tensor) -> Tensor:
        return -(x.mean((1, 2, 3))[:, None] - self.get_buffer("centres")).square()


def bright_images(model: nn.Module, count: int = 64) -> tuple[Tensor, Tensor]:
    """Images with all brightnesses, labelled by a model that is used correctly."""
    levels = torch.linspace(0.05, 0.95, count).view(-1, 1, 1, 1)
    noise = torch.rand(count, 3, 4, 4, generator=torch.Generator().manual_seed(2)) * 0.1 - 0.05
    x = (levels + noise).clamp(0, 1)
    return x, model(x).argmax(1)


@pytest.fixture
def pair() -> tuple[nn.Module, nn.Module]:
    """A network for normalised images, and the same behind its normalisation."""
    network = Brightness()
    return network, nn.Sequential(Normalize(*IMAGENET), network)


def test_a_correct_model_is_not_suspected(pair: tuple[nn.Module, nn.Module]) -> None:
    assert probe(pair[1], *bright_images(pair[1])) == []


@pytest.mark.parametrize("kind", ["missing", "twice", "bytes"])
def test_wrong_normalisation_is_found(kind: str, pair: tuple[nn.Module, nn.Module]) -> None:
    network, correct = pair

    class Bytes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            z: Tensor = correct(x / 255)
            return z

    x, y = bright_images(correct)
    wrong = {
        "missing": network,
        "twice": nn.Sequential(Normalize(*IMAGENET), correct),
        "bytes": Bytes(),
    }[kind]
    (finding,) = probe(wrong, x, y)
    assert TEXTS[kind] in finding.sentence and finding.alternative == 1.0 and finding.count == 64
    assert finding.accuracy is not None and finding.accuracy < 0.7
    assert f"{finding.accuracy:.0%} of 64 images" in str(finding) and "\n" not in str(finding)


def test_batches_are_small(pair: tuple[nn.Module, nn.Module]) -> None:
    """A model may take few images at a time."""
    sizes = []

    class Counted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            sizes.append(len(x))
            z: Tensor = pair[0](x)
            return z

    x, y = bright_images(pair[1])
    assert probe(Counted(), x, y, batch_size=3) == probe(pair[0], x, y) and max(sizes) == 3


def test_few_images_are_no_evidence(pair: tuple[nn.Module, nn.Module]) -> None:
    x, y = bright_images(pair[1])
    assert probe(pair[0], x[:6], y[:6]) == [] and probe(pair[0], x, y) != []


def test_probabilities(pair: tuple[nn.Module, nn.Module]) -> None:
    z = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    assert (
        are_probabilities(z.softmax(1))
        and not are_probabilities(z)
        and not are_probabilities(z.log_softmax(1))
    )
    assert are_probabilities(z.softmax(1).half()) and not are_probabilities(torch.eye(3)), (
        "classes alone"
    )
    model = nn.Sequential(pair[1], nn.Softmax(1))
    (finding,) = probe(model, *bright_images(pair[1]))
    assert finding == Finding(
        "its outputs look like probabilities, not logits: they lie in [0, 1] and add up to 1; "
        "return the logits, or their logarithm"
    )


def test_the_random_state_of_the_caller_is_kept(pair: tuple[nn.Module, nn.Module]) -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            z: Tensor = pair[1](x + 0.001 * torch.randn_like(x))
            return z

    x, y = bright_images(pair[1])
    before = torch.get_rng_state()
    probe(Noisy(), x, y)
    assert torch.equal(torch.get_rng_state(), before)
