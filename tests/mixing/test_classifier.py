from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lookup_models import LookupModel, lookup_pair, numbered_images, numbers_of
from torch import nn

from equipoise import data, models
from equipoise.core.checks import InputError
from equipoise.core.rng import stream
from equipoise.mixing import FrontierMixture, HardLabels, LogitMap, MixedClassifier


def _base(classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(105, classes), nn.BatchNorm1d(classes))


def _images(count: int) -> torch.Tensor:
    return torch.rand(count, 3, 5, 7, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_logits_of_the_formula(count: int, alpha: float) -> None:
    mixture = MixedClassifier(_base(6), _base(6), alpha).eval()
    x = _images(count)
    expected = (1 - alpha) * mixture.accurate(x).softmax(1) + alpha * mixture.robust(x).softmax(1)
    torch.testing.assert_close(mixture(x).exp(), expected)
    assert mixture.alpha == pytest.approx(alpha)


def test_mode_never_changes_the_formula() -> None:
    mixture = MixedClassifier(
        nn.Sequential(nn.Flatten(), nn.Linear(105, 6)),
        nn.Sequential(nn.Flatten(), nn.Linear(105, 6)),
        0.7,
    )
    x = _images(4)
    assert torch.equal(mixture.train()(x), mixture.eval()(x))


def test_saved_and_moved_like_any_module() -> None:
    mixture = MixedClassifier(_base(6), _base(6), 0.3).eval()
    other = MixedClassifier(_base(6), _base(6), 0.9).eval()
    other.load_state_dict(mixture.state_dict())
    assert torch.equal(other(_images(4)), mixture(_images(4)))
    assert mixture.double()(_images(4).double()).dtype == torch.float64


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan")])
def test_an_invalid_alpha_is_an_error(alpha: float) -> None:
    with pytest.raises(InputError, match=r"`alpha` must lie in \[0, 1\]"):
        MixedClassifier(_base(6), _base(6), alpha)


def test_different_numbers_of_classes_are_an_error() -> None:
    with pytest.raises(InputError, match="equal numbers of classes"):
        MixedClassifier(_base(6), _base(5), 0.5).eval()(_images(4))


def test_the_formula_with_map_and_one_hot() -> None:
    g, h = lookup_pair(0, 4.0)
    logit_map = LogitMap(1.3, 2.0, -0.5)
    mixture = MixedClassifier(g, h, 0.8, logit_map=logit_map, hard=True)
    x = numbered_images(40)
    expected = 0.2 * nn.functional.one_hot(g(x).argmax(1), 6) + 0.8 * logit_map(h(x)).softmax(1)
    torch.testing.assert_close(mixture(x).exp(), expected)


@settings(deadline=None, max_examples=200)
@given(
    st.integers(0, 10**6),
    st.sampled_from([0.0, 0.5, 1.0, 3.0, 20.0]),
    st.floats(0, 1),
    st.booleans(),
    st.sampled_from([None, (0.3, 1.0, 0.0), (2.0, 3.0, -1.0), (0.05, 1.4, -1.1)]),
    st.sampled_from([0.0, 0.4, 1.0]),
    st.sampled_from([None, 1.5]),
    st.integers(2, 7),
)
def test_predict_equals_forward(
    seed: int,
    scale: float,
    alpha: float,
    hard: bool,
    numbers: tuple[float, float, float] | None,
    rivals: float,
    unit: float | None,
    classes: int,
) -> None:
    g, h = lookup_pair(seed, scale, classes=classes)
    logit_map = None if numbers is None else LogitMap(*numbers, rivals=rivals, unit=unit)
    mixture = MixedClassifier(g, h, alpha, logit_map=logit_map, hard=hard)
    x = numbered_images(40)
    assert torch.equal(mixture.predict(x), mixture(x).argmax(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hard", [True, False])
def test_predict_equals_forward_for_half_precision_logits(dtype: torch.dtype, hard: bool) -> None:
    """In half precision, sums of probabilities would tie where margins do not."""
    random_stream = stream(0, "tables", torch.arange(4000))
    g, h = (LookupModel((2 * random_stream.at(side).normal(3)).to(dtype)) for side in ("g", "h"))
    x = numbered_images(4000)
    for alpha in (0.55, 0.7, 0.9, 0.97):
        mixture = MixedClassifier(g, h, alpha, hard=hard)
        assert torch.equal(mixture.predict(x), mixture(x).argmax(1))


def test_predict_equals_forward_at_the_threshold() -> None:
    """q is fitted to a margin, so equality happens; then the accurate side decides."""
    g, h = lookup_pair(3, 3.0)
    plain = MixedClassifier(g, h, 0.5, logit_map=LogitMap(1.0, 1.5, -0.4), hard=True)
    x = numbered_images(40)
    top = plain.map_robust(h(x)).exp().double().topk(2, dim=1).values
    for q in (top[:, 0] - top[:, 1]).tolist():
        mixture = MixedClassifier(g, h, 1 / (1 + q), logit_map=plain.logit_map, hard=True)
        assert torch.equal(mixture.predict(x), mixture(x).argmax(1))


def test_the_accurate_side_runs_only_where_it_can_change_the_class() -> None:
    rows = torch.tensor([[9.0, 0, 0], [0.1, 0, 0], [0, 8.0, 0], [0, 0, 0.2]])
    g, h = LookupModel(rows.roll(1, dims=1)), LookupModel(rows)
    mixture = MixedClassifier(g, h, 0.8, hard=True)
    assert mixture.predict(numbered_images(4)).tolist() == [0, 1, 1, 0]
    assert g.images_run == 2


@pytest.mark.reference
@pytest.mark.parametrize("images", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_predict_equals_forward_on_cifar10(
    real_data: Path, real_weights: Path, images: int
) -> None:
    bases = [
        models.load(f"{real_weights}/cifar10_resnet8_{kind}.safetensors")
        for kind in ("standard", "pgd_at_linf8")
    ]
    mixture = MixedClassifier(
        bases[0], bases[1], 0.9, logit_map=LogitMap(1.0, 2.0, -0.5), hard=True
    ).eval()
    loaded = data.load_data("cifar10", data_dir=real_data, count=images)
    count = 0
    with torch.no_grad():
        for batch in data.batches(loaded, 250, device="cpu"):
            assert torch.equal(mixture.predict(batch.images), mixture(batch.images).argmax(1))
            count += int(
                mixture.needs_accurate(mixture.map_robust(mixture.robust(batch.images))).sum()
            )
    assert 0 < count < images


def test_an_accurate_side_that_returns_classes() -> None:
    g, h = lookup_pair(2, 3.0)
    x = numbered_images(40)
    classes = g(x).argmax(1)
    logit_map = LogitMap(1.0, 2.0, -0.5)
    full = MixedClassifier(g, h, 0.8, logit_map=logit_map, hard=True)
    for function in (lambda x: classes[numbers_of(x)], lambda x: classes[numbers_of(x)].tolist()):
        mixture = MixedClassifier(HardLabels(function), h, 0.8, logit_map=logit_map, hard=True)
        assert torch.equal(mixture(x), full(x)) and torch.equal(mixture.predict(x), full.predict(x))
        assert mixture.surrogate()(x).shape == mixture.hinges()(x).shape == (40, 6)
    with pytest.raises(InputError, match="`accurate` must return 40 classes"):
        MixedClassifier(HardLabels(lambda x: torch.rand(len(x))), h, 0.8, hard=True)(x)


FRONTIER = (
    FrontierMixture(0.01, 0.85, 0.9, "relu", 1.0, 2.0, -0.5),
    FrontierMixture(0.03, 0.9, 0.8, "gelu", 2.0, 3.0, -1.0, 0.25, 1.5),
)


def test_with_target_selects_from_the_frontier() -> None:
    g, h = lookup_pair(0, 3.0)
    mixture = MixedClassifier(g, h, 0.9, hard=True, frontier=FRONTIER).eval()
    assert mixture.with_target(1.5).alpha == pytest.approx(0.9)
    selected = mixture.with_target(3.0)
    assert (
        selected.alpha == pytest.approx(0.8)
        and selected.frontier == FRONTIER
        and selected.accurate is g
    )
    assert (
        selected.logit_map is not None
        and selected.logit_map.settings.clamp == "gelu"
        and not selected.training
    )
    with pytest.raises(
        InputError, match=r"must be at least 1, the least that was fitted, got 0\.5"
    ):
        mixture.with_target(0.5)
    with pytest.raises(InputError, match="must have a fitted frontier"):
        MixedClassifier(g, h, 0.9).with_target(1.0)


def test_predict_checks_its_images_and_converts_bytes() -> None:
    mixture = MixedClassifier(_base(6), _base(6), 0.5).eval()
    levels = torch.randint(
        0, 256, (9, 3, 5, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    assert torch.equal(mixture.predict(levels), mixture(levels.float() / 255).argmax(1))
    for wrong, message in (
        (levels.float(), "lie in"),
        (_images(2) - 0.5, "lie in"),
        (_images(2) * torch.nan, "lie in"),
        (levels[0], r"have shape \(B, C, H, W\)"),
        (levels.int(), "be floating point"),
        (levels.tolist(), "be a tensor"),
    ):
        with pytest.raises(InputError, match=f"^`images` must {message}.*, got [^\n]*$"):
            mixture.predict(wrong)  # type: ignore[arg-type]
    assert mixture(levels.float()).isfinite().all()  # forward is free to extrapolate


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("side", ["accurate", "robust"])
@pytest.mark.parametrize("hard", [True, False])
def test_predict_refuses_logits_without_a_softmax(side: str, value: float, hard: bool) -> None:
    g, h = lookup_pair(0, 1.0)
    (g if side == "accurate" else h).rows[7, 2] = value
    mixture = MixedClassifier(g, h, 0.5, hard=hard)
    with pytest.raises(
        InputError, match=f"`logits of the {side} model LookupModel` must not contain"
    ):
        mixture.predict(numbered_images(40))


def test_a_row_of_minus_infinity_is_refused() -> None:
    g, h = lookup_pair(0, 1.0)
    h.rows[3] = -math.inf
    with pytest.raises(
        InputError, match="`logits of the robust model LookupModel` must hold a finite number"
    ):
        MixedClassifier(g, h, 0.5).predict(numbered_images(40))


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("hard", [True, False])
@pytest.mark.parametrize("impossible", [True, False])
def test_gradients_are_finite(alpha: float, hard: bool, impossible: bool) -> None:
    """Also where neither side gives a class any probability."""
    g, h = (
        LookupModel(torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)))
        for seed in (1, 2)
    )
    for side in (g, h):
        side.rows[:, 5] = -math.inf if impossible else 0.0
        side.rows.requires_grad_()
    logits = MixedClassifier(g, h, alpha, hard=hard)(numbered_images(4))
    assert not logits.isnan().any()
    nn.functional.cross_entropy(logits, torch.tensor([0, 1, 2, 3])).backward()
    gradients = [side.rows.grad for side in (g, h) if side.rows.grad is not None]
    assert len(gradients) == 2 - hard and all(
        bool(gradient.isfinite().all()) for gradient in gradients
    )


@pytest.mark.parametrize("cast", ["half", "bfloat16", "float", "double"])
def test_casting_the_module_does_not_round_its_settings(cast: str) -> None:
    logit_map = LogitMap(
        1.2345678901, 2.3456789012, -0.3456789012, rivals=0.123456789, unit=1.7654321
    )
    mixture = MixedClassifier(_base(6), nn.Sequential(_base(6)), 0.123456789, logit_map=logit_map)
    before, gate = logit_map.settings, mixture.gate.clone()
    assert getattr(mixture, cast)() is mixture and next(mixture.parameters()).dtype == getattr(
        torch, cast
    )
    assert (
        mixture.alpha == 0.123456789
        and torch.equal(mixture.gate, gate)
        and logit_map.settings == before
    )
    assert (
        nn.Sequential(mixture).to("cpu", torch.float16)[0].alpha == 0.123456789
        and logit_map.settings == before
    )
    assert {"gate", "logit_map.numbers"} <= mixture.state_dict().keys()
    mixture.float().to("meta", torch.float16)
    assert mixture.gate.is_meta and logit_map.numbers.is_meta and next(mixture.parameters()).is_meta


def test_one_class_is_refused() -> None:
    for mixture in (
        MixedClassifier(_base(1), _base(1), 0.5).eval(),
        MixedClassifier(
            _base(1), _base(1), 0.5, logit_map=LogitMap(1.0, 1.0, 0.0, rivals=0.5)
        ).eval(),
    ):
        for run in (mixture, mixture.predict):
            with pytest.raises(
                InputError, match=r"`logits of the robust model Sequential` must have shape .*K ≥ 2"
            ):
                run(_images(4))
    with pytest.raises(
        InputError, match=r"`logits` must have shape \(B, K\) with K ≥ 2, got \(4, 1\)"
    ):
        LogitMap(1.0, 1.0, 0.0)(torch.zeros(4, 1))


@pytest.mark.parametrize("wrong", [6, -1, 2**40])
def test_classes_out_of_range_are_refused(wrong: int) -> None:
    _, h = lookup_pair(2, 3.0)
    mixture = MixedClassifier(HardLabels(lambda x: [0] * (len(x) - 1) + [wrong]), h, 0.1, hard=True)
    for run in (mixture, mixture.predict):
        with pytest.raises(
            InputError, match=r"`classes of the accurate model HardLabels` must lie in 0\.\.5"
        ):
            run(numbered_images(40))
    wide = LookupModel(torch.eye(40, 9))
    with pytest.raises(InputError, match="equal numbers of classes"):
        MixedClassifier(wide, h, 0.1, hard=True)(numbered_images(40))


def test_classes_out_of_range_are_nan_where_they_cannot_be_read() -> None:
    class Returns(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.where(x[:, 0, 0, 0] > 0.5, 99, 1)

    mixture = MixedClassifier(Returns(), _base(6), 0.5, hard=True).eval()
    x = torch.stack((torch.zeros(3, 5, 7), torch.ones(3, 5, 7)))
    program = torch.export.export(mixture, (x,)).module()
    assert program(x).isnan().all(dim=1).tolist() == [False, True]


@pytest.mark.parametrize("cast", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("images", [torch.uint8, torch.float16, torch.float32, torch.float64])
def test_predict_takes_images_of_any_precision(cast: torch.dtype, images: torch.dtype) -> None:
    mixture, x = (
        MixedClassifier(_base(6), _base(6), 0.7).eval().to(cast),
        (_images(4) * 255).round(),
    )
    x = x.to(images) if images == torch.uint8 else (x / 255).to(images)
    assert mixture.predict(x).shape == (4,)


class _Wrong(nn.Module):
    """A base that does one thing wrong."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.what == "exit":
            raise SystemExit(3)
        if self.what == "change":
            x.mul_(0.5)
        logits = x.flatten(1)[:, :6]
        return logits.long() if self.what == "integers" else logits


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("exit", "SystemExit: 3"),
        ("change", "must not change its images"),
        ("integers", "must be floating point, got torch.int64"),
    ],
)
def test_predict_names_a_wrong_base(what: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        MixedClassifier(_base(6), _Wrong(what), 0.7).eval().predict(_images(4))


def test_classes_in_floating_point_are_refused() -> None:
    accurate = LookupModel(torch.tensor([1.7, 2.0, 0.0, 1.0]))
    robust = LookupModel(torch.zeros(4, 3))
    with pytest.raises(InputError, match="must be whole numbers"):
        MixedClassifier(accurate, robust, 0.5, hard=True).eval().predict(numbered_images(4))
