"""Classifiers in ONNX files, where the packages onnx and onnxruntime are installed."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import equipoise as eq
from equipoise import models
from equipoise.core.checks import InputError
from equipoise.mixing import MixedClassifier

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

X = torch.rand(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))
FLOAT, BYTES, WHOLE = 1, 2, 7


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 6, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(54, 4)).eval()


def write(
    path: Path,
    *,
    shape: list[Any] | None = None,
    kind: int = FLOAT,
    first: tuple[Any, ...] = (),
    last: tuple[Any, ...] = (),
    output: tuple[int, list[Any]] = (FLOAT, ["n", 4]),
    quantized: bool = False,
) -> str:
    """The network as an ONNX file; `first` and `last` are operations before and after it,
    (operator, attributes)."""
    net, helper = network(), onnx.helper
    weights = {
        name: net.get_parameter(key).detach()
        for name, key in (("w", "0.weight"), ("b", "0.bias"), ("fw", "3.weight"), ("fb", "3.bias"))
    }
    initializers = [
        onnx.numpy_helper.from_array(value.numpy(), name) for name, value in weights.items()
    ]
    nodes, name = [], "images"
    for number, (operator, attributes) in enumerate(first):
        nodes.append(helper.make_node(operator, [name], [f"first{number}"], **attributes))
        name = f"first{number}"
    if quantized:
        scale = float(weights["fw"].abs().max()) / 127
        small = (weights["fw"] / scale).round().to(torch.int8).numpy()
        initializers[2] = onnx.numpy_helper.from_array(small, "fq")
        initializers += [
            onnx.numpy_helper.from_array(np.array(scale, np.float32), "scale"),
            onnx.numpy_helper.from_array(np.array(0, np.int8), "zero"),
        ]
        nodes.append(helper.make_node("DequantizeLinear", ["fq", "scale", "zero"], ["fw"]))
    nodes += [
        helper.make_node("Conv", [name, "w", "b"], ["a"], strides=[2, 2]),
        helper.make_node("Relu", ["a"], ["r"]),
        helper.make_node("Flatten", ["r"], ["f"]),
        helper.make_node("Gemm", ["f", "fw", "fb"], ["z"], transB=1),
    ]
    name = "z"
    for number, (operator, attributes) in enumerate(last):
        nodes.append(helper.make_node(operator, [name], [f"last{number}"], **attributes))
        name = f"last{number}"
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("images", kind, shape or ["n", 3, 8, 8])],
        [helper.make_tensor_value_info(name, *output)],
        initializers,
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path
    )
    return f"onnx:{path}"


def expected(x: Tensor = X) -> Tensor:
    with torch.no_grad():
        logits: Tensor = network()(x)
    return logits


def test_a_known_graph_has_gradients(tmp_path: Path) -> None:
    model = eq.load_model(write(tmp_path / "a.onnx"))
    x = X.clone().requires_grad_()
    torch.testing.assert_close(model(x), expected(), rtol=1e-5, atol=1e-5)
    (gradient,) = torch.autograd.grad(model(x)[:, 0].sum(), x)
    y = X.clone().requires_grad_()
    torch.testing.assert_close(gradient, torch.autograd.grad(network()(y)[:, 0].sum(), y)[0])
    assert models.has_gradients(model)
    line = str(models.info_of(model))
    assert "run by torch with gradients, as onnxruntime computes it; 4 classes; input 3×8×8" in line


def test_channels_last_a_fixed_batch_and_probabilities(tmp_path: Path) -> None:
    model = eq.load_model(
        write(
            tmp_path / "a.onnx",
            shape=[2, 8, 8, 3],
            first=(("Transpose", {"perm": [0, 3, 1, 2]}),),
            last=(("Softmax", {"axis": 1}), ("Identity", {})),
            output=(FLOAT, [2, 4]),
        )
    )
    assert models.has_gradients(model)
    torch.testing.assert_close(model(X), expected().log_softmax(1), rtol=1e-5, atol=1e-5)


def test_normalisation_comes_with_the_reference(tmp_path: Path) -> None:
    reference = write(tmp_path / "a.onnx")
    model = eq.load_model(f"{reference}?mean=0.5,0.5,0.5&std=1/255,1/255,1/255")
    torch.testing.assert_close(model(X), expected((X - 0.5) * 255), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"quantized": True}, "the operator DequantizeLinear"),
        ({"kind": BYTES, "first": (("Cast", {"to": FLOAT}),)}, "images in bytes"),
        ({"last": (("ThresholdedRelu", {"alpha": -100.0}),)}, "the operator ThresholdedRelu"),
    ],
)
def test_other_graphs_are_attacked_by_random_search(
    settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    reference = write(tmp_path / "a.onnx", **settings)
    model = eq.load_model(reference)
    assert not models.has_gradients(model)
    assert f"without gradients ({reason}): attacked by random search" in str(models.info_of(model))
    wanted = expected((X * 255).round()) if "kind" in settings else expected()
    torch.testing.assert_close(model(X), wanted, rtol=0.02, atol=0.05)
    y = model(X).argmax(1)
    y[0] = 3
    result = eq.evaluate(
        reference, (X, y), threat=eq.Threat("linf", 0.3), attack="square", steps=20, batch_size=5
    )
    assert "was attacked by random search alone (Square, 20 queries)" in str(result)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {},
            "ONNX graph of 4 operators, run by torch with gradients, as onnxruntime computes it; 4 classes",
        ),
        ({"shape": [2, 3, 8, 8], "output": (FLOAT, [2, 4])}, "run by torch with gradients"),
        (
            {"shape": ["n", 8, 8, 3], "first": (("Transpose", {"perm": [0, 3, 1, 2]}),)},
            "run by torch with gradients",
        ),
        (
            {"quantized": True},
            "without gradients (the operator DequantizeLinear): attacked by random search; 4 classes",
        ),
        (
            {"last": (("ArgMax", {"axis": 1, "keepdims": 0}),), "output": (WHOLE, ["n"])},
            "without gradients (the operator ArgMax): attacked by random",
        ),
    ],
)
def test_what_is_said_in_a_command(
    settings: dict[str, Any],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line about the model, no warning, and in the results how it was attacked."""
    from equipoise.cli.main import run
    from equipoise.evaluation import random_search

    monkeypatch.setattr(random_search, "QUERIES", 20)
    monkeypatch.chdir(tmp_path)
    reference = write(Path("a.onnx"), **settings)
    np.savez("images.npz", images=(X * 255).byte().numpy(), labels=np.arange(5) % 4)
    assert (
        run(
            [
                "evaluate",
                reference,
                "--data",
                "npz:images.npz",
                "--eps",
                "0.05",
                "--attack",
                "pgd",
                "--steps",
                "2",
                "--batch-size",
                "5",
                "--audit",
                "0",
                "--out",
                "run",
            ]
        )
        == 0
    )
    captured = capsys.readouterr()
    (line,) = [line for line in captured.err.splitlines() if line.startswith("onnx:a.onnx: ")]
    assert words in line and "warning" not in captured.err
    assert ("has no gradients and was attacked by random search alone" in captured.out) == (
        "without" in words
    )


