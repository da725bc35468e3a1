"""Adaptive smoothing [Bai2024]: mixing with one alpha, and with a gate that sets it per image.

    alphas       accuracy against alpha under attacks on either model and on the mixture [Figure 4]
    transfer     both models on images of attacks on the mixture with other alphas [Figure 2]
    confidence   how confident both models are where they are right, and where not [Table 1]
    adversaries  gates trained against adversary A, B or C, under A to D [Tables 2 and 3]
    ablation     gates with other weights of the loss, and other scales [Tables 6 and 7]

A is PGD without the gate's gradient, B is PGD with it, C a suite with all gradients, D the same
suite with a term that lowers alpha.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

import equipoise as eq
from equipoise.attacks import (
    Apgd,
    Attack,
    FunctionAttack,
    Pgd,
    Suite,
    TargetedApgd,
    TransferPgd,
    minimum_margin,
)
from equipoise.core.device import full_precision, resolve
from equipoise.core.rng import Stream
from equipoise.core.rows import AttackRow
from equipoise.data import pixels
from equipoise.evaluation.adaptive import white_box
from equipoise.mixing import AlphaPenalty, GatedClassifier, MixedClassifier
from equipoise.mixing.formula import mix
from equipoise.mixing.gated import SCALE, SHIFT
from equipoise.training import train_gate
from experiments import attacked, common

HERE = Path(__file__).parent
ROWS = HERE / "rows"
KEPT = ("cifar10", "cifar100", "cifar10-resnet8")
PARTS = ("alphas", "transfer", "confidence", "adversaries", "ablation")
TRAINED_AGAINST = ("A", "B", "C")
ADVERSARIES = ("A", "B", "C", "D")
SHIFTS = [step / 10 for step in range(-80, 81)]  # of the gate, for a given clean accuracy
# Of gates; the hinge attacks on both models at once come on top.
SUITE = Suite((Apgd("margin", 20), TargetedApgd(15, ranks=(1, 2, 3), order="distance")))
PAPER = {  # accuracy in percent [Bai2024, Tables 2 and 3]: clean, A, B, C, D
    ("cifar10", "A"): ("92.05", "57.22", "56.63", "40.04", "39.85"),
    ("cifar10", "B"): ("92.07", "57.25", "57.09", "40.02", "39.70"),
    ("cifar10", "C"): ("91.51", "56.30", "56.29", "42.78", "42.66"),
    ("cifar100", "A"): ("83.99", "40.04", "30.59", "23.54", "23.78"),
    ("cifar100", "B"): ("83.96", "39.80", "34.48", "26.37", "26.17"),
    ("cifar100", "C"): ("80.90", "39.26", "38.92", "32.94", "32.80"),
}
BEST = (0.0, 0.2)  # c_CE and c_prod of the paper's best weights
CURVES = {
    "clean": "clean",
    "std": "PGD on the accurate model",
    "rob": "PGD on the robust model",
    "mix": "PGD on the mixture",
}
Rows = attacked.Rows


def main(args: argparse.Namespace) -> None:
    """Run parts and keep their rows, or print the page of rows that were kept."""
    if args.page:
        kept = {name: common.read_kept(ROWS / f"{name}.csv.gz") for name in KEPT}
        print(page(kept))
        for name in KEPT:
            print(f"\n{name}\n{attacked.summary(kept[name])}")
        print("crossing at odds", crossing_text(kept["cifar10-resnet8"]))
        print(confidence_text(kept["cifar10-resnet8"]))
        draw(kept["cifar10-resnet8"], HERE / "alphas.svg")
        return
    attacked.start(args)
    accurate, robust = (attacked.load(args, model) for model in common.pair(args))
    images = common.test_images(args)
    rows: Rows = []
    if "alphas" in args.parts:
        rows += alpha_rows(args, accurate, robust, images)
    if "transfer" in args.parts:
        rows += transfer_rows(args, accurate, robust, images)
    if "confidence" in args.parts:
        rows += confidence_rows(args, accurate, robust, images)
    if "adversaries" in args.parts:
        rows += adversary_rows(args, accurate, robust, images)
    if "ablation" in args.parts:
        rows += ablation_rows(args, accurate, robust, images)
    attacked.keep(args.out / "rows.csv.gz", rows)
    print(attacked.summary(rows))


# Without a gate


def alpha_rows(
    args: argparse.Namespace, accurate: nn.Module, robust: nn.Module, images: eq.Dataset
) -> Rows:
    """Plain mixing at every alpha, clean and under PGD on g (std), on h (rob) and on itself (mix)."""
    evaluation = common.evaluate(
        args,
        "alphas",
        {"accurate": accurate, "robust": robust},
        images,
        attack="pgd",
        steps=args.settings["steps"],
        alphas=args.settings["alphas"],
    )
    rows: Rows = []
    for row in evaluation.rows:
        assert isinstance(row, AttackRow)
        values = ("alphas", row.model, f"{row.alpha:.6g}", row.attack)
        rows.append(attacked.row(*values, row.index, bool(row.correct)))
    return rows


def transfer_rows(
    args: argparse.Namespace, accurate: nn.Module, robust: nn.Module, images: eq.Dataset
) -> Rows:
    """Both models on images of PGD on the mixture with odds γ_t = α_t / (1 − α_t)."""
    rows: Rows = []
    for gamma in args.settings["transfer_gammas"]:
        alpha = 1.0 if gamma == float("inf") else gamma / (1 + gamma)
        mixture = MixedClassifier(accurate, robust, alpha).to(resolve(args.device)).eval()
        at = attacked.perturbed(args, mixture, images, TransferPgd(mixture, args.settings["steps"]))
        for name, model in (("accurate", accurate), ("robust", robust)):
            rows += attacked.measure(
                args, "transfer", name, model, "on the mixture", images, at, strength=gamma
            )
    return rows


def confidence_rows(
    args: argparse.Namespace, accurate: nn.Module, robust: nn.Module, images: eq.Dataset
) -> Rows:
    """Both models, clean, at the last step of PGD and at the smallest margin that APGD reaches."""
    rows: Rows = []
    for name, model in (("accurate", accurate), ("robust", robust)):
        attacks: dict[str, Attack | None] = {
            "clean": None,
            "pgd": TransferPgd(model, args.settings["steps"]),
            "smallest margin": smallest_margin(args.settings["margin_steps"]),
        }
        for attack_name, attack in attacks.items():
            rows += attacked.measure(args, "confidence", name, model, attack_name, images, attack)
    return rows


def smallest_margin(steps: int) -> FunctionAttack:
    """The image with the smallest margin over all iterates of APGD [Bai2024, appendix D.2]."""
    suite = Suite((Apgd("ce", steps), TargetedApgd(steps)))

    def run(
        model: nn.Module, x: Tensor, y: Tensor, *, threat: eq.Threat, stream: Stream, **_: object
    ) -> Tensor:
        points = minimum_margin(
            model, x, y, threat=threat, stream=stream, attack=suite, skip_broken=True
        )
        return points.images[0]

    return FunctionAttack(name="smallest-margin", function=run, settings={"steps": steps})


# With a gate


def adversary_rows(
    args: argparse.Namespace, accurate: nn.Module, robust: nn.Module, images: eq.Dataset
) -> Rows:
    """Both models clean and under B, and gates trained against A, B and C under all adversaries."""
    steps = args.settings["steps"]
    rows: Rows = []
    for name, model in (("accurate", accurate), ("robust", robust)):
        rows += attacked.measure(args, "models", name, model, "clean", images)
        rows += attacked.measure(args, "models", name, model, "B", images, Pgd(steps=steps))
    for letter in TRAINED_AGAINST:
        gate = trained_gate(
            args, accurate, robust, f"against-{letter}", adversary=letter, **args.settings["gate"]
        )
        name = f"trained against {letter}"
        for adversary, attack in adversaries(gate, steps).items():
            rows += attacked.measure(args, "adversaries", name, gate, adversary, images, attack)
    return rows


def adversaries(gate: GatedClassifier, steps: int) -> dict[str, Attack | None]:
    """Attacks that know how a gate is built [Bai2024, Section 4.2].

    A is PGD without the gate's gradient, B with it; C is the suite on both models at once, and D the
    same with a term that lowers alpha.
    """
    pgd = Pgd(steps=steps)
    suite = white_box(gate, SUITE)
    return {
        "clean": None,
        "A": replace(pgd, surrogate=gate.without_gate_gradient()),
        "B": pgd,
        "C": suite,
        "D": replace(suite, extra=AlphaPenalty(gate)),
    }


def ablation_rows(
    args: argparse.Namespace, accurate: nn.Module, robust: nn.Module, images: eq.Dataset
) -> Rows:
    """Gates with other loss weights and scales, beside plain mixing, clean and under B.

    All are shifted to the same clean accuracy on held-out images, half-way between both models.
    """
    held_out = common.held_out_images(args)
    models: dict[str, nn.Module] = {}
    for c_prod, c_ce in itertools.product(args.settings["c_prod"], args.settings["c_ce"]):
        name = f"c_CE {c_ce:g}, c_BCE {1.5 - c_ce:g}, c_prod {c_prod:g}"
        weights = {"c_ce": c_ce, "c_bce": 1.5 - c_ce, "c_prod": c_prod}
        gate = trained_gate(
            args, accurate, robust, name, adversary="B", **weights, **args.settings["ablation_gate"]
        )
        models[name] = shifted(args, gate, held_out, SCALE)
        if (c_ce, c_prod) == BEST:
            for scale in args.settings["scales"]:
                models[f"scale {scale:g}"] = shifted(args, gate, held_out, scale)
            models["plain"] = plain_mixture(args, gate, held_out)
    rows: Rows = []
    for name, model in models.items():
        rows += attacked.measure(args, "ablation", name, model, "clean", images)
        pgd = Pgd(steps=args.settings["steps"])
        rows += attacked.measure(args, "ablation", name, model, "B", images, pgd)
    return rows


def trained_gate(
    args: argparse.Namespace, accurate: nn.Module, robust: nn.Module, name: str, **settings: Any
) -> GatedClassifier:
    """A gate with alpha in all of (0, 1), trained in `OUT/gates/NAME`."""
    threat = common.threat(args)
    result = train_gate(
        accurate,
        robust,
        data=common.training_images(args),
        norm=threat.norm,
        eps=threat.eps,
        out=args.out / "gates" / name.replace(" ", "-"),
        device=args.device,
        seed=args.seed,
        **settings,
    )
    assert isinstance(result.model, GatedClassifier)
    return result.model.eval()


def shifted(
    args: argparse.Namespace, gate: GatedClassifier, images: eq.Dataset, scale: float
) -> GatedClassifier:
    """The gate with the largest shift that reaches the clean accuracy on these images."""
    g, h, z, y = outputs(args, gate, images)
    target = clean_target(g, h, y)
    unscaled = (z - SHIFT) / SCALE
    shift = SHIFTS[0]
    for candidate in SHIFTS:
        if accuracy(mix(g, h, scale * unscaled + candidate), y) >= target:
            shift = candidate
    return gate.with_range(0.0, 1.0, scale=scale, shift=shift)


def plain_mixture(
    args: argparse.Namespace, gate: GatedClassifier, images: eq.Dataset
) -> MixedClassifier:
    """The same two models with the largest alpha that reaches the clean accuracy."""
    g, h, _, y = outputs(args, gate, images)
    target = clean_target(g, h, y)
    reaching = 0.0
    for alpha in (step / 100 for step in range(1, 100)):
        log_odds = torch.tensor(alpha).logit().to(g.device)
        if accuracy(mix(g, h, log_odds), y) >= target:
            reaching = alpha
    mixture = MixedClassifier(gate.accurate, gate.robust, reaching)
    return mixture.to(resolve(args.device)).eval()


def outputs(
    args: argparse.Namespace, gate: GatedClassifier, images: eq.Dataset
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities of both models (N, K), the gate's log-odds (N,) and the labels (N,)."""
    device = resolve(args.device)
    parts = []
    for x in pixels(images.images).split(attacked.batch_size(args)):
        with torch.no_grad(), full_precision(device):
            parts.append(gate.log_probabilities_and_gate(x.to(device)))
    g, h, z = (torch.cat(part) for part in zip(*parts, strict=True))
    return g, h, z, images.labels.to(device)


