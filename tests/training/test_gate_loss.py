"""The loss of the gate: its formula, its attacks, and that it learns to tell attacked images."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.core import losses, rng
from equipoise.core.ascent import value_and_gradient
from equipoise.core.checks import InputError
from equipoise.core.modes import inference
from equipoise.data.dataset import Dataset, whole_split
from equipoise.mixing import GatedClassifier, LogitMap, MixedClassifier, new_gate
from equipoise.models import build, formats
from equipoise.training import Objective, TrainingPlan, compilation, train
from equipoise.training.inner_apgd import auto_ascend
from equipoise.training.objectives import Standard
from equipoise.training.objectives.gate import GateLoss
from equipoise.training.objectives.policy import PolicyLoss
from equipoise.training.recorder import LAST

B, C, H, W, K = 48, 1, 8, 8, 5


def _model(**settings: float) -> GatedClassifier:
    g, h = (build("cnn_small", num_classes=K, image_shape=(C, H, W), seed=seed).eval() for seed in (1, 2))
    return GatedClassifier(g, h, new_gate(g, h, torch.rand(2, C, H, W), width=4, momentum=0.3), **settings)  # type: ignore[arg-type]


def _images() -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(0)
    return torch.rand(B, C, H, W, generator=chance), torch.randint(0, K, (B,), generator=chance)


def _stream(count: int = B) -> rng.Stream:
    return rng.stream(0, "test", torch.arange(count))


@pytest.mark.parametrize("adversary", ["A", "B", "C"])
def test_the_loss_is_its_formula_whatever_the_range(adversary: str) -> None:
    model, (x, y) = _model(alpha_min=0.9, alpha_max=0.95).train(), _images()
    objective = GateLoss(adversary=adversary, eps=0.1, steps=3, c_ce=0.3, c_bce=0.7, c_prod=0.2, clean=2.0)
    x_adv = objective.attack(model, x, y, _stream())
    out = objective(model, x, y, _stream(), {})
    g, h, z = model.parts(torch.cat((x, x_adv)))
    alpha = torch.sigmoid(z)  # all of (0, 1), not the range
    assert float(alpha.detach().min()) < 0.9
    p = (1 - alpha)[:, None] * g.exp() + alpha[:, None] * h.exp()
    for row in range(B):
        total = torch.zeros(())
        for place, s, weight in ((row, 0.0, 2.0), (B + row, 1.0, 1.0)):
            ce = -torch.log(p[place, y[row]])
            bce = F.binary_cross_entropy(alpha[place], torch.tensor(s))
            total = total + weight * (0.3 * ce + 0.7 * bce + 0.2 * ce * bce) / 3
        torch.testing.assert_close(out.losses[row], total, rtol=1e-3, atol=1e-4)
    assert model.network.training and out.losses.requires_grad


@pytest.mark.parametrize("adversary", ["A", "B", "C"])
def test_every_image_is_attacked_at_its_own_radius(adversary: str) -> None:
    model, (x, y) = _model().train(), _images()
    x = 0.3 + 0.4 * x  # away from the ends of [0, 1]
    objective = GateLoss(adversary=adversary, eps=0.1, steps=6, least=0.5, most=1.5)
    moved = (objective.attack(model, x, y, _stream()) - x).abs().flatten(1).amax(dim=1)
    radius = 0.1 * _stream().at("radius").uniform(low=0.5, high=1.5)
    assert bool((moved <= radius + 1e-6).all()) and float(moved.max() / moved.min()) > 1.5
    assert torch.isclose(moved, radius, atol=1e-5).float().mean() > 0.9  # they go to the edge


def test_the_attacks_raise_what_they_should() -> None:
    model, (x, _) = _model().eval(), _images()
    y = model(x).argmax(dim=1)
    reached = {}
    for adversary in ("A", "B", "C"):
        objective = GateLoss(adversary=adversary, eps=0.1, steps=8, term=0.0, untargeted=1.0, least=1.0, most=1.0)
        reached[adversary] = losses.cross_entropy(model(objective.attack(model, x, y, _stream())), y).mean()
    assert all(value > losses.cross_entropy(model(x), y).mean() for value in reached.values())
    assert min(reached["B"], reached["C"]) > 0.98 * reached["A"]


def test_the_term_pushes_alpha_down() -> None:
    model, (x, y) = _model().eval(), _images()
    objective = [GateLoss(adversary="C", eps=0.1, steps=8, term=term) for term in (0.0, 1.0)]
    alpha = [model.alphas(each.attack(model, x, y, _stream())).mean() for each in objective]
    assert alpha[1] < alpha[0] - 0.05


def test_kinds_targets_and_steps_are_drawn() -> None:
    model, many = _model().eval(), _stream(2000)
    x, y = torch.rand(2000, C, H, W), torch.zeros(2000, dtype=torch.int64)
    objective = GateLoss(untargeted=0.25, steps=15)
    aim = objective.aims(model, x, y, many)
    assert float((aim < 0).float().mean()) == pytest.approx(0.25, abs=0.03)
    assert bool((aim != y).all()) and len(aim.unique()) == K
    counts = torch.tensor([objective.count(rng.stream(n, "steps", torch.arange(2))) for n in range(400)]).float()
    assert float(counts.mean()) == pytest.approx(15, abs=0.8) and float(counts.std()) == pytest.approx(30**0.5, abs=0.8)


def test_auto_ascent_finds_the_corner_of_a_linear_loss() -> None:
    x = 0.3 + 0.4 * _images()[0]
    way = torch.randn(x.shape, generator=torch.Generator().manual_seed(3))
    eps = torch.linspace(0.01, 0.1, B)
    found = auto_ascend(value_and_gradient(lambda at: (way * at).flatten(1).sum(1)), x, x, norm="linf", eps=eps, steps=10)
    torch.testing.assert_close(found, x + eps.view(-1, 1, 1, 1) * way.sign())


def test_it_trains_over_a_map_and_a_hard_decision() -> None:
    model, (x, y) = _model(), _images()
    over = model.on(MixedClassifier(model.accurate, model.robust, 0.9, logit_map=LogitMap(2.0, 1.2, 0.2), hard=True))
    out = GateLoss(c_ce=1.0, eps=0.1, steps=3)(over.train(), x, y, _stream(), {})
    out.losses.mean().backward()
    found = [p.grad for p in over.network.parameters()]
    assert bool(out.losses.isfinite().all()) and all(g is not None and bool(g.isfinite().all()) for g in found)


def _grey() -> tuple[Tensor, Tensor]:
    """Images of one grey each, so that an attack shows."""
    return _images()[0][:, :, :1, :1].expand(-1, -1, H, W), _images()[1]


def _data() -> Dataset:
    x, y = _grey()
    return whole_split("noise", "train", (x * 255).to(torch.uint8), y, tuple("abcde"))


def test_it_learns_to_tell_attacked_images_and_leaves_the_bases_alone() -> None:
    model = _model()
    before = {key: value.clone() for key, value in model.state_dict().items() if not key.startswith("network.")}
    objective = GateLoss(adversary="A", eps=0.2, steps=3, least=1.0, most=1.0)
    plan = TrainingPlan(epochs=12, batch_size=16, optimizer="adamw", lr=5e-3, held_out=0, ema=0.8, clip=10.0, warmup=0.5)
    train(model, objective, _data(), plan)
    x, y = _grey()
    with inference(model):
        x_adv = objective.attack(model, x, y, _stream())
        z, attacked = model.parts(x)[2], model.parts(x_adv)[2]
    assert float(attacked.mean() - z.mean()) > 1.5
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items() if key in before)


def test_a_folder_needs_no_facts(tmp_path: Path) -> None:
    """A mixture is not of the zoo: what its checkpoints must say is known without the user."""
    objective = GateLoss(eps=0.1, steps=2)
    plan = TrainingPlan(epochs=2, batch_size=16, optimizer="adamw", lr=5e-3, held_out=0, ema=0.8, save_seconds=0)
    whole = train(_model(), objective, _data(), plan).state_dict()
    again = train(_model(), objective, _data(), plan, out=tmp_path / "run")
    assert all(torch.equal(value, whole[key]) for key, value in again.state_dict().items())
    told = formats.read_safetensors(tmp_path / "run" / LAST)[1]
    assert told.items() >= {"arch": "GatedClassifier", "num_classes": "5", "image_shape": "1,8,8"}.items()


def test_mistakes_are_one_sentence() -> None:
    with pytest.raises(InputError, match="`adversary` must be one of A, B, C, got 'D'"):
        GateLoss(adversary="D")
    with pytest.raises(InputError, match=r"`least` must be at most 1, the largest radius, got 2"):
        GateLoss(least=2.0, most=1.0)
    with pytest.raises(InputError, match="`model` must be a GatedClassifier, got CNN"):
        GateLoss()(_model().accurate, *_images(), _stream(), {})


@pytest.mark.parametrize("objective", [GateLoss(eps=0.1), PolicyLoss(eps=0.1)])
@pytest.mark.parametrize("blanks", [{"pad": 2}, {"cutout": 3}])
def test_blank_pixels_are_refused_because_an_attack_on_them_shows(objective: Objective, blanks: dict[str, int]) -> None:
    ((name, value),) = blanks.items()
    plan = TrainingPlan(epochs=1, batch_size=16, held_out=0, pad=blanks.get("pad", 0), cutout=blanks.get("cutout", 0))
    with pytest.raises(InputError, match=f"^`{name}` must be 0 where attacked images are told from .*got {value}$"):
        train(_model(), objective, _data(), plan)


@pytest.mark.parametrize("objective", [GateLoss(eps=0.1), PolicyLoss(eps=0.1)])
def test_on_a_gpu_nothing_of_it_is_compiled(objective: Objective) -> None:
    """The number of steps is drawn on the host, and a compiled model is no mixture any more."""
    feed: Any = SimpleNamespace(device=torch.device("cuda"), world=SimpleNamespace(size=1))
    assert compilation.how(TrainingPlan(), _model(), feed, objective) == "off"
    assert compilation.how(TrainingPlan(), _model(), feed, Standard()) == "graph"
    with pytest.raises(InputError, match="`compile` must be auto or off for an objective that decides on the way"):
        compilation.how(TrainingPlan(compile="model"), _model(), feed, objective)
