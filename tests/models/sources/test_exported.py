"""Programs that torch.export and TorchScript save."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import equipoise as eq
from equipoise.core.checks import InputError
from equipoise.mixing import MixedClassifier, load_model, save_mixture
from equipoise.models import build, checkpoint, info_of, load, weights_digest

SHAPE = (3, 8, 8)
X = torch.rand(5, *SHAPE, generator=torch.Generator().manual_seed(1))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.fc(self.norm(self.conv(x)).relu().mean((2, 3)))
        return z


@pytest.fixture(scope="module")
def network() -> nn.Module:
    torch.manual_seed(0)
    return Network().eval()


@pytest.fixture(scope="module")
def files(network: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("programs")
    example = (X[:2],)
    dynamic = torch.export.export(
        network, example, dynamic_shapes={"x": {0: torch.export.Dim("batch")}}
    )
    torch.export.save(dynamic, folder / "dynamic.pt2")
    torch.export.save(torch.export.export(network, example), folder / "fixed.pt2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        torch.jit.save(torch.jit.script(network), folder / "script.pt")
        torch.jit.save(torch.jit.trace(network, X), folder / "trace.pt")
    return {path.stem: path for path in folder.iterdir()}


@pytest.mark.parametrize("kind", ["dynamic", "fixed", "script", "trace"])
def test_programs_are_the_network(kind: str, files: dict[str, Path], network: nn.Module) -> None:
    model = load(f"exported:{files[kind]}")
    for count in (1, 2, 5):
        torch.testing.assert_close(model(X[:count]), network(X[:count]))
    assert model.train().eval() is model
    assert not any(module.training for module in model.modules()), (
        "else it would fail a sanity check"
    )
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    model(x).square().sum().backward()
    network(y).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    info = info_of(model)
    assert info is not None and str(files[kind]) in str(info) and "in the program" in str(info)
    assert info.num_classes == (5 if kind in ("dynamic", "fixed") else None)


def test_normalisation_and_labels_of_the_reference(
    files: dict[str, Path], network: nn.Module
) -> None:
    model = load(
        f"exported:{files['dynamic']}?mean=0.5,0.25,0.5&std=0.5,0.5,0.25&labels=4,0&preset=Crop8"
    )
    mean, std = (
        torch.tensor(values).view(1, 3, 1, 1) for values in ((0.5, 0.25, 0.5), (0.5, 0.5, 0.25))
    )
    torch.testing.assert_close(model(X), network((X - mean) / std)[:, [4, 0]])
    assert "mean 0.5,0.25,0.5, std 0.5,0.5,0.25 (reference)" in str(info_of(model))


def test_a_program_is_attacked(files: dict[str, Path], network: nn.Module) -> None:
    labels = network(X).argmax(1)
    model = load(f"exported:{files['fixed']}")
    attacked = eq.attack(model, X, labels, threat=eq.Threat("linf", 0.5), attack="pgd", steps=5)
    before, after = (network(x).gather(1, labels[:, None]) for x in (X, attacked))
    assert bool((after < before - 0.005).all())


def test_programs_with_the_same_weights_have_other_digests(tmp_path: Path) -> None:
    """Of a frozen program, the weights are constants that no state dict shows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in (1, 2):
            torch.manual_seed(number)
            script = torch.jit.freeze(
                torch.jit.script(nn.Sequential(nn.Flatten(), nn.Linear(192, 3)).eval())
            )
            torch.jit.save(script, tmp_path / f"{number}.pt")
    first, again, second = (load(f"exported:{tmp_path}/{number}.pt") for number in (1, 1, 2))
    assert weights_digest(first) == weights_digest(again) != weights_digest(second)


def test_a_folder_that_names_a_program_needs_allow_code(
    files: dict[str, Path], tmp_path: Path
) -> None:
    checkpoint.save(
        tmp_path / "robust.safetensors", build("cnn_small", num_classes=5, image_shape=SHAPE)
    )
    accurate, robust = (
        load(f"exported:{files['script']}"),
        load(str(tmp_path / "robust.safetensors")),
    )
    save_mixture(tmp_path / "m", MixedClassifier(accurate, robust, 0.5))
    with pytest.raises(InputError, match="--allow-code"):
        load_model(tmp_path / "m")
    assert weights_digest(
        load_model(tmp_path / "m", allow_code=True).get_submodule("accurate")
    ) == weights_digest(accurate)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("exported:{}/none.pt2", "must be a file that exists"),
        ("exported:{}/page.pt2", "got a web page"),
        ("exported:{}/text.pt2", "cannot be read"),
        ("exported:{}/two.pt2", "one batch of images"),
        ("exported:{}/state.pt", "holds weights; use file:"),
        ("{}/script.pt?arch=resnet20", "exported:script.pt runs it"),
        ("{}/page.pt?arch=resnet20", "got a web page"),
        ("{}/page.safetensors", "got a web page"),
        ("exported:{}/page.pt2?arch=cnn", "`arch` must be left out"),
        ("exported:{}/dynamic.pt2?labels=1,7", "0..4, got 7"),
    ],
)
def test_other_files_are_one_sentence(
    text: str, message: str, files: dict[str, Path], tmp_path: Path
) -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x + y

    for name in ("page.pt2", "page.pt", "page.safetensors"):
        (tmp_path / name).write_text("\n <!DOCTYPE html><html>quota exceeded</html>")
    (tmp_path / "text.pt2").write_text("no program")
    for name in ("script.pt", "dynamic.pt2"):
        (tmp_path / name).write_bytes(
            next(path for path in files.values() if path.name == name).read_bytes()
        )
    torch.save({"fc.weight": torch.zeros(3, 3)}, tmp_path / "state.pt")
    if "two" in text:
        torch.export.save(torch.export.export(Two(), (X, X)), tmp_path / "two.pt2")
    with pytest.raises(InputError, match=message) as caught:
        load(text.format(tmp_path))
    assert "\n" not in str(caught.value)


def test_the_data_have_as_many_classes(files: dict[str, Path]) -> None:
    with pytest.raises(InputError, match="must have the 3 classes of the data, got 5"):
        load(f"exported:{files['dynamic']}", num_classes=3)
    assert load(f"exported:{files['dynamic']}?labels=4,1,0", num_classes=3)(X).shape == (5, 3)


def test_torch_writes_no_traceback_of_its_own(tmp_path: Path) -> None:
    """As the user sees it: the sentence alone."""
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "net.pt")
    code = "import equipoise as eq, sys\ntry: eq.load_model(sys.argv[1])\nexcept ValueError as error: print(error)"
    found = subprocess.run(
        [sys.executable, "-c", code, f"exported:{tmp_path}/net.pt"],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert (
        found.stderr == "" and len(found.stdout.splitlines()) == 1 and "use file:" in found.stdout
    )
