"""Model references with a mistake, as a user types them: one sentence, exit code 2, and nothing is
written."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from equipoise.cli.main import run
from equipoise.models import build, checkpoint

CODE = """
import torch
from torch import nn
class Six(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(192, 6))
def broken():
    raise ValueError("no weights here")
number = 5
"""
SHAPE = (3, 8, 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of four classes, and models of four and six classes in several formats."""
    folder = tmp_path_factory.mktemp("references")
    labels = np.arange(8) % 4
    images = np.random.default_rng(3).integers(0, 255, (8, *SHAPE))
    np.savez(folder / "images.npz", images=images.astype(np.uint8), labels=labels)
    four, six = (
        build("cnn_small", num_classes=count, image_shape=SHAPE, seed=1).eval() for count in (4, 6)
    )
    checkpoint.save(folder / "four.safetensors", four)
    checkpoint.save(folder / "six.safetensors", six)
    torch.save(four.state_dict(), folder / "net.pt")
    torch.save(six.state_dict(), folder / "six.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript
        torch.jit.script(nn.Sequential(nn.Flatten(), nn.Linear(192, 6))).save(folder / "script6.pt")
    torch.save(nn.Linear(3, 4), folder / "pickle.pt")
    (folder / "page.pt").write_text("<!DOCTYPE html><title>404</title>")
    (folder / "damaged.safetensors").write_bytes(b'\x08\0\0\0\0\0\0\0{"a": 1')
    (folder / "own.py").write_text(CODE)
    (folder / "mixture").mkdir()
    return folder


@pytest.mark.parametrize(
    ("reference", "sentence"),
    [
        # names that nearly exist
        ("zoo:resnt18", "`model` must be one of {}, got 'resnt18' (did you mean 'resnet18'?)"),
        (
            "resnet18",
            "`model` must be a path that exists or begin with one of {} (did you mean 'zoo:resnet18'?)",
        ),
        ("tim:resnet18", "`scheme of a model` must be one of {}, got 'tim' (did you mean 'timm'?)"),
        (
            "four.safetensor",
            "`model` must be a path that exists {} (did you mean 'four.safetensors'?)",
        ),
        (
            "file:fuor.safetensors",
            "`fuor.safetensors` must be a file that exists (did you mean 'four.safetensors'?)",
        ),
        (
            "exported:script.pt",
            "`script.pt` must be a file that exists (did you mean 'script6.pt'?)",
        ),
        (
            "mixture:mixtur",
            "`mixture` must be a folder that holds mixture.toml, got 'mixtur' (did you mean 'mixture'?)",
        ),
        (
            "hf:./mixtur",
            "`model` must be a folder that exists, got './mixtur' (did you mean 'mixture'?)",
        ),
        (
            "python:owm.py:Six",
            "`model` must name a module {} no file owm.py (did you mean 'own.py'?)",
        ),
        (
            "python:own.py:Sixx",
            "`model` must name a function, a class {} got 'Sixx', {} (did you mean 'Six'?)",
        ),
        (
            "python:own.py:number",
            "`model` must name a function, a class or a torch module of own.py, got 'number', {}",
        ),
        (
            "python:own.py:broken",
            "`model` must name a function that works without arguments, {} no weights here",
        ),
        (
            "net.pt?archi=cnn",
            "`setting of net.pt?archi=cnn` must be one of {}, got 'archi' (did you mean 'arch'?)",
        ),
        (
            "net.pt?arch=cnn_smal",
            "`arch` must be one of {}, got 'cnn_smal' (did you mean 'cnn_small'?), for net.pt",
        ),
        (
            "net.pt?arch=cnn_small&labels=imagenete",
            "`labels` must be one of {} (did you mean 'imagenette'?)",
        ),
        (
            "net.pt?arch=cnn_small&preset=Res256Cop224",
            "`preset` must be none or like Res256Crop224, {}",
        ),
        (
            "robustbench:cifar10/Linf/Carmon2019",
            "`model of RobustBench` must be one of {} (did you mean "
            "'cifar10/Linf/Carmon2019Unlabeled'?)",
        ),
        (
            "robustbench:cifar/Linf/Carmon2019Unlabeled",
            "`data set and threat of RobustBench` must be one of {} (did you mean 'cifar10/Linf'?)",
        ),
        (
            "robustbench:cifar10/Linf/Carmon2019Unlabeled",
            "`model` must have its file at {}; download https://{}",
        ),
        ("timm:", "`model` must name a model after timm:, got 'timm:'"),
        (
            "python:own.py",
            "`model` must read python:FILE.py:NAME or python:MODULE:NAME, got 'python:own.py'",
        ),
        # another number of classes
        (
            "six.safetensors",
            "`six.safetensors` must have the 4 classes of the data, got 6; ?labels=… says which {}",
        ),
        (
            "six.pt?arch=cnn_small",
            "`six.pt` must hold exactly the weights of cnn_small, got another shape or type of "
            "fc.weight, fc.bias, with 6 classes instead of 4; ?labels=… says which {}",
        ),
        (
            "python:own.py:Six",
            "`python:own.py:Six` must have as many classes as npz:images.npz, 4, got 6",
        ),
        (
            "exported:script6.pt",
            "`exported:script6.pt` must have as many classes as npz:images.npz, 4, got 6",
        ),
        (
            "six.safetensors?labels=0,1,2",
            "`six.safetensors?labels=0,1,2` must have the 4 classes of the data, got 3; {}",
        ),
        (
            "six.safetensors?labels=0,1,2,6",
            "`labels` must be classes of {}, which lie in 0..5, got 6",
        ),
        (
            "six.safetensors?labels=imagenette",
            "`labels` must be numbers or a file for a model with other than the 1000 {}",
        ),
        # files of something else
        ("net.pt", "`arch` must be given, because net.pt does not contain it, got None"),
        (
            "net.pt?arch=resnet8",
            "`net.pt` must hold exactly the weights of resnet8, got no bn1.weight, bn1.bias, "
            "bn1.running_mean and 41 more",
        ),
        (
            "net.pt?arch=cnn",
            "`net.pt` must hold exactly the weights of cnn, got another shape or type of conv1.weight, "
            "conv1.bias, conv2.weight and 4 more",
        ),
        (
            "script6.pt",
            "`script6.pt` must hold weights only, got a program (TorchScript); exported:script6.pt runs it",
        ),
        (
            "exported:net.pt",
            "`net.pt` must be a file of torch.export.save or TorchScript, got one that holds weights; "
            "use file:net.pt",
        ),
        (
            "pickle.pt?arch=cnn",
            "`pickle.pt` must hold weights only, got torch.nn.modules.linear.Linear, of which {}",
        ),
        (
            "page.pt?arch=cnn",
            "`page.pt` must be a file of a model, got a web page: its download has failed",
        ),
        (
            "damaged.safetensors",
            "`damaged.safetensors` must be a whole safetensors file, got one that cannot be read {}",
        ),
        ("mixture:mixture", "`mixture` must be a folder that holds mixture.toml, got 'mixture'"),
        # wrappers and servers
        (
            "tta:3:four.safetensors",
            "`model` must read tta:N:REFERENCE with N among 2, 6, 10, got {}",
        ),
        ("tta:2:tta:2:four.safetensors", "`model` must have tta: only once, got {}"),
        ("smoothed:four.safetensors", "`model` must read smoothed:SIGMA:REFERENCE, {}"),
        (
            "http://localhost:1/v2/models/x",
            "the server http://localhost:1/v2/models/x must be reachable, got {}",
        ),
    ],
)
def test_one_sentence(
    reference: str,
    sentence: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    before = sorted(folder.iterdir())
    command = [
        "evaluate",
        reference,
        "--data",
        "npz:images.npz",
        "--eps",
        "0.05",
        "--attack",
        "pgd",
        "--out",
        "run",
    ]
    assert run(command) == 2
    captured = capsys.readouterr()
    start, *rest = sentence.split("{}")
    line = captured.err.removesuffix("\n")
    assert captured.out == "" and "\n" not in line and line.startswith(f"equipoise: {start}"), line
    assert all(part in line for part in rest) and line.endswith(rest[-1] if rest else start), line
    assert sorted(path for path in folder.iterdir() if path.name != "__pycache__") == before
