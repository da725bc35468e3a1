"""A bundle holds both bases: copied to another place and user, it loads and predicts the same."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equipoise as eq
from equipoise import mixing, models
from equipoise.core.checks import InputError
from equipoise.mixing import LogitMap, MixedClassifier
from equipoise.models import RandomlySmoothedClassifier, TTAClassifier, checkpoint

SHAPE = (3, 8, 8)
X = torch.rand(5, *SHAPE, generator=torch.Generator().manual_seed(3))
LOAD = """
import sys, torch
import equipoise as eq
model = eq.load_model("mixture:" + sys.argv[1])
torch.save(model(torch.load(sys.argv[2], weights_only=True)).detach(), sys.argv[3])
"""


def pair(*archs: str) -> tuple[nn.Module, ...]:
    return tuple(
        models.build(
            arch,
            num_classes=6,
            image_shape=SHAPE,
            seed=seed,
            mean=(0.4, 0.5, 0.6),
            std=(0.2, 0.3, 0.25),
        ).eval()
        for seed, arch in enumerate(archs)
    )


def mixture_of(accurate: nn.Module, robust: nn.Module) -> MixedClassifier:
    return MixedClassifier(accurate, robust, 0.7, logit_map=LogitMap(1.0, 2.0, -0.5)).eval()


def loads_elsewhere(folder: Path, place: Path) -> Tensor:
    """The mixture's logits in another process, folder and home, after the folder was moved there
    alone."""
    home, moved = place / "home", place / "received"
    home.mkdir(parents=True)
    shutil.copytree(folder, moved)
    shutil.rmtree(folder.parent)
    for path in (*moved.iterdir(), moved):  # another user's, who may only read it
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = {path.name: path.read_bytes() for path in moved.iterdir()}
    torch.save(X, place / "x.pt")
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(Path(eq.__file__).parents[1]),
        "HOME": str(home),
        "OMP_NUM_THREADS": "1",
    }
    subprocess.run(
        [sys.executable, "-c", LOAD, "received", "x.pt", "out.pt"],
        cwd=place,
        env=environment,
        check=True,
        timeout=300,
    )
    assert {path.name: path.read_bytes() for path in moved.iterdir()} == before and not list(
        home.iterdir()
    )
    moved.chmod(0o755)
    logits: Tensor = torch.load(place / "out.pt", weights_only=True)
    return logits


def test_a_copied_folder_predicts_the_same(tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    bases = pair("cnn_small", "resnet8")
    checkpoint.save(here / "a.safetensors", bases[0])
    weights = {
        key: value for key, value in bases[1].state_dict().items() if key not in ("mean", "std")
    }
    torch.save(weights, here / "r.pt")
    accurate = models.load(f"tta:2:file:{here}/a.safetensors")
    robust = models.load(
        f"file:{here}/r.pt?arch=resnet8&image_shape=3,8,8&mean=0.4,0.5,0.6&std=0.2,0.3,0.25"
    )
    mixture = mixture_of(accurate, robust)
    eq.save(here / "m", mixture, bundle=True)
    with torch.no_grad():
        expected = mixture(X)
    assert torch.equal(loads_elsewhere(here / "m", tmp_path / "there"), expected)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda base: base,
        lambda base: TTAClassifier(base, 6),
        lambda base: RandomlySmoothedClassifier(base, 0.12, 3),
        lambda base: TTAClassifier(RandomlySmoothedClassifier(base, 0.1, 2), 2),
    ],
)
def test_save_needs_no_more_arguments(wrap: object, tmp_path: Path) -> None:
    """Bases that were built in Python, by no reference."""
    accurate, robust = pair("cnn_small", "resnet8")
    mixture = mixture_of(accurate, wrap(robust))  # type: ignore[operator]
    eq.save(tmp_path / "m", mixture)
    assert {"accurate.safetensors", "robust.safetensors", "mixture.toml"} == {
        path.name for path in (tmp_path / "m").iterdir()
    }
    loaded = eq.load_model(f"mixture:{tmp_path}/m")
    assert models.identity(loaded) == models.identity(mixture)
    with torch.no_grad():
        assert torch.equal(loaded(X), mixture(X))


def test_without_bundle_references_stay(tmp_path: Path) -> None:
    accurate, robust = pair("cnn_small", "resnet8")
    checkpoint.save(tmp_path / "a.safetensors", accurate)
    mixture = mixture_of(models.load(f"file:{tmp_path}/a.safetensors"), robust)
    eq.save(tmp_path / "m", mixture)
    assert not (tmp_path / "m" / "accurate.safetensors").exists()
    assert "file:../a.safetensors" in (tmp_path / "m" / "mixture.toml").read_text()


def test_weights_in_memory_are_those_that_are_bundled(tmp_path: Path) -> None:
    """A base that was trained further after loading is not the file that it was loaded from."""
    accurate, robust = pair("cnn_small", "resnet8")
    checkpoint.save(tmp_path / "a.safetensors", accurate)
    trained = models.load(f"file:{tmp_path}/a.safetensors")
    with torch.no_grad():
        next(trained.parameters()).add_(0.5)
    mixture = mixture_of(trained, robust)
    eq.save(tmp_path / "m", mixture, bundle=True)
    with torch.no_grad():
        assert torch.equal(eq.load_model(f"mixture:{tmp_path}/m")(X), mixture(X))


def test_a_bundle_of_a_bundle_may_lie_in_the_same_folder(tmp_path: Path) -> None:
    mixture = mixture_of(*pair("cnn_small", "resnet8"))
    eq.save(tmp_path / "m", mixture)
    loaded = eq.load_model(f"mixture:{tmp_path}/m")
    eq.save(tmp_path / "m", loaded, bundle=True)
    assert models.identity(eq.load_model(f"mixture:{tmp_path}/m")) == models.identity(mixture)


def test_a_gate_is_bundled_too(tmp_path: Path) -> None:
    from gate_pairs import gated, images

    mixture = gated()
    eq.save(tmp_path / "m", mixture, bundle=True)
    shutil.move(tmp_path / "m", tmp_path / "n")
    loaded = eq.load_model(f"mixture:{tmp_path}/n")
    with torch.no_grad():
        assert torch.equal(loaded(images()), mixture(images()))


class Own(nn.Module):
    """A network of the user's own, which only torch.export can store."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Flatten(), nn.Linear(144, 6)
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x * 2 - 1)
        return logits


