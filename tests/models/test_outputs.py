"""Networks whose output is an object, a tuple or a dictionary, and calls inside
`torch.inference_mode`."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equipoise as eq
from equipoise.models import as_classifier, load, unwrap_outputs, weights_digest
from equipoise.models.outputs import select_logits

SHAPE = (1, 6, 6)
Pair = namedtuple("Pair", ["logits", "features"])
FORMS: dict[str, Callable[[Tensor], Any]] = {
    "object": lambda z: SimpleNamespace(logits=z, hidden=z[:, :1]),
    "tuple": lambda z: (z, z.sum()),
    "list": lambda z: [z],
    "dict": lambda z: {"loss": z.sum(), "logits": z},
    "one value": lambda z: {"out": z},
    "ordered": lambda z: OrderedDict(features=z[:, :1], logits=z),
    "named tuple": lambda z: Pair(z, z[:, :1]),
}


class Wrapped(nn.Module):
    """A linear classifier with one of these forms of output."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.fc = FORMS[form], nn.Linear(36, 4, bias=False)
        with torch.no_grad():
            self.fc.weight.copy_(torch.randn(4, 36, generator=torch.Generator().manual_seed(4)))

    def forward(self, x: Tensor) -> Any:
        return self.form(self.fc(x.flatten(1)))


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    x = torch.rand(12, *SHAPE, generator=torch.Generator().manual_seed(5))
    return x, Wrapped("tuple")(x)[0].argmax(1)


@pytest.mark.parametrize("form", FORMS)
def test_logits_are_selected(form: str) -> None:
    z = torch.randn(3, 4)
    assert select_logits(FORMS[form](z)) is z
    model = Wrapped(form)
    changed = unwrap_outputs(model)
    x = torch.rand(2, *SHAPE)
    assert isinstance(changed(x), Tensor) and not isinstance(model(x), Tensor)
    assert type(changed) is Wrapped and weights_digest(changed) == weights_digest(model)
    assert unwrap_outputs(changed)(x).shape == (2, 4)


@pytest.mark.parametrize(
    "output", [{"a": torch.zeros(2), "b": torch.zeros(2)}, (), "text", {"logits": "text"}]
)
def test_other_outputs_are_left_for_the_check(output: Any) -> None:
    assert select_logits(output) is output


@pytest.mark.parametrize("form", ["object", "tuple", "dict"])
def test_such_modules_are_attacked_and_evaluated(form: str, data: tuple[Tensor, Tensor]) -> None:
    model, plain = Wrapped(form), nn.Sequential(nn.Flatten(), Wrapped(form).fc)
    threat = eq.Threat("linf", 0.05)
    expected = eq.attack(plain, *data, threat=threat, attack="pgd", steps=3)
    assert torch.equal(eq.attack(model, *data, threat=threat, attack="pgd", steps=3), expected)
    result = eq.evaluate({"m": model}, data, threat=threat, attack="pgd", steps=3, audit=0)
    assert [found.value for found in result.summary.results if found.metric == "clean"] == [1.0]
    assert not model._forward_hooks, "the caller's own module is unchanged"


class Scriptable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(36, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.fc(x.flatten(1))
        return z, z.sum()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "wrap", [lambda net: nn.Sequential(nn.Identity(), net), nn.DataParallel, torch.jit.script]
)
def test_tuples_of_modules_of_torch_are_selected_from(
    wrap: Callable[[nn.Module], nn.Module],
) -> None:
    network, x = Scriptable().eval(), torch.rand(2, *SHAPE)
    model = as_classifier(wrap(network).eval(), SHAPE)
    assert torch.equal(model(x), network(x)[0]) and not model.training


def test_a_module_that_fails_is_returned_as_it_is() -> None:
    model = Wrapped("dict")
    assert as_classifier(model, (3, 99, 99)) is model and as_classifier(model, None) is model
    assert as_classifier(model, SHAPE) is not model


def test_python_references_return_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_outputs.py").write_text(
        "from torch import nn\nclass Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.fc = nn.Linear(36, 4)\n    def forward(self, x):\n"
        "        return {'loss': x.sum(), 'logits': self.fc(x.flatten(1))}\n"
        "instance = Net()\ndef function():\n    return instance\n"
    )
    monkeypatch.chdir(tmp_path)
    x = torch.rand(2, *SHAPE)
    sources = ("own_outputs", "own_outputs.py", f"{tmp_path}/own_outputs.py")
    logits = [
        load(f"python:{source}:{name}")(x)
        for source in sources
        for name in ("Net", "instance", "function")
    ]
    assert all(isinstance(z, Tensor) and z.shape == (2, 4) for z in logits)
    assert torch.equal(logits[1], logits[2]) and torch.equal(logits[4], logits[7]), (
        "a file is run once"
    )


def test_inside_inference_mode(data: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    """As in a validation step of Lightning: images and model arrive in a mode without gradients."""
    threat, model = eq.Threat("linf", 0.05), Wrapped("dict")
    expected = eq.attack(model, *data, threat=threat, attack="fast")
    assert not torch.equal(expected, data[0])
    with torch.inference_mode():
        images, labels = data[0] + 0, data[1] + 0
        assert images.is_inference()
        attacked = eq.attack(model, images, labels, threat=threat, attack="fast")
        evaluated = eq.evaluate(
            model, (images, labels), threat=threat, attack="pgd", steps=3, audit=0
        )
        zoo = eq.load_model("zoo:cnn_small", num_classes=4, image_shape=SHAPE)
        eq.attack(zoo, images, labels, threat=threat, attack="pgd", steps=2)
        assert torch.is_inference_mode_enabled()
    assert torch.equal(attacked, expected)
    assert str(evaluated) == str(
        eq.evaluate(model, data, threat=threat, attack="pgd", steps=3, audit=0)
    )
    zoo.zero_grad()
    zoo(data[0]).sum().backward()
