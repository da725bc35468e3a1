"""The folder of a training run: rows, summary, checkpoints, identity, and files that cannot be
used."""

from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path

import pytest
import torch
from small_training import METADATA, PLAN, dataset, network, same, weights
from torch import nn

from equipoise import models
from equipoise.core import config, records
from equipoise.core.checks import InputError
from equipoise.core.results import read_summary
from equipoise.core.rows import EpochRow
from equipoise.data.dataset import Dataset
from equipoise.training import Objective, TrainingPlan, fit_model
from equipoise.training.objectives import Adversarial, Standard


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    """A finished run and its model."""
    out = tmp_path_factory.mktemp("training") / "run"
    return out, fit_model(network(), Standard(), dataset(), PLAN, out=out, metadata=METADATA)


def epoch_rows(out: Path) -> list[EpochRow]:
    rows = [row for row in records.read_rows(out) if isinstance(row, EpochRow)]
    assert len(rows) == len(records.read_rows(out))
    return rows


def test_one_row_per_epoch(finished: tuple[Path, nn.Module]) -> None:
    rows = epoch_rows(finished[0])
    assert [row.index for row in rows] == [0, 1, 2]
    assert all(
        row.loss > 0 and row.images_per_second > 0 and list(row.validation) == ["clean"]
        for row in rows
    )


def test_summary_has_the_best_and_the_last_epoch(finished: tuple[Path, nn.Module]) -> None:
    summary, rows = read_summary(finished[0]), epoch_rows(finished[0])
    assert (
        summary.command == "train"
        and summary.best_epoch is not None
        and summary.compile_seconds == 0
    )
    assert [(result.model, result.metric, result.n) for result in summary.results] == [
        ("best", "clean", 20),
        ("last", "clean", 20),
    ]
    assert summary.result("best", "clean").value == max(row.validation["clean"] for row in rows)
    assert rows[summary.best_epoch].validation["clean"] == summary.result("best", "clean").value


def test_checkpoints_hold_weights_and_metadata(finished: tuple[Path, nn.Module]) -> None:
    out, model = finished
    assert same(weights(models.load(str(out / "last.safetensors"))), weights(model))
    metadata = models.read_metadata(out / "best.safetensors")
    assert (
        metadata["objective"] == "standard"
        and int(metadata["epoch"]) == read_summary(out).best_epoch
    )
    assert not (out / "state.pt").exists()


def test_identity_has_name_version_and_settings(finished: tuple[Path, nn.Module]) -> None:
    identity = config.read(finished[0] / "run.toml")["identity"]
    assert identity["command"] == "train" and identity["arch"] == "cnn_small"
    assert identity["objective"] == {"name": "standard", "version": 1, "label_smoothing": 0.0}
    assert identity["model"]["weights"] == models.weights_digest(network())
    assert identity["plan"]["epochs"] == 3 and "compile" not in identity["plan"]


def test_a_finished_run_is_not_repeated(finished: tuple[Path, nn.Module]) -> None:
    out, model = finished
    before = (out / "last.safetensors").stat().st_mtime_ns
    again = fit_model(network(), Standard(), dataset(), PLAN, out=out, metadata=METADATA)
    assert (
        same(weights(model), weights(again))
        and (out / "last.safetensors").stat().st_mtime_ns == before
    )


@pytest.mark.parametrize(
    ("model", "objective", "data", "plan", "arch"),
    [
        (network(), Standard(), dataset(), PLAN, "cnn"),
        (network(1), Standard(), dataset(), PLAN, "cnn_small"),
        (network(), Standard(), dataset(80), PLAN, "cnn_small"),
        (network(), Standard(), dataset(), dataclasses.replace(PLAN, lr=0.03), "cnn_small"),
        (network(), Standard(label_smoothing=0.1), dataset(), PLAN, "cnn_small"),
        (network(), Adversarial(), dataset(), PLAN, "cnn_small"),
    ],
    ids=["arch", "weights", "data", "plan", "settings", "objective"],
)
def test_a_folder_of_another_run_is_refused(
    model: nn.Module,
    objective: Objective,
    data: Dataset,
    plan: TrainingPlan,
    arch: str,
    finished: tuple[Path, nn.Module],
) -> None:
    with pytest.raises(InputError, match="belong to this run"):
        fit_model(model, objective, data, plan, out=finished[0], metadata={"arch": arch})


def stop_at_write(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full after some writes."""
    fsync, calls = os.fsync, [0]

    def full(descriptor: int) -> None:
        calls[0] += 1
        if calls[0] > number:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)


def test_a_full_disk_keeps_the_previous_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, whole = tmp_path / "run", weights(fit_model(network(), Standard(), dataset(), PLAN))
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        stop_at_write(12, patch)
        fit_model(network(), Standard(), dataset(), PLAN, out=out, metadata=METADATA)
    step = torch.load(out / "state.pt", weights_only=True)["progress"]["step"]
    assert 0 < step < 15 and not list(out.glob(".*"))
    assert same(
        whole,
        weights(fit_model(network(), Standard(), dataset(), PLAN, out=out, metadata=METADATA)),
    )


def test_a_damaged_state_is_an_input_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        stop_at_write(12, patch)
        fit_model(network(), Standard(), dataset(), PLAN, out=out, metadata=METADATA)
    (out / "state.pt").write_bytes((out / "state.pt").read_bytes()[:1000])
    with pytest.raises(InputError, match=r"state.pt` must be the saved state of this run"):
        fit_model(network(), Standard(), dataset(), PLAN, out=out, metadata=METADATA)
