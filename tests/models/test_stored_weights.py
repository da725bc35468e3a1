"""The stored checkpoints give the accuracies written in their metadata."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from equipoise.core import rng
from equipoise.models import checkpoint, reference

pytestmark = pytest.mark.reference

RESNET8 = ("cifar10_resnet8_standard", "cifar10_resnet8_pgd_at_linf8")
RESNET18 = ("cifar10_resnet18_standard", "cifar10_resnet18_pgd_at_linf8")
NOISY = "cifar10_resnet18_gaussian_sigma050"


@pytest.fixture
def cifar(real_data: Path) -> tuple[Tensor, Tensor]:
    """(10000, 3, 32, 32) bytes and (10000,) labels of the test images."""
    raw = np.fromfile(real_data / "cifar-10-batches-bin" / "test_batch.bin", dtype=np.uint8)
    rows = torch.from_numpy(raw.reshape(-1, 1 + 3 * 32 * 32))
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].long()


def stored_figures(path: Path) -> dict[str, float]:
    figures: dict[str, float] = json.loads(checkpoint.read_metadata(path)["measured"])
    return figures


def accuracy(
    model: nn.Module, data: tuple[Tensor, Tensor], count: int, sigma: float = 0.0
) -> float:
    images, labels = data
    correct = 0
    with torch.inference_mode():
        for start in range(0, count, 250):
            index = torch.arange(start, start + 250)
            x = images[index].float() / 255
            if sigma:
                x = x + sigma * rng.stream(0, "noise", index).normal(3, 32, 32)
            correct += int((model(x).argmax(dim=1) == labels[index]).sum())
    return correct / count


@pytest.mark.parametrize("name", (*RESNET8, *RESNET18, NOISY))
def test_loads_as_its_architecture(name: str, real_weights: Path) -> None:
    path = real_weights / f"{name}.safetensors"
    model = reference.load(str(path), num_classes=10, image_shape=(3, 32, 32))
    assert not model.training
    assert {value.dtype for value in model.parameters()} == {torch.float32}
    assert checkpoint.read_metadata(path)["arch"] == name.split("_")[1]


@pytest.mark.parametrize("name", RESNET8)
def test_resnet8_accuracy(name: str, real_weights: Path, cifar: tuple[Tensor, Tensor]) -> None:
    path = real_weights / f"{name}.safetensors"
    measured_here = accuracy(checkpoint.load(path), cifar, 10_000)
    assert measured_here == pytest.approx(stored_figures(path)["clean_10000"], abs=0.001)


def test_robust_resnet18_accuracy_of_the_first_250(
    real_weights: Path, cifar: tuple[Tensor, Tensor]
) -> None:
    """Of the first thousand, 826 are correct. None of the first 250 is so close to a tie that
    rounding decides."""
    measured_here = accuracy(
        checkpoint.load(real_weights / f"{RESNET18[1]}.safetensors"), cifar, 250
    )
    assert measured_here == pytest.approx(211 / 250, abs=0.002)


def test_gaussian_resnet18_accuracy_of_the_first_250(
    real_weights: Path, cifar: tuple[Tensor, Tensor]
) -> None:
    """Images and noise are fixed, so the number is too, up to one image that rounding may
    decide."""
    path = real_weights / f"{NOISY}.safetensors"
    measured_here = accuracy(checkpoint.load(path), cifar, 250, sigma=0.5)
    assert measured_here == pytest.approx(170 / 250, abs=0.005)
    assert measured_here == pytest.approx(
        stored_figures(path)["accuracy_under_noise_10000"], abs=0.045
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", RESNET18)
def test_resnet18_accuracy(name: str, real_weights: Path, cifar: tuple[Tensor, Tensor]) -> None:
    path = real_weights / f"{name}.safetensors"
    measured_here = accuracy(checkpoint.load(path), cifar, 10_000)
    assert measured_here == pytest.approx(stored_figures(path)["clean_10000"], abs=0.001)


@pytest.mark.slow
def test_gaussian_resnet18_accuracy_under_noise(
    real_weights: Path, cifar: tuple[Tensor, Tensor]
) -> None:
    path = real_weights / f"{NOISY}.safetensors"
    measured_here = accuracy(checkpoint.load(path), cifar, 10_000, sigma=0.5)
    assert measured_here == pytest.approx(
        stored_figures(path)["accuracy_under_noise_10000"], abs=0.01
    )
