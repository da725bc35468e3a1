"""`onnx:PATH`: a classifier in an ONNX file.

Where all of its operators are known (:mod:`~equipoise.models.sources.onnx_operators`), the graph
runs in torch and has gradients; `onnxruntime`, if it is installed, must agree on two images.
Otherwise `onnxruntime` runs it, without gradients. Images may be NCHW or NHWC, in floating point or
bytes, and the batch may be fixed.

`?mean=…&std=…` are subtracted and divided by before the graph: `?std=1/255,1/255,1/255` is for one
of 0 … 255.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.core import checks
from equipoise.core.checks import InputError
from equipoise.models.inspection import Described, one_line
from equipoise.models.loaded import LoadedModel, ModelInfo
from equipoise.models.options import LoadOptions
from equipoise.models.sources.black_box import BlackBox, ImageInput
from equipoise.models.sources.onnx_operators import OPERATORS, UnsupportedError
from equipoise.models.torch_files import require_file

if TYPE_CHECKING:
    from equipoise.models.reference import Reference

FLOATS, BYTES = (1, 10, 11), 2  # numbers of types in TensorProto
UNKNOWN = (3, 224, 224)  # sizes of images where the file leaves them open
MAX_VALUES = (
    2**28
)  # of one batch of images, 1 GiB in float32: a few digits in a file cannot ask for more memory
TOLERANCE = 1e-3  # of outputs, in units of their largest one


@dataclass(frozen=True)
class Step:
    """One operation of a graph."""

    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]


class OnnxGraph(Described):
    """A graph of known operators, run in torch; a final softmax becomes its logarithm."""

    description = ("onnx", "runtime", "channels_last")
    runtime = "torch"

    def __init__(
        self,
        images: ImageInput,
        steps: Sequence[Step],
        constants: dict[str, Tensor],
        output: str,
        digest: bytes,
    ) -> None:
        super().__init__()
        self.images, self.steps, self.output, self.channels_last = (
            images,
            steps,
            output,
            images.channels_last,
        )
        self.register_buffer("digest", torch.tensor(list(digest), dtype=torch.uint8))
        # Shapes and the like stay on the CPU, which reads them wherever the network runs.
        self.indices = {
            name: value for name, value in constants.items() if not value.is_floating_point()
        }
        self.weights = {
            f"weight{number}": name
            for number, name in enumerate(constants)
            if name not in self.indices
        }
        for key, name in self.weights.items():
            self.register_buffer(key, constants[name])
        self.last_use = {name: number for number, step in enumerate(steps) for name in step.inputs}

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, K) logits."""
        return torch.cat([self._run(part) for part in self.images.chunks(x)])[: len(x)]

    def _run(self, x: Tensor) -> Tensor:
        values: dict[str, Tensor | None] = {
            "": None,
            self.images.name: self.images.arrange(x),
            **self.indices,
        }
        values.update((name, getattr(self, key)) for key, name in self.weights.items())
        for number, step in enumerate(self.steps):
            is_last = self.output in step.outputs
            operator = "LogSoftmax" if is_last and step.operator == "Softmax" else step.operator
            results = OPERATORS[operator](step.attributes, [values[name] for name in step.inputs])
            values[step.outputs[0]] = results
            for name in step.inputs:
                if name not in ("", self.output) and self.last_use[name] == number:
                    values[name] = None  # no longer needed
        logits = values[self.output]
        assert logits is not None
        return logits


class OnnxRuntimeModel(BlackBox):
    """A graph run by onnxruntime on the CPU, without gradients."""

    description = ("onnx", "runtime", "num_classes")
    runtime = "onnxruntime"

    def __init__(
        self,
        content: bytes,
        images: ImageInput,
        output: str,
        num_classes: int | None,
        probabilities: bool,
    ) -> None:
        super().__init__(num_classes, hashlib.sha256(content).digest(), probabilities=probabilities)
        self.images, self.output = images, output
        self.session = _new_session(content)

    def query(self, x: Tensor) -> Tensor:
        """Scores or classes of images."""
        parts = [
            torch.from_numpy(
                self.session.run(
                    [self.output], {self.images.name: self.images.arrange(part).numpy()}
                )[0]
            )
            for part in self.images.chunks(x)
        ]
        return torch.cat(parts)[: len(x)]