@pytest.mark.slow
def test_a_network_of_the_users_own_is_traced(tmp_path: Path) -> None:
    torch.manual_seed(0)
    robust, (accurate, _) = Own().eval(), pair("cnn_small", "resnet8")
    mixture = mixture_of(accurate, TTAClassifier(robust, 2))
    eq.save(tmp_path / "m", mixture, bundle=True, image_shape=SHAPE)
    with pytest.raises(
        InputError, match="`allow_code` must be set"
    ):  # a program computes what it likes
        eq.load_model(f"mixture:{tmp_path}/m")
    loaded = eq.load_model(f"mixture:{tmp_path}/m", allow_code=True)
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    torch.testing.assert_close(loaded(x), mixture(y))
    for model, images in ((loaded, x), (mixture, y)):
        model(images)[:, 0].sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    assert x.grad is not None and x.grad.abs().max() > 0
    eq.save(tmp_path / "again", loaded, bundle=True)  # the traced program is copied
    with torch.no_grad():
        assert torch.equal(
            eq.load_model(f"mixture:{tmp_path}/again", allow_code=True)(X), loaded(X)
        )


def test_plain_mixing_is_bundled(tmp_path: Path) -> None:
    from equipoise.fitting import fit

    accurate, robust = pair("cnn_small", "resnet8")
    mixture = fit(
        accurate,
        robust,
        (X, torch.arange(len(X)) % 6),
        threat=eq.Threat("linf", 0.01),
        alpha=0.5,
        bundle=True,
        out=tmp_path / "m",
    ).mixture
    (tmp_path / "m").rename(tmp_path / "moved")
    with torch.no_grad():
        assert torch.equal(eq.load_model(f"mixture:{tmp_path}/moved")(X), mixture(X))


@pytest.mark.slow
def test_fit_bundles_a_network_of_the_users_own(tmp_path: Path) -> None:
    """The folder is resumed with the network itself, whose weights have other names than those of
    the program."""
    from equipoise.fitting import fit

    threat = eq.Threat("linf", 0.01)
    data = (
        torch.rand(60, *SHAPE, generator=torch.Generator().manual_seed(1)),
        torch.arange(60) % 6,
    )
    accurate, robust = pair("cnn_small", "resnet8")[0], Own().eval()
    settings: dict[str, Any] = {
        "threat": threat,
        "out": tmp_path / "m",
        "bundle": True,
        "lose_at_most": 50.0,
        "steps": 2,
        "targets": 2,
        "pool": 1,
        "rounds": 0,
    }
    first, again = (fit(accurate, robust, data, **settings) for _ in range(2))
    loaded = eq.load_model(f"mixture:{tmp_path}/m", allow_code=True)
    with torch.no_grad():
        torch.testing.assert_close(loaded(X), first.mixture(X))
        assert torch.equal(first.mixture(X), again.mixture(X))


