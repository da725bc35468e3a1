"""Models of several kinds in one command, as a user types it: settings, what is said of them,
mixtures and warnings."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from equipoise import models
from equipoise.cli.main import run
from equipoise.core.results import read_summary
from equipoise.mixing import load_model
from equipoise.models import LoadedModel, LoadOptions, ModelInfo, Reference, build

CODE = """
import torch
from torch import nn
class Wrong(nn.Module):
    def forward(self, x):
        light = ((x - 0.5) / 0.25).mean((1, 2, 3))
        return {{"logits": torch.stack([-light, light], 1){ending}, "features": light}}
"""
LIGHTNING = """
import warnings
import torch
from torch import nn
class LightningModule(nn.Module):  # what Lightning's own class does to code that looks into a module
    @property
    def trainer(self):
        raise RuntimeError("is not attached to a `Trainer`")
    def log(self, name, value):
        self.trainer
class Lit(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
        with torch.no_grad():
            self.model[1].weight.copy_(torch.tensor([[-1.0], [1.0]]).expand(2, 64))
            self.model[1].bias.copy_(torch.tensor([32.0, -32.0]))
    def forward(self, x):
        return self.model(x)
    def validation_step(self, batch, number):
        import equipoise as eq
        return eq.attack(self, *batch, threat=eq.Threat("linf", 0.2), attack="pgd", steps=3)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    scripted = torch.jit.load("scripted.pt")
def load_script():
    return scripted
"""
DATA = [
    "--data",
    "npz:images.npz",
    "--eps",
    "0.05",
    "--attack",
    "pgd",
    "--steps",
    "2",
    "--batch-size",
    "64",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Dark and light images; a file of weights without settings, a Python file, and a saved
    program."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(3)
    labels = np.arange(120) % 2
    images = (rng.random((120, 1, 8, 8)) * 0.4 + 0.1 + 0.3 * labels[:, None, None, None]) * 255
    np.savez("images.npz", images=images.astype(np.uint8), labels=labels)
    last = nn.Linear(64, 2)
    with torch.no_grad():
        last.weight.copy_(torch.stack([-torch.ones(64), torch.ones(64)]))
        last.bias.copy_(torch.tensor([32.0, -32.0]))
    network = nn.Sequential(nn.Flatten(), last)
    example = (torch.rand(2, 1, 8, 8),)
    torch.export.save(
        torch.export.export(network, example, dynamic_shapes={"input": {0: torch.export.Dim("b")}}),
        "light.pt2",
    )
    Path("own.py").write_text(CODE.format(ending=""))
    Path("sums.py").write_text(CODE.format(ending=".softmax(1)"))
    state = build("cnn_small", num_classes=2, image_shape=(1, 8, 8), seed=1).state_dict()
    torch.save({key: value for key, value in state.items() if key not in ("mean", "std")}, "net.pt")
    return tmp_path


def test_several_kinds_in_one_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    references = [
        "net.pt?arch=cnn_small&mean=0.5&std=0.5",
        "python:own.py:Wrong",
        "exported:light.pt2",
    ]
    assert (
        run(["evaluate", *references, *DATA, "--count", "40", "--audit", "0", "--out", "run"]) == 0
    )
    err = capsys.readouterr().err
    assert "exported:light.pt2: torch.export; 2 classes; input 1×8×8; normalisation: " in err
    assert "mean 0.5, std 0.5 (from the reference); weights: net.pt" in err
    assert "own.py:Wrong: " not in err and "warning" not in err, "of Python code, nothing is known"
    clean = {row.model: row.value for row in read_summary("run").results if row.metric == "clean"}
    assert clean["exported:light.pt2"] == clean["python:own.py:Wrong"] == 1.0 and len(clean) == 3


@pytest.mark.parametrize("name", ["Lit", "scripted", "load_script"])
def test_lightning_modules_and_scripts_of_python_code(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A Lightning module, and TorchScript that returns its logits first in a tuple, as an object
    and by a function."""
    write_lightning()
    assert (
        run(
            [
                "evaluate",
                f"python:lit.py:{name}",
                *DATA,
                "--count",
                "20",
                "--audit",
                "0",
                "--out",
                "run",
            ]
        )
        == 0
    )
    clean = [row.value for row in read_summary("run").results if row.metric == "clean"]
    assert clean == [1.0]


def test_an_attack_in_a_validation_step(folder: Path) -> None:
    """Lightning calls it inside `torch.inference_mode`, and the module that is attacked is its
    own."""
    write_lightning()
    content = np.load("images.npz")
    with torch.inference_mode():
        images, labels = (
            torch.tensor(content["images"][:20] / 255).float(),
            torch.tensor(content["labels"][:20]),
        )
        module = load_model("python:lit.py:Lit")
        attacked = module.validation_step((images, labels), 0)  # type: ignore[operator]
        assert (module(images).argmax(1) == labels).all() and (
            module(attacked).argmax(1) != labels
        ).any()


def test_a_checkpoint_of_lightning(folder: Path) -> None:
    """Weights of a network that is an attribute `model`, compiled, beside what the trainer
    stores."""
    state = torch.load("net.pt", weights_only=True)
    torch.save(
        {
            "epoch": 1,
            "hyper_parameters": {"lr": 0.1},
            "optimizer_states": [{"param_groups": []}],
            "state_dict": {f"model._orig_mod.{key}": value for key, value in state.items()},
        },
        "epoch=1.ckpt",
    )
    settings = "?arch=cnn_small&mean=0.5&std=0.5&image_shape=1,8,8"
    x = torch.rand(3, 1, 8, 8)
    assert torch.equal(load_model(f"epoch=1.ckpt{settings}")(x), load_model(f"net.pt{settings}")(x))


def write_lightning() -> None:
    Path("lit.py").write_text(LIGHTNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript
        torch.jit.script(Pair()).save("scripted.pt")


class Pair(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        light = x.mean((1, 2, 3)) - 0.5
        return torch.stack([-light, light], 1), light


def test_a_mixture_with_a_pt_base_needs_no_option_afterwards(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit = [
        "fit",
        "--accurate",
        "net.pt",
        "--robust",
        "exported:light.pt2",
        "--out",
        "M",
        "--alpha",
        "0.5",
        "--norm",
        "linf",
        "--eps",
        "0.05",
    ]
    assert run([*fit, "--arch", "cnn_small", "--mean", "0.5", "--std", "0.5"]) == 2
    assert "`mean` must hold 3 numbers" in capsys.readouterr().err, (
        "nothing says that the images are grey"
    )
    assert (
        run(
            [
                *fit[:2],
                "net.pt?image_shape=1,8,8",
                *fit[3:],
                "--arch",
                "cnn_small",
                "--mean",
                "0.5",
                "--std",
                "0.5",
            ]
        )
        == 0
    )
    assert (
        "net.pt?arch=cnn_small&mean=0.5&std=0.5&image_shape=1,8,8"
        in Path("M/mixture.toml").read_text()
    )
    capsys.readouterr()
    command = ["evaluate", "mixture:M", *DATA, "--count", "20", "--audit", "0", "--out", "run"]
    assert run(command) == 2 and "--allow-code" in capsys.readouterr().err, (
        "it also names a program"
    )
    assert run([*command, "--allow-code"]) == 0
    assert load_model("M", allow_code=True)(torch.rand(2, 1, 8, 8)).shape == (2, 2)


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("python:sums.py:Wrong", "its outputs look like probabilities, not logits"),
        (
            "exported:light.pt2?mean=0.5&std=0.25",
            r"normalised twice \(mean 0.5, std 0.(25|5), .*: \d+% of 64 images "
            "are classified correctly as they are, 100% otherwise",
        ),
    ],
)
def test_suspicious_models_are_warned_of(
    folder: Path, capsys: pytest.CaptureFixture[str], reference: str, words: str
) -> None:
    assert run(["evaluate", reference, *DATA, "--audit", "0", "--out", "run"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert (
        len(lines) == 1
        and re.search(words, lines[0])
        and lines[0].startswith(f"warning: {reference}: ")
    )


def test_an_option_that_no_model_takes_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["evaluate", "python:own.py:Wrong", *DATA, "--out", "run", "--mean", "0.5"]) == 2
    assert (
        "`mean` must be left out, because no model of this command takes it"
        in capsys.readouterr().err
    )


def test_classes_in_another_order_are_warned_of(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from the config.json of a published model; here, what is known of the model is
    replaced."""

    def load(reference: Reference, options: LoadOptions) -> LoadedModel:
        network = models.load("exported:light.pt2")
        return LoadedModel(network, ModelInfo("light", 2, class_names=("1", "0")))

    monkeypatch.setitem(models.SCHEMES.builtin, "named", load)
    assert (
        run(["evaluate", "named:light", *DATA, "--count", "4", "--audit", "0", "--out", "run"]) == 0
    )
    assert "in another order; ?labels=1,0 is that of the data" in capsys.readouterr().err
    assert (
        run(
            [
                "evaluate",
                "named:light?labels=1,0",
                *DATA,
                "--count",
                "4",
                "--audit",
                "0",
                "--out",
                "other",
            ]
        )
        == 0
    )
    assert "another order" not in capsys.readouterr().err


def test_certify_says_what_it_loaded_and_a_pt_file_may_stand_beside_it(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The option --arch is for the accurate model, which is not among those that are certified."""
    command = [
        "certify",
        "exported:light.pt2",
        "--accurate",
        "net.pt",
        "--alpha",
        "0.5",
        "--sigma",
        "0.1",
        "--samples",
        "100",
        "--data",
        "npz:images.npz",
        "--count",
        "2",
        "--out",
        "run",
    ]
    assert run([*command, "--arch", "cnn_small", "--mean", "0.5", "--std", "0.5"]) == 0
    assert "exported:light.pt2: torch.export; 2 classes" in capsys.readouterr().err
