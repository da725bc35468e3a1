from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from equipoise.core.checks import InputError
from equipoise.models import build, checkpoint, load
from equipoise.models.torch_files import is_torch_file

QUERY = "arch=cnn_small&image_shape=3,8,8"


@pytest.mark.parametrize("suffix", [".pth.tar", ".ckpt", ".bin", ".model", ".pt"])
@pytest.mark.parametrize("form", ["zip", "legacy", "safetensors"])
def test_weights_are_read_by_content(tmp_path: Path, suffix: str, form: str) -> None:
    model, path = (
        build("cnn_small", num_classes=4, image_shape=(3, 8, 8), seed=1).eval(),
        tmp_path / f"net{suffix}",
    )
    if form == "safetensors":
        save_file(model.state_dict(), path)
    else:
        torch.save(
            {"state_dict": model.state_dict()}, path, _use_new_zipfile_serialization=form == "zip"
        )
    x = torch.rand(2, 3, 8, 8)
    assert torch.equal(load(f"file:{path}?{QUERY}")(x), model(x))
    assert checkpoint.read_metadata(path) == {}


def test_a_header_whose_length_begins_like_a_pickle(tmp_path: Path) -> None:
    path = tmp_path / "net.model"
    path.write_bytes((0x280).to_bytes(8, "little") + b"{" + b" " * 0x280)
    assert path.read_bytes()[:2] == b"\x80\x02" and not is_torch_file(path, ())


class Harmful:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("harm",)


@pytest.mark.parametrize("form", ["zip", "pickle"])
def test_the_forbidden_function_is_named(tmp_path: Path, form: str) -> None:
    path = tmp_path / "net.ckpt"
    if form == "zip":
        torch.save({"x": Harmful()}, path)
    else:
        path.write_bytes(pickle.dumps(Harmful(), protocol=2))
    with pytest.raises(
        InputError, match=r"weights only, got (posix|nt)\.mkdir, of which nothing was executed"
    ):
        load(f"file:{path}?{QUERY}")
