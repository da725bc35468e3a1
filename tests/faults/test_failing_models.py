"""Models of the user that raise, exit, change their images or return nonsense: one sentence each,
and no folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import equipoise as eq
from equipoise.cli.main import run
from equipoise.core.checks import InputError
from equipoise.core.records import Run
from equipoise.data import Dataset
from equipoise.models import build, check_forward, checkpoint

SHAPE = (3, 8, 8)
MODULE = '''
import sys
import torch
from torch import nn

class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(192, 4)
    def forward(self, x):
        return self.fc(x.flatten(1))

class Late(Base):
    """Raises only for more than two images."""
    def forward(self, x):
        if len(x) > 2:
            raise KeyError("late\\nand on two lines")
        return super().forward(x)

class LateExit(Base):
    def forward(self, x):
        if len(x) > 2:
            sys.exit(3)
        return super().forward(x)

class OneRow(Base):
    def forward(self, x):
        z = super().forward(x)
        return z if len(x) <= 2 else z[:1]

class Exit(Base):
    def forward(self, x):
        sys.exit("enough")

class Mutates(Base):
    def forward(self, x):
        return super().forward(x.mul_(0.5))

class MutatesThroughNumpy(Base):
    def forward(self, x):
        x.numpy()[:] = 0
        return super().forward(x)

class Integers(Base):
    def forward(self, x):
        return super().forward(x).long()

class Pair(Base):
    def forward(self, x):
        return {"one": super().forward(x), "two": x}

class Sparse(Base):
    def forward(self, x):
        return super().forward(x).to_sparse()

class Meta(Base):
    def forward(self, x):
        return super().forward(x).to("meta")

class Flat(Base):
    def forward(self, x):
        return super().forward(x).flatten()

class Array(Base):
    def forward(self, x):
        return super().forward(x).numpy()

def make_exit():
    sys.exit(0)
'''
AT_ONCE = {
    "Exit": "raised SystemExit: enough",
    "Mutates": "must not change its images",
    "Integers": "got torch.int64",
    "MutatesThroughNumpy": "must not change its images",
    "Pair": "one tensor, got 'dict'",
    "Sparse": "dense tensor",
    "Meta": "dense tensor",
    "Flat": "one row of logits per image, got shape (8,)",
    "Array": "one tensor, got 'ndarray'",
    "make_exit": "raised SystemExit: 0",
}
LATE = {
    "Late": (
        "the model python:{module}:Late must work for every batch, but raised KeyError: 'late\\nand on two lines' "
        "for a batch of shape ("
    ),
    "LateExit": "raised SystemExit: 3 for a batch of shape (",
    "OneRow": "must have shape (",
}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with these models, in the current directory beside images and a
    checkpoint."""
    name = f"models_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    images = np.random.default_rng(0).integers(0, 256, (60, *SHAPE), dtype=np.uint8)
    np.savez(tmp_path / "images.npz", images=images, labels=np.arange(60) % 4)
    checkpoint.save(
        tmp_path / "robust.safetensors", build("cnn_small", num_classes=4, image_shape=SHAPE)
    )
    monkeypatch.chdir(tmp_path)
    return name


def commands(reference: str) -> dict[str, list[str]]:
    data = ["--data", "npz:images.npz", "--out", "run"]
    return {
        "evaluate": [
            "evaluate",
            reference,
            "--eps",
            "0.1",
            "--attack",
            "pgd",
            "--steps",
            "1",
            *data,
        ],
        "certify": ["certify", reference, "--sigma", "0.5", "--samples", "200", *data],
        "fit": [
            "fit",
            "--accurate",
            reference,
            "--robust",
            "robust.safetensors",
            "--eps",
            "0.1",
            *data,
        ],
    }


@pytest.mark.parametrize("name", AT_ONCE)
@pytest.mark.parametrize("command", ["evaluate", "certify", "fit"])
def test_a_model_that_fails_at_once(
    module: str,
    capsys: pytest.CaptureFixture[str],
    name: str,
    command: str,
) -> None:
    assert run(commands(f"python:{module}:{name}")[command]) == 2
    error = capsys.readouterr().err
    assert AT_ONCE[name] in error and error.count("\n") == 1
    assert not Path("run").exists()


@pytest.mark.parametrize("name", LATE)
@pytest.mark.parametrize("command", ["evaluate", "certify", "fit"])
def test_a_model_that_fails_at_a_later_batch(
    module: str,
    capsys: pytest.CaptureFixture[str],
    name: str,
    command: str,
) -> None:
    assert run(commands(f"python:{module}:{name}")[command]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error and error.splitlines()[-1].startswith("equipoise: ")
    if (name, command) != ("OneRow", "fit"):
        assert LATE[name].format(module=module) in error
    if name != "OneRow":
        assert f"({module}.py, line " in error


def test_as_a_user_types_it(module: str) -> None:
    line = [sys.executable, "-m", "equipoise", *commands(f"python:{module}:Late")["evaluate"]]
    done = subprocess.run(line, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "Traceback" not in done.stderr and done.stderr.count("\n") == 1
    assert "raised KeyError" in done.stderr


class _Late(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 2:
            raise ZeroDivisionError("late")
        return x.flatten(1)[:, :4]


class _Mutates(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sub_(0.1).flatten(1)[:, :4]


THREAT = eq.Threat("linf", 0.1)


@pytest.mark.parametrize("function", ["evaluate", "attack", "inside a mixture"])
def test_the_original_exception_is_the_cause(function: str) -> None:
    data = (torch.rand(6, *SHAPE), torch.arange(6) % 4)
    model: nn.Module = _Late()
    if function == "inside a mixture":
        robust = build("cnn_small", num_classes=4, image_shape=SHAPE)
        model = eq.MixedClassifier(model, robust, 0.5).eval()
    with pytest.raises(
        InputError, match=r"_Late .* ZeroDivisionError: late .*test_failing_models.py, line"
    ) as caught:
        call = getattr(eq, function if function == "attack" else "evaluate")
        call(model, data, threat=THREAT, attack="pgd", steps=1)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_images_of_the_caller_are_never_changed() -> None:
    images = torch.rand(6, *SHAPE)
    before = images.clone()
    for function in (eq.evaluate, eq.attack):
        with pytest.raises(InputError, match="must not change its images"):
            function(_Mutates(), (images, torch.arange(6) % 4), threat=THREAT)
    with torch.inference_mode(), pytest.raises(InputError, match="must not change its images"):
        check_forward("model", _Mutates(), images)
    assert torch.equal(images, before)


def test_a_bug_of_ours_keeps_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Run, "append", fail)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 4))
    with pytest.raises(ZeroDivisionError, match="a bug"):
        data = torch.rand(6, *SHAPE), torch.arange(6) % 4
        eq.evaluate(model, data, threat=THREAT, attack="pgd", steps=1)


def test_a_model_that_cannot_be_probed_is_not_taken_for_one_with_logits() -> None:
    class Raises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no image suits me")

    mixture = eq.MixedClassifier(
        Raises(), build("cnn_small", num_classes=4, image_shape=SHAPE), 0.5
    )
    data = Dataset(
        "random", "test", torch.rand(2, *SHAPE), torch.arange(2), torch.arange(2), tuple("abcd")
    )
    with pytest.raises(InputError, match=r"`accurate` .* raised ValueError: no image suits me"):
        eq.evaluate({"mixture": mixture}, data, threat=THREAT)