def _new_session(content: bytes) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def load_reference(reference: Reference, options: LoadOptions) -> LoadedModel:
    """The loader of `onnx:`."""
    path = Path(reference.body).expanduser()
    require_file(path)
    content, model = path.read_bytes(), None
    try:
        import onnx

        model = onnx.load_model_from_string(content)
    except ImportError:
        raise InputError(
            f"`model` must have the package onnx, which {reference.text} needs: pip install onnx "
            "onnxruntime"
        ) from None
    except Exception as error:  # a damaged file can raise any error
        raise InputError(
            f"`{path}` must be a whole ONNX file, got one that cannot be read ({one_line(error)})"
        ) from None
    outside = [
        value.name
        for value in all_tensors(model)
        if value.data_location == onnx.TensorProto.EXTERNAL
    ]
    checks.require(
        not outside,
        str(path),
        "hold its weights itself; save it without external data",
        f"{len(outside)} weights in other files",
    )
    graph = model.graph
    images, (output, classes, is_classes) = find_images(graph, path), find_scores(graph, path)
    probabilities = any(
        node.op_type == "Softmax" and before_identities(graph, output) in node.output
        for node in graph.node
    )
    try:
        digest = hashlib.sha256(content).digest()
        network: nn.Module = to_torch(graph, images, before_identities(graph, output), digest)
        how = _compare(content, network, images, output, probabilities)
    except UnsupportedError as error:
        num_classes = classes if classes is not None and not is_classes else options.num_classes
        network = _black_box(
            content, images, output, num_classes, probabilities, reference.text, error
        )
        how = f"without gradients ({error}): attacked by random search"
    info = ModelInfo(
        f"ONNX graph of {len(graph.node)} operators, {how}",
        None if is_classes else classes,
        images.known_shape,
        origin=f"{path}, SHA-256 {hashlib.sha256(content).hexdigest()[:12]}",
    )
    return LoadedModel(network, info, preprocessing=images.preprocessing)


def _black_box(
    content: bytes,
    images: ImageInput,
    output: str,
    num_classes: int | None,
    probabilities: bool,
    name: str,
    reason: Exception,
) -> OnnxRuntimeModel:
    try:
        return OnnxRuntimeModel(content, images, output, num_classes, probabilities)
    except ImportError:
        raise InputError(
            f"`model` must have the package onnxruntime, because {name} has {reason}, which runs in no "
            "other way: pip install onnxruntime"
        ) from None
    except Exception as error:
        raise InputError(
            f"`model` must be a graph that onnxruntime can run, got {name}, which raised "
            f"{one_line(error)}"
        ) from None


def all_tensors(message: Any) -> Iterator[Any]:
    """Every tensor of a file: weights, also sparse ones, attributes of operations, in subgraphs and
    functions."""
    from onnx import TensorProto

    pending = [message]
    while pending:
        part = pending.pop()
        if isinstance(part, TensorProto):
            yield part
            continue
        for field, value in part.ListFields():
            if field.message_type is not None:
                pending += [value] if hasattr(value, "ListFields") else value


def find_images(graph: Any, path: Path) -> ImageInput:
    """The one input of a graph that is not a constant; it must be a batch of images."""
    constants = {value.name for value in graph.initializer}
    inputs = [value for value in graph.input if value.name not in constants]
    checks.require(len(inputs) == 1, str(path), "have one input", [value.name for value in inputs])
    kind = inputs[0].type.tensor_type
    sizes = [
        size.dim_value if size.HasField("dim_value") and size.dim_value > 0 else None
        for size in kind.shape.dim
    ]
    checks.require(len(sizes) == 4, str(path), "take images as (N, C, H, W) or (N, H, W, C)", sizes)
    checks.require(
        kind.elem_type in (FLOATS[0], BYTES),
        str(path),
        "take images in float32 or uint8",
        f"the type number {kind.elem_type}",
    )
    images = ImageInput.of(inputs[0].name, sizes, is_bytes=kind.elem_type == BYTES)
    checks.require(
        (images.batch or 1) * math.prod(_sizes(images)) <= MAX_VALUES,
        str(path),
        f"take batches of at most {MAX_VALUES} values",
        "×".join(str(size or "any") for size in sizes),
    )
    return images


