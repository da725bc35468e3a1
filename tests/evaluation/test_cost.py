from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from equipoise import models
from equipoise.core.modes import inference
from equipoise.data import Dataset, pixels
from equipoise.evaluation import cost
from equipoise.mixing import GatedClassifier, HardLabels, MixedClassifier, new_gate


def _base(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1, bias=False), nn.Flatten(), nn.Linear(width * 35, 6)
    )


def _two_convolutions(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(width * 2 * 3, 6),
    ).eval()


def _data() -> Dataset:
    images = torch.randint(
        0, 256, (20, 3, 5, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    return Dataset(
        "random",
        "test",
        images,
        torch.zeros(20, dtype=torch.int64),
        torch.arange(20),
        tuple("abcdef"),
    )


def test_operations_in_closed_form() -> None:
    # Each of the 35 pixels of each output channel sums 27 products; the last layer has 35·width·6
    # of them.
    assert cost.flops(_base(4), (3, 5, 7)) == 2 * (35 * 4 * 27 + 35 * 4 * 6)
    assert cost.parameters(_base(4)) == 4 * 27 + 35 * 4 * 6 + 6


def test_a_shared_module_counts_once() -> None:
    base = _base(4)
    assert cost.parameters(base, base) == cost.parameters(base)


def test_costs_of_a_mixture() -> None:
    mixture = MixedClassifier(_base(4), _base(2), 0.9, hard=True).eval()
    found = {entry.model: entry for entry in cost.costs(mixture, _data())}
    g, h = found["accurate"], found["robust"]
    assert g.flops and h.flops and g.parameters and h.parameters
    assert (
        found["mixed"].flops == g.flops + h.flops
        and found["mixed"].parameters == g.parameters + h.parameters
    )
    gated = found["mixed, gated"]
    assert gated.accurate_share is not None and gated.flops == pytest.approx(
        h.flops + gated.accurate_share * g.flops
    )
    x = _data().images.float() / 255
    with torch.no_grad():
        share = float(mixture.needs_accurate(mixture.map_robust(mixture.robust(x))).float().mean())
    assert gated.accurate_share == pytest.approx(share) and g.accurate_share is None


def test_the_cost_of_what_runs_outside_of_torch_is_unknown() -> None:
    service = HardLabels(lambda x: [0] * len(x))
    found = cost.costs(MixedClassifier(service, _base(2), 0.9, hard=True).eval(), _data())
    assert [entry.model for entry in found if entry.flops is not None] == ["robust"]
    assert [entry.model for entry in found if entry.parameters is not None] == ["robust"]
    assert found[-1].accurate_share is not None


def count_products(model: nn.Module) -> dict[str, int]:
    """Count products of all convolutions and linear layers in the passes from now on, per child and
    in all."""
    counts: dict[str, int] = {}

    def count(
        name: str, layer: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor
    ) -> None:
        weight = layer.weight
        assert isinstance(weight, torch.Tensor)
        counts[name] = counts.get(name, 0) + output.numel() * weight[0].numel()

    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(partial(count, name.partition(".")[0]))
    return counts


@pytest.mark.parametrize("hard", [False, True])
def test_the_reported_cost_is_what_predict_runs(hard: bool) -> None:
    """Of a mixture with a gate: the robust base once per image, the accurate one and the gate where
    h is unsure."""
    images, accurate, robust = _data(), _two_convolutions(4), _two_convolutions(6)
    with torch.no_grad():
        top = robust(pixels(images.images)).softmax(dim=1).topk(2, dim=1).values
    gate = new_gate(
        accurate,
        robust,
        pixels(images.images[:2]),
        width=2,
        feature_layers=(("0", "2"), ("0", "2")),
    )
    q = float((top[:, 0] - top[:, 1]).median())  # half of the margins are larger
    mixture = GatedClassifier(accurate, robust, gate, alpha_min=1 / (1 + q), hard=hard).eval()
    g, h, mixed, first = cost.costs(mixture, images)
    assert first.accurate_share is not None and 0.1 < first.accurate_share < 0.9
    counts = count_products(mixture)
    mixture.predict(images.images)
    assert h.flops is not None and counts["robust"] == 20 * h.flops / 2
    assert g.flops is not None and counts["accurate"] == pytest.approx(
        20 * first.accurate_share * g.flops / 2
    )
    assert counts["network"] > 0 and first.flops == pytest.approx(2 * sum(counts.values()) / 20)
    counts.clear()
    mixture(pixels(images.images))
    assert mixed.flops == 2 * sum(counts.values()) / 20
    assert mixed.parameters == cost.parameters(accurate, robust, gate)


@pytest.mark.parametrize(("alpha", "share"), [(0.0, 1.0), (1.0, 0.0)])
def test_the_accurate_model_runs_never_or_always_at_the_ends(alpha: float, share: float) -> None:
    assert (
        cost.accurate_share(MixedClassifier(_base(4), _base(2), alpha), _data(), batch_size=7)
        == share
    )


class Attention(nn.Module):
    """Operations that consist of others: linear layers and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.fc = nn.Linear(16, 48), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.queries(x.reshape(len(x), 1, -1, 16)).chunk(3, dim=-1)
        out: Tensor = self.fc(F.scaled_dot_product_attention(q, k, v).mean(dim=(1, 2)))
        return out


@pytest.mark.parametrize("arch", ["resnet8", "cnn_small", "attention"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_flops_are_those_of_torch(
    arch: str, mode: Callable[[], AbstractContextManager[None]]
) -> None:
    shape = (3, 16, 16)
    model = (
        Attention()
        if arch == "attention"
        else models.build(arch, num_classes=10, image_shape=shape)
    )
    with inference(model), mode(), FlopCounterMode(display=False) as expected:
        model(torch.zeros(1, *shape))
    with mode():
        assert cost.flops(model, shape) == expected.get_total_flops() > 10_000


def test_flops_are_counted_without_the_compiler() -> None:
    """Importing it takes seconds."""
    code = (
        "import sys, torch\nfrom equipoise import models\nfrom equipoise.evaluation.cost import flops\n"
        "model = models.build('cnn_small', num_classes=4, image_shape=(3, 8, 8))\n"
        "assert flops(model, (3, 8, 8)) > 0\nassert not {'torch._dynamo', 'sympy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
