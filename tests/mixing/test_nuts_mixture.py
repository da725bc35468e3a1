"""The mixture with a map, a hard accurate side and a gate that runs first."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from equipoise import data, mixing, models
from equipoise.core.checks import InputError
from equipoise.core.rng import stream
from equipoise.mixing import HardLabels, LogitMap, MixedClassifier, Point, Provenance, frontier
from equipoise.models import checkpoint


class Table(nn.Module):
    """Image number i (its first pixel) gets row i of a table, so any logits can be asked for."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.register_buffer("rows", rows)
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        out: Tensor = self.get_buffer("rows")[x[:, 0, 0, 0].long()]
        return out


def _numbered(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.float32).view(-1, 1, 1, 1).expand(-1, 3, 5, 7)


def _tables(seed: int, scale: float, count: int = 40, classes: int = 6) -> tuple[Table, Table]:
    chance = stream(seed, "tables", torch.arange(count))
    # Coarse logits, so that ties of classes and of margins happen.
    g, h = ((scale * chance.at(side).normal(classes)).round() / 2 for side in ("g", "h"))
    return Table(g), Table(h)


def test_the_formula_with_map_and_one_hot() -> None:
    g, h = _tables(0, 4.0)
    chosen = LogitMap(1.3, 2.0, -0.5)
    mixture = MixedClassifier(g, h, 0.8, logit_map=chosen, hard=True)
    x = _numbered(40)
    expected = 0.2 * nn.functional.one_hot(g(x).argmax(1), 6) + 0.8 * chosen(h(x)).softmax(1)
    torch.testing.assert_close(mixture(x).exp(), expected)


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.5, 1.0, 3.0, 20.0]), st.floats(0, 1), st.booleans(),
       st.sampled_from([None, (0.3, 1.0, 0.0), (2.0, 3.0, -1.0), (0.05, 1.4, -1.1)]),
       st.sampled_from([0.0, 0.4, 1.0]), st.sampled_from([None, 1.5]), st.integers(2, 7))
