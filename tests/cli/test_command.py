"""The command line as a user types it."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from equipoise import __version__, mixing, models
from equipoise.cli import table
from equipoise.cli.main import run
from equipoise.core import records
from equipoise.mixing import MixedClassifier
from equipoise.models import checkpoint


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with twelve images and three checkpoints: two bases, and one of another number of classes."""
    monkeypatch.chdir(tmp_path)
    chance = np.random.default_rng(0)
    np.savez("images.npz", images=chance.integers(0, 256, (12, 3, 8, 8), dtype=np.uint8), labels=np.arange(12) % 4)
    for seed, name in enumerate(("accurate", "robust")):
        base = models.build("cnn_small", num_classes=4, image_shape=(3, 8, 8), seed=seed)
        checkpoint.save(f"{name}.safetensors", base, {})
    checkpoint.save("other.safetensors", models.build("cnn_small", num_classes=5, image_shape=(3, 8, 8)), {})
    return tmp_path


def evaluate(*arguments: str) -> int:
    base = ["evaluate", "robust.safetensors", "--data", "npz:images.npz", "--out", "run", "--steps", "2",
            "--batch-size", "5", "--eps", "8/255"]
    return run([*base, *arguments])


def test_evaluate_a_checkpoint(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate() == 0
    told = records.summary("run")
    assert {(row["model"], row["metric"]) for row in told["results"]} == {
        ("robust.safetensors", metric) for metric in ("clean", "pgd", "worst")}
    assert all(row["n"] == 12 for row in told["results"])
    assert "run/summary.json" in capsys.readouterr().out
    assert evaluate() == 0 and records.summary("run") == told


def test_a_mixture_beside_its_bases(place: Path) -> None:
    bases = [models.load(f"{side}.safetensors") for side in ("accurate", "robust")]
    mixing.save("mixture", MixedClassifier(bases[0], bases[1], 0.5), accurate="accurate.safetensors",
                robust="robust.safetensors")
    for source in ("mix", "std", "rob"):
        assert run(["evaluate", "mixture:mixture", "--data", "npz:images.npz", "--out", source, "--steps", "2",
                    "--source", source, *(["--estimate"] if source == "mix" else [])]) == 0
        told = records.summary(source)
        assert {row["model"] for row in told["results"]} == {"accurate", "robust", "mixed"}
        assert {(row["model"], row["versus"]) for row in told["differences"]} == {
            ("mixed", "robust"), ("mixed", "accurate")}
    assert {row["model"] for row in records.summary("mix/estimate")["results"]} == {"robust"}


def test_report_of_a_run(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate() == 0 and run(["report", "run"]) == 0
    assert "<html" in (place / "run" / "report.html").read_text()
    assert run(["report", "nothing"]) == 2
    assert "must be a finished run folder" in capsys.readouterr().err


def test_settings_from_a_file(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "run.toml").write_text('eps = "4/255"\ncount = 7\nsteps = 1\n')
    assert evaluate("--config", "run.toml") == 0
    told = records.summary("run")["results"]
    assert {row["n"] for row in told} == {7}
    assert {row["threat"]["eps"] for row in told if "threat" in row} == {8 / 255}, "what is typed wins"
    (place / "bad.toml").write_text("batch_sise = 3\n")
    assert evaluate("--config", "bad.toml") == 2
    assert "did you mean 'batch_size'?" in capsys.readouterr().err
    (place / "worse.toml").write_text("steps = true\n")
    assert evaluate("--config", "worse.toml") == 2
    assert "`steps` must not be true or false" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--eps", "-1"], "`eps` must be positive, got -1.0"),
        (["--eps", "8"], "`eps` must be at most 1 for linf (8/255, not 8), got '8'"),
        (["--source", "rob"], "`source` must be mix where no model is a mixture"),
        (["--eps", "8/0"], "`eps` must be a number or a fraction such as 8/255, got '8/0'"),
        (["--norm", "l3"], "`norm` must be one of l2, linf, got 'l3'"),
        (["--attack", "pdg"], "did you mean 'pgd'?"),
        (["--source", "moon"], "`source` must be one of mix, rob, std"),
        (["--steps", "0"], "`steps` must be a whole number of at least 1, got 0"),
        (["--steps", "many"], "--steps"),
        (["--count", "13"], "`count` must be at most 12"),
        (["--start", "12"], "`start` must be at most 11"),
        (["--every", "0"], "`every` must be a whole number of at least 1"),
        (["--data", "npz:none.npz"], "none.npz"),
        (["--data", "imagenet"], "`data` must be one of"),
        (["--batch-size", "0"], "`batch_size` must be"),
        (["--seed", "-1"], "`seed` must be"),
        (["--precision", "fp8"], "`precision` must be one of"),
        (["--device", "tpu"], "`device` must be one of"),
        (["--arch", "resnet18"], "arch"),
        (["--stepz", "3"], "--stepz"),
        (["other.safetensors"], "num_classes"),
        (["none.safetensors"], "none.safetensors"),
        (["cloud:model"], "must be one of file, looks, mixture, python, zoo, got 'cloud'"),
        (["python:nowhere:make"], "nowhere"),
        (["images.npz"], "images.npz"),
    ],
)
def test_one_sentence_and_exit_code_two(
    place: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert evaluate(*arguments) == 2
    out, err = capsys.readouterr()
    assert sentence in err and out == ""
    assert err.startswith("equipoise: ") and err.count("\n") == 1 and "Traceback" not in err
    assert not (place / "run").exists(), "a mistake claims no folder"


def test_an_out_of_another_run_stays_as_it_is(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate() == 0
    before = {path: path.read_bytes() for path in (place / "run").rglob("*") if path.is_file()}
    assert evaluate("--seed", "1") == 2
    assert "has seed = 0, this run has 1" in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in (place / "run").rglob("*") if path.is_file()}


def test_nan_logits(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = models.build("cnn_small", num_classes=4, image_shape=(3, 8, 8))
    torch.nn.init.constant_(model.fc.bias, torch.nan)  # type: ignore[arg-type, union-attr]
    checkpoint.save("nan.safetensors", model, {})
    assert evaluate("nan.safetensors") == 2
    assert "must not contain NaN" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 2, "the disk is full"),
        (PermissionError(errno.EACCES, "Permission denied", "run/run.toml"), 2, "run/run.toml: Permission denied"),
        (torch.OutOfMemoryError("CUDA out of memory"), 2, "out of memory even for one image at a time"),
        (KeyboardInterrupt(), 130, "stopped; repeat the command to go on"),
    ],
)
def test_trouble_of_the_machine(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int,
    sentence: str,
) -> None:
    def broken(self: records.Run, rows: list[records.Row]) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(records.Run, "append", broken)
        assert evaluate() == code
    assert sentence in capsys.readouterr().err
    assert evaluate() == 0, "the folder it left can be resumed"


