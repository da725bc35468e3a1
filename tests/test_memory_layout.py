"""The user's own module sees ordinary contiguous images, whatever layout our copies of it have."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equipoise as eq
from equipoise.attacks.adapters import from_callable
from equipoise.attacks.fused import channels_last_copy, fuse
from equipoise.attacks.registry import ATTACKS, make_attack
from equipoise.core.rng import stream
from equipoise.core.threat import Threat
from equipoise.data import Dataset, pixels
from equipoise.mixing import MixedClassifier

THREAT = Threat("linf", 0.03)
CLASSES = tuple("abcd")
on_each_device = pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
            ],
        ),
    ],
)


class Flattened(nn.Module):
    """Flattens with `.view` after a convolution, which needs contiguous activations.

    It remembers the layout of the images that it is given itself; a copy has a list of its own.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv, self.norm = nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5)
        self.fc = nn.Linear(5 * 6 * 7, 4)
        self.contiguous: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, 6, 7) → (B, 4)."""
        self.contiguous.append(x.is_contiguous())
        features = torch.relu(self.norm(self.conv(x)))
        logits: Tensor = 20 * self.fc(features.view(len(x), -1))
        return logits


class Pooled(Flattened):
    """The same with a flattening that any layout allows: copies with channels last agree with
    it."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, 6, 7) → (B, 4)."""
        self.contiguous.append(x.is_contiguous())
        features = torch.relu(self.norm(self.conv(x)))
        logits: Tensor = 20 * self.fc(features.flatten(1))
        return logits