def test_gated_answers_are_the_same(
    seed: int, scale: float, alpha: float, hard: bool, numbers: tuple[float, float, float] | None, rivals: float,
    unit: float | None, classes: int,
) -> None:
    g, h = _tables(seed, scale, classes=classes)
    chosen = None if numbers is None else LogitMap(*numbers, rivals=rivals, unit=unit)
    mixture = MixedClassifier(g, h, alpha, logit_map=chosen, hard=hard)
    x = _numbered(40)
    assert torch.equal(mixture.predict(x), mixture(x).argmax(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hard", [True, False])
def test_gated_answers_of_half_precision_logits_are_the_same(dtype: torch.dtype, hard: bool) -> None:
    """Rounded to eight bits, sums of probabilities would tie where margins do not."""
    chance = stream(0, "tables", torch.arange(4000))
    g, h = (Table((2 * chance.at(side).normal(3)).to(dtype)) for side in ("g", "h"))
    x = _numbered(4000)
    for alpha in (0.55, 0.7, 0.9, 0.97):
        mixture = MixedClassifier(g, h, alpha, hard=hard)
        assert torch.equal(mixture.predict(x), mixture(x).argmax(1))


def test_a_threshold_that_is_itself_a_margin() -> None:
    """q is fitted to a margin, so equality happens; then the accurate side is asked."""
    g, h = _tables(3, 3.0)
    plain = MixedClassifier(g, h, 0.5, logit_map=LogitMap(1.0, 1.5, -0.4), hard=True)
    x = _numbered(40)
    top = plain.mapped(h(x)).exp().double().topk(2, dim=1).values
    for q in (top[:, 0] - top[:, 1]).tolist():
        mixture = MixedClassifier(g, h, 1 / (1 + q), logit_map=plain.logit_map, hard=True)
        assert torch.equal(mixture.predict(x), mixture(x).argmax(1))


def test_the_accurate_side_runs_only_where_it_can_decide() -> None:
    rows = torch.tensor([[9.0, 0, 0], [0.1, 0, 0], [0, 8.0, 0], [0, 0, 0.2]])
    g, h = Table(rows.roll(1, dims=1)), Table(rows)
    mixture = MixedClassifier(g, h, 0.8, hard=True)
    assert mixture.predict(_numbered(4)).tolist() == [0, 1, 1, 0]
    assert g.seen == 2


@pytest.mark.reference
def test_gated_answers_on_cifar10(real_data: Path, real_weights: Path) -> None:
    bases = [models.load(f"{real_weights}/cifar10_resnet8_{kind}.safetensors") for kind in ("standard", "pgd_at_linf8")]
    mixture = MixedClassifier(bases[0], bases[1], 0.9, logit_map=LogitMap(1.0, 2.0, -0.5), hard=True).eval()
    images = data.load("cifar10", split="test", data_dir=real_data)
    asked = 0
    with torch.no_grad():
        for batch in data.batches(images, 250, device="cpu"):
            assert torch.equal(mixture.predict(batch.images), mixture(batch.images).argmax(1))
            asked += int(mixture.undecided(mixture.mapped(mixture.robust(batch.images))).sum())
    assert 0 < asked < 10_000


def test_any_accurate_model_that_names_classes() -> None:
    g, h = _tables(2, 3.0)
    x = _numbered(40)
    said = g(x).argmax(1)
    chosen = LogitMap(1.0, 2.0, -0.5)
    full = MixedClassifier(g, h, 0.8, logit_map=chosen, hard=True)
    for function in (lambda x: said[x[:, 0, 0, 0].long()], lambda x: said[x[:, 0, 0, 0].long()].tolist()):
        mixture = MixedClassifier(HardLabels(function), h, 0.8, logit_map=chosen, hard=True)
        assert torch.equal(mixture(x), full(x)) and torch.equal(mixture.predict(x), full.predict(x))
        assert mixture.surrogate()(x).shape == mixture.hinges()(x).shape == (40, 6)
    with pytest.raises(InputError, match="`accurate` must answer with 40 classes"):
        MixedClassifier(HardLabels(lambda x: torch.rand(len(x))), h, 0.8, hard=True)(x)


def test_the_surrogate_is_equation_8() -> None:
    g, h = _tables(1, 3.0)
    chosen = LogitMap(1.3, 2.0, -0.5)
    mixture = MixedClassifier(g, h, 0.99, logit_map=chosen, hard=True, surrogate_alpha=0.7)
    x = _numbered(40)
    expected = 0.3 * g(x).softmax(1) + 0.7 * (0.9 * h(x).softmax(1) + 0.1 * chosen(h(x)).softmax(1))
    torch.testing.assert_close(mixture.surrogate()(x).exp(), expected)
    assert not mixture.differentiable and MixedClassifier(g, h, 0.5).differentiable


def _linear(seed: int) -> nn.Module:
    chance = torch.Generator().manual_seed(seed)
    layer = nn.Linear(105, 6)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(6, 105, generator=chance))
    return nn.Sequential(nn.Flatten(), layer)


def test_surrogates_show_a_way_where_the_mixture_does_not() -> None:
    mixture = MixedClassifier(_linear(1), _linear(2), 0.9, logit_map=LogitMap(5.0, 4.0, -1.1, "relu"), hard=True)
    x = torch.rand(4, 3, 5, 7, generator=torch.Generator().manual_seed(0), requires_grad=True)
    y = mixture(x).argmax(1)
    switch = MixedClassifier(mixture.accurate, mixture.robust, 0.6, logit_map=LogitMap(1.0, 1.0, 0.0, rivals=0.0),
                             hard=True)
    for source in (mixture.surrogate(), mixture.hinges(), switch.surrogate(), switch.hinges()):
        loss = nn.functional.cross_entropy(source(x), y, reduction="sum")
        gradient = torch.autograd.grad(loss, x)[0]
        assert bool((gradient.abs().amax((1, 2, 3)) > 0).all())


def test_hinges_are_zero_where_the_accurate_side_passes() -> None:
    g, h = _tables(4, 3.0)
    mixture = MixedClassifier(g, h, 0.8, logit_map=LogitMap(1.0, 2.0, -0.5), hard=True)
    x = _numbered(40)
    named = g(x).argmax(1)
    p = mixture.mapped(h(x)).exp()
    passes = p.amax(1) - p.gather(1, named.unsqueeze(1)).squeeze(1) <= mixture.q
    scores = mixture.hinges()(x).gather(1, named.unsqueeze(1)).squeeze(1)
    assert bool(passes.any()) and bool((~passes).any())
    assert torch.equal(scores == 0, passes)


POINTS = (Point(0.01, 0.85, 0.9, "relu", 1.0, 2.0, -0.5), Point(0.03, 0.9, 0.8, "gelu", 2.0, 3.0, -1.0, 0.25, 1.5))


def test_targets_slide_along_the_frontier() -> None:
    g, h = _tables(0, 3.0)
    mixture = MixedClassifier(g, h, 0.9, hard=True, frontier=POINTS).eval()
    assert mixture.with_target(1.5).alpha == pytest.approx(0.9)
    chosen = mixture.with_target(3.0)
    assert chosen.alpha == pytest.approx(0.8) and chosen.frontier == POINTS and chosen.accurate is g
    assert chosen.logit_map is not None and chosen.logit_map.facts()["clamp"] == "gelu" and not chosen.training
    with pytest.raises(InputError, match=r"must be at least 1, the least that was fitted, got 0\.5"):
        mixture.with_target(0.5)
    with pytest.raises(InputError, match="must have a fitted frontier"):
        MixedClassifier(g, h, 0.9).with_target(1.0)


def test_a_frontier_holds_no_point_that_is_beaten() -> None:
    beaten = Point(0.03, 0.84, 0.7, "relu", 1.0, 2.0, -0.5)
    assert frontier.non_dominated([POINTS[1], beaten, POINTS[0], POINTS[0]]) == POINTS


def _saved(folder: Path) -> MixedClassifier:
    folder.mkdir()
    bases = [models.build("cnn", num_classes=6, image_shape=(3, 8, 8), seed=seed) for seed in (1, 2)]
    for name, base in zip(("accurate", "robust"), bases, strict=True):
        checkpoint.save(folder / f"{name}.safetensors", base, {})
    mixture = MixedClassifier(bases[0], bases[1], 0.875, hard=True,
                              logit_map=LogitMap(0.1, 2.5, -1.1, "gelu", rivals=0.5, unit=1.25),
                              surrogate_alpha=0.7, frontier=POINTS,
                              fitted=Provenance("cifar10", "test", ("3-5", "9"), "promised")).eval()
    mixing.save(folder, mixture, accurate=f"{folder}/accurate.safetensors", robust=f"{folder}/robust.safetensors")
    return mixture


def test_a_fitted_mixture_on_disk(tmp_path: Path) -> None:
    mixture = _saved(tmp_path / "m")
    loaded = mixing.load(f"mixture:{tmp_path}/m")
    assert isinstance(loaded, MixedClassifier) and loaded.logit_map is not None and mixture.logit_map is not None
    assert loaded.logit_map.facts() == mixture.logit_map.facts() and loaded.hard and not loaded.training
    assert (loaded.frontier, loaded.fitted, loaded.surrogate_alpha) == (POINTS, mixture.fitted, 0.7)
    x = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(loaded.predict(x), mixture.predict(x))
    assert models.weights_digest(loaded) == models.weights_digest(mixture)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [("power = ", "powr = ", "did you mean 'power'"), ('clamp = "gelu"', 'clamp = "gelo"', "did you mean 'gelu'"),
     ("scale = 0.1", "scale = -0.1", "`scale` must be positive"), ("shift = -1.1\n", "", "must hold clamp"),
     ("clean = [0.85, 0.9]", "clean = [0.85]", "equally long columns"), ('split = "test"\n', "", "must hold data")],
)
def test_a_spoiled_file(tmp_path: Path, old: str, new: str, message: str) -> None:
    _saved(tmp_path / "m")
    told = tmp_path / "m" / "mixture.toml"
    assert old in told.read_text()
    told.write_text(told.read_text().replace(old, new))
    with pytest.raises(InputError, match=message):
        mixing.load(f"mixture:{tmp_path}/m")


def test_images_that_it_was_fitted_on() -> None:
    fitted = Provenance("shapes", "test", ("3-5", "9"), "")
    images = data.load("shapes", split="test", count=12)
    assert fitted.overlap(images) == ("3-5", "9")
    assert fitted.overlap(images.slice(4, 3)) == ("4-5",)
    assert fitted.overlap(images.slice(6, 2)) == () and Provenance("digits", "test", ("3-5",), "").overlap(images) == ()
    assert Provenance.on(images.slice(2, 4), "p") == Provenance("shapes", "test", ("2-5",), "p")
