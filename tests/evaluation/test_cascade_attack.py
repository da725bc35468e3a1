"""The adaptive attacks on a cascade find both ways to break it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from equipoise.attacks import Apgd, Suite
from equipoise.core import rng
from equipoise.core.threat import Threat
from equipoise.evaluation.adaptive import adaptive_attacks
from equipoise.mixing import CascadedClassifier, MixedClassifier
from equipoise.mixing.logit_maps import confidence_switch
from equipoise.models.preprocessing import TTAClassifier

THREAT = Threat("linf", 0.1)
SHORT = Suite((Apgd("ce", 10),), name="short")


class Halves(nn.Module):
    """Two classes by brightness: weights of the mean over an image, and of right half minus left half.

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
    return CascadedClassifier(accurate, TTAClassifier(robust, 2), 1 / (1 + q), first_q=first_q,
                              logit_map=confidence_switch(1.0)).eval()


def survivors(model: MixedClassifier, images: Tensor, attack: Suite = SHORT) -> int:
    labels = torch.zeros(len(images), dtype=torch.int64)
    own = adaptive_attacks(model, attack)["adaptive"]
    attacked = own(model, images, labels, threat=THREAT, stream=rng.stream(0, "test", torch.arange(len(images))))
    assert float((attacked - images).abs().max()) <= THREAT.eps + 1e-6
    with torch.no_grad():
        assert bool((model(images).argmax(1) == 0).all())
        return int((model(attacked).argmax(1) == 0).sum())


def test_a_sure_first_view_is_made_sure_of_a_wrong_class() -> None:
    """All views and g keep the class in the whole ball; only the first view does not."""
    images, constant = torch.full((2, 3, 4, 4), 0.75), Halves(100.0, 0.0)
    robust = Halves(20.0, 200.0)  # mean score at least 3; the difference adds up to ±40 to the first view
    assert survivors(cascade(constant, robust, 0.5, 0.5), images) == 0
    assert survivors(cascade(constant, robust, 1.0, 0.5), images) == len(images)


def test_both_stages_are_made_unsure_where_the_accurate_model_falls() -> None:
    """Score 2.5 for the clean image; 0.5, margin .46, is the least: below q of both stages, so that g decides."""
    images, robust = torch.full((2, 3, 4, 4), 0.625), Halves(20.0, 0.0)
    accurate = nn.Sequential(Shifted(0.05), Halves(1000.0, 0.0))  # it falls at a brightness of 0.55
    assert survivors(cascade(accurate, robust, 0.6, 0.6), images) == 0
    for first_q, q in ((0.4, 0.6), (0.6, 0.4)):  # one stage that stays sure is enough to keep the class
        assert survivors(cascade(accurate, robust, first_q, q), images) == len(images)


class Shifted(nn.Module):
    """Images with some brightness subtracted."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return x - self.by


def test_the_list_names_both_stages() -> None:
    names = [stage.name for stage in adaptive_attacks(cascade(Halves(1.0, 0.0), Halves(1.0, 1.0), 0.5, 0.5),
                                                      SHORT)["adaptive"].stages()]
    for prefix in ("short/first-stage/", "short/both-stages/", "short/hinges/", "short/own-gradients/"):
        assert any(name.startswith(prefix) for name in names), prefix
