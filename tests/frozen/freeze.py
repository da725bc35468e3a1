"""Writes the frozen files: `python tests/frozen/freeze.py networks|mixtures|verdicts [--gpu] [--only TEXT]`.

What exists is kept: to make something anew, delete its file or folder first. `freeze.py compare` writes nothing and
compares the verdicts of today with the frozen ones, as the test does, where there is no pytest.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from frozen_cells import BASES, DATA, GPU_RUNS, HERE, RUNS, VERDICTS, Run, base, evaluate, lay_out
from frozen_comparison import compare_run
from safetensors import safe_open
from safetensors.torch import save_file

import equipoise as eq

NETWORKS = HERE / "networks"

# Two small networks for each of the sets that come with the package: objective, training images, its settings.
SMALL: dict[tuple[str, str], tuple[str, int | None, dict[str, Any]]] = {
    ("digits", "accurate"): ("standard", None, {"epochs": 15, "lr": 3e-3, "label_smoothing": 0.1}),
    ("digits", "robust"): ("adversarial", None, {"epochs": 20, "lr": 3e-3, "eps": 0.3, "steps": 5}),
    ("shapes", "accurate"): ("standard", 4096, {"epochs": 6, "lr": 3e-3, "label_smoothing": 0.1}),
    ("shapes", "robust"): (
        "adversarial",
        4096,
        {"epochs": 10, "lr": 5e-3, "eps": 20 / 255, "steps": 4},
    ),
}
TRAINING: dict[str, Any] = {
    "arch": "cnn_small",
    "optimizer": "adamw",
    "weight_decay": 1e-4,
    "schedule": "one-cycle",
    "held_out": 0,
}

# The mixtures of every pair: settings of `eq.fit`, beside the threat and the images of the pair.
SHORT = {"lose_at_most": 6.0, "steps": 20, "targets": 4, "pool": 2}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"alpha": 0.8},
    "nuts": {"rule": "nuts", **SHORT},
    "paper": {"rule": "paper", "beta": 0.95, "steps": 20},
    "switch": {"rule": "switch", **SHORT},
    "cascade": {"rule": "cascade", "views": 2, "passes": 1.7, **SHORT},
    "gate": {"rule": "nuts", "range_attack": "short", **SHORT},
    "blackbox": {"alpha": 0.8},
}
MIXTURES = {(pair, kind): KINDS[kind] for pair in ("digits", "shapes", "resnet8") for kind in KINDS}
del MIXTURES["shapes", "nuts"]  # no map helps there
GPU_MIXTURES: dict[tuple[str, str], dict[str, Any]] = {
    ("resnet18", "switch"): {"rule": "switch", "lose_at_most": 2.0},
    ("resnet18", "plain"): {"alpha": 0.97},
}
FITTED_FOR = {
    "digits": "0.2",
    "shapes": "20/255",
    "resnet8": "8/255",
    "resnet18": "8/255",
}  # in linf
FITTING_IMAGES = {  # of the test images: first, and how many
    "digits": (128, 227),
    "shapes": (1000, 300),
    "resnet8": (9000, 300),
    "resnet18": (9000, 1000),
}
GATE = ["--count", "1500", "--width", "4", "--epochs", "3", "--steps", "5", "--batch-size", "50"]


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["networks", "mixtures", "verdicts", "compare"], nargs="+")
    parser.add_argument(
        "--gpu", action="store_true", help="those of the GPU, in place of all others"
    )
    parser.add_argument("--only", default="", help="those whose name holds this text")
    given = parser.parse_args()
    if "networks" in given.what:
        for pair, side in SMALL:
            if given.only in f"{pair}-{side}":
                freeze_network(pair, side)
    if "mixtures" in given.what:
        for (pair, kind), settings in (GPU_MIXTURES if given.gpu else MIXTURES).items():
            if given.only in f"{pair}-{kind}":
                freeze_mixture(pair, kind, settings)
    if "verdicts" in given.what:
        for run in GPU_RUNS if given.gpu else RUNS:
            if given.only in str(run):
                freeze_verdicts(run)
    if "compare" in given.what:
        sys.exit(
            compare_all(
                [run for run in (GPU_RUNS if given.gpu else RUNS) if given.only in str(run)]
            )
        )


def compare_all(runs: Sequence[Run]) -> str | None:
    """Print what differs from the frozen verdicts; the answer names the runs in which too much does."""
    failed = []
    for run in runs:
        with tempfile.TemporaryDirectory() as folder:
            comparisons = compare_run(run, Path(folder))
        print(*comparisons, sep="\n", flush=True)
        if not all(comparison.allowed for comparison in comparisons):
            failed.append(str(run))
    return f"too much differs in {', '.join(failed)}" if failed else None


def freeze_network(pair: str, side: str) -> None:
    """Train a small network, and keep its weights in half precision."""
    target = NETWORKS / f"{pair}-{side}.safetensors"
    if target.exists():
        return
    objective, count, settings = SMALL[pair, side]
    images = eq.load_data(pair, split="train", count=count)
    with tempfile.TemporaryDirectory() as folder:
        eq.train(objective, data=images, out=folder, device="cpu", **TRAINING, **settings)
        with safe_open(Path(folder) / "last.safetensors", "pt") as trained:
            metadata = trained.metadata()
            weights = {name: trained.get_tensor(name).half() for name in trained.keys()}  # noqa: SIM118
    save_file(weights, target, metadata)
    print(f"{pair} {side}: {target.stat().st_size} bytes", flush=True)


def freeze_mixture(pair: str, kind: str, settings: dict[str, Any]) -> None:
    """Fit a mixture, and keep what `mixture:DIR` reads."""
    target = HERE / "mixtures" / pair / kind
    if target.exists():
        return
    begun = time.monotonic()
    first, count = FITTING_IMAGES[pair]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        lay_out(root)
        accurate, robust = (str(base(pair, side, root)) for side in BASES)
        if kind == "blackbox":
            accurate = f"python:{root}/networks/black_boxes.py:{pair}"
        if kind == "gate":
            settings = {**settings, "gate": train_gate(pair, accurate, robust, root / "gate")}
        out = (
            root / "fits" / pair / kind
        )  # as deep as the folder it goes to: paths of the bases are relative
        fit = eq.fit(
            accurate,
            robust,
            eq.load_data(DATA[pair], start=first, count=count),
            threat=eq.Threat("linf", FITTED_FOR[pair]),
            out=out,
            device="cuda" if pair == "resnet18" else "cpu",
            **settings,
        )
        target.mkdir(parents=True)
        for name in ("mixture.toml", "gate.safetensors"):
            if (out / name).exists():
                shutil.copy(out / name, target)
    print(f"{pair} {kind}: {time.monotonic() - begun:.1f} s\n{fit}\n", flush=True)


def train_gate(pair: str, accurate: str, robust: str, out: Path) -> Path:
    """A small gate of two bases, by the command line."""
    command = [
        sys.executable,
        "-m",
        "equipoise",
        "train",
        "gate",
        "--accurate",
        accurate,
        "--robust",
        robust,
    ]
    eps = str(eq.Threat("linf", FITTED_FOR[pair]).eps)
    where = [
        "--data",
        DATA[pair],
        "--eps",
        eps,
        "--device",
        "cpu",
        "--no-report",
        "--quiet",
        "--out",
        str(out),
    ]
    images = ["--count", "1442"] if pair == "digits" else []
    subprocess.run([*command, *where, *GATE, *images], check=True)
    return out


def freeze_verdicts(run: Run) -> None:
    """Evaluate a run, and write a file for each of its cells."""
    paths = {model: VERDICTS / f"{run.cell(model)}.json" for model in run.models}
    if all(path.exists() for path in paths.values()):
        return
    VERDICTS.mkdir(exist_ok=True)
    begun = time.process_time()
    data = eq.load_data(DATA[run.pair], count=run.count)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        lay_out(root)
        verdicts = evaluate(run, data, root, root / "run")
    for model, path in paths.items():
        verdicts[model].write(path)
    left = ", ".join(f"{model} {sum(found.survives)}" for model, found in verdicts.items())
    print(
        f"{run}: {left} of {run.count} survive; {time.process_time() - begun:.1f} CPU seconds",
        flush=True,
    )


if __name__ == "__main__":
    main()
