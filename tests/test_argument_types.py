"""Public functions refuse arguments of wrong types with an InputError, before any work."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import equipoise as eq
from equipoise.attacks import Pgd
from equipoise.certification import SamplingSettings
from equipoise.core import memory
from equipoise.data.conversion import as_dataset
from equipoise.evaluation import (
    CertificationSettings,
    EvaluationSettings,
    attacker,
    certifier,
    evaluator,
)
from equipoise.fitting import FitSettings, fitter
from equipoise.models import LoadOptions
from equipoise.reporting import page
from equipoise.training import TrainingPlan, train_gate, trainer
from equipoise.training.objectives.gate import GateLoss

WRONG: dict[str, Any] = {
    "None": None,
    "number": 5,
    "negative": -1,
    "float": 2.5,
    "nan": math.nan,
    "inf": math.inf,
    "huge": 10**400,
    "longer": 10**9999,
    "large seed": 2**64,
    "bool": True,
    "text": "x",
    "empty text": "",
    "null": "a\0b",
    "bytes": b"x",
    "list": [],
    "list of numbers": [1, 2],
    "tuple": (),
    "dict": {},
    "object": object(),
    "class": Pgd,
    "function": lambda: 5,
    "module class": nn.Linear,
    "tensor": torch.zeros(2),
    "array": np.zeros(3),
    "meta tensors": (
        torch.zeros(2, 1, 8, 8, device="meta"),
        torch.zeros(2, dtype=torch.int64, device="meta"),
    ),
    "list of wrong models": [nn.Identity(), 5],
    "mapping to a number": {"a": 5},
    "complex": 1j,
}


class AcceptedError(Exception):
    """The arguments passed all checks, and the work would begin."""


def accept(*arguments: object, **more: object) -> None:
    raise AcceptedError


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layer(x.flatten(1))
        return logits


def names(function: Callable[..., Any], *settings: Any) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    own = [p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
    return [*own, *(name for cls in settings for name in cls.names() if name not in own)]


DATA, OTHER_DATA = (eq.load_data("digits", start=start, count=4) for start in (0, 4))
THREAT = eq.Threat("linf", 0.1)
BASES = (Flat(), Flat())
NETWORKS = tuple(
    eq.load_model("zoo:cnn_small", num_classes=10, image_shape=(1, 8, 8), seed=seed)
    for seed in (0, 1)
)
MIXTURE = eq.MixedClassifier(*BASES, 0.5)
# Function, valid arguments, and the names of all arguments.
CALLS: dict[str, tuple[Callable[..., Any], Mapping[str, Any], list[str]]] = {
    "Threat": (eq.Threat, {"norm": "linf", "eps": 0.1}, names(eq.Threat)),
    "Dataset": (
        eq.Dataset,
        {
            "name": "x",
            "split": "test",
            "images": DATA.images,
            "labels": DATA.labels,
            "index": DATA.index,
            "classes": DATA.classes,
        },
        names(eq.Dataset),
    ),
    "MixedClassifier": (
        eq.MixedClassifier,
        {"accurate": BASES[0], "robust": BASES[1], "alpha": 0.5},
        names(eq.MixedClassifier),
    ),
    "load_data": (eq.load_data, {"name": "digits", "count": 2}, names(eq.load_data)),
    "load_model": (
        eq.load_model,
        {"reference": "zoo:cnn_small", "num_classes": 10, "image_shape": (1, 8, 8)},
        names(eq.load_model, LoadOptions),
    ),
    "save": (
        eq.save,
        {"path": "m", "model": MIXTURE, "accurate": "zoo:cnn", "robust": "zoo:cnn"},
        names(eq.save),
    ),
    "evaluate": (
        eq.evaluate,
        {"models": BASES[0], "data": DATA, "threat": THREAT},
        names(eq.evaluate, EvaluationSettings),
    ),
    "attack": (
        eq.attack,
        {"model": BASES[0], "data": DATA, "threat": THREAT, "attack": "pgd"},
        [*names(eq.attack), "steps", "restarts", "step_size", "loss"],
    ),
    "attack on tensors": (
        eq.attack,
        {"model": BASES[0], "data": DATA.images, "labels": DATA.labels, "threat": THREAT},
        names(eq.attack),
    ),
    "attack by square": (
        eq.attack,
        {"model": BASES[0], "data": DATA, "threat": THREAT, "attack": "square"},
        ["steps", "share", "restarts"],
    ),
    "attack by targets": (
        eq.attack,
        {"model": BASES[0], "data": DATA, "threat": THREAT, "attack": "targeted"},
        ["steps", "targets", "order"],
    ),
    "certify": (
        eq.certify,
        {"models": BASES[0], "data": DATA, "sigma": 0.1},
        names(eq.certify, CertificationSettings, SamplingSettings),
    ),
    "fit": (
        eq.fit,
        {"accurate": BASES[0], "robust": BASES[1], "data": DATA, "threat": THREAT},
        names(eq.fit, FitSettings),
    ),
    "train": (
        eq.train,
        {"objective": "standard", "data": DATA, "arch": "cnn_small"},
        names(eq.train, TrainingPlan),
    ),
    "train a module": (
        eq.train,
        {"objective": "trades", "data": DATA, "model": BASES[0]},
        ["model", "eps", "steps", "beta", "step_size"],
    ),
    "train_gate": (
        train_gate,
        {"accurate": NETWORKS[0], "robust": NETWORKS[1], "data": DATA},
        names(train_gate, GateLoss, TrainingPlan),
    ),
    "report": (eq.report, {"folder": "absent"}, names(eq.report)),
}


@pytest.fixture(autouse=True)
def _no_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Work is replaced by an exception; whatever is written goes to a folder of its own."""
    monkeypatch.chdir(tmp_path)
    for module, name in (
        (evaluator, "run_jobs"),
        (attacker, "attack_dataset"),
        (certifier, "run_certification"),
        (trainer, "run_training"),
        (fitter, "_Task"),
        (page, "save_figures"),
    ):
        monkeypatch.setattr(module, name, accept)
    monkeypatch.setattr(memory, "in_batches", accept)


