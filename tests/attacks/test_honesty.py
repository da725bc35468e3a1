"""What must not pass as a success, nor hide one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from conftest import Linear, generator
from equipoise import attacks
from equipoise.attacks import FunctionAttack, Square, run_sanity_checks, worst_case
from equipoise.core.checks import InputError
from equipoise.core.rng import Stream, stream
from equipoise.core.threat import Threat
from equipoise.data import Dataset


def _images(count: int = 8) -> Dataset:
    images = torch.randint(80, 170, (count, 3, 5, 7), generator=generator(1), dtype=torch.uint8)
    return Dataset("made", "test", images, torch.zeros(count, dtype=torch.int64), torch.arange(count), tuple("abcdef"))


def test_an_extra_term_does_not_move_the_boundary_that_fab_walks_to(linear: Linear) -> None:
    x = torch.rand(16, 3, 5, 7, generator=generator(2), dtype=torch.float64)
    y, chance = linear(x).argmax(1), stream(0, "fab", torch.arange(16))
    threat = Threat("linf", 0.03)
    plain = attacks.fab(linear, x, y, threat=threat, stream=chance, steps=20)
    shifted = attacks.fab(linear, x, y, threat=threat, stream=chance, steps=20,
                          extra=lambda z: 10 + 0 * z.flatten(1).sum(1))
    assert torch.equal(plain, shifted)
    assert bool((linear(plain).argmax(1) != y).any())


def test_an_attack_that_leaves_the_ball_is_refused() -> None:
    def cheat(model: nn.Module, x: Tensor, y: Tensor, *, threat: Threat, stream: Stream, **_: object) -> Tensor:
        return 1 - x

    model = Linear(torch.randn(6, 105, generator=generator(0)), torch.tensor([100.0, 0, 0, 0, 0, 0]))
    with pytest.raises(InputError, match="`cheat` must stay within"):
        worst_case([FunctionAttack("cheat", cheat)], model, _images(), threat=Threat("linf", 0.01), seed=0, batch_size=8,
                   device="cpu")


class Brittle(nn.Module):
    """Answers bytes with class 0, and anything between them with NaN."""

    def forward(self, x: Tensor) -> Tensor:
        between = ((x * 255 - (x * 255).round()).abs() > 1e-3).flatten(1).any(dim=1, keepdim=True)
        logits = torch.tensor([1.0, 0, 0, 0, 0, 0]).expand(len(x), 6) + 0 * x.flatten(1).sum(1, keepdim=True)
        return torch.where(between, torch.nan, logits)


def test_nan_is_no_success() -> None:
    with pytest.raises(InputError, match="not contain NaN"):
        worst_case([Square(queries=3)], Brittle(), _images(), threat=Threat("linf", 0.1), seed=0, batch_size=8,
                   device="cpu")


def test_symptoms_of_wide_balls_stay_inside_the_box(linear: Linear) -> None:
    x = torch.rand(8, 3, 5, 7, generator=generator(2), dtype=torch.float64)
    seen = run_sanity_checks(linear, x, linear(x).argmax(1), threat=Threat("linf", 0.3), stream=stream(0, "s", torch.arange(8)))
    assert {symptom.name for symptom in seen} >= {"randomness", "vanishing gradients"}


@pytest.mark.parametrize("name", ["pgd", "apgd", "fab", "square", "targeted"])
def test_chance_of_other_images_is_refused(name: str, linear: Linear) -> None:
    x = torch.rand(4, 3, 5, 7, generator=generator(2), dtype=torch.float64)
    with pytest.raises(InputError, match="`stream` must be the chance of 4 images"):
        getattr(attacks, name)(linear, x, torch.zeros(4, dtype=torch.int64), threat=Threat("linf", 0.1),
                               stream=stream(0, "s", torch.arange(3)))