def make_data(count: int = 24) -> Dataset:
    """Images whose channels lie last in memory, as of a transposed array; labels of the network."""
    values = torch.randint(
        256, (count, 6, 7, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    images = values.permute(0, 3, 1, 2)
    with torch.no_grad():
        labels = Flattened().eval()(pixels(images)).argmax(dim=1)
    return Dataset("random", "test", images, labels, torch.arange(count), CLASSES)


def assert_only_contiguous(*models: Flattened) -> None:
    """Every image that the modules were given was contiguous, and their weights still are."""
    for model in models:
        assert model.contiguous and all(model.contiguous)
        assert model.conv.weight.is_contiguous()


def settings_of(attack: str) -> dict[str, Any]:
    """Few steps, where the attack has steps."""
    return (
        {"steps": 3} if "steps" in inspect.signature(ATTACKS.get_entry(attack)).parameters else {}
    )


@on_each_device
@pytest.mark.parametrize("model_type", [Flattened, Pooled])
@pytest.mark.parametrize("attack", list(ATTACKS))
def test_every_attack(attack: str, model_type: type[Flattened], device: str) -> None:
    model, data = model_type().eval(), make_data(6)
    result = eq.evaluate(
        model, data, threat=THREAT, attack=attack, device=device, **settings_of(attack)
    )
    assert result.result("model", "clean").n == 6
    assert_only_contiguous(model)


@pytest.mark.parametrize("attack", list(ATTACKS))
@pytest.mark.parametrize("side", ["accurate", "robust"])
def test_either_base_of_a_mixture(attack: str, side: str) -> None:
    flattened, other = Flattened().eval(), Pooled(1).eval()
    accurate, robust = (flattened, other) if side == "accurate" else (other, flattened)
    mixture = MixedClassifier(accurate, robust, 0.7)
    result = eq.evaluate(
        mixture, make_data(4), threat=THREAT, attack=attack, device="cpu", **settings_of(attack)
    )
    assert result.result("mixed", "clean").n == 4
    assert_only_contiguous(flattened, other)


@pytest.mark.parametrize("attack", ["pgd", "apgd", "square", "minimum-norm"])
def test_an_attack_on_one_batch(attack: str) -> None:
    model, data = Flattened().eval(), make_data(6)
    x = data.images.float() / 255
    assert not x.is_contiguous()
    made = make_attack(attack, **settings_of(attack))
    x_adv = made(model, x, data.labels, threat=THREAT, stream=stream(0, "attack", data.index))
    assert x_adv.is_contiguous()
    assert_only_contiguous(model)


def channels_last(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """An attack of the user's own that changes nothing but the layout."""
    return x.to(memory_format=torch.channels_last)


def test_an_attack_of_the_users_own_may_return_any_layout() -> None:
    model, data = Flattened().eval(), make_data(6)
    own = from_callable(channels_last)
    attacked = eq.attack(model, data, threat=THREAT, attack=own, device="cpu")
    assert torch.equal(attacked.predicted, data.labels)
    eq.evaluate(model, data, threat=THREAT, attack=own, device="cpu")
    assert_only_contiguous(model)


@pytest.mark.parametrize("as_floats", [False, True])
def test_predict(as_floats: bool) -> None:
    accurate, robust, images = Flattened(1).eval(), Flattened().eval(), make_data(6).images
    x = images.float() / 255 if as_floats else images
    assert not x.is_contiguous()
    mixture = MixedClassifier(accurate, robust, 0.7)
    with torch.no_grad():
        expected = mixture(pixels(images)).argmax(dim=1)
    assert torch.equal(mixture.predict(x), expected)
    assert_only_contiguous(accurate, robust)


@pytest.mark.parametrize("side", ["accurate", "robust"])
def test_fit(side: str) -> None:
    flattened, other = Flattened().eval(), Pooled(1).eval()
    accurate, robust = (flattened, other) if side == "accurate" else (other, flattened)
    fitted = eq.fit(
        accurate,
        robust,
        make_data(120),
        threat=THREAT,
        lose_at_most=50,
        steps=2,
        targets=2,
        pool=1,
        rounds=1,
        device="cpu",
    )
    assert isinstance(fitted.mixture, MixedClassifier)
    assert_only_contiguous(flattened, other)


def test_fit_by_the_rule_of_the_paper() -> None:
    accurate, robust = Flattened().eval(), Flattened(1).eval()
    fitted = eq.fit(
        accurate,
        robust,
        make_data(60),
        threat=THREAT,
        rule="paper",
        beta=0.9,
        steps=2,
        targets=2,
        pool=1,
        rounds=1,
        device="cpu",
    )
    assert isinstance(fitted.mixture, MixedClassifier)
    assert_only_contiguous(accurate, robust)


@on_each_device
@pytest.mark.parametrize("model_type", [Flattened, Pooled])
def test_certify(model_type: type[Flattened], device: str) -> None:
    model, accurate = model_type().eval(), Flattened(1).eval()
    result = eq.certify(
        {"smoothed": model},
        make_data(4),
        sigma=0.1,
        samples=200,
        accurate=accurate,
        alpha=0.6,
        device=device,
    )
    assert len(result.rows) == 4
    assert_only_contiguous(model, accurate)


def test_train() -> None:
    model = Flattened()
    result = eq.train(
        "adversarial",
        data=make_data(16),
        model=model,
        epochs=1,
        batch_size=8,
        norm=THREAT.norm,
        eps=THREAT.eps,
        steps=2,
        device="cpu",
    )
    assert isinstance(result.model, Flattened)
    assert_only_contiguous(result.model, model)


def test_a_network_that_needs_contiguous_activations_has_no_copy() -> None:
    model, x = Flattened().eval(), pixels(make_data(4).images)
    assert fuse(model, x) is model and channels_last_copy(model, x) is model


def test_a_copy_is_made_where_it_agrees() -> None:
    model, x = Pooled().eval(), pixels(make_data(4).images)
    for copy in (fuse(model, x), channels_last_copy(model, x)):
        assert isinstance(copy, Pooled) and copy is not model
        assert copy.conv.weight.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(copy(x), model(x), rtol=1e-4, atol=1e-4)


class _ViewedBackward(torch.autograd.Function):
    """The identity, whose backward pass flattens its gradient with `.view`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].view(len(gradients[0]), -1).view(gradients[0].shape)


class FlattenedGradient(nn.Module):
    """Its forward pass allows any layout, its backward pass does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 5, 3), nn.Conv2d(5, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, 6, 7) → (B, 4)."""
        features: Tensor = _ViewedBackward.apply(self.first(x))  # type: ignore[no-untyped-call]
        logits: Tensor = self.second(features).mean(dim=(2, 3))
        return logits


def test_a_copy_whose_backward_pass_fails_is_not_used() -> None:
    model, data = FlattenedGradient().eval(), make_data(6)
    x = pixels(data.images)
    assert fuse(model, x) is model
    copy = channels_last_copy(model, x)  # which is for forward passes only
    assert copy is not model
    with pytest.raises(RuntimeError, match="view"):
        copy(x.requires_grad_()).sum().backward()
    eq.evaluate(model, data, threat=THREAT, attack="apgd", steps=3, device="cpu")