@pytest.mark.parametrize("call", CALLS)
def test_wrong_types_are_input_errors(call: str) -> None:
    function, valid, arguments = CALLS[call]
    tried, wrong = 0, []
    for name in arguments:
        for kind, value in WRONG.items():
            try:
                function(**{**valid, name: value})
            except (eq.InputError, AcceptedError) as error:
                assert len(str(error)) < 1500 and "\n" not in str(error)
            except Exception as error:
                wrong.append(f"{name}={kind}: {type(error).__name__}: {str(error)[:200]}")
            tried += 1
    assert not wrong
    print(f"{call}: {tried} calls")


@pytest.mark.parametrize("call", CALLS)
def test_valid_arguments_are_accepted(call: str) -> None:
    function, valid, _ = CALLS[call]
    try:
        function(**valid)
    except AcceptedError:
        pass
    except eq.InputError as error:
        assert call in ("report", "save"), error  # of a folder and of weights that do not exist


def test_unknown_settings_are_named() -> None:
    for call in ("evaluate", "fit", "certify", "train", "load_model"):
        function, valid, _ = CALLS[call]
        with pytest.raises(eq.InputError, match="step_s"):
            function(**valid, step_s=5)


class Pictures(Dataset[Any]):
    """Images as torchvision gives them without a transform."""

    classes = ("dark", "light")

    def __init__(self, mode: str) -> None:
        self.mode = mode

    def __len__(self) -> int:
        return 3

    def __getitem__(self, number: int) -> tuple[Any, int]:
        if number >= len(self):
            raise IndexError
        values = np.full((5, 7), 80 * number, np.uint8)
        return Image.fromarray(values).convert(self.mode), number % 2


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("RGB", 3)])
def test_data_sets_of_pillow_images(mode: str, channels: int) -> None:
    data = as_dataset(Pictures(mode))
    assert data.image_shape == (channels, 5, 7) and data.images.dtype == torch.uint8
    assert data.images[:, 0, 0, 0].tolist() == [0, 80, 160] and data.labels.tolist() == [0, 1, 0]
    assert data.classes == ("dark", "light")
    with pytest.raises(eq.InputError, match="`data` must give batches of tensors"):
        as_dataset(DataLoader(Pictures(mode)))
    with pytest.raises(eq.InputError, match="transparency"):
        as_dataset(Pictures("RGBA"))


@pytest.mark.parametrize(
    "labels", [[0, 2, 1], np.array([0, 2, 1], np.uint16), torch.tensor([0, 2, 1])]
)
def test_numpy_arrays(labels: Any) -> None:
    values = np.random.default_rng(0).integers(0, 256, (3, 1, 4, 4), np.uint8)
    for images in (values, values / 255, (values / 255).astype(np.float32)):
        data = as_dataset((images, labels))
        assert torch.equal(data.images, torch.from_numpy(values)) and data.labels.tolist() == [
            0,
            2,
            1,
        ]
        assert data.num_classes == 3
    for bad in (values.astype(str), values.astype(object), values[0], values.astype(np.int64)):
        with pytest.raises(eq.InputError, match="`images` must"):
            as_dataset((bad, labels))


def test_batches_of_floats_are_stored_as_bytes_where_that_is_exact() -> None:
    exact, other = torch.full((2, 1, 2, 2), 51 / 255), torch.full((2, 1, 2, 2), 0.1234)
    labels = torch.tensor([0, 1])
    assert (
        as_dataset(DataLoader(TensorDataset(exact, labels), batch_size=2)).images.dtype
        == torch.uint8
    )
    mixed = as_dataset(
        DataLoader(TensorDataset(torch.cat([exact, other]), labels.repeat(2)), batch_size=2)
    )
    assert torch.equal(mixed.images, torch.cat([exact, other]))
