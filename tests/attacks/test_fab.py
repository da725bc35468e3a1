from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attack_models import inner_images
from test_apgd import CENTRE, Bowl

from conftest import Linear, generator
from equipoise.attacks import Fab
from equipoise.core.rng import stream
from equipoise.core.threat import Threat


def test_extra_term_does_not_move_the_boundary(linear: Linear) -> None:
    x = torch.rand(16, 3, 5, 7, generator=generator(2), dtype=torch.float64)
    y, numbers = linear(x).argmax(1), stream(0, "fab", torch.arange(16))
    attack, threat = Fab(steps=20), Threat("linf", 0.03)
    plain = attack(linear, x, y, threat=threat, stream=numbers)
    shifted = replace(attack, extra=lambda z: 10 + 0 * z.flatten(1).sum(1))(
        linear, x, y, threat=threat, stream=numbers
    )
    assert torch.equal(plain, shifted)
    assert bool((linear(plain).argmax(1) != y).any())


@pytest.mark.parametrize(("radius_offset", "expected"), [(-0.01, True), (0.01, False)])
def test_quadratic_model_in_euclidean_norm(radius_offset: float, expected: bool) -> None:
    """The farthest point of the ball around x is x + eps·(x − c)/‖x − c‖."""
    x, numbers = inner_images(6)
    distance = (x - CENTRE).flatten(1).norm(dim=1)
    farthest = distance.min() + 1.2 if expected else distance.max() + 1.2
    bowl, y = Bowl(CENTRE, float(farthest) + radius_offset), torch.zeros(6, dtype=torch.int64)
    with torch.no_grad():
        broken = (
            bowl(Fab(steps=40)(bowl, x, y, threat=Threat("l2", 1.2), stream=numbers)).argmax(dim=1)
            == 1
        )
    assert broken.tolist() == [expected] * 6
