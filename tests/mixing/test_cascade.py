from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from equipoise import models
from equipoise.core.checks import InputError
from equipoise.data import Dataset, pixels
from equipoise.evaluation import cost
from equipoise.mixing import (
    CascadedClassifier,
    FrontierMixture,
    LogitMap,
    MixedClassifier,
    load_model,
    save_mixture,
)
from equipoise.mixing.cascade import BothStages, CascadeMargins
from equipoise.mixing.logit_maps import confidence_switch
from equipoise.mixing.surrogates import Sides, hinge_sums
from equipoise.models.layers.tta import SHIFTS, TTAClassifier, shift

COUNT, CLASSES = 60, 5


class Counted(nn.Module):
    """A linear model that counts the images it was run on."""

    def __init__(self, seed: int, scale: float = 3.0) -> None:
        super().__init__()
        weight = torch.randn(CLASSES, 3 * 6 * 7, generator=torch.Generator().manual_seed(seed))
        self.weight = nn.Parameter(scale * weight)
        self.images_run = 0

    def forward(self, x: Tensor) -> Tensor:
        self.images_run += len(x)
        return (x.flatten(1) - 0.5) @ self.weight.T


class FirstCopy(nn.Module):
    """A model on the first copy of its images only."""

    def __init__(self, model: nn.Module, views: int) -> None:
        super().__init__()
        self.model, self.views = model, views

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(shift(x, *SHIFTS[self.views][0]))
        return logits