def test_a_mean_for_other_channels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="`mean` must hold 3 numbers, one per channel"):
        eq.load_model(f"{write(tmp_path / 'a.onnx')}?mean=0.5")


def test_classes_alone_become_scores(tmp_path: Path) -> None:
    reference = write(
        tmp_path / "a.onnx", last=(("ArgMax", {"axis": 1, "keepdims": 0}),), output=(WHOLE, ["n"])
    )
    model = eq.load_model(f"{reference}?num_classes=4")
    assert torch.equal(model(X).argmax(1), expected().argmax(1)) and model(X).shape == (5, 4)


def test_a_mixture_with_onnx_is_bundled(tmp_path: Path) -> None:
    """The file is copied; a graph is data, and needs no permission."""
    here = tmp_path / "here"
    here.mkdir()
    accurate = eq.load_model(write(here / "a.onnx") + "?std=0.5,0.5,0.5")
    robust = eq.load_model(write(here / "r.onnx", quantized=True))
    mixture = MixedClassifier(accurate, robust, 0.6).eval()
    eq.save(here / "m", mixture, bundle=True)
    shutil.move(here / "m", tmp_path / "m")
    shutil.rmtree(here)
    loaded = eq.load_model(f"mixture:{tmp_path}/m")
    assert torch.equal(loaded(X), mixture(X))
    write(tmp_path / "m" / "robust.onnx")
    with pytest.raises(InputError, match="its weights have changed"):
        eq.load_model(f"mixture:{tmp_path}/m")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"shape": ["n", 192]}, r"must take images as \(N, C, H, W\) or \(N, H, W, C\)"),
        ({"kind": 10, "first": (("Cast", {"to": FLOAT}),)}, "must take images in float32 or uint8"),
    ],
)
def test_graphs_that_are_no_classifier_of_images(
    settings: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=sentence):
        eq.load_model(write(tmp_path / "a.onnx", **settings))


