"""One function of bytes for every reader: an `InputError` is a refusal, any other exception a
finding.

Run one with Atheris (`pip install equipoise[fuzz]`): `python tests/faults/fuzz_targets.py TARGET
[libFuzzer options]`.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from equipoise import models
from equipoise.core import config, records, rows
from equipoise.core.arrays import ExampleArrays, FitArrays
from equipoise.core.checks import InputError
from equipoise.core.results import Summary, read_summary
from equipoise.data import cifar, mnist, user_files
from equipoise.mixing import Gate, folder, save_gate
from equipoise.models import checkpoint

PLACE = Path(tempfile.mkdtemp())


BASE = models.build("cnn_small", num_classes=3, image_shape=(1, 8, 8))


def _reader(name: str, read: Callable[[Path], object]) -> Callable[[bytes], bool]:
    def target(data: bytes) -> bool:
        path = PLACE / name
        path.write_bytes(data)
        try:
            read(path)
        except InputError:
            return False
        return True

    return target


# Each returns whether the bytes were accepted.
TARGETS: dict[str, Callable[[bytes], bool]] = {
    "run.toml": _reader("run.toml", records.read_description),
    "mixture.toml": _reader("mixture.toml", folder._read),
    "rows.jsonl": _reader("rows.jsonl", lambda path: records.read_rows(path.parent)),
    "summary.json": _reader("summary.json", lambda path: read_summary(path.parent)),
    "arrays.npz": _reader("arrays.npz", lambda path: ExampleArrays.load(path.parent)),
    "fit.npz": _reader("arrays.npz", lambda path: FitArrays.load(path.parent)),
    "checkpoint": _reader("checkpoint.safetensors", lambda path: checkpoint.load(path)),
    "state dict": _reader(
        "weights.pt", lambda path: checkpoint.load(path, "cnn_small", image_shape=(1, 8, 8))
    ),
    "gate": _reader("gate.safetensors", lambda path: folder.load_gate(path, BASE, BASE)),
    "npz data": _reader("images.npz", lambda path: user_files.read_npz(path, "test")),
    "idx": _reader("images-idx3-ubyte", lambda path: mnist.read_file(path, dims=3)),
    "idx.gz": _reader("images-idx3-ubyte.gz", lambda path: mnist.read_file(path, dims=3)),
    "pickle": _reader("data_batch_1", cifar.load_pickle),
}


def seeds() -> dict[str, bytes]:
    """A valid file of every target, to start from."""
    checkpoint.save(PLACE / "seed.safetensors", BASE)
    weights = (PLACE / "seed.safetensors").read_bytes()
    save_gate(
        PLACE / "seed.safetensors",
        Gate((("conv1", "conv2"), ("conv1", "conv2")), 32, 64, 2),
        BASE,
        BASE,
    )
    gate, state, arrays, images = (
        (PLACE / "seed.safetensors").read_bytes(),
        io.BytesIO(),
        io.BytesIO(),
        io.BytesIO(),
    )
    torch.save(BASE.state_dict(), state)
    pictures, label = np.zeros((2, 3, 4, 4), np.uint8), np.array([0, 1])
    examples: dict[str, Any] = dict(
        ExampleArrays(
            clean=pictures, attacked=pictures, label=label, predicted=np.zeros((2, 3), np.int64)
        ).to_dict()
    )
    np.savez(arrays, **examples)
    np.savez(images, images=pictures, labels=label)
    idx = bytes((0, 0, 8, 3, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 2, 5, 6))
    fit = io.BytesIO()
    line, cube = np.linspace(0, 1, 4), np.zeros((4, 4, 4))
    fitted: dict[str, Any] = dict(
        FitArrays(
            q=0.5,
            clean_before=line,
            clean_after=line,
            clean_correct=line > 0,
            attacked_before=line,
            attacked_after=line,
            attacked_correct=line > 0,
            landscape=cube,
            usable=cube > 0,
            axis_s=line,
            axis_p=line,
            axis_c=line,
        ).to_dict()
    )
    np.savez(fit, **fitted)
    row = rows.AttackRow(index=0, model="m", attack="clean", label=1, correct=True, margin=0.5)
    side = {"reference": "a.safetensors", "digest": "0" * 64}
    return {
        "run.toml": config.dumps(
            {"schema": 2, "version": "0", "identity": {"a": {"b": [1]}}, "settings": {}}
        ).encode(),
        "mixture.toml": config.dumps(
            {
                "schema": 2,
                "alpha": 0.5,
                "hard": True,
                "accurate": side,
                "robust": side,
                "provenance": {"data": "d", "split": "s", "images": ["0-3"], "promise": ""},
            }
        ).encode(),
        "rows.jsonl": f"{row.to_json()}\n".encode(),
        "summary.json": json.dumps(Summary(command="evaluate", seconds=1.0).to_dict()).encode(),
        "arrays.npz": arrays.getvalue(),
        "fit.npz": fit.getvalue(),
        "checkpoint": weights,
        "state dict": state.getvalue(),
        "gate": gate,
        "npz data": images.getvalue(),
        "idx": idx,
        "idx.gz": gzip.compress(idx),
        "pickle": pickle.dumps({b"data": [1, 2], b"labels": [0]}, protocol=2),
    }


def fuzz(arguments: list[str]) -> None:
    """Run one target under Atheris until it finds something or its time is over."""
    import atheris

    atheris.instrument_all()
    atheris.Setup([arguments[0], *arguments[2:]], lambda data: TARGETS[arguments[1]](data) and None)
    atheris.Fuzz()


if __name__ == "__main__":
    fuzz(sys.argv)
