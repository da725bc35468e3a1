from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from closed_form import chance
from scipy.special import ndtr

from equipoise.certification import Engine, SmoothingPlan, certify, noise, sound
from equipoise.certification.sampler import Sampler
from equipoise.core.checks import InputError


@pytest.mark.parametrize("sigma", [0.003, 0.12, 1.0])
def test_the_table_is_the_law_exactly(sigma: float) -> None:
    """Columns and coins counted in whole numbers give back every probability."""
    law = sound.table(sigma)
    lowest, chances = sound.probabilities(255 * sigma)
    full = 1 << (64 - law.bits)
    mass = [0] * (1 << law.bits)
    for column in range(1 << law.bits):
        mass[column] += int(law.threshold[column])
        mass[int(law.alias[column])] += full - int(law.threshold[column])
    assert sum(mass) == 1 << 64 and lowest == law.lowest
    error = sum(abs(own / 2**64 - p) for own, p in zip(mass, chances, strict=False)) / 2
    assert error < sound.ERROR_PER_PIXEL and all(own == 0 for own in mass[len(chances) :])


def test_the_law_is_that_of_rounded_noise() -> None:
    lowest, chances = sound.probabilities(30.6)
    k = np.arange(lowest, -lowest + 1)
    expected = ndtr((k + 0.5) / 30.6) - ndtr((k - 0.5) / 30.6)
    assert np.allclose(chances, expected, atol=1e-15) and math.fsum(chances) == pytest.approx(1, abs=1e-12)


def test_draws_follow_the_law() -> None:
    law, index = sound.table(0.02), torch.arange(4000)
    level = torch.full((4000, 1, 3, 5), 100, dtype=torch.int32)
    x = sound.noisy(level, noise.key_of(chance(4000)), index, index * 0, law, torch.float32)
    drawn = (x.double() * 255 - 100).flatten()
    assert torch.equal(drawn, drawn.round()) or (drawn - drawn.round()).abs().max() < 1e-4
    lowest, chances = sound.probabilities(255 * 0.02)
    counts = np.bincount((drawn.round().long() - lowest).numpy(), minlength=len(chances))
    from scipy.stats import chisquare

    expected = np.array(chances) * counts.sum()
    common = expected > 10
    rest = np.append(counts[common], counts[~common].sum()), np.append(expected[common], expected[~common].sum())
    assert chisquare(*rest).pvalue > 1e-3


def test_same_whole_numbers_same_bits() -> None:
    """What the network sees never depends on how a level was reached."""
    law, index = sound.table(0.12), torch.arange(300)
    key = noise.key_of(chance(300))
    dark = sound.noisy(torch.zeros(300, 1, 4, 4, dtype=torch.int32), key, index, index, law, torch.float32)
    light = sound.noisy(torch.full((300, 1, 4, 4), 7, dtype=torch.int32), key, index, index, law, torch.float32)
    assert set(light.flatten().tolist()) & set(dark.flatten().tolist())
    assert torch.equal(((light * 255).round() - 7).to(torch.int32), (dark * 255).round().to(torch.int32))
    assert torch.equal(light, (light * 255).round() / torch.tensor(255.0))


def test_certificates_agree_with_the_plain_sampler() -> None:
    """On one pixel in whole levels; the smoothed probabilities differ only by rounding."""
    from closed_form import Bins

    x = (torch.arange(0, 256, 3).float() / 255).view(-1, 1, 1, 1)
    model = Bins((0.0, 1.0))
    plan = SmoothingPlan(0.3, samples=4000, n0=100)
    plain = certify(model, x, plan=plan, stream=chance(len(x)), engine=Engine(batch_size=1 << 15))
    exact = certify(model, x, plan=SmoothingPlan(0.3, samples=4000, n0=100, sound=True), stream=chance(len(x)),
                    engine=Engine(batch_size=1 << 15))
    assert (plain.radius - exact.radius).abs().max() < 0.1 and (plain.radius - exact.radius).mean().abs() < 0.005
    sampler = Sampler(model, x, chance(len(x)), SmoothingPlan(0.3, sound=True), Engine())
    assert 0 < sampler.slack <= 1e-11


def test_only_images_of_whole_levels() -> None:
    with pytest.raises(InputError, match="multiples of 1/255"):
        certify(torch.nn.Flatten(), torch.full((2, 1, 1, 2), 0.5), plan=SmoothingPlan(0.3, samples=100, sound=True),
                stream=chance(2))
