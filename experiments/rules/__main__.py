"""All rules for mixing one pair of models, fitted to one target and attacked on the same images.

    plain     one alpha for all images [Bai2024, section 3]
    paper     MixedNUTS, Algorithm 1 literally [Bai2024nuts]
    nuts      the NUTS map: the same family of maps with another search and a promise
    switch    the confidence switch
    cascade   the switch over one view of the robust model where it is sure, else over all its views
    gate      a trained gate over the confidence switch [Bai2024, section 4]

Fits are on held-out images; the table is of test images, which no fit has seen.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from torch import nn

import equipoise as eq
from equipoise.fitting import Fit
from equipoise.training import train_gate
from experiments import common

HERE = Path(__file__).parent
PARTS = ("plain", "paper", "nuts", "switch", "cascade", "gate")
NAMES = {
    "plain": "plain mixing",
    "paper": "MixedNUTS",
    "nuts": "NUTS map (ours)",
    "switch": "confidence switch",
    "cascade": "cascade",
    "gate": "gate on the switch",
}
SHOWN = ("cifar10", "cifar10-maps", "cifar100-maps")  # in the figure


def main(args: argparse.Namespace) -> None:
    """Fit the chosen rules, evaluate all of them at once, keep the rows, and print their table."""
    if args.page:
        print(table(HERE / "rows"))
        draw(HERE / "rows", HERE / "trade-off.svg")
        return
    accurate, robust = common.pair(args)
    held_out, test = common.held_out_images(args), common.test_images(args)
    if args.size == "smoke":
        robust = f"tta:2:{robust}"
    views = int(robust.split(":")[1]) if robust.startswith("tta:") else None
    lose_at_most = args.lose_at_most or args.settings["lose_at_most"]

    def fit(name: str, **settings: Any) -> Fit:
        own = {"lose_at_most": lose_at_most, **args.settings["fit"], **settings}
        return common.fit(args, name, accurate, robust, held_out, **own)

    mixtures: dict[str, nn.Module] = {}
    for part in args.parts:
        name = NAMES[part]
        if part == "cascade" and views is None:
            if args.part is not None:
                raise eq.InputError("`--robust` must have views for the cascade, as in tta:6:REF")
        elif part == "plain":
            alpha = select_alpha(args, accurate, robust, held_out, lose_at_most / 100)
            mixtures[name] = common.fit(args, part, accurate, robust, held_out, alpha=alpha).mixture
        elif part == "cascade":
            mixtures[name] = fit(part, rule=part, views=views, passes=args.passes).mixture
        elif part == "gate":
            for gate in gates(args, accurate, robust):
                fitted = fit(gate.name, rule="switch", gate=gate, **args.settings["gate"])
                assert fitted.gated is not None
                mixtures[f"{name}, {gate.name}"] = fitted.gated
        else:
            mixtures[name] = fit(part, rule=part).mixture
    result = common.evaluate(args, "evaluation", mixtures, test, **args.settings["attack"])
    rows = common.accuracy_rows(result, mixtures)
    common.keep(args.out / "rows" / "evaluation.csv.gz", common.ACCURACY_COLUMNS, rows)
    print(result)
    print(table(args.out / "rows"))


def select_alpha(
    args: argparse.Namespace, accurate: str, robust: str, images: eq.Dataset, lose: float
) -> float:
    """The smallest alpha of plain mixing that keeps the target under attack on these images."""
    alphas = [*args.settings["alphas"], 1.0]
    models: dict[str, str | nn.Module] = {"accurate": accurate, "robust": robust}
    attack = {name: value for name, value in args.settings["attack"].items() if name != "audit"}
    sweep = common.evaluate(args, "alphas", models, images, alphas=tuple(alphas), **attack)
    worst = {result.alpha: result.value for result in sweep.results if result.metric == "worst"}
    return float(min(alpha for alpha in alphas if worst[alpha] >= worst[1.0] - lose))


def gates(args: argparse.Namespace, accurate: str, robust: str) -> list[Path]:
    """Folders of trained gates: those given, at smoke size one that is trained here."""
    if args.size == "full":
        return [Path(gate) for gate in args.gate]
    own = common.threat(args)
    out = args.out / "models" / "gate"
    train_gate(
        eq.load_model(accurate),
        eq.load_model(robust),
        data=common.training_images(args),
        width=8,
        out=out,
        device=args.device,
        norm=own.norm,
        eps=own.eps,
        steps=2,
        epochs=1,
    )
    return [out]


# The page


def table(folder: Path) -> str:
    """Accuracies of all kept rows, and what every mixture gains and loses."""
    lines = []
    for name, rows in common.read_folder(folder).items():
        count = len({row["index"] for row in rows})
        lines += common.accuracy_lines(f"{name}, n = {count}", rows)
    return common.markdown(common.ACCURACY_TABLE, lines)


def draw(folder: Path, path: Path) -> None:
    """Attacked against clean accuracy of some comparisons."""
    panels = {}
    for name in SHOWN:
        rows = common.read_kept(folder / f"{name}.csv.gz")
        rows = [row for row in rows if row["model"] != "accurate"]
        clean, attacked = (common.accuracies(rows, column) for column in ("clean", "attacked"))
        panels[name] = {model: (clean[model], attacked[model]) for model in clean}
    common.draw_trade_offs(path, panels)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    own = common.new_parser("rules", PARTS, __doc__)
    own.add_argument("--lose-at-most", type=float, help="points of robust accuracy; 2 at full size")
    own.add_argument("--passes", type=float, help="most views of a cascade per image, on average")
    own.add_argument("--gate", action="append", default=[], help="folder of a gate (full)")
    return own


if __name__ == "__main__":
    common.run(main, parser())
