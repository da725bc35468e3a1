"""One contract over all objectives, their settings, and objectives of other packages."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_objectives import LABELS, B, NormNetwork, PlainNetwork, images, losses, stream

from equipoise.core.checks import InputError
from equipoise.core.registry import Registry
from equipoise.training import OBJECTIVES, Objective, train
from equipoise.training.objectives import Adversarial, Gaussian, SmoothMix

SETTINGS: dict[str, dict[str, Any]] = {"macer": {"noises": 3}, "smoothmix": {"one_step": True}}
NAMES = sorted(OBJECTIVES.builtin)


def build(name: str) -> Objective:
    """The objective of a late epoch."""
    return OBJECTIVES[name](**SETTINGS.get(name, {})).at_epoch(20, 30)


@pytest.mark.parametrize("name", NAMES)
def test_output(name: str) -> None:
    objective, model = build(name), NormNetwork()
    memory = objective.initial_memory(B)
    output = objective(model, images(), LABELS, stream(), memory)
    assert output.losses.shape == output.correct.shape == (B,)
    assert (
        output.correct.dtype == torch.bool
        and output.losses.isfinite().all()
        and not output.correct.requires_grad
    )
    assert output.memory.keys() == memory.keys()
    assert all(
        value.shape == memory[key].shape and not value.requires_grad
        for key, value in output.memory.items()
    )


@pytest.mark.parametrize("name", NAMES)
def test_gradients(name: str) -> None:
    model = NormNetwork()
    loss = losses(build(name), model, images(), LABELS).mean()
    gradients = torch.autograd.grad(loss, [model.fc.weight, model.norm.weight])
    assert all(gradient.isfinite().all() and gradient.abs().sum() > 0 for gradient in gradients)


@pytest.mark.parametrize("name", NAMES)
def test_no_side_effects(name: str) -> None:
    """Modes, frozen parameters, gradients, images and the global random state stay as they were."""
    model, x = NormNetwork(), images()
    model.conv.weight.requires_grad_(False)
    model.norm.eval()
    modes = {key: module.training for key, module in model.named_modules()}
    flags = {key: p.requires_grad for key, p in model.named_parameters()}
    before, first = torch.get_rng_state(), losses(build(name), model, x, LABELS)
    assert {key: module.training for key, module in model.named_modules()} == modes
    assert {key: p.requires_grad for key, p in model.named_parameters()} == flags
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), before) and torch.equal(x, images())
    assert torch.equal(first, losses(build(name), model, x, LABELS))


@pytest.mark.parametrize("name", NAMES)
def test_validation_metrics(name: str) -> None:
    metrics = build(name).validation_metrics(NormNetwork().eval(), images(), LABELS, stream())
    assert next(iter(metrics)) == "clean"
    assert all(value.shape == (B,) and value.dtype == torch.bool for value in metrics.values())


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_of_an_image_does_not_depend_on_its_batch(name: str) -> None:
    objective, model, x = build(name), PlainNetwork(), images()
    part = objective(model, x[1:3], LABELS[1:3], stream()[1:3], objective.initial_memory(2)).losses
    torch.testing.assert_close(part, losses(objective, model, x, LABELS)[1:3], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", sorted({*NAMES} - {"standard"}))
def test_the_random_stream_matters(name: str) -> None:
    objective, model, x = build(name), PlainNetwork(), images()
    first, second = (losses(objective, model, x, LABELS, seed=seed) for seed in (0, 1))
    assert not torch.allclose(first, second, rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_description_has_name_version_and_settings(name: str) -> None:
    objective = OBJECTIVES[name]()
    version = {"smoothmix": 2}.get(name, 1)
    assert objective.describe() == {"name": name, "version": version, **objective.to_dict()}


@pytest.mark.parametrize(
    ("objective", "settings", "message"),
    [
        (Adversarial, {"steps": 0}, "`steps` must be a whole number of at least 1"),
        (Adversarial, {"norm": "linfy"}, "did you mean 'linf'"),
        (Gaussian, {"sigma": -1}, "`sigma` must not be negative"),
        (SmoothMix, {"form": "codes"}, "`form` must be one of code, paper"),
    ],
)
def test_wrong_settings_are_refused(
    objective: type[Objective], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        objective(**settings)


def test_radii_may_be_written_as_fractions() -> None:
    assert Adversarial(eps="8/255").eps == 8 / 255  # type: ignore[arg-type]


EXTERNAL_OBJECTIVE = '''
from dataclasses import dataclass
from equipoise.core.settings import setting
from equipoise.training import Objective, ObjectiveOutput

@dataclass(frozen=True, kw_only=True)
class SquaredLogits(Objective):
    """The squared logits."""

    name = "squared-logits"
    scale: float = setting(1.0, "Factor of the loss.", positive=True)

    def __call__(self, model, x, y, stream, memory):
        logits = model(x)
        return ObjectiveOutput(self.scale * logits.square().sum(dim=1), logits.argmax(dim=1) == y)
'''


@pytest.fixture
def external_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package with an objective."""
    (tmp_path / "my_objectives.py").write_text(EXTERNAL_OBJECTIVE)
    information = tmp_path / "my_objectives-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: my-objectives\nVersion: 1.0\n"
    )
    (information / "entry_points.txt").write_text(
        "[equipoise.objectives]\nsquared-logits = my_objectives:SquaredLogits\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield
    sys.modules.pop("my_objectives", None)


@pytest.mark.usefixtures("external_package")
def test_an_installed_package_adds_an_objective() -> None:
    registry: Registry[type[Objective]] = Registry(
        OBJECTIVES.group, OBJECTIVES.noun, OBJECTIVES.builtin
    )
    objective = registry.get_entry("squared-logits")
    result = train(
        objective, data="digits", arch="cnn_small", epochs=1, scale=2.0, held_out=1000, device="cpu"
    )
    assert objective().describe() == {"name": "squared-logits", "version": 1, "scale": 1.0}
    assert [r.metric for r in result.results] == ["clean", "clean"]
