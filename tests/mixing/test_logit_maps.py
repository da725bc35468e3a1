from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core.checks import InputError
from equipoise.core.rng import stream
from equipoise.mixing import LogitMap, gate_of, logit_maps, mix
from equipoise.mixing.logit_maps import confidence_switch, one_hot, switch_confidence


def _logits(seed: int, scale: float, classes: int = 6, rows: int = 4) -> torch.Tensor:
    return scale * stream(seed, "logits", torch.arange(rows)).normal(classes).double()


def _literal(z: torch.Tensor, s: float, p: float, c: float, clamp: str) -> torch.Tensor:
    """Equation (4) as printed in the paper."""
    normed = (z - z.mean(1, keepdim=True)) / (z.var(1, keepdim=True) + 1e-8).sqrt()
    u = logit_maps.CLAMPS[clamp](normed + c)
    return s * u.abs() ** p * u.sign()


@pytest.mark.parametrize("clamp", logit_maps.CLAMPS)
def test_the_formula(clamp: str) -> None:
    z = _logits(0, 3.0)
    torch.testing.assert_close(
        LogitMap(0.7, 2.5, -0.4, clamp)(z), _literal(z, 0.7, 2.5, -0.4, clamp)
    )


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 99),
    st.sampled_from([1e-30, 1e-6, 1.0, 50.0, 1e20, 1e37]),
    st.sampled_from(list(logit_maps.CLAMPS)),
    st.floats(0.5, 6),
    st.floats(-2, 1),
    st.sampled_from([2, 3, 6, 300]),
)
def test_finite_with_finite_gradients_in_fp32_and_bf16(
    seed: int, scale: float, clamp: str, p: float, c: float, classes: int
) -> None:
    logit_map = LogitMap(2.0, p, c, clamp)
    for dtype in (torch.float32, torch.bfloat16):
        z = _logits(seed, scale, classes).to(dtype).requires_grad_()
        out = logit_map(z)
        log_p = out.log_softmax(1)
        gradient = torch.autograd.grad(log_p[:, 0].sum(), z)[0]
        assert out.dtype == torch.float32 and gradient.dtype == dtype
        assert bool(log_p.isfinite().all()) and bool(gradient.isfinite().all())


@pytest.mark.parametrize("clamp", logit_maps.CLAMPS)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_fp32_against_double(clamp: str, scale: float) -> None:
    logit_map = LogitMap(1.5, 2.2, -0.5, clamp)
    results = []
    for dtype in (torch.float32, torch.float64):
        z = _logits(3, scale, rows=40).float().to(dtype).requires_grad_()
        out = logit_map(z).log_softmax(1)
        gradient = torch.autograd.grad(out[:, 1].sum(), z)[0] * scale
        results.append((out.double(), gradient.double()))
    for single, double in zip(*results, strict=True):
        torch.testing.assert_close(single, double, rtol=2e-4, atol=2e-5)


def test_gradient_against_differences() -> None:
    z = _logits(5, 2.0).requires_grad_()
    for clamp in ("gelu", "softplus", "elu", "linear"):
        assert torch.autograd.gradcheck(LogitMap(0.8, 1.7, -0.3, clamp), (z,))


@pytest.mark.parametrize("p", [0.5, 1.0, 1.5, 3.0])
def test_power_has_a_finite_gradient_at_zero(p: float) -> None:
    u = torch.tensor([[0.0, 1e-20, -2.0]], requires_grad=True)
    gradient = torch.autograd.grad(logit_maps.power(u, p).sum(), u)[0]
    assert bool(gradient.isfinite().all())
    assert float(gradient[0, 2]) == pytest.approx(p * 2 ** (p - 1))
    if p == 1.0:
        assert gradient.tolist() == [[1.0, 1.0, 1.0]]


def test_equal_logits_stay_equal() -> None:
    z = torch.full((2, 6), 3.0, requires_grad=True)
    out = logit_maps.layer_norm(z)
    assert torch.equal(out, torch.zeros(2, 6))
    assert bool(torch.autograd.grad(out[:, 0].sum(), z)[0].isfinite().all())


def test_two_classes_keep_their_margin() -> None:
    z = torch.tensor([[1.0, 0.0], [5.0, 0.0]])
    first, second = LogitMap(1.0, 1.0, 0.0, "linear")(z).softmax(1)[:, 0].tolist()
    assert second > first + 0.1, "the layer norm would have made them equal"


def test_only_the_largest_logits_give_mean_and_variance() -> None:
    z = _logits(1, 1.0, classes=300)
    z[:, 280:] -= 1000  # very small logits change nothing
    most = z.topk(250, dim=1).values
    expected = (z - most.mean(1, keepdim=True)) / (most.var(1, keepdim=True) + 1e-8).sqrt()
    torch.testing.assert_close(logit_maps.layer_norm(z), expected)
    assert (
        float(logit_maps.layer_norm(z, top=None).amax())
        < 1
        < float(logit_maps.layer_norm(z).amax())
    )


@settings(deadline=None)
@given(st.integers(0, 999), st.floats(0.5, 5), st.floats(-1.0, 0.5))
def test_monotone_clamps_keep_the_class(seed: int, p: float, c: float) -> None:
    z = _logits(seed, 2.0, rows=30)
    for clamp in set(logit_maps.CLAMPS) - {"gelu"}:
        mapped = LogitMap(1.0, p, c, clamp)(z)
        assert bool(
            (mapped.gather(1, z.argmax(1, keepdim=True)).squeeze(1) == mapped.amax(1)).all()
        ), clamp