def test_a_bug_of_ours_is_not_hidden(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: records.Run, rows: list[records.Row]) -> None:
        raise ValueError("an honest mistake")

    monkeypatch.setattr(records.Run, "append", broken)
    with pytest.raises(ValueError, match="an honest mistake"):
        evaluate()


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "equipoise", *arguments]


def test_version_and_help() -> None:
    assert subprocess.run(_command("--version"), capture_output=True, text=True, check=True).stdout == (
        f"equipoise {__version__}\n")
    assert "evaluate" in subprocess.run(_command("--help"), capture_output=True, text=True, check=True).stdout


COMMON = ["--data", "npz:images.npz", "--batch-size", "2", "--eps", "1/255"]
SLOW = {"pgd": [*COMMON, "--steps", "400"], "apgd": [*COMMON, "--attack", "apgd", "--steps", "400"]}


@pytest.mark.parametrize(("attack", "sent", "code"), [("pgd", signal.SIGKILL, -9), ("pgd", signal.SIGINT, 130),
                                                      ("apgd", signal.SIGKILL, -9)])
def test_stopped_halfway_and_repeated(place: Path, attack: str, sent: signal.Signals, code: int) -> None:
    """A real process, stopped by a real signal after its first attacked batch."""
    slow = SLOW[attack]
    assert run(["evaluate", "robust.safetensors", "--out", "whole", *slow]) == 0
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    # Whatever runs the tests in the background has Ctrl-C ignored, and children inherit that.
    process = subprocess.Popen(_command("evaluate", "robust.safetensors", "--out", "run", *slow), env=environment,
                               stderr=subprocess.PIPE, text=True,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    part = place / "run" / "parts" / "0.jsonl"
    deadline = time.monotonic() + 60
    while not (part.exists() and f'"attack": "{attack}"' in part.read_text()):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(sent)
    _, err = process.communicate()
    assert process.returncode == code
    assert not (place / "run" / "summary.json").exists(), "stopped too late to test anything"
    if sent == signal.SIGINT:
        assert err.splitlines()[-1].startswith("equipoise: stopped") and "Traceback" not in err
    assert run(["evaluate", "robust.safetensors", "--out", "run", *slow]) == 0
    whole, again = (json.loads((place / name / "summary.json").read_text()) for name in ("whole", "run"))
    assert {**whole, "seconds": 0} == {**again, "seconds": 0}
    assert (place / "whole" / "rows.jsonl").read_bytes() == (place / "run" / "rows.jsonl").read_bytes()


@pytest.mark.parametrize("attack", ["pgd", "fast"])
def test_two_processes_write_the_same_rows(place: Path, attack: str) -> None:
    settings = [*COMMON, "--attack", attack]
    assert run(["evaluate", "robust.safetensors", "--out", "one", *settings]) == 0
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "equipoise",
              "evaluate", "robust.safetensors", "--out", "two", *settings]
    subprocess.run(launch, env=environment, check=True, capture_output=True)
    assert (place / "one" / "rows.jsonl").read_bytes() == (place / "two" / "rows.jsonl").read_bytes()


def test_a_gate_under_every_attack_fits_into_eighty_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    metrics = ("clean", "fast", "adaptive", "adaptive-lowered", "worst")
    table.show([{"model": model, "metric": metric, "value": 0.4, "low": 0.191, "high": 0.639, "n": 20}
                for model in ("accurate", "mixed") for metric in metrics], "here")
    told = capsys.readouterr().out
    assert told.count("[19.1, 63.9]") == 2 * len(metrics) and "…" not in told and "lowered" in told
