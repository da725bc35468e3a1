"""Selection among candidates: the target, the pool of attacks, and resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise.attacks import Apgd, Attack, Suite
from equipoise.core.checks import InputError
from equipoise.core.threat import Threat
from equipoise.data import Dataset
from equipoise.evaluation import Conditions
from equipoise.fitting.selection import CandidateEvaluator, CandidateLogits, Selection
from equipoise.mixing import GatedClassifier, MixedClassifier, mix

N = 60
RANGES = ((0.0, 0.5), (0.2, 0.7), (0.5, 0.9), (0.8, 1.0))


class Ramp(nn.Module):
    """Two classes by one pixel; `slope` is how confident the model is."""

    def __init__(self, pixel: int, slope: float) -> None:
        super().__init__()
        self.first, self.second = nn.Identity(), nn.Identity()
        self.pixel, self.weight = pixel, nn.Parameter(torch.tensor(slope))

    def forward(self, x: Tensor) -> Tensor:
        score = self.weight * (self.second(self.first(x)).flatten(1)[:, self.pixel] - 0.5)
        return torch.stack((score, -score), dim=1)


class PixelGate(nn.Module):
    """A gate whose output is the third pixel."""

    feature_layers = (("first", "second"), ("first", "second"))

    def forward(self, features: list[tuple[Tensor, Tensor]]) -> Tensor:
        return 4 * (features[0][0].flatten(1)[:, 2] - 0.5)


def make_gated() -> GatedClassifier:
    gate: Any = PixelGate()
    return GatedClassifier(Ramp(0, 30.0), Ramp(1, 6.0), gate, scale=1.0, shift=0.0).eval()


def make_data() -> Dataset:
    """The accurate model is always correct and easily attacked; the robust one is correct far from
    the middle."""
    x = torch.rand(N, 1, 1, 3, generator=torch.Generator().manual_seed(0))
    y = torch.arange(N) % 2
    x[:, 0, 0, 0] = torch.where(y == 0, 0.56, 0.44)
    x[:, 0, 0, 1] = torch.where(y == 0, 0.4, 0.0) + 0.6 * x[:, 0, 0, 1]
    return Dataset("ramps", "train", (x * 255).to(torch.uint8), y, torch.arange(N), ("a", "b"))


class CountedAttack:
    """The attack on a candidate, counting how often it is made; interrupted at one of them."""

    def __init__(self, interrupt_at: int | None = None) -> None:
        self.models: list[str] = []
        self.interrupt_at = interrupt_at

    def __call__(self, model: MixedClassifier) -> Attack:
        self.models.append(model.extra_repr())
        if len(self.models) == self.interrupt_at:
            raise KeyboardInterrupt
        return Suite(attacks=(Apgd(loss="margin", steps=10),))


def make_evaluator(
    attack: CountedAttack | None = None, folder: Path | None = None
) -> CandidateEvaluator:
    conditions = Conditions(Threat("linf", 0.1), torch.device("cpu"), 0, 16)
    return CandidateEvaluator(make_data(), conditions, attack or CountedAttack(), folder)


def test_outputs_serve_every_candidate() -> None:
    model, evaluator = make_gated(), make_evaluator()
    logits = evaluator.clean(model.with_range(0.2, 0.9, scale=3.0, shift=-1.0))
    x, y = evaluator.data.images.float() / 255, evaluator.data.labels
    for candidate in (model, model.with_range(0.5, 0.8, scale=0.5, shift=0.7)):
        assert torch.equal(logits.correct(candidate), candidate(x).argmax(dim=1) == y)
    fixed = MixedClassifier(model.accurate, model.robust, 0.3)
    assert torch.equal(evaluator.clean(fixed).correct(fixed), fixed(x).argmax(dim=1) == y)


def test_candidate_logits_are_mixed_by_the_formula() -> None:
    generator = torch.Generator().manual_seed(1)
    g, h = (torch.log_softmax(torch.randn(5, 3, generator=generator), dim=1) for _ in range(2))
    u, y = torch.randn(5, generator=generator), torch.tensor([0, 1, 2, 0, 1])
    model = make_gated().with_range(0.1, 0.9, scale=2.0, shift=0.3)
    expected = mix(g, h, model.restrict_gate(2 * u + 0.3)).argmax(dim=1) == y
    assert torch.equal(CandidateLogits(g, h, u, y).correct(model), expected)


@pytest.fixture(scope="module")
def brute_force() -> tuple[dict[MixedClassifier, float], dict[MixedClassifier, float]]:
    """Clean accuracy of many candidates, and accuracy of each under its own attack."""
    model, evaluator = make_gated(), make_evaluator()
    candidates = [
        MixedClassifier(model.accurate, model.robust, alpha).eval()
        for alpha in torch.linspace(0.3, 1.0, 29).tolist()
    ]
    return (
        {c: float(evaluator.clean(c).correct(c).float().mean()) for c in candidates},
        {c: float(evaluator.attacked(c).correct(c).float().mean()) for c in candidates},
    )


@pytest.mark.parametrize("target", [0.2, 0.4, 0.55])
def test_selection_equals_brute_force(
    brute_force: tuple[dict[MixedClassifier, float], dict[MixedClassifier, float]], target: float
) -> None:
    """Up to two images, the most accurate of the candidates that reach the target."""
    clean, robust = brute_force
    candidates = list(clean)
    selected = Selection(candidates, make_evaluator()).select(robust=target)
    assert selected.met and target <= selected.attacked <= robust[selected.model]
    assert selected.clean >= max(clean[c] for c in candidates if robust[c] >= target) - 2 / N
    assert selected.candidates_attacked < len(candidates)


def test_clean_target_and_unreachable_target() -> None:
    model = make_gated()
    selection = Selection([model.with_range(*ends) for ends in RANGES], make_evaluator())
    accurate = selection.select(clean=0.9)
    assert accurate.met and accurate.clean >= 0.9
    unreachable = selection.select(robust=0.999)
    assert not unreachable.met and unreachable.attacked >= accurate.attacked


def test_exactly_one_target() -> None:
    with pytest.raises(InputError, match="one of them"):
        Selection([make_gated()], make_evaluator()).select(robust=0.5, clean=0.5)


def test_interrupted_selection_resumes(tmp_path: Path) -> None:
    model, attack = make_gated(), CountedAttack(interrupt_at=3)
    candidates = [model.with_range(*ends) for ends in RANGES]
    with pytest.raises(KeyboardInterrupt):
        Selection(candidates, make_evaluator(attack, tmp_path)).select(robust=0.4)
    selected = Selection(candidates, make_evaluator(attack, tmp_path)).select(robust=0.4)
    assert len(attack.models) == selected.candidates_attacked + 1 == len(set(attack.models)) + 1
    uninterrupted = Selection(candidates, make_evaluator()).select(robust=0.4)
    assert (uninterrupted.model, uninterrupted.summary()) == (selected.model, selected.summary())


def test_repeated_selection_attacks_only_other_models(tmp_path: Path) -> None:
    model, attack = make_gated(), CountedAttack()
    candidates = [model.with_range(*ends) for ends in RANGES]
    first = Selection(candidates, make_evaluator(attack, tmp_path)).select(robust=0.4)
    count = len(attack.models)
    again = Selection(candidates, make_evaluator(attack, tmp_path)).select(robust=0.4)
    assert again.summary() == first.summary() and len(attack.models) == count
    with torch.no_grad():
        next(model.parameters()).add_(0.1)
    Selection(candidates, make_evaluator(attack, tmp_path)).select(robust=0.4)
    assert len(attack.models) > count
