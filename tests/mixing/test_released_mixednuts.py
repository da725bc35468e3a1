from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import equipoise as eq
from equipoise.core.checks import InputError
from equipoise.mixing import MixedClassifier
from equipoise.mixing.mixednuts import RELEASED, read_numbers
from equipoise.models.architectures import zoo
from equipoise.models.sources import robustbench

OFFICIAL = """\
cifar10:
  Peng2023Robust:
    gelu:
      default_beta: 98.5
      98.5:
        s: 5.0
        c: -1.1
        p: 4.0
        alpha: 0.9987500602493457
    none:
      default_beta: 95.0
      100.0:
        alpha: 1
      95.0:
        alpha: 0.9570535356459247
cifar100:
  Wang2023Better_WRN-70-16:
    gelu:
      default_beta: 98.5
      98.5:
        s: 0.6115753843212784
        c: -2.142857142857143
        p: 3.571428571428571
        alpha: 0.9860300534207915
    none:
      default_beta: 93.5
      93.5:
        alpha: 0.9706995384302841
      0.0:
        alpha: 0"""
REFERENCE = "robustbench:cifar10/Linf/Bai2024MixedNUTS"


def test_the_numbers_of_the_official_file(tmp_path: Path) -> None:
    path = tmp_path / "optimal_spca.yaml"
    path.write_text(OFFICIAL)
    for name in ("cifar10", "cifar100"):
        assert read_numbers(path, name) == RELEASED[name]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "cifar10:",
        OFFICIAL.replace("s: 5.0", "s: five"),
        OFFICIAL.replace("98.5:", "98:"),
        OFFICIAL.replace("alpha: 0.99875", "alpha: 1.99875"),
        "<html>",
    ],
)
def test_a_damaged_file_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "optimal_spca.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match="must hold s, p, c and alpha of MixedNUTS for cifar10"):
        read_numbers(path, "cifar10")


@pytest.fixture
def released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, nn.Module, nn.Module]:
    """RobustBench's folder with both files, of networks that are small enough for a test."""
    monkeypatch.setitem(robustbench.ACCURATE_BASES, "cifar10", ("resnet8", (0.5,) * 3, (0.5,) * 3))
    small = replace(robustbench.find_entry("cifar10/Linf/Peng2023Robust"), arch="wide_resnet40_2")
    monkeypatch.setitem(robustbench.catalog(), small.key, small)
    bases = [
        zoo.build(arch, num_classes=10, image_shape=(3, 32, 32), mean=mean, std=std, seed=7).eval()
        for arch, mean, std in (
            ("resnet8", (0.5,) * 3, (0.5,) * 3),
            ("wide_resnet40_2", small.mean, small.std),
        )
    ]
    entry = robustbench.find_entry(REFERENCE.removeprefix("robustbench:"))
    with torch.no_grad():
        bases[1].get_parameter("fc.weight").mul_(20)  # a confident robust model
    for base, name in zip(bases, entry.files, strict=True):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(
            {
                f"module.{key}": value
                for key, value in base.state_dict().items()
                if key not in ("mean", "std")
            },
            path,
        )
    return tmp_path, bases[0], bases[1]


def by_the_paper(
    accurate: nn.Module,
    robust: nn.Module,
    x: torch.Tensor,
    s: float,
    p: float,
    c: float,
    alpha: float,
) -> torch.Tensor:
    """(1 − α)·onehot(g) + α·softmax(s·sgn(u)|u|^p) with u = GELU(LN(h) + c), in double
    precision."""
    with torch.no_grad():
        g, h = accurate(x).double(), robust(x).double()
    u = F.gelu((h - h.mean(1, keepdim=True)) / (h.var(1, keepdim=True) + 1e-8).sqrt() + c)
    return (1 - alpha) * F.one_hot(g.argmax(1), 10) + alpha * (s * u.sign() * u.abs() ** p).softmax(
        1
    )


@pytest.mark.parametrize("with_file", [False, True])
def test_the_entry_of_robustbench_is_a_mixture(
    with_file: bool, released: tuple[Path, nn.Module, nn.Module]
) -> None:
    root, accurate, robust = released
    if with_file:
        (root / "optimal_spca.yaml").write_text(
            OFFICIAL.replace("s: 5.0", "s: 0.7").replace("0.99875", "0.61")
        )
    mixture = eq.load_model(f"{REFERENCE}?weights={root}")
    assert isinstance(mixture, MixedClassifier) and mixture.hard and not mixture.training
    assert mixture.surrogate_alpha == 0.9570535356459247
    assert mixture.provenance is not None and mixture.provenance.images == ("0-999",)
    whose = f"numbers of {root}/optimal_spca.yaml" if with_file else "published numbers"
    assert mixture.provenance.promise == f"promises nothing: {whose} for cifar10"
    x = torch.rand(16, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    s, alpha = (0.7, 0.610060249345700) if with_file else (5.0, 0.9987500602493457)
    expected = by_the_paper(accurate, robust, x, s, 4.0, -1.1, alpha)
    with torch.no_grad():
        torch.testing.assert_close(mixture(x).double().exp(), expected, rtol=2e-4, atol=1e-5)


def test_settings_of_a_single_network_are_refused(
    released: tuple[Path, nn.Module, nn.Module],
) -> None:
    with pytest.raises(InputError, match="`mean` must be left out for a mixture of RobustBench"):
        eq.load_model(f"{REFERENCE}?weights={released[0]}&mean=0.5")


def test_it_is_no_base_of_another_mixture(released: tuple[Path, nn.Module, nn.Module]) -> None:
    from equipoise import models

    with pytest.raises(InputError, match="must be a single network here"):
        models.load(f"{REFERENCE}?weights={released[0]}")