def test_gelu_can_change_the_class() -> None:
    z = torch.tensor([[1.0, 0.8, 0.8, 0.8, 0.8, -4.0]], dtype=torch.float64)
    shift = -1.4  # all but the last are near the minimum of GELU
    assert int(LogitMap(1.0, 1.0, shift, "gelu")(z).argmax()) == 5
    assert int(LogitMap(1.0, 1.0, shift, "gelu-monotone")(z).argmax()) == 0


def test_one_hot_in_log_probabilities() -> None:
    log_0 = -math.inf
    assert logit_maps.one_hot(torch.tensor([1, 0]), 3).tolist() == [
        [log_0, 0, log_0],
        [0, log_0, log_0],
    ]


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((0.0, 1.0, 0.0), "`scale`"),
        ((1.0, -1.0, 0.0), "`power`"),
        ((1.0, 1.0, math.nan), "`shift`"),
    ],
)
def test_invalid_settings_are_an_error(numbers: tuple[float, float, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        LogitMap(*numbers)
    with pytest.raises(InputError, match="did you mean 'relu'"):
        LogitMap(1.0, 1.0, 0.0, "relo")
    with pytest.raises(InputError, match="`rivals` must lie in"):
        LogitMap(1.0, 1.0, 0.0, rivals=2.0)
    with pytest.raises(InputError, match="`unit` must be positive"):
        LogitMap(1.0, 1.0, 0.0, unit=0.0)


def test_rivals_are_flattened() -> None:
    log_p = _logits(2, 3.0).log_softmax(1)
    p = log_p.exp()
    for share in (0.0, 0.3, 1.0):
        r = logit_maps.flatten_rivals(log_p, share).exp()
        torch.testing.assert_close(r.sum(1), torch.ones(4, dtype=torch.float64))
        assert torch.equal(r.argmax(1), p.argmax(1))
        torch.testing.assert_close(r.amax(1), p.amax(1))
        even = (1 - p.amax(1, keepdim=True)) / 5
        others = p < p.amax(1, keepdim=True)
        torch.testing.assert_close(r[others], (share * p + (1 - share) * even)[others])
    flat = LogitMap(2.0, 1.0, 0.0, "linear", rivals=0.0)(_logits(2, 3.0)).softmax(1)
    assert bool((flat.sort(1).values[:, :-1].diff(dim=1).abs() < 1e-12).all())


def test_with_a_unit_the_spread_of_logits_matters() -> None:
    z = _logits(4, 1.0)
    logit_map = LogitMap(1.0, 1.0, 0.0, "linear", unit=2.0)
    torch.testing.assert_close(logit_map(z), (z - z.mean(1, keepdim=True)) / 2)
    assert not torch.allclose(logit_map(3 * z).softmax(1), logit_map(z).softmax(1))
    assert logit_map.settings.unit == 2.0 and LogitMap(1.0, 1.0, 0.0).settings.unit is None


@pytest.mark.parametrize("scale", [0.0, 1e-6, 1.0, 1e20])
@pytest.mark.parametrize("rivals", [0.0, 0.5])
def test_flattened_rivals_stay_finite(scale: float, rivals: float) -> None:
    for unit in (None, 1.7):
        z = _logits(1, scale).float().requires_grad_()
        out = LogitMap(3.0, 2.0, -0.5, rivals=rivals, unit=unit)(z)
        gradient = torch.autograd.grad(out[:, 0].sum(), z)[0]
        assert bool(out.isfinite().all()) and bool(gradient.isfinite().all())


@pytest.mark.parametrize("clamp", [*logit_maps.CLAMPS])
@pytest.mark.parametrize("options", [{}, {"rivals": 0.3}, {"unit": 1.5}])
@pytest.mark.parametrize("classes", [2, 3, 10, 300])
def test_impossible_classes_stay_finite(
    clamp: str, options: dict[str, float], classes: int
) -> None:
    """Logits of −inf: finite outputs and gradients, the same first class, and nothing changes for
    finite rows."""
    z = torch.randn(6, classes, generator=torch.Generator().manual_seed(classes))
    z[0, 1:], z[1, 0], z[2, : classes // 2], z[3, :-1] = (
        -torch.inf,
        -torch.inf,
        -torch.inf,
        -torch.inf,
    )
    logit_map = LogitMap(1.5, 1.2, 0.5, clamp, **options)
    leaf = z.clone().requires_grad_()
    mapped = logit_map(leaf)
    assert mapped.isfinite().all() and torch.equal(mapped[4:], logit_map(z.clamp_min(-9.0))[4:])
    mapped.logsumexp(dim=1).sum().backward()
    assert leaf.grad is not None and leaf.grad.isfinite().all()
    if clamp != "gelu":  # which is not monotone
        assert torch.equal(mapped.argmax(1), z.argmax(1))


@pytest.mark.parametrize(("scale", "alpha"), [(1.0, 0.6), (3.0, 0.75), (0.5, 0.95)])
def test_a_confidence_switch_depends_on_the_top_probability_alone(
    scale: float, alpha: float
) -> None:
    """h decides exactly where softmax(s·z/unit) is large enough, whatever the other classes are and
    g predicts."""
    generator = torch.Generator().manual_seed(0)
    h, g = (3 * torch.randn(2000, 6, generator=generator) for _ in range(2))
    switch = confidence_switch(scale, unit=2.0)
    mapped = F.log_softmax(switch(h), dim=1)
    mixed = mix(one_hot(g.argmax(1), 6), mapped, gate_of(alpha)).argmax(1)
    top = torch.softmax(scale * h / 2.0, dim=1).amax(1)
    confident = top > switch_confidence((1 - alpha) / alpha, 6)
    assert 0 < int(confident.sum()) < 2000
    assert torch.equal(mixed, torch.where(confident, h.argmax(1), g.argmax(1)))