@pytest.mark.parametrize(
    "preset", ["BicubicRes8Crop8", pytest.param("Res8x8", marks=pytest.mark.slow)]
)
def test_a_network_with_a_preset_is_traced_for_any_batch(preset: str, tmp_path: Path) -> None:
    """Images of 10 × 14 pixels, which a first layer resizes; also after it has seen such images."""
    checkpoint.save(tmp_path / "a.safetensors", pair("cnn_small")[0])
    robust = models.build("cnn_small", num_classes=6, image_shape=(3, 10, 14), seed=1).eval()
    mixture = mixture_of(models.load(f"{tmp_path}/a.safetensors?preset={preset}"), robust)
    x = torch.rand(5, 3, 10, 14, generator=torch.Generator().manual_seed(1))
    mixture.accurate(x)
    eq.save(tmp_path / "m", mixture, bundle=True, image_shape=(3, 10, 14))
    loaded = eq.load_model(f"mixture:{tmp_path}/m", allow_code=True)
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), mixture(x))
        torch.testing.assert_close(loaded(x[:1]), mixture(x[:1]))


def test_a_program_is_copied_with_its_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a path that begins with ~, with a file of labels, into a folder with a question mark in
    its name."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    torch.export.save(
        torch.export.export(pair("cnn_small")[0], (X,), strict=False), tmp_path / "net.pt2"
    )
    (tmp_path / "names.txt").write_text("3\n1\n2\n")
    accurate = models.load("tta:2:exported:~/net.pt2?labels=./names.txt&mean=0.5,0.5,0.5")
    robust = models.build("cnn_small", num_classes=3, image_shape=SHAPE).eval()
    mixture = mixture_of(accurate, robust)
    eq.save("which?/m?", mixture, bundle=True)
    (tmp_path / "names.txt").unlink()
    (tmp_path / "net.pt2").unlink()
    loaded = eq.load_model("mixture:which?/m?", allow_code=True)
    with torch.no_grad():
        assert torch.equal(loaded(X), mixture(X))


def test_a_network_is_traced_into_a_folder_with_a_question_mark(tmp_path: Path) -> None:
    mixture = mixture_of(Own().eval(), TTAClassifier(pair("cnn_small")[0], 2))
    eq.save(tmp_path / "m?", mixture)  # for images of the shape that the other base was built for
    loaded = eq.load_model(f"mixture:{tmp_path}/m?", allow_code=True)
    with torch.no_grad():
        torch.testing.assert_close(loaded(X), mixture(X))


def test_a_path_with_a_colon_may_have_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run:1").mkdir()
    network = pair("resnet8")[0]
    torch.save(network.state_dict(), "run:1/net.pt")
    loaded = eq.load_model("run:1/net.pt?arch=resnet8&image_shape=3,8,8")
    with torch.no_grad():
        torch.testing.assert_close(loaded(X), network(X))


def test_what_cannot_be_traced_is_named(tmp_path: Path) -> None:
    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1)[:, : 6 if float(x.sum()) > 0 else 5]

    accurate = pair("cnn_small", "resnet8")[0]
    with pytest.raises(
        InputError, match=r"`robust` must be a network that torch\.export can trace, got Reads"
    ):
        eq.save(tmp_path / "m", mixture_of(accurate, Reads()), image_shape=SHAPE)
    with pytest.raises(InputError, match="`image_shape` must be given to bundle a Reads"):
        eq.save(tmp_path / "m", mixture_of(Reads(), Reads()))
    assert not (tmp_path / "m" / "mixture.toml").exists()


def test_a_missing_base_of_a_bundle_is_named(tmp_path: Path) -> None:
    eq.save(tmp_path / "m", mixture_of(*pair("cnn_small", "resnet8")))
    (tmp_path / "m" / "robust.safetensors").unlink()
    with pytest.raises(InputError, match=r"robust\.safetensors` must be a file that exists"):
        mixing.load_model(f"mixture:{tmp_path}/m")


def test_the_noise_of_a_smoothed_base_must_be_the_default(tmp_path: Path) -> None:
    accurate, robust = pair("cnn_small", "resnet8")
    with pytest.raises(InputError, match="`seed` must be 0 for a smoothed base of a bundle, got 5"):
        eq.save(
            tmp_path / "m", mixture_of(accurate, RandomlySmoothedClassifier(robust, 0.1, 2, seed=5))
        )
