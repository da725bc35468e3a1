from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from closed_form import Bins, key_of, random_stream
from scipy.special import ndtr
from scipy.stats import chisquare, kstest

from equipoise.certification import Sampler, SamplerOptions, SmoothingPlan, certify, noise
from equipoise.core.checks import InputError


@pytest.mark.parametrize("sigma", [0.003, 0.12, 1.0])
def test_the_alias_table_has_the_exact_distribution(sigma: float) -> None:
    """Columns and coins, counted in integers, give back every probability."""
    table = noise.alias_table(sigma)
    lowest, probabilities = noise.rounded_normal(255 * sigma)
    full = 1 << (64 - table.bits)
    mass = [0] * (1 << table.bits)
    for column in range(1 << table.bits):
        mass[column] += int(table.threshold[column])
        mass[int(table.alias[column])] += full - int(table.threshold[column])
    assert sum(mass) == 1 << 64 and lowest == table.lowest
    error = sum(abs(own / 2**64 - p) for own, p in zip(mass, probabilities, strict=False)) / 2
    assert error < noise.ERROR_PER_PIXEL and all(own == 0 for own in mass[len(probabilities) :])


def test_the_distribution_is_that_of_rounded_noise() -> None:
    lowest, probabilities = noise.rounded_normal(30.6)
    k = np.arange(lowest, -lowest + 1)
    expected = ndtr((k + 0.5) / 30.6) - ndtr((k - 0.5) / 30.6)
    assert np.allclose(probabilities, expected, atol=1e-15) and math.fsum(
        probabilities
    ) == pytest.approx(1, abs=1e-12)


def test_draws_follow_the_distribution() -> None:
    table, index = noise.alias_table(0.02), torch.arange(4000)
    level = torch.full((4000, 1, 3, 5), 100, dtype=torch.int32)
    x = noise.noisy_levels(
        level, key_of(random_stream(4000)), index, index * 0, table, torch.float32
    )
    drawn = (x.double() * 255 - 100).flatten()
    assert torch.equal(drawn, drawn.round()) or (drawn - drawn.round()).abs().max() < 1e-4
    lowest, probabilities = noise.rounded_normal(255 * 0.02)
    counts = np.bincount((drawn.round().long() - lowest).numpy(), minlength=len(probabilities))
    expected = np.array(probabilities) * counts.sum()
    common = expected > 10
    pooled = [np.append(values[common], values[~common].sum()) for values in (counts, expected)]
    assert chisquare(*pooled).pvalue > 1e-3


def test_equal_levels_have_equal_bits() -> None:
    """The input of the network does not depend on how a level was reached."""
    table, index = noise.alias_table(0.12), torch.arange(300)
    key = key_of(random_stream(300))
    dark_level = torch.zeros(300, 1, 4, 4, dtype=torch.int32)
    dark = noise.noisy_levels(dark_level, key, index, index, table, torch.float32)
    light = noise.noisy_levels(dark_level + 7, key, index, index, table, torch.float32)
    assert set(light.flatten().tolist()) & set(dark.flatten().tolist())
    assert torch.equal(
        ((light * 255).round() - 7).to(torch.int32), (dark * 255).round().to(torch.int32)
    )
    assert torch.equal(light, (light * 255).round() / torch.tensor(255.0))


def test_certificates_agree_with_gaussian_noise() -> None:
    """On one pixel of 8 bits; the smoothed probabilities differ only by rounding."""
    x = (torch.arange(0, 256, 3).float() / 255).view(-1, 1, 1, 1)
    model = Bins((0.0, 1.0))
    plan = SmoothingPlan(0.3, samples=4000, n0=100)
    plain = certify(
        model,
        x,
        plan=plan,
        stream=random_stream(len(x)),
        options=SamplerOptions(batch_size=1 << 15),
    )
    exact = certify(
        model,
        x,
        plan=dataclasses.replace(plan, sound=True),
        stream=random_stream(len(x)),
        options=SamplerOptions(batch_size=1 << 15),
    )
    assert (plain.radius - exact.radius).abs().max() < 0.1 and (
        plain.radius - exact.radius
    ).mean().abs() < 0.005
    sampler = Sampler(model, x, random_stream(len(x)), SmoothingPlan(0.3, sound=True))
    assert 0 < sampler.probability_error <= 1e-11


def test_only_8_bit_images() -> None:
    with pytest.raises(InputError, match="multiples of 1/255"):
        certify(
            torch.nn.Flatten(),
            torch.full((2, 1, 1, 2), 0.5),
            plan=SmoothingPlan(0.3, samples=100, sound=True),
            stream=random_stream(2),
        )


def test_gaussian_noise_is_standard_normal() -> None:
    index = torch.arange(2000)
    z = (
        noise.gaussian(key_of(random_stream(2000)), index, index % 7, torch.Size((3, 5, 7)))
        .double()
        .flatten()
    )
    assert kstest(z.numpy(), "norm").pvalue > 1e-3
    assert z.mean().abs() < 0.01 and abs(z.var() - 1) < 0.01
    assert torch.corrcoef(z.view(2000, -1)[:, :40].T).fill_diagonal_(0).abs().max() < 0.12
