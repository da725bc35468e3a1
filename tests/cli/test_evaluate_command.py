"""`equipoise evaluate` and `equipoise report` as a user types them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
from small_files import write_files

from equipoise import evaluation, mixing, models
from equipoise.cli.main import run
from equipoise.core.results import read_summary
from equipoise.core.threat import Threat
from equipoise.data import load_data
from equipoise.mixing import MixedClassifier
from equipoise.models import checkpoint

COMMON = ["--data", "npz:images.npz", "--batch-size", "2", "--eps", "1/255"]
SLOW = {
    "pgd": [*COMMON, "--attack", "pgd", "--steps", "400"],
    "apgd": [*COMMON, "--attack", "apgd", "--steps", "400"],
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    return tmp_path


def evaluate(*arguments: str) -> int:
    return run(
        [
            "evaluate",
            "robust.safetensors",
            "--data",
            "npz:images.npz",
            "--out",
            "run",
            "--attack",
            "pgd",
            "--steps",
            "2",
            "--batch-size",
            "5",
            "--eps",
            "8/255",
            *arguments,
        ]
    )


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_results_of_a_checkpoint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate() == 0
    summary = read_summary("run")
    assert {(r.model, r.metric) for r in summary.results} == {
        ("robust.safetensors", metric) for metric in ("clean", "pgd", "worst")
    }
    assert all(result.n == 12 for result in summary.results)
    assert "run/summary.json" in capsys.readouterr().out
    assert evaluate() == 0 and read_summary("run") == summary


@pytest.mark.usefixtures("figures_once")
def test_minimum_norm(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate("--attack", "minimum-norm", "--restarts", "2", "--eps", "16/255") == 0
    printed = capsys.readouterr().out
    assert "Accuracy by radius (ℓ∞), 95 % intervals; radii are upper bounds" in printed
    assert all(f"{radius}/255" in printed for radius in (4, 8, 12, 16))
    (curve,) = read_summary("run").radius_curves
    assert f"{curve.wrong} of 12 images misclassified without a perturbation" in printed
    rows = Path("run/rows.jsonl").read_text()
    assert evaluate("--attack", "minimum-norm", "--restarts", "2", "--eps", "16/255") == 0
    assert Path("run/rows.jsonl").read_text() == rows and run(["report", "run"]) == 0
    assert "Accuracy against radius" in Path("run/report.html").read_text()
    assert evaluate("--attack", "minimum-norm", "--eot", "3") == 2
    assert "`eot` must be left out for minimum-norm" in capsys.readouterr().err


@pytest.mark.usefixtures("figures_once")
def test_l1(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate("--norm", "l1", "--eps", "0.5") == 0
    assert "ℓ1 ≤ 0.5" in capsys.readouterr().out
    assert run(["report", "run"]) == 0
    assert "within ℓ1 ≤ 0.5" in Path("run/report.html").read_text()
    assert (
        run(
            [
                "evaluate",
                "robust.safetensors",
                "--data",
                "npz:images.npz",
                "--out",
                "other",
                "--norm",
                "l1",
            ]
        )
        == 2
    )
    assert "`eps` must be given for l1, such as 12" in capsys.readouterr().err
    assert not Path("other").exists()


@pytest.mark.parametrize("source", ["mix", "std", "rob"])
def test_a_mixture_beside_its_bases(folder: Path, source: str) -> None:
    bases = [models.load(f"{side}.safetensors") for side in ("accurate", "robust")]
    mixing.save(
        "mixture",
        MixedClassifier(bases[0], bases[1], 0.5),
        accurate="accurate.safetensors",
        robust="robust.safetensors",
    )
    assert (
        run(
            [
                "evaluate",
                "mixture:mixture",
                "--data",
                "npz:images.npz",
                "--out",
                "run",
                "--attack",
                "pgd",
                "--steps",
                "2",
                "--source",
                source,
                "--estimate",
            ]
        )
        == 0
    )
    assert {result.model for result in read_summary("run").results} == {
        "accurate",
        "robust",
        "mixed",
    }
    assert {result.model for result in read_summary("run/estimate").results} == {"robust"}


def test_two_models_at_several_alphas(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the same sweep in Python, and with a rule of local smoothing."""
    command = [
        "evaluate",
        "accurate.safetensors",
        "robust.safetensors",
        "--data",
        "npz:images.npz",
        "--attack",
        "pgd",
        "--steps",
        "2",
        "--alphas",
        "0.8,1/2",
    ]
    assert run([*command, "--out", "run"]) == 0
    results = read_summary("run").results
    assert {(r.model, r.metric, r.alpha) for r in results} == {
        ("mixed", metric, alpha)
        for metric in ("clean", "std", "rob", "mix", "worst")
        for alpha in (0.5, 0.8)
    }
    out = capsys.readouterr().out
    assert "alpha 0.5" in out
    assert (
        "std, rob, mix: under attacks on the accurate model, on the robust model and on the mixture"
        in out
    )
    python = evaluation.evaluate(
        [models.load(f"{side}.safetensors") for side in ("accurate", "robust")],
        load_data("npz:images.npz"),
        threat=Threat("linf", "8/255"),
        attack="pgd",
        steps=2,
        alphas=(0.5, 0.8),
    )
    assert python.results == results
    assert run([*command, "--smoothing", "added", "--trust", "gradient", "--out", "added"]) == 0
    assert {r.metric for r in read_summary("added").results} == {
        "clean",
        "std",
        "rob",
        "mix",
        "mix-soft",
        "worst",
    }
    assert run([*command, "--source", "std", "--out", "other"]) == 2 and not Path("other").exists()
    assert "`source` must be left out with `alphas`, got 'std'" in capsys.readouterr().err


