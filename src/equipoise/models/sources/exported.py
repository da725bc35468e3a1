"""Saved programs: `exported:PATH` of a file that `torch.export.save` or TorchScript wrote.

Such a file holds the network itself, not only its weights, and computes whatever it says: a folder
that names one needs `allow_code`. Pickles with code inside it are refused all the same.
"""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from equipoise.core import checks
from equipoise.core.checks import InputError
from equipoise.models.inspection import one_line
from equipoise.models.layers.resizing import Preprocessing
from equipoise.models.loaded import LoadedModel, ModelInfo
from equipoise.models.options import expand_home
from equipoise.models.torch_files import holds_weights, is_torchscript, only_weights, require_file

if TYPE_CHECKING:
    from equipoise.models.options import LoadOptions
    from equipoise.models.reference import Reference

LOGGERS = ("torch.export", "torch.export.pt2_archive._package")


def load(reference: Reference, options: LoadOptions) -> LoadedModel:
    """The network of a saved program; it normalises itself unless the reference has `mean` and
    `std`."""
    path = Path(expand_home(reference.body))
    require_file(path)
    script = is_torchscript(path)
    try:
        with only_weights(), warnings.catch_warnings(), _without_log():
            warnings.simplefilter("ignore")  # TorchScript is deprecated
            network = (
                ScriptedNetwork(torch.jit.load(path, map_location="cpu"))
                if script
                else ExportedNetwork(torch.export.load(path))
            )
    except Exception as error:  # a damaged file can raise any error
        if holds_weights(path):
            raise InputError(
                f"`{path}` must be a file of torch.export.save or TorchScript, got one that holds "
                f"weights; use file:{path}"
            ) from None
        raise InputError(
            f"`{path}` must be a file of torch.export.save or TorchScript, got one that cannot be read "
            f"({one_line(error)})"
        ) from None
    network.identify(path)
    info = ModelInfo(
        "TorchScript" if script else "torch.export",
        network.num_classes,
        network.input_shape,
        origin=str(path),
    )
    return LoadedModel(network, info, preprocessing=Preprocessing(origin="in the program"))


@contextmanager
def _without_log() -> Iterator[None]:
    """Inside, torch does not write the traceback of a file that it cannot read."""
    levels = {logger: logger.level for logger in map(logging.getLogger, LOGGERS)}
    for logger in levels:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


class ScriptedNetwork(nn.Module):
    """The program of a file. Its state dict holds the SHA-256 of the file beside the weights, which
    do not say what is computed and may be constants of the program.
    """

    num_classes: int | None = None
    input_shape: tuple[int, int, int] | None = None

    def __init__(self, program: nn.Module) -> None:
        super().__init__()
        self.program = program
        self.register_buffer("sha256", torch.zeros(32, dtype=torch.uint8))

    def identify(self, path: Path) -> None:
        """Store the SHA-256 of the file."""
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").digest()
        self.sha256 = torch.tensor(list(digest), dtype=torch.uint8)

    def forward(self, x: Tensor) -> Any:
        """(B, C, H, W) → what the program returns."""
        return self.program(x)


class ExportedNetwork(ScriptedNetwork):
    """The program of `torch.export`, which has no training mode; a batch size fixed by the export
    is filled up."""

    def __init__(self, program: Any) -> None:
        super().__init__(program.module())
        inputs = [
            node for node in program.graph.nodes if node.name in program.graph_signature.user_inputs
        ]
        outputs = [
            value
            for node in program.graph.nodes
            if node.op == "output"
            for value in node.args[0]
            if getattr(value, "name", None) in program.graph_signature.user_outputs
        ]
        checks.require(
            len(inputs) == 1 and inputs[0].meta["val"].dim() == 4,
            "exported",
            "be a program of one batch of images (B, C, H, W)",
            [str(node) for node in inputs],
        )
        batch, *shape = inputs[0].meta["val"].shape
        self.batch = batch if isinstance(batch, int) else None
        fixed = all(isinstance(size, int) for size in shape)
        self.input_shape = (shape[0], shape[1], shape[2]) if fixed else None
        sizes: tuple[Any, ...] = tuple(outputs[0].meta["val"].shape) if outputs else ()
        self.num_classes = sizes[1] if len(sizes) == 2 and isinstance(sizes[1], int) else None

    def train(self, mode: bool = True) -> Self:
        """The program is as it was exported, and the method of its modules raises an error; only
        their mode is set."""
        for module in self.modules():
            module.training = mode
        return self

    def forward(self, x: Tensor) -> Any:
        """(B, C, H, W) → what the program returns; of a fixed batch size, its logits (B, K)."""
        if self.batch is None or len(x) == self.batch:
            return self.program(x)
        parts = []
        for part in x.split(self.batch):
            missing = self.batch - len(part)
            output = self.program(
                torch.cat([part, part[-1:].expand(missing, *part.shape[1:])]) if missing else part
            )
            checks.instance(
                "exported", output, Tensor, "return one tensor, because its batch size is fixed"
            )
            parts.append(output[: len(part)])
        return torch.cat(parts)