def images() -> Dataset:
    random = torch.randint(
        0, 256, (COUNT, 3, 6, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    return Dataset(
        "random",
        "test",
        random,
        torch.zeros(COUNT, dtype=torch.int64),
        torch.arange(COUNT),
        tuple("abcde"),
    )


def cascade(
    first_q: float,
    q: float,
    views: int = 6,
    logit_map: LogitMap | None = None,
    first_scale: float | None = None,
) -> CascadedClassifier:
    return CascadedClassifier(
        Counted(1),
        TTAClassifier(Counted(2), views),
        1 / (1 + q),
        first_q=first_q,
        first_scale=first_scale,
        logit_map=logit_map or confidence_switch(0.15),
    ).eval()


@pytest.mark.parametrize("views", list(SHIFTS))
def test_the_views_together_are_the_mean(views: int) -> None:
    model, x = TTAClassifier(Counted(2), views), pixels(images().images)
    first = model.first_view(x)
    assert torch.equal(first, FirstCopy(model.model, views)(x))
    assert torch.allclose(model.complete(x, first), model(x), atol=1e-5)


@pytest.mark.parametrize("views", list(SHIFTS))
def test_thresholds_at_the_ends_give_the_switches_with_one_view_and_with_all(views: int) -> None:
    x = pixels(images().images)
    model = cascade(1.0, 0.3, views)
    switch = MixedClassifier(
        model.accurate, model.robust, model.alpha, hard=True, logit_map=model.logit_map
    )
    assert torch.allclose(model(x), switch(x), atol=1e-5)
    one = cascade(0.3, 1.0, views)  # q = 1: all views together are never confident, so g decides
    assert one.alpha == 0.5
    switch = MixedClassifier(
        one.accurate,
        FirstCopy(one.robust.model, views),
        model.alpha,
        hard=True,
        logit_map=one.logit_map,
    )
    assert torch.equal(one(x).argmax(1), switch(x).argmax(1))
    assert 0 < int((one.alphas(x) == 1).sum()) < COUNT


@pytest.mark.parametrize(
    "logit_map",
    [confidence_switch(0.15), LogitMap(0.3, 1.5, -0.1, "linear")],
    ids=["switch", "nuts"],
)
@pytest.mark.parametrize(
    ("first_q", "q", "first_scale"),
    [(0.0, 0.4, None), (0.3, 0.3, None), (0.5, 0.2, 0.3), (0.2, 0.6, 0.08), (1.0, 0.3, None)],
)
def test_predict_is_the_class_of_forward_with_the_passes_it_counts(
    first_q: float, q: float, first_scale: float | None, logit_map: LogitMap
) -> None:
    data = images()
    model, x = (
        cascade(first_q, q, logit_map=logit_map, first_scale=first_scale),
        pixels(data.images),
    )
    with torch.no_grad():
        expected = model(x).argmax(dim=1)
        views, needs_accurate = model.passes(x)
    network, accurate = model.robust.model, model.accurate
    assert isinstance(network, Counted) and isinstance(accurate, Counted)
    network.images_run = accurate.images_run = 0
    assert torch.equal(model.predict(data.images), expected)
    assert network.images_run == int(views.sum()) and accurate.images_run == int(
        needs_accurate.sum()
    )
    assert set(views.tolist()) <= {1.0, 6.0}
    report = cost.costs(model, data)[-1]
    assert report.robust_passes == pytest.approx(float(views.double().mean()))
    assert report.accurate_share == pytest.approx(float(needs_accurate.float().mean()))


def test_the_cost_in_operations_counts_views_that_run() -> None:
    data = images()
    model = cascade(0.3, 0.3)
    g, h, mixed, gated = cost.costs(model, data)
    assert g.flops and h.flops == 6 * g.flops and mixed.flops == 7 * g.flops
    assert (
        gated.robust_passes is not None
        and gated.accurate_share is not None
        and 1 < gated.robust_passes < 6
    )
    assert gated.flops == pytest.approx(g.flops * (gated.robust_passes + gated.accurate_share))
    switch = MixedClassifier(
        model.accurate, model.robust, model.alpha, hard=True, logit_map=model.logit_map
    )
    assert cost.costs(switch, data)[-1].robust_passes == 6


@pytest.mark.parametrize("first_scale", [None, 0.1])
def test_the_prediction_by_its_definition(first_scale: float | None) -> None:
    model, x = cascade(0.3, 0.25, first_scale=first_scale), pixels(images().images)
    maps = confidence_switch(0.15), confidence_switch(first_scale or 0.15)
    with torch.no_grad():
        mean, first = model.robust_outputs(x)
        predicted = model(x).argmax(dim=1)
        g = model.accurate(x).argmax(dim=1)
    seen = set()
    for row in range(COUNT):
        p, p_first = (
            torch.softmax(own(z[row : row + 1]), 1)[0]
            for own, z in zip(maps, (mean, first), strict=True)
        )
        top, top_first = p.sort().values, p_first.sort().values
        if top_first[-1] - top_first[-2] > 0.3:
            stage, own = "first", p_first.argmax()
        elif top[-1] - top[-2] > 0.25:
            stage, own = "all", p.argmax()
        else:
            stage, own = "accurate", g[row]
        seen.add(stage)
        assert predicted[row] == own
    assert seen == {"first", "all", "accurate"}


def test_a_folder_keeps_the_cascade_and_its_frontier(tmp_path: Path) -> None:
    model = load_pair(tmp_path)
    save_mixture(tmp_path / "m", model)
    loaded = load_model(f"mixture:{tmp_path / 'm'}")
    x = torch.rand(8, 3, 8, 8, generator=torch.Generator().manual_seed(3))
    assert isinstance(loaded, CascadedClassifier) and loaded.describe() == model.describe()
    assert torch.equal(loaded(x), model(x)) and loaded.method == "cascade of views"
    other = loaded.with_target(2.0)
    assert isinstance(other, CascadedClassifier) and (other.first_q, other.alpha) == (0.7, 0.6)
    assert loaded.first_scale == 0.5 and other.first_scale == 2.0 and other.logit_map is not None
    assert (
        other.first_map is not None
        and other.first_map.settings == other.logit_map.with_scale(2.0).settings
    )
    # A fit for which no cascade helps is the robust model alone; other targets still give cascades.
    alone = MixedClassifier(model.accurate, model.robust, 1.0, hard=True, frontier=model.frontier)
    assert models.identity(alone.with_target(2.0)) == models.identity(other)


def load_pair(folder: Path) -> CascadedClassifier:
    for seed, name in enumerate(("accurate", "robust")):
        net = models.build("cnn_small", num_classes=10, image_shape=(3, 8, 8), seed=seed)
        models.checkpoint.save(folder / f"{name}.safetensors", net)
    accurate = load_model(f"file:{folder}/accurate.safetensors")
    robust = load_model(f"tta:2:file:{folder}/robust.safetensors")
    frontier = (
        FrontierMixture(0.01, 0.8, 0.8, "linear", 1.0, 1.0, 0.0, 0.0, 1.0, 0.9),
        FrontierMixture(0.02, 0.9, 0.6, "linear", 1.0, 1.0, 0.0, 0.0, 1.0, 0.7, 2.0),
    )
    return CascadedClassifier(
        accurate,
        robust,
        0.8,
        first_q=0.9,
        first_scale=0.5,
        logit_map=confidence_switch(),
        frontier=frontier,
    )


def test_a_robust_model_without_views_and_a_threshold_outside_are_refused() -> None:
    with pytest.raises(InputError, match="`robust` must have views"):
        CascadedClassifier(Counted(1), Counted(2), 0.8, first_q=0.5)
    with pytest.raises(InputError, match="`first_q` must"):
        cascade(1.5, 0.3)
    with pytest.raises(InputError, match="`scale` must be positive"):
        cascade(0.5, 0.3, first_scale=0.0)
    with pytest.raises(InputError, match="`first_scale` must come with a map"):
        CascadedClassifier(
            Counted(1), TTAClassifier(Counted(2), 2), 0.8, first_q=0.5, first_scale=1.0
        )


def test_the_robust_side_leaves_the_class_of_a_sure_first_view_to_nobody() -> None:
    model, x = cascade(0.3, 0.25, first_scale=0.2), pixels(images().images)
    with torch.no_grad():
        side, outputs = CascadeMargins(model)(x), model.base_outputs(x)
        assert torch.equal(CascadeMargins(model).from_base_outputs(*outputs), side)
    first, sure = model.map_first(outputs[2]), model.alphas(x) == 1
    assert torch.equal(side.argmax(1)[sure], first.argmax(1)[sure]) and not bool(
        model.needs_accurate(side)[sure].any()
    )
    assert torch.equal(side[~sure], model.map_robust(outputs[1])[~sure])
    average = (first.exp() + model.map_robust(outputs[1]).exp()) / 2
    assert torch.allclose(BothStages(model)(x).exp(), average, atol=1e-6)


def test_hinges_of_a_cascade_are_zero_exactly_where_the_accurate_side_gives_the_class() -> None:
    model, x = cascade(0.3, 0.25, first_scale=0.2), pixels(images().images)
    with torch.no_grad():
        scores, predicted = model.hinges()(x), model(x).argmax(1)
        g, h, first = model.base_outputs(x)
        sides = Sides(model)(x)
    by_accurate = (
        (model.alphas(x) < 1)
        & model.needs_accurate(model.map_robust(h))
        & (g.argmax(1) != h.argmax(1))
        & (g.argmax(1) != first.argmax(1))
    )
    assert bool(by_accurate.any())
    rows = by_accurate.nonzero().squeeze(1)
    assert float(scores[rows, predicted[rows]].abs().max()) == 0
    sums = hinge_sums(sides, h.argmax(1), "mapped", reserve=0.0, rivals=0.0, stages=2)
    reached = (sums.gather(1, g.argmax(1, keepdim=True)).squeeze(1) == 0) & (
        g.argmax(1) != h.argmax(1)
    )
    assert bool(reached.any())
    assert not bool((reached & (model.alphas(x) == 1) & (first.argmax(1) == h.argmax(1))).any())
    # A sure first view keeps its hinge, whatever g predicts: the sum over one stage misses it.
    one = hinge_sums(sides[:, : 3 * CLASSES + 1], h.argmax(1), "mapped", reserve=0.0, rivals=0.0)
    assert bool((sums > one + 1e-3).any()) and not bool((sums < one - 1e-6).any())