def test_bad_files_and_missing_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.onnx"
    with pytest.raises(InputError, match="must be a file that exists"):
        eq.load_model(f"onnx:{path}")
    path.write_text("<!doctype html>")
    with pytest.raises(InputError, match="got a web page"):
        eq.load_model(f"onnx:{path}")
    reference = write(path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(InputError, match="must be a whole ONNX file"):
        eq.load_model(reference)
    path.write_bytes(content)
    model = onnx.load(path)
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    with pytest.raises(InputError, match="must hold its weights itself"):
        eq.load_model(reference)
    write(path, quantized=True)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(
        InputError, match=r"must have the package onnxruntime, because .* the operator Dequant"
    ):
        eq.load_model(reference)
    write(path)
    assert "not compared with onnxruntime" in str(models.info_of(eq.load_model(reference)))
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(InputError, match="must have the package onnx"):
        eq.load_model(reference)


def outside(name: str = "secret") -> Any:
    """A tensor whose values lie in another file."""
    tensor = onnx.TensorProto(
        name=name, dims=[4], data_type=FLOAT, data_location=onnx.TensorProto.EXTERNAL
    )
    tensor.external_data.add(key="location", value="secret.bin")
    return tensor


@pytest.mark.parametrize("place", ["constant", "subgraph", "sparse weight", "function"])
def test_no_tensor_of_a_file_is_read_from_another_one(place: str, tmp_path: Path) -> None:
    path, helper = tmp_path / "net.onnx", onnx.helper
    write(path)
    (tmp_path / "secret.bin").write_bytes(bytes(16))
    model = onnx.load(path)
    constant = helper.make_node("Constant", [], ["secret"], value=outside())
    if place == "constant":
        add = helper.make_node("Add", ["z", "secret"], ["sum"])
        model.graph.node.extend([constant, add])
        model.graph.output[0].name = "sum"
    elif place == "subgraph":
        result = [helper.make_tensor_value_info("secret", FLOAT, [4])]
        branch = helper.make_graph([constant], "branch", [], result)
        model.graph.node.append(
            helper.make_node("If", ["z"], ["y"], then_branch=branch, else_branch=branch)
        )
    elif place == "sparse weight":
        model.graph.sparse_initializer.append(onnx.SparseTensorProto(values=outside(), dims=[4]))
    else:
        model.functions.append(helper.make_function("own", "F", [], ["secret"], [constant], []))
    path.write_bytes(model.SerializeToString())
    with pytest.raises(
        InputError, match=r"must hold its weights itself; .* '[12] weights in other files"
    ):
        eq.load_model(f"onnx:{path}")


@pytest.mark.parametrize(
    "shape", [[1, 3, 400_000, 400_000], [10**9, 3, 8, 8], ["n", 10**9, "h", "w"]]
)
def test_sizes_in_a_file_ask_for_limited_memory(shape: list[Any], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="must take batches of at most 268435456 values, got "):
        eq.load_model(write(tmp_path / "net.onnx", shape=shape))
