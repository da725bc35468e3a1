"""Images and logits that cannot be used: one sentence from every public function, and no row holds
NaN."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equipoise as eq

THREAT = eq.Threat("linf", 0.03)
K = 4


class Linear(nn.Module):
    """A linear model; for bright images the logit of class 1 is replaced."""

    def __init__(self, seed: int, value: float | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.randn(K, 27, generator=torch.Generator().manual_seed(seed))
        )
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        logits = x.flatten(1) @ self.weight.T
        bright = (x.mean(dim=(1, 2, 3)) > 0.9).unsqueeze(1) & (torch.arange(K) == 1)
        return logits if self.value is None else logits.masked_fill(bright, self.value)


def _data(count: int = 60) -> tuple[Tensor, Tensor]:
    """Only the last image is bright, so that a check of the first ones does not notice it."""
    images = torch.rand(count, 3, 3, 3, generator=torch.Generator().manual_seed(1)) * 0.8
    images[-1] = 0.95
    return images, torch.arange(count) % K


FUNCTIONS: dict[str, Callable[[nn.Module, Any, Path], object]] = {
    "evaluate": lambda model, data, out: eq.evaluate(
        {"m": model}, data, threat=THREAT, attack="pgd", steps=1, out=out, device="cpu"
    ),
    "suite": lambda model, data, out: eq.evaluate(
        {"m": model}, data, threat=THREAT, attack="apgd", steps=1, out=out, device="cpu"
    ),
    "attack": lambda model, data, out: eq.attack(
        model, data, threat=THREAT, attack="pgd", steps=1, device="cpu"
    ),
    "fit": lambda model, data, out: eq.fit(Linear(2), model, data, threat=THREAT, device="cpu"),
    "certify": lambda model, data, out: eq.certify(
        {"m": model}, data, sigma=0.05, samples=20, n0=5, out=out, device="cpu"
    ),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    "change",
    [
        lambda x: x * 255,
        lambda x: x - 0.1,
        lambda x: x * torch.nan,
        lambda x: x.int(),
        lambda x: x[0],
    ],
    ids=["255", "negative", "nan", "int", "one"],
)
def test_images_are_checked(
    function: str, change: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    images, labels = _data()
    with pytest.raises(eq.InputError, match=r"^`images` must [^\n]*, got [^\n]*$"):
        FUNCTIONS[function](Linear(1), (change(images), labels), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_logits_are_checked(function: str, value: float, tmp_path: Path) -> None:
    with pytest.raises(
        eq.InputError,
        match=r"^[^\n]*(`logits of (m|the model Linear)`|the robust model) must [^\n]*$",
    ):
        FUNCTIONS[function](Linear(1, value), _data(), tmp_path / "run")
    rows = tmp_path / "run" / "rows.jsonl"
    for line in rows.read_text().splitlines() if rows.exists() else ():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"a row holds {name}"))


def test_bytes_are_converted() -> None:
    levels, labels = (_data()[0] * 255).byte(), _data()[1]
    results = [
        eq.attack(
            Linear(1), (images, labels), threat=THREAT, attack="pgd", steps=1, device="cpu"
        ).images
        for images in (levels, levels.float() / 255)
    ]
    assert torch.equal(*results)


def test_minus_infinity_is_a_logit(tmp_path: Path) -> None:
    """A class that a model rules out is no error, and every row is finite."""
    FUNCTIONS["evaluate"](Linear(1, -math.inf), _data(), tmp_path / "run")
    for line in (tmp_path / "run" / "rows.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"a row holds {name}"))