def clean_target(g: Tensor, h: Tensor, y: Tensor) -> float:
    """The clean accuracy half-way between those of both models."""
    return (accuracy(g, y) + accuracy(h, y)) / 2


def accuracy(logits: Tensor, y: Tensor) -> float:
    """The share of images classified correctly."""
    return float((logits.argmax(dim=1) == y).float().mean())


# The page


def page(kept: Mapping[str, Rows]) -> str:
    """Tables 2 and 3: gates under all adversaries, beside the paper's."""
    table = []
    for data, shown in (("cifar10", "CIFAR-10"), ("cifar100", "CIFAR-100")):
        for letter in TRAINED_AGAINST:
            key = {"part": "adversaries", "model": f"trained against {letter}"}
            attacks = ("clean", *ADVERSARIES)
            own = [attacked.percent(kept[data], [attack], **key) for attack in attacks]
            table.append([f"{shown}, {letter}", *own])
            table.append([f"{shown}, {letter}, paper", *PAPER[data, letter]])
    return common.markdown(("gate trained against", "clean", *ADVERSARIES), table)


def crossing_text(rows: Rows) -> str:
    """Figure 2: the odds α_t / (1 − α_t) above which g is the more accurate model."""
    crossing = attacked.find_crossing(rows, "transfer")
    return f"{crossing.gamma:.1f} [{crossing.low:.1f}, {crossing.high:.1f}]"


def confidence_text(rows: Rows) -> str:
    """Table 1: the mean gap of the first two probabilities where a model is right, and where not."""
    gaps: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        if row["part"] == "confidence":
            key = (row["model"], row["attack"], row["correct"])
            gaps.setdefault(key, []).append(float(row["gap"]))
    lines = []
    for (model, attack, correct), values in gaps.items():
        kind = "right" if correct == "1" else "wrong"
        lines.append(f"{model}, {attack}, {kind}: gap {fmean(values):.2f}, n = {len(values)}")
    return "\n".join(lines)


def draw(rows: Rows, path: Path) -> None:
    """Figure 4: accuracy against alpha."""
    alphas = sorted({row["strength"] for row in rows if row["part"] == "alphas"}, key=float)
    curves = {}
    for attack, name in CURVES.items():
        values = []
        for alpha in alphas:
            key = {"part": "alphas", "strength": alpha}
            values.append(float(attacked.percent(rows, [attack], **key)))
        curves[name] = ([float(alpha) for alpha in alphas], values, "o-")
    attacked.draw_curves(path, curves, "alpha", "accuracy, %")


if __name__ == "__main__":
    common.run(main, common.new_parser("adaptive_smoothing", PARTS, __doc__))
