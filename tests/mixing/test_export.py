"""Every kind of mixture is exported with a dynamic batch, and compiles without a graph break."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from gate_pairs import C, gated, images, pair
from torch import Tensor, nn

from equipoise.mixing import GatedClassifier, LogitMap, MixedClassifier, new_gate
from equipoise.models.layers.tta import TTAClassifier

SIZES = (1, 2, 5, 9)
MAPS = {
    "layer-norm": LogitMap(2.0, 1.5, -0.3),
    "gelu": LogitMap(2.0, 0.7, -0.3, "gelu"),
    "rivals": LogitMap(2.0, 1.5, -0.3, rivals=0.3),
    "unit": LogitMap(0.4, 1.2, 0.1, "softplus", unit=1.5),
}


class Classes(nn.Module):
    """A model that returns classes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        classes: Tensor = self.model(x).argmax(dim=1)
        return classes


class Tokens(nn.Module):
    """A base whose feature layers output tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.first, self.second = nn.Conv2d(C, 6, 1), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.second(self.first(self.patches(x).flatten(2).transpose(1, 2))).mean(
            dim=1
        )
        return logits


def _fixed(**settings: object) -> MixedClassifier:
    return MixedClassifier(*pair(), 0.6, **settings).eval()  # type: ignore[arg-type]


def _tta() -> MixedClassifier:
    g, h = pair()
    return MixedClassifier(
        TTAClassifier(g, 2), TTAClassifier(h, 6), 0.6, logit_map=MAPS["rivals"]
    ).eval()


def _returning_classes() -> MixedClassifier:
    g, h = pair()
    return MixedClassifier(Classes(g), h, 0.6, hard=True).eval()


def _gated_tokens() -> MixedClassifier:
    torch.manual_seed(1)
    g, h = Tokens().eval(), pair()[1]
    return GatedClassifier(
        g,
        h,
        new_gate(
            g, h, images(2), feature_layers=(("first", "second"), ("conv1", "conv2")), width=4
        ),
    ).eval()


KINDS: dict[str, Callable[[], MixedClassifier]] = {
    "plain": _fixed,
    "hard": lambda: _fixed(hard=True),
    **{name: partial(_fixed, logit_map=logit_map, hard=True) for name, logit_map in MAPS.items()},
    "tta": _tta,
    "returning-classes": _returning_classes,
    "gated": lambda: gated(alpha_min=0.2, alpha_max=0.9),
    "gated-hard": lambda: gated(hard=True, logit_map=MAPS["layer-norm"], alpha_min=0.2),
    "gated-tokens": _gated_tokens,
}


def _check(model: nn.Module, exported: Callable[[Tensor], Tensor]) -> None:
    with torch.no_grad():
        for size in SIZES:
            torch.testing.assert_close(
                exported(images(size, seed=size)), model(images(size, seed=size))
            )


FAST = ("rivals", "tta", "returning-classes", "gated-hard")


@pytest.mark.parametrize(
    "kind", [kind if kind in FAST else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_export(kind: str) -> None:
    model = KINDS[kind]()
    batch = torch.export.Dim("batch", min=1, max=1024)
    with torch.no_grad():
        program = torch.export.export(model, (images(4),), dynamic_shapes={"x": {0: batch}})
    _check(model, program.module())


@pytest.mark.parametrize("kind", KINDS)
def test_trace(kind: str) -> None:
    model = KINDS[kind]()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # branches on the shape of an image, and that tracing is deprecated
        buffer = io.BytesIO()
        torch.jit.save(torch.jit.trace(model, images(4)), buffer)
        buffer.seek(0)
        _check(model, torch.jit.load(buffer))


@pytest.mark.parametrize("kind", ["hard", "tta", "gated-hard"])
def test_onnx(kind: str, tmp_path: object) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model = KINDS[kind]()
    batch = torch.export.Dim("batch", min=1, max=1024)
    program = torch.onnx.export(model, (images(4),), dynamo=True, dynamic_shapes={"x": {0: batch}})
    path = f"{tmp_path}/mixture.onnx"
    program.save(path)  # type: ignore[union-attr]
    session = runtime.InferenceSession(path)
    name = session.get_inputs()[0].name
    _check(model, lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hard", "gated-hard"])
def test_compile_without_graph_breaks(kind: str) -> None:
    model = KINDS[kind]()
    torch._dynamo.reset()
    _check(model, torch.compile(model, backend="eager", fullgraph=True, dynamic=True))
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", ["plain", "layer-norm", "gated"])
def test_vmap_over_images(kind: str) -> None:
    model, x = KINDS[kind](), images(3)
    alone = torch.func.vmap(lambda image: model(image.unsqueeze(0)).squeeze(0))(x)
    torch.testing.assert_close(alone, model(x))