def _sizes(images: ImageInput) -> list[int]:
    return [size or default for size, default in zip(images.shape, UNKNOWN, strict=True)]


def find_scores(graph: Any, path: Path) -> tuple[str, int | None, bool]:
    """The output with scores, else that with classes: its name, the number of classes, and whether
    it is the latter."""
    outputs = []
    for value in graph.output:
        kind = value.type.tensor_type
        sizes = [size.dim_value or None for size in kind.shape.dim]
        outputs.append((value.name, kind.elem_type in FLOATS and len(sizes) != 1, sizes))
    checks.require(bool(outputs), str(path), "have an output", [])
    name, is_scores, sizes = next((output for output in outputs if output[1]), outputs[0])
    return name, sizes[1] if is_scores and len(sizes) == 2 else None, not is_scores


def before_identities(graph: Any, output: str) -> str:
    """The name of an output before operations that only give it another one."""
    for node in reversed(graph.node):
        if output in node.output and node.op_type == "Identity":
            output = node.input[0]
    return str(output)


def to_torch(graph: Any, images: ImageInput, output: str, digest: bytes) -> OnnxGraph:
    """The graph in torch; an :class:`UnsupportedError` names the first operator that is not
    known."""
    from onnx import helper, numpy_helper

    if images.is_bytes:
        raise UnsupportedError("images in bytes")
    constants = {
        value.name: torch.from_numpy(numpy_helper.to_array(value).copy())
        for value in graph.initializer
    }
    steps = []
    for node in graph.node:
        attributes = {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}
        if node.op_type == "Constant" and "value" in attributes:
            constants[node.output[0]] = torch.from_numpy(
                numpy_helper.to_array(attributes["value"]).copy()
            )
            continue
        if node.op_type not in OPERATORS or node.domain not in ("", "ai.onnx"):
            raise UnsupportedError(f"the operator {node.op_type}")
        texts = {
            key: value.decode() if isinstance(value, bytes) else value
            for key, value in attributes.items()
        }
        steps.append(Step(node.op_type, tuple(node.input), tuple(node.output), texts))
    if any(value.dtype in (torch.int8, torch.uint8) for value in constants.values()):
        raise UnsupportedError("weights in 8 bits")
    return OnnxGraph(images, steps, constants, output, digest).eval()


def _compare(
    content: bytes, network: nn.Module, images: ImageInput, output: str, probabilities: bool
) -> str:
    """Check with onnxruntime that torch computes the same; how this went, in words."""
    try:
        session = OnnxRuntimeModel(content, images, output, None, probabilities)
    except ImportError:
        return "run by torch with gradients (not compared with onnxruntime, which is not installed)"
    except Exception as error:
        raise UnsupportedError(f"a graph that onnxruntime refuses, {one_line(error)}") from None
    x = torch.rand(2, *_sizes(images), generator=torch.Generator().manual_seed(0))
    try:
        with torch.no_grad():
            ours, theirs = network(x), session(x)
    except Exception as error:
        raise UnsupportedError(f"an operation that torch cannot do, {one_line(error)}") from None
    ours, theirs = (F.softmax(z, dim=1) if probabilities else z for z in (ours, theirs))
    if ours.shape != theirs.shape or not bool(
        ((ours - theirs).abs() <= TOLERANCE * theirs.abs().max()).all()
    ):
        raise UnsupportedError("results in torch that differ from those of onnxruntime")
    return "run by torch with gradients, as onnxruntime computes it"
