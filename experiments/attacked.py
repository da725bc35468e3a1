"""Rows of models on attacked images, for experiments that bring attacks of their own.

A model under one attack is one file `OUT/PART/MODEL, ATTACK.csv.gz`; a file that exists is read and
not computed again.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

import equipoise as eq
from equipoise.attacks import Attack
from equipoise.core import stats
from equipoise.core.device import full_precision, resolve
from equipoise.core.stats import Estimate
from equipoise.data import pixels
from equipoise.local_smoothing import crossing
from equipoise.local_smoothing.crossing import Crossing
from equipoise.mixing import GatedClassifier
from experiments import common

COLUMNS = ("part", "model", "strength", "attack", "index", "correct", "gap", "alpha")
BATCH = {"cpu": 32, "cuda": 250}  # images in one pass; gradients of all classes take much memory
Rows = list[dict[str, str]]


def start(args: argparse.Namespace) -> None:
    """Note the settings of a run in its folder, and refuse a folder of other settings."""
    ignored = ("name", "part", "parts", "page", "out", "device")
    settings = {key: str(value) for key, value in vars(args).items() if key not in ignored}
    path = Path(args.out) / "settings.json"
    if path.exists() and json.loads(path.read_text()) != settings:
        raise eq.InputError(f"`--out` must be a new folder: {args.out} has other settings")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(settings, indent=1) + "\n")


def load(args: argparse.Namespace, reference: str) -> nn.Module:
    """A frozen model on the device of the run."""
    model: nn.Module = eq.load_model(reference)
    return model.to(resolve(args.device)).eval().requires_grad_(False)


def perturbed(
    args: argparse.Namespace,
    model: nn.Module,
    images: eq.Dataset,
    attack: Attack,
    threat: eq.Threat | None = None,
) -> Tensor:
    """(N, C, H, W) the images attacked."""
    return eq.attack(
        model,
        images,
        threat=threat or common.threat(args),
        attack=attack,
        device=args.device,
        batch_size=batch_size(args),
        seed=args.seed,
    ).images


def batch_size(args: argparse.Namespace) -> int:
    """Images in one pass of a model."""
    return BATCH[resolve(args.device).type]


def measure(
    args: argparse.Namespace,
    part: str,
    name: str,
    model: nn.Module,
    attack_name: str,
    images: eq.Dataset,
    attack: Attack | Tensor | None = None,
    *,
    strength: float | None = None,
    threat: eq.Threat | None = None,
) -> Rows:
    """The rows of a model under an attack, or on images (N, C, H, W) that were attacked before.

    Without an attack the images are clean. `strength` is an alpha or a γ that is part of the
    model's or the attack's name.
    """
    shown = "" if strength is None else f"{strength:.6g}"
    title = f"{name} {shown}, {attack_name}"
    file_name = re.sub(r"[^\w.,-]+", "-", title)
    path = Path(args.out) / part / f"{file_name}.csv.gz"
    if path.exists():
        return common.read_kept(path)
    print(f"{part}: {title}", flush=True)
    if attack is None:
        at = pixels(images.images)
    elif isinstance(attack, Tensor):
        at = attack
    else:
        at = perturbed(args, model, images, attack, threat)
    correct, gaps, alphas = judge(args, model, at, images.labels)
    columns = (images.index.tolist(), correct, gaps, alphas)
    rows = []
    for index, is_correct, gap, alpha in zip(*columns, strict=True):
        rows.append(row(part, name, shown, attack_name, index, is_correct, gap, alpha))
    keep(path, rows)
    return rows


def row(
    part: str,
    model: str,
    strength: str,
    attack: str,
    index: int,
    correct: bool,
    gap: str = "",
    alpha: str = "",
) -> dict[str, str]:
    """The row of one image."""
    values = (part, model, strength, attack, str(index), str(int(correct)), gap, alpha)
    return dict(zip(COLUMNS, values, strict=True))


def keep(path: Path, rows: Rows) -> None:
    """Write rows; the same rows give the same bytes."""
    common.keep(path, COLUMNS, [tuple(row.values()) for row in rows])


def judge(
    args: argparse.Namespace, model: nn.Module, images: Tensor, labels: Tensor
) -> tuple[list[bool], list[str], list[str]]:
    """Of N images whether each is classified correctly, its gap and, with a gate, its alpha.

    The gap is the probability of the predicted class minus that of the runner-up.
    """
    device, count = resolve(args.device), batch_size(args)
    correct: list[bool] = []
    gaps: list[str] = []
    alphas: list[str] = []
    for x, y in zip(images.split(count), labels.split(count), strict=True):
        x = x.to(device)
        with torch.no_grad(), full_precision(device):
            logits = model(x)
            own = model.alphas(x).tolist() if isinstance(model, GatedClassifier) else None
        top = torch.softmax(logits, dim=1).topk(2, dim=1).values
        correct += (logits.argmax(dim=1).cpu() == y.cpu()).tolist()
        gaps += [f"{gap:.4f}" for gap in (top[:, 0] - top[:, 1]).tolist()]
        alphas += [""] * len(y) if own is None else [f"{alpha:.4f}" for alpha in own]
    return correct, gaps, alphas


def worst(rows: Sequence[Mapping[str, str]], attacks: Sequence[str], **key: str) -> Estimate | None:
    """The share of images that are correct under all of these attacks, of those that were run."""
    survives: dict[str, bool] = {}
    for attack in attacks:
        for index, correct in correct_by_image(rows, attack=attack, **key).items():
            survives[index] = survives.get(index, True) and correct
    return stats.share(survives.values()) if survives else None


def percent(rows: Sequence[Mapping[str, str]], attacks: Sequence[str], **key: str) -> str:
    """:func:`worst` as a cell of a table; empty where none of the attacks was run."""
    estimate = worst(rows, attacks, **key)
    return "" if estimate is None else f"{100 * estimate.value:.1f}"


def correct_by_image(rows: Sequence[Mapping[str, str]], **key: str) -> dict[str, bool]:
    """Whether each image is correct, by its index, in the rows with these values."""
    correct = {}
    for row in rows:
        if all(row[name] == value for name, value in key.items()):
            correct[row["index"]] = row["correct"] == "1"
    return correct


def summary(rows: Sequence[Mapping[str, str]]) -> str:
    """A line for every model and attack: the accuracy with its interval, and the median alpha."""
    groups: dict[tuple[str, ...], list[Mapping[str, str]]] = {}
    for one in rows:
        group = (one["part"], one["model"], one["strength"], one["attack"])
        groups.setdefault(group, []).append(one)
    lines = []
    for key, own in groups.items():
        estimate = stats.share(row["correct"] == "1" for row in own)
        line = f"{', '.join(filter(None, key))}: {common.cell(estimate)}, n = {len(own)}"
        if own[0]["alpha"]:
            line += f", median alpha {median(float(row['alpha']) for row in own):.2f}"
        lines.append(line)
    return "\n".join(lines)


def find_crossing(rows: Sequence[Mapping[str, str]], part: str, seed: int = 0) -> Crossing:
    """The strength of the attacked mixture above which g is more accurate than h, in these rows."""
    strengths = {row["strength"] for row in rows if row["part"] == part}
    ordered = sorted(strengths, key=float)
    correct: dict[str, Tensor] = {}
    for model in ("accurate", "robust"):
        by_strength = []
        for strength in ordered:
            by_image = correct_by_image(rows, part=part, model=model, strength=strength)
            by_strength.append(list(by_image.values()))
        correct[model] = torch.tensor(by_strength)
    gammas = [float(strength) for strength in ordered]
    return crossing.find_crossing(gammas, correct["accurate"], correct["robust"], seed=seed)


def draw_curves(
    path: Path,
    curves: Mapping[str, tuple[Sequence[float], Sequence[float], str]],
    x_label: str,
    y_label: str,
) -> None:
    """Draw a figure of named curves (x, y, style); the same curves give the same file."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "equipoise"
    figure = Figure(figsize=(6.4, 4.8), layout="constrained")
    axes = figure.subplots()
    for name, (x, y, style) in curves.items():
        axes.plot(x, y, style, label=name, markersize=4)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    figure.savefig(path, metadata={"Date": None})
