from __future__ import annotations

from pathlib import Path

import pytest
import torch
from stand_in_packages import SOURCES, installed, logits, weights
from torch import nn

from equipoise.models import load


@pytest.mark.parametrize("auxiliary", [True, False])
@pytest.mark.parametrize("name", ["inception_v3", "googlenet"])
def test_inceptions_with_own_weights_transform_their_input(
    tmp_path: Path, name: str, auxiliary: bool
) -> None:
    """As with published weights, whose preprocessing they get; with and without the auxiliary
    classifier."""
    state, x = weights(), torch.rand(2, 3, 20, 20)
    more = (
        {f"AuxLogits.{key}": value for key, value in nn.Linear(2, 2).state_dict().items()}
        if auxiliary
        else {}
    )
    torch.save({**state, **more}, tmp_path / "own.pth")
    with installed(tmp_path / "packages", *SOURCES):
        model = load(
            f"torchvision:{name}?weights={tmp_path}/own.pth&preset=none&mean=0,0,0&std=1,1,1"
        )
    torch.testing.assert_close(model(x), logits(state, x * 0.5 + 0.1))