def test_several_attacks_and_weights_named_twice(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bases = [models.load(f"{side}.safetensors") for side in ("accurate", "robust")]
    mixing.save(
        "mixture",
        MixedClassifier(bases[0], bases[1], 0.5),
        accurate="accurate.safetensors",
        robust="robust.safetensors",
    )
    assert evaluate("mixture:mixture", "--attack", "pgd,square", "--restarts", "2") == 0
    summary = read_summary("run")
    assert {result.metric for result in summary.results} == {"clean", "pgd", "square", "worst"}
    assert summary.result("mixture:mixture robust", "square").n == 12
    assert evaluate("--attack", "fast,standard", "--out", "other") == 2
    assert "none of which has such a setting" in capsys.readouterr().err


def test_attacked_images_are_saved(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate("--save-adversarial", "--attack", "pgd,apgd") == 0
    assert "\nattacked images: run/adversarial.safetensors\n" in capsys.readouterr().out
    saved = safetensors.torch.load_file(folder / "run" / "adversarial.safetensors")
    assert saved["robust.safetensors/apgd/images"].shape == (12, 3, 8, 8)
    worst = torch.load(folder / "run" / "adversarial-robust.pt", weights_only=True)
    model = models.load("robust.safetensors").eval()
    correct = int((model(worst).argmax(dim=1) == saved["labels"]).sum())
    assert correct == read_summary("run").result("robust.safetensors", "worst").count
    assert evaluate("--out", "other") == 0 and evaluate("--out", "other", "--save-adversarial") == 2
    assert "`save_adversarial` must be given at the first start of a run" in capsys.readouterr().err


def test_failed_sanity_checks_are_printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "rounded.py").write_text("""
import torch
from equipoise import models

class Rounded(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.base = models.load("robust.safetensors")
    def forward(self, x):
        return self.base(x).round()

def make():
    return Rounded().eval()
""")
    assert (
        run(
            [
                "evaluate",
                "python:rounded:make",
                "--data",
                "npz:images.npz",
                "--out",
                "run",
                "--attack",
                "pgd",
                "--steps",
                "2",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert (
        "- vanishing gradients (python:rounded:make, pgd)" in out and "run --attack standard" in out
    )


def test_the_report_of_a_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate() == 0 and run(["report", "run"]) == 0
    assert "<html" in (folder / "run" / "report.html").read_text()
    assert run(["report", "nothing"]) == 2
    assert "must be a run folder" in capsys.readouterr().err


def test_a_file_gives_defaults_and_typed_options_override_it(folder: Path) -> None:
    (folder / "run.toml").write_text('eps = "4/255"\ncount = 7\nsteps = 1\n')
    assert evaluate("--config", "run.toml") == 0
    results = read_summary("run").results
    assert {result.n for result in results} == {7}
    assert {result.threat.eps for result in results if result.threat} == {8 / 255}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("batch_sise = 3\n", "did you mean 'batch_size'?"),
        ("steps = true\n", "`steps` must not be true or false"),
    ],
)
def test_mistakes_in_a_file(
    folder: Path, capsys: pytest.CaptureFixture[str], content: str, sentence: str
) -> None:
    (folder / "bad.toml").write_text(content)
    assert evaluate("--config", "bad.toml") == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--eps", "-1"], "`eps` must be positive, got -1.0"),
        (["--eps", "8"], "`eps` must be at most 1 for linf (8/255, not 8), got 8.0"),
        (["--source", "rob"], "`source` must be mix where no model is a mixture"),
        (["--eps", "8/0"], "`eps` must be a number or a fraction such as 8/255, got '8/0'"),
        (["--norm", "l3"], "`norm` must be one of l1, l2, linf, got 'l3'"),
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
        (["other.safetensors"], "`other.safetensors` must have the 4 classes of the data, got 5"),
        (["none.safetensors"], "none.safetensors"),
        (["cloud:model"], "got 'cloud'"),
        (["python:nowhere:make"], "nowhere"),
        (["images.npz"], "images.npz"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert evaluate(*arguments) == 2
    out, err = capsys.readouterr()
    assert sentence in err and out == ""
    assert err.startswith("equipoise: ") and err.count("\n") == 1 and "Traceback" not in err
    assert not (folder / "run").exists()


def test_the_folder_of_another_run_is_unchanged(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate() == 0
    before = contents(folder / "run")
    assert evaluate("--seed", "1") == 2
    assert "has seed = 0, this run has 1" in capsys.readouterr().err
    assert contents(folder / "run") == before


def test_nan_logits(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = models.build("cnn_small", num_classes=4, image_shape=(3, 8, 8))
    torch.nn.init.constant_(model.fc.bias, torch.nan)  # type: ignore[arg-type, union-attr]
    checkpoint.save("nan.safetensors", model, {})
    assert evaluate("nan.safetensors") == 2
    assert "must not contain NaN" in capsys.readouterr().err


def wait_for_row(process: subprocess.Popen[str], part: Path, attack: str) -> None:
    deadline = time.monotonic() + 60
    while not (part.exists() and f'"attack": "{attack}"' in part.read_text()):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("attack", "sent", "code"),
    [("pgd", signal.SIGKILL, -9), ("pgd", signal.SIGINT, 130), ("apgd", signal.SIGKILL, -9)],
)
def test_a_stopped_process_is_resumed_to_the_same_bytes(
    folder: Path, attack: str, sent: signal.Signals, code: int
) -> None:
    """A real process, stopped by a real signal after its first attacked batch."""
    arguments = ["evaluate", "robust.safetensors", *SLOW[attack], "--save-adversarial", "--out"]
    assert run([*arguments, "complete"]) == 0
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    # Whatever runs the tests in the background has Ctrl-C ignored, and children inherit that.
    process = subprocess.Popen(
        [sys.executable, "-m", "equipoise", *arguments, "run"],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    wait_for_row(process, folder / "run" / "parts" / "0.jsonl", attack)
    process.send_signal(sent)
    _, err = process.communicate()
    assert process.returncode == code
    assert not (folder / "run" / "summary.json").exists(), "stopped too late to test anything"
    if sent == signal.SIGINT:
        assert err.splitlines()[-1].startswith("equipoise: stopped") and "Traceback" not in err
    assert run([*arguments, "run"]) == 0
    complete, resumed = (
        json.loads((folder / name / "summary.json").read_text()) for name in ("complete", "run")
    )
    assert {**complete, "seconds": 0} == {**resumed, "seconds": 0}
    for name in ("rows.jsonl", "adversarial.safetensors"):
        assert (folder / "complete" / name).read_bytes() == (folder / "run" / name).read_bytes()


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(["pgd"], id="pgd"),
        # The sample is drawn from the survivors of both processes; one of them audits it, which
        # takes seconds.
        pytest.param(["fast", "--audit", "1"], id="fast"),
        pytest.param(["fast", "--audit", "3"], id="fast, audited by both", marks=pytest.mark.slow),
    ],
)
def test_two_processes_write_the_same_rows(folder: Path, attack: list[str]) -> None:
    arguments = ["evaluate", "robust.safetensors", *COMMON, "--attack", *attack, "--out"]
    assert run([*arguments, "one"]) == 0
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "equipoise",
    ]
    subprocess.run([*launch, *arguments, "two"], env=environment, check=True, capture_output=True)
    assert (folder / "one" / "rows.jsonl").read_bytes() == (
        folder / "two" / "rows.jsonl"
    ).read_bytes()


@pytest.mark.parametrize(
    ("model", "passes"),
    [
        ("smoothed:1/4,5:robust.safetensors", None),
        ("smoothed:0.25,2,fresh:file:robust.safetensors", 3),
    ],
)
def test_a_randomly_smoothed_classifier(
    folder: Path, capsys: pytest.CaptureFixture[str], model: str, passes: int | None
) -> None:
    """With fixed noise like any other model, with fresh noise as a randomised one."""
    attack = ["apgd"] if passes is None else ["rand", "--eot", "2", "--repeats", str(passes)]
    assert (
        run(
            [
                "evaluate",
                model,
                "--data",
                "npz:images.npz",
                "--out",
                "run",
                "--norm",
                "l2",
                "--eps",
                "0.5",
                "--steps",
                "2",
                "--attack",
                *attack,
            ]
        )
        == 0
    )
    summary = read_summary("run")
    assert {(r.model, r.metric, r.passes) for r in summary.results} == {
        (model, metric, passes) for metric in ("clean", attack[0], "worst")
    }
    assert [check.alarm for check in summary.sanity_checks if check.name == "randomness"] == [False]
    assert ("3 passes each" in capsys.readouterr().out) == (passes is not None)
