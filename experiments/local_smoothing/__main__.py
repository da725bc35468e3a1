"""Locally biased smoothing of a pair of models [Bai2022; Bai2024, Figure 1].

    trust        every trust term, over logits and probabilities, at several strengths
    neighbours   votes of the nearest training images in place of the robust model
    policy       a network that sets the strength for every image, and attacks through it

γ is the strength of the robust model: 0 is the accurate model alone, ∞ the robust one.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

import equipoise as eq
from equipoise.attacks import Attack, Pgd, TransferPgd, make_attack
from equipoise.core.device import full_precision, resolve
from equipoise.data import pixels
from equipoise.local_smoothing import (
    AdaptiveSmoothing,
    Neighbours,
    SmoothedClassifier,
    attack_at_strengths,
)
from equipoise.local_smoothing.jacobian import SoftplusSurrogate
from equipoise.local_smoothing.policy import TARGETS
from equipoise.training.objectives.gate import PolicyLoss
from experiments import attacked, common

HERE = Path(__file__).parent
ROWS = HERE / "rows"
KEPT = {"cifar10-resnet8": "CIFAR-10", "digits": "digits"}
PARTS = ("trust", "neighbours", "policy")
TERMS = {
    "constant": "constant",
    "gradient": "‖∇g_i‖",
    "top-gradient": "‖∇max g‖",
    "ratio": "‖∇g_i‖ / ‖∇h_i‖",
}
NEIGHBOUR_GAMMA = "0.1"  # of the table
SPACES = ("probabilities", "logits")
THROUGH = ("through", "softplus", "pgd-20", "pgd-100")  # PGD through a rule or a model
WORST = ("clean", "on g", "on h", *THROUGH)
Rows = attacked.Rows


def main(args: argparse.Namespace) -> None:
    """Run parts and keep their rows, or print the page of rows that were kept."""
    if args.page:
        kept = {name: common.read_kept(ROWS / f"{name}.csv.gz") for name in KEPT}
        print(page(kept))
        for name in KEPT:
            print(f"{name}\n{attacked.summary(kept[name])}\n")
        draw(kept["cifar10-resnet8"], HERE / "trust.svg")
        return
    attacked.start(args)
    accurate, robust = (attacked.load(args, model) for model in common.pair(args))
    images = common.test_images(args)
    rows = base_rows(args, accurate, robust, images)
    if "trust" in args.parts:
        rows += trust_rows(args, accurate, robust, images)
    if "neighbours" in args.parts:
        rows += neighbour_rows(args, accurate, images)
    if "policy" in args.parts:
        rows += policy_rows(args, accurate, robust, images)
    attacked.keep(args.out / "rows.csv.gz", rows)
    print(attacked.summary(rows))


# Parts


def base_rows(
    args: argparse.Namespace, accurate: nn.Module, robust: nn.Module, images: eq.Dataset
) -> Rows:
    """Both models alone: the ends of every curve."""
    pgd = Pgd(steps=args.settings["steps"])
    rows: Rows = []
    for name, model in (("accurate", accurate), ("robust", robust)):
        rows += attacked.measure(args, "models", name, model, "clean", images)
        rows += attacked.measure(args, "models", name, model, "through", images, pgd)
    return rows


def trust_rows(
    args: argparse.Namespace, accurate: nn.Module, robust: nn.Module, images: eq.Dataset
) -> Rows:
    """The four trust terms over logits and probabilities [Bai2024, Figure 1].

    Trust terms are in units of gradients, so each has strengths of its own: those that give the
    robust model the same weights at the median of the term on held-out images.
    """
    on_accurate, on_robust = attacks_on_bases(args, accurate, robust, images)
    held_out = common.held_out_images(args).images[:256]
    rows: Rows = []
    for space, trust in itertools.product(SPACES, TERMS):
        name = f"{trust}, {space}"
        median = median_trust(args, rule(args, accurate, robust, 1.0, trust, space), held_out)
        for weight in args.settings["weights"]:
            gamma = weight / (1 - weight) / median
            model = rule(args, accurate, robust, gamma, trust, space)
            attacks: dict[str, Attack | Tensor | None] = {"clean": None}
            attacks |= {"on g": on_accurate, "on h": on_robust}
            attacks |= attacks_through(args, accurate, robust, gamma, trust, space)
            for attack_name, attack in attacks.items():
                rows += attacked.measure(
                    args, "trust", name, model, attack_name, images, attack, strength=weight
                )
    return rows


def neighbour_rows(args: argparse.Namespace, accurate: nn.Module, images: eq.Dataset) -> Rows:
    """K nearest training images as the oracle, plain and weighted [Bai2022, Figures 5 and 9].

    No attack targets the selection of neighbours. Plain votes have no gradient without g.
    """
    training = common.training_images(args)
    on_accurate = attacked.perturbed(
        args, accurate, images, TransferPgd(accurate, args.settings["steps"])
    )
    rows: Rows = []
    for k, weights in itertools.product(args.settings["neighbours"], ("plain", "distance")):
        votes = Neighbours(
            training.images, training.labels, training.num_classes, k=k, weights=weights
        )
        for gamma in args.settings["neighbour_gammas"]:
            model = rule(args, accurate, votes, gamma, "gradient", "logits")
            for attack_name, attack in (("clean", None), ("on g", on_accurate)):
                rows += attacked.measure(
                    args,
                    "neighbours",
                    f"K = {k}, {weights}",
                    model,
                    attack_name,
                    images,
                    attack,
                    strength=gamma,
                )
    return rows


def policy_rows(
    args: argparse.Namespace, accurate: nn.Module, robust: nn.Module, images: eq.Dataset
) -> Rows:
    """A policy that sets γ for every image, and attacks through it [Bai2022, Table 1]."""
    models = {"accurate": accurate, "robust": robust}
    rows = strength_rows(args, "crossing", models, common.held_out_images(args))
    crossing = attacked.find_crossing(rows, "crossing", args.seed)
    print(f"crossing at γ = {crossing.gamma:.3g} [{crossing.low:.3g}, {crossing.high:.3g}]")
    models["adaptive"] = trained_policy(args, accurate, robust, crossing.gamma)
    rows += strength_rows(args, "targets", models, images)
    rows += policy_attack_rows(args, models, images)
    rows += radius_rows(args, models, images)
    return rows


def strength_rows(
    args: argparse.Namespace, part: str, models: Mapping[str, nn.Module], images: eq.Dataset
) -> Rows:
    """Models under attacks on the rule with a fixed strength γ_t [Bai2022, Figures 4 and 7]."""
    fixed = rule(args, models["accurate"], models["robust"], 1.0, "top-ratio", "logits")
    device = resolve(args.device)
    attacked_images = attack_at_strengths(
        fixed,
        pixels(images.images).to(device),
        images.labels.to(device),
        TARGETS,
        threat=common.threat(args),
        steps=args.settings["steps"],
        batch_size=attacked.batch_size(args),
    )
    rows: Rows = []
    for gamma, at in zip(TARGETS, attacked_images, strict=True):
        for name, model in models.items():
            rows += attacked.measure(args, part, name, model, "at γ", images, at, strength=gamma)
    return rows


def trained_policy(
    args: argparse.Namespace, accurate: nn.Module, robust: nn.Module, gamma_0: float
) -> nn.Module:
    """The rule (10) with a policy trained by the loss (9) of [Bai2022]."""
    threat, settings = common.threat(args), args.settings
    training = common.training_images(args)
    policy = AdaptiveSmoothing(
        accurate,
        robust,
        width=settings["policy_width"],
        example=pixels(training.images[:2]).to(resolve(args.device)),
        seed=args.seed,
        norm=threat.norm,
    )
    loss = PolicyLoss(norm=threat.norm, eps=threat.eps, gamma_0=gamma_0, steps=settings["steps"])
    eq.train(
        loss,
        model=policy,
        data=training.slice(0, min(settings["policy_images"], len(training))),
        out=args.out / "policy-training",
        device=args.device,
        seed=args.seed,
        **settings["policy"],
    )
    return policy.eval().requires_grad_(False)


def policy_attack_rows(
    args: argparse.Namespace, models: Mapping[str, nn.Module], images: eq.Dataset
) -> Rows:
    """Both models and the policy under PGD and AutoAttack; the policy also under transferred PGD."""
    settings = args.settings
    on_accurate, on_robust = attacks_on_bases(args, models["accurate"], models["robust"], images)
    few = images.slice(0, min(settings["suite_images"], len(images)))
    rows: Rows = []
    for name, model in models.items():
        attacks: dict[str, Attack | Tensor | None] = {"clean": None}
        for steps in settings["long_steps"]:
            attacks[f"pgd-{steps}"] = Pgd(steps=steps)
        if name == "adaptive":
            attacks |= {"on g": on_accurate, "on h": on_robust}
            attacks["softplus"] = Pgd(steps=20, surrogate=SoftplusSurrogate(model))
        for attack_name, attack in attacks.items():
            rows += attacked.measure(args, "policy", name, model, attack_name, images, attack)
        suite = make_attack(settings["suite"])
        rows += attacked.measure(args, "policy", name, model, settings["suite"], few, suite)
    return rows


def radius_rows(
    args: argparse.Namespace, models: Mapping[str, nn.Module], images: eq.Dataset
) -> Rows:
    """Other radii than the one that the policy was trained for [Bai2022, Figure 8]."""
    threat = common.threat(args)
    rows: Rows = []
    for factor in args.settings["eps_factors"]:
        other = eq.Threat(threat.norm, threat.eps * factor)
        for name, model in models.items():
            rows += attacked.measure(
                args,
                "radii",
                name,
                model,
                "pgd-20",
                images,
                Pgd(steps=20),
                strength=factor,
                threat=other,
            )
    return rows


# Rules and attacks


def rule(
    args: argparse.Namespace,
    accurate: nn.Module,
    oracle: nn.Module,
    gamma: float,
    trust: str,
    space: str,
    *,
    attached: bool = False,
) -> SmoothedClassifier:
    """Eq. (3.2) or (3.3) with one of the trust terms.

    Over logits the gradient of ‖∇g‖ is zero almost everywhere for a ReLU network, so unless
    `attached`, attacks save these second derivatives.
    """
    smoothed = SmoothedClassifier(
        accurate,
        oracle,
        gamma,
        trust=trust,
        space=space,
        norm=common.threat(args).norm,
        attached=attached or space == "probabilities",
    )
    smoothed.to(resolve(args.device)).eval()
    return smoothed


def attacks_on_bases(
    args: argparse.Namespace, accurate: nn.Module, robust: nn.Module, images: eq.Dataset
) -> list[Tensor]:
    """The images of PGD on either model alone, which serve against every rule."""
    steps = args.settings["steps"]
    return [
        attacked.perturbed(args, model, images, TransferPgd(model, steps))
        for model in (accurate, robust)
    ]


def attacks_through(
    args: argparse.Namespace,
    accurate: nn.Module,
    robust: nn.Module,
    gamma: float,
    trust: str,
    space: str,
) -> dict[str, Attack]:
    """PGD through a rule; where its trust term depends on gradients, also with softened ReLUs."""
    pgd = Pgd(steps=args.settings["steps"])
    if trust == "constant":
        return {"through": pgd}
    soft = SoftplusSurrogate(rule(args, accurate, robust, gamma, trust, space, attached=True))
    return {"through": pgd, "softplus": replace(pgd, surrogate=soft)}


def median_trust(args: argparse.Namespace, smoothed: SmoothedClassifier, images: Tensor) -> float:
    """The median of a trust term over images and classes."""
    x = pixels(images).to(resolve(args.device))
    with torch.no_grad(), full_precision(x.device):
        return float(smoothed.sides_and_trust(x)[2].median())


# The page


def page(kept: Mapping[str, Rows]) -> str:
    """The table: every rule under every attack."""
    table = []
    for name, data in KEPT.items():
        table += [[f"{data}, {line[0]}", *line[1:]] for line in lines(kept[name])]
    columns = ("accuracy, %", "clean", "PGD on g", "PGD on h", "PGD through the rule", "worst")
    return common.markdown(columns, table)


def lines(rows: Rows) -> list[list[str]]:
    """Lines for both models, every trust term at the second largest weight of h, neighbours at one
    γ, and the policy."""
    table = [line(rows, "accurate g", "models", "accurate")]
    table.append(line(rows, "robust h", "models", "robust"))
    for space in SPACES:
        for trust, formula in TERMS.items():
            weights = weights_of(rows, f"{trust}, {space}")
            if weights:
                name = f"{formula}, {space}"
                table.append(line(rows, name, "trust", f"{trust}, {space}", weights[-2]))
    for model in dict.fromkeys(row["model"] for row in rows if row["part"] == "neighbours"):
        if "plain" in model:
            name = f"{model.removesuffix(', plain')} neighbours, γ = {NEIGHBOUR_GAMMA}"
            table.append(line(rows, name, "neighbours", model, NEIGHBOUR_GAMMA))
    if attacked.correct_by_image(rows, model="adaptive"):
        table.append(line(rows, "policy", "policy", "adaptive"))
    return table


def line(rows: Rows, title: str, part: str, model: str, strength: str = "") -> list[str]:
    """A line of the table."""
    key = {"part": part, "model": model, "strength": strength}
    columns = (["clean"], ["on g"], ["on h"], THROUGH, WORST)
    return [title, *(attacked.percent(rows, attacks, **key) for attacks in columns)]


def weights_of(rows: Rows, model: str) -> list[str]:
    """The weights of h at the median image at which a trust term was measured, rising."""
    weights = {row["strength"] for row in rows if row["part"] == "trust" and row["model"] == model}
    return sorted(weights, key=float)


def draw(rows: Rows, path: Path) -> None:
    """Accuracy in the worst case against clean accuracy, a curve for each trust term."""
    curves = {}
    for space, style in zip(SPACES, ("o-", "s--"), strict=True):
        for trust, formula in TERMS.items():
            name = f"{trust}, {space}"
            clean, survived = [], []
            for weight in weights_of(rows, name):
                key = {"part": "trust", "model": name, "strength": weight}
                clean.append(float(attacked.percent(rows, ["clean"], **key)))
                survived.append(float(attacked.percent(rows, WORST, **key)))
            curves[f"{formula}, {space}"] = (clean, survived, style)
    attacked.draw_curves(path, curves, "clean accuracy, %", "accuracy under all attacks, %")


if __name__ == "__main__":
    common.run(main, common.new_parser("local_smoothing", PARTS, __doc__))
