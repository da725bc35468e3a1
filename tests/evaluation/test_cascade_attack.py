"""The adaptive attacks on a cascade find both ways to break it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise.attacks import Apgd, Attack, Pgd, Square, Suite
from equipoise.core import rng
from equipoise.core.arrays import FrontierArrays
from equipoise.core.threat import Threat
from equipoise.data import Dataset
from equipoise.evaluation import evaluate
from equipoise.evaluation.adaptive import KINDS, adaptive_attacks
from equipoise.mixing import CascadedClassifier, MixedClassifier
from equipoise.mixing.logit_maps import confidence_switch
from equipoise.models.layers.tta import TTAClassifier

THREAT = Threat("linf", 0.1)
SHORT = Suite((Apgd("ce", 10),), name="short")


class Halves(nn.Module):
    """Two classes by brightness: weights of the mean over an image, and of right half minus left
    half.

    Of an image and its mirror image together, only the first is left.
    """

    def __init__(self, mean: float, difference: float) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.tensor([mean, difference]))

    def forward(self, x: Tensor) -> Tensor:
        left, right = x[..., :2].mean(dim=(1, 2, 3)), x[..., 2:].mean(dim=(1, 2, 3))
        score = self.weights[0] * ((left + right) / 2 - 0.5) + self.weights[1] * (right - left)
        return torch.stack([score, -score, score * 0 - 30], dim=1)


def cascade(accurate: nn.Module, robust: nn.Module, first_q: float, q: float) -> CascadedClassifier:
    return CascadedClassifier(
        accurate,
        TTAClassifier(robust, 2),
        1 / (1 + q),
        first_q=first_q,
        logit_map=confidence_switch(1.0),
    ).eval()


def survivors(
    model: MixedClassifier, images: Tensor, attack: Attack = SHORT, kind: str = "surrogate"
) -> int:
    labels = torch.zeros(len(images), dtype=torch.int64)
    own = adaptive_attacks(model, attack, (kind,))[KINDS[kind]]
    attacked = own(
        model,
        images,
        labels,
        threat=THREAT,
        stream=rng.stream(0, "test", torch.arange(len(images))),
    )
    assert float((attacked - images).abs().max()) <= THREAT.eps + 1e-6
    with torch.no_grad():
        assert bool((model(images).argmax(1) == 0).all())
        return int((model(attacked).argmax(1) == 0).sum())


def test_a_sure_first_view_is_made_sure_of_a_wrong_class() -> None:
    """All views and g keep the class in the whole ball; only the first view does not."""
    images, constant = torch.full((2, 3, 4, 4), 0.75), Halves(100.0, 0.0)
    robust = Halves(
        20.0, 200.0
    )  # mean score at least 3; the difference adds up to ±40 to the first view
    assert survivors(cascade(constant, robust, 0.5, 0.5), images) == 0
    assert survivors(cascade(constant, robust, 1.0, 0.5), images) == len(images)


@pytest.mark.parametrize(
    ("attack", "kind"),
    [
        (Apgd("ce", 50), "surrogate"),
        (Pgd(steps=50), "surrogate"),
        (Apgd("ce", 50), "through"),
        (SHORT, "through"),
    ],
    ids=["apgd", "pgd", "apgd-through", "suite-through"],
)
def test_any_attack_sees_the_first_view(attack: Attack, kind: str) -> None:
    images = torch.full((2, 3, 4, 4), 0.75)
    model = cascade(Halves(100.0, 0.0), Halves(20.0, 200.0), 0.5, 0.5)
    assert survivors(model, images, attack, kind) == 0


@pytest.mark.parametrize("tempered", [False, True])
def test_surrogates_have_a_gradient_of_the_first_view(tempered: bool) -> None:
    """Right minus left half changes the first view alone: the mean over an image and its mirror
    image does not."""
    model = cascade(Halves(1.0, 0.0), Halves(2.0, 2.0), 0.5, 0.5)
    surrogate: Any = model.tempered_surrogate() if tempered else model.surrogate()
    x = torch.full((1, 3, 4, 4), 0.6, requires_grad=True)
    gradient = torch.autograd.grad(surrogate(x)[:, 0].sum(), x)[0]
    assert float(gradient[..., 2:].sum() - gradient[..., :2].sum()) > 0.01
    with torch.no_grad():
        assert torch.equal(surrogate(x), surrogate.from_base_outputs(*model.base_outputs(x)))
        assert float(surrogate(x).exp().sum()) == pytest.approx(1, abs=1e-5)
    assert surrogate.reads_bases_of(model) and not surrogate.reads_bases_of(nn.Identity())


def test_square_alone_stays_alone() -> None:
    model = cascade(Halves(1.0, 0.0), Halves(1.0, 1.0), 0.5, 0.5)
    assert isinstance(adaptive_attacks(model, Square(10))["adaptive"], Square)
    suite = adaptive_attacks(model, Apgd("ce", 5, repeats=3))["adaptive"]
    assert isinstance(suite, Suite) and suite.repeats == 3


def test_both_stages_are_made_unsure_where_the_accurate_model_falls() -> None:
    """Score 2.5 for the clean image; 0.5, margin .46, is the least: below q of both stages, so that
    g decides."""
    images, robust = torch.full((2, 3, 4, 4), 0.625), Halves(20.0, 0.0)
    accurate = nn.Sequential(Shifted(0.05), Halves(1000.0, 0.0))  # it falls at a brightness of 0.55
    assert survivors(cascade(accurate, robust, 0.6, 0.6), images) == 0
    for first_q, q in (
        (0.4, 0.6),
        (0.6, 0.4),
    ):  # one stage that stays sure is enough to keep the class
        assert survivors(cascade(accurate, robust, first_q, q), images) == len(images)


class Shifted(nn.Module):
    """Images with some brightness subtracted."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return x - self.by


def test_the_list_names_both_stages() -> None:
    names = [
        stage.name
        for stage in adaptive_attacks(cascade(Halves(1.0, 0.0), Halves(1.0, 1.0), 0.5, 0.5), SHORT)[
            "adaptive"
        ].stages()
    ]
    for prefix in (
        "short/first-stage/",
        "short/both-stages/",
        "short/hinges/",
        "short/own-gradients/",
    ):
        assert any(name.startswith(prefix) for name in names), prefix


def test_a_frontier_has_no_switches_in_place_of_a_cascade(tmp_path: Path) -> None:
    """Other mixtures are computed from the logits of all views alone, which do not decide the class
    of a cascade."""
    model = cascade(Halves(1.0, 0.0), Halves(1.0, 1.0), 0.5, 0.5)
    switch = MixedClassifier(
        model.accurate, model.robust, model.alpha, hard=True, logit_map=model.logit_map
    ).eval()
    images = torch.randint(
        0, 256, (4, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    data = Dataset(
        "random", "test", images, torch.zeros(4, dtype=torch.int64), torch.arange(4), tuple("abc")
    )
    for mixture, expected in ((model, False), (switch, True)):
        folder = tmp_path / type(mixture).__name__
        evaluate(
            {"mixture": mixture},
            data,
            threat=THREAT,
            attack=Apgd("ce", 2),
            out=folder,
            device="cpu",
        )
        assert (FrontierArrays.load(folder) is not None) == expected
