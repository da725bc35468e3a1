"""MixedNUTS [Bai2024nuts] beside its bases, plain mixing and the confidence switch.

    main          at the paper's beta; the robust model with the map alone [Figure 5, Tables 1, 4]
    curves        several beta, with every robust model that was given [Figure 8]
    counts        fits on fewer images; images that the fit has seen [Tables 8 and 9]
    temperature   temperature of the accurate model, at equal clean accuracy [Table 10]
    black-box     margins by random search; the map of another robust model [D.5]
    objective     only errors that the accurate model corrects [D.8.3]

Every mixture is fitted on held-out images by `fit --rule paper`, and attacked adaptively on test
images that no fit has seen.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import equipoise as eq
from equipoise.core.modes import inference
from equipoise.data import pixels
from equipoise.fitting import Fit
from experiments import common

HERE = Path(__file__).parent
PARTS = ("main", "curves", "counts", "temperature", "black-box", "objective")
COLUMNS = ("part", *common.ACCURACY_COLUMNS)  # of kept rows


def main(args: argparse.Namespace) -> None:
    """Fit and evaluate the chosen parts, keep the rows, and print their table."""
    if args.page:
        print(table(HERE / "rows"))
        draw(HERE / "rows", HERE / "trade-off.svg")
        return
    accurate, robust = common.pair(args)
    further = other_robust_models(args)
    held_out, test = common.held_out_images(args), common.test_images(args)
    some = test.slice(0, min(args.settings["part_count"], len(test)))
    rows: dict[str, list[tuple[object, ...]]] = {name: [] for name in ("robust", *further)}

    def fit(name: str, data: eq.Dataset = held_out, robust: str = robust, **settings: Any) -> Fit:
        own = {"rule": "paper", "beta": args.settings["beta"], **args.settings["fit"]}
        return common.fit(args, name, accurate, robust, data, **{**own, **settings})

    def measure(
        part: str, models: Mapping[str, nn.Module], images: eq.Dataset = some, of: str = "robust"
    ) -> None:
        folder = part if of == "robust" else f"{part}-{of}"
        result = common.evaluate(args, folder, models, images, **args.settings["attack"])
        rows[of] += [(part, *row) for row in common.accuracy_rows(result, models)]

    mixednuts = fit("mixednuts").mixture
    logit_map = mixednuts.logit_map
    assert logit_map is not None
    g, h, y = outputs(mixednuts, held_out)
    clean = float((mixednuts.from_base_outputs(g, h).argmax(dim=1) == y).float().mean())

    if "main" in args.parts:
        alpha = alpha_of_accuracy(g.softmax(dim=1), h.softmax(dim=1), y, clean)
        models = {
            "plain mixing": eq.MixedClassifier(mixednuts.accurate, mixednuts.robust, alpha),
            "MixedNUTS": mixednuts,
            "confidence switch": fit("switch", rule="switch").mixture,
        }
        measure("main", models, test)
        mapped_robust = nn.Sequential(mixednuts.robust, logit_map)
        measure("mapped", {"robust with the map": mapped_robust}, test)

    if "curves" in args.parts:
        for name, reference in {"robust": robust, **further}.items():
            models = {}
            for beta in args.settings["betas"]:
                fitted = fit(f"{name}-beta-{beta:g}", robust=reference, beta=beta)
                models[f"MixedNUTS, β = {beta:g}"] = fitted.mixture
            measure("curves", models, of=name)

    if "counts" in args.parts:
        models = {f"MixedNUTS fitted on {len(held_out)} images": mixednuts}
        for count in args.settings["counts"]:
            fitted = fit(f"count-{count}", held_out.slice(0, count))
            models[f"MixedNUTS fitted on {count} images"] = fitted.mixture
        measure("counts", models)
        seen = held_out.slice(0, min(len(some), len(held_out)))
        measure("seen", {"MixedNUTS on images of its fit": mixednuts}, seen)

    if "temperature" in args.parts:
        models = {}
        mapped = logit_map(h).softmax(dim=1)
        for value in args.settings["temperatures"]:
            models[f"MixedNUTS, temperature {value:g} of g"] = eq.MixedClassifier(
                mixednuts.accurate,
                mixednuts.robust,
                alpha_of_accuracy((g / value).softmax(dim=1), mapped, y, clean),
                logit_map=logit_map,
                accurate_temperature=value,
            )
        measure("temperature", models)

    if "black-box" in args.parts:
        models = {"MixedNUTS, margins by random search": fit("random", gradient_free=True).mixture}
        for name, reference in list(further.items())[:1]:
            fit(f"map-of-{name}", robust=reference)
            like = f"mixture:{args.out}/fits/map-of-{name}"
            models[f"MixedNUTS, map of {name}"] = fit(f"like-{name}", like=like).mixture
        measure("black-box", models)

    if "objective" in args.parts:
        fitted = fit("conditional", objective="conditional")
        measure("objective", {"MixedNUTS, only errors that g corrects": fitted.mixture})

    for name, own in rows.items():
        path, parts = args.out / "rows" / f"{name}.csv.gz", {row[0] for row in own}
        before = common.read_kept(path) if path.exists() else []
        others = [tuple(row.values()) for row in before if row["part"] not in parts]
        common.keep(path, COLUMNS, [*others, *own])
    print(table(args.out / "rows"))


def other_robust_models(args: argparse.Namespace) -> dict[str, str]:
    """Further robust models by name: those given, at smoke size one that is trained here."""
    if args.size == "full":
        return {Path(reference).parent.name: reference for reference in args.robust[1:]}
    own = common.threat(args)
    settings = {"norm": own.norm, "eps": own.eps, "steps": 4, "step_size": 0.6 * own.eps}
    trades = common.train_small(args, "TRADES", "trades", epochs=4, lr=5e-3, beta=6.0, **settings)
    return {"TRADES": trades}


# A mixture as accurate as another one


@torch.no_grad()
def outputs(mixture: eq.MixedClassifier, images: eq.Dataset) -> tuple[Tensor, Tensor, Tensor]:
    """(N, K) logits of both bases, and (N,) labels."""
    device = next(mixture.parameters()).device
    accurate, robust = [], []
    with inference(mixture):
        for part in images.images.split(250):
            x = pixels(part.to(device))
            accurate.append(mixture.accurate(x))
            robust.append(mixture.robust(x))
    return torch.cat(accurate), torch.cat(robust), images.labels.to(device)


def alpha_of_accuracy(g: Tensor, h: Tensor, y: Tensor, least: float) -> float:
    """The largest alpha with which a mixture of probabilities (N, K) is at least so accurate.

    If none is, the alpha of the most accurate mixture. Maps put the alphas of MixedNUTS close to 1,
    so the odds (1 − α)/α are tried in equal ratios.
    """
    alphas = [1.0] + [1 / (1 + 10 ** (step / 200 - 6)) for step in range(1201)]
    best, most = 1.0, -1.0
    for alpha in alphas:
        mixed = (1 - alpha) * g.double() + alpha * h.double()
        share = float((mixed.argmax(dim=1) == y).float().mean())
        if share >= least:
            return alpha
        if share > most:
            best, most = alpha, share
    return best


# The page


def table(folder: Path) -> str:
    """Accuracies of all kept rows, and what every mixture gains over its robust model."""
    lines = []
    for pair, rows in common.read_folder(folder).items():
        main = [row for row in rows if row["model"] == "robust"]
        listed = set()
        for part in dict.fromkeys(row["part"] for row in rows):
            own = [row for row in rows if row["part"] == part]
            count = len({row["index"] for row in own})
            robust = [] if part == "seen" else main  # which has no rows of the held-out images
            for line in common.accuracy_lines(f"{pair}, n = {count}", own, robust):
                if tuple(line[:2]) not in listed:  # the bases are in every part
                    lines.append(line)
                listed.add(tuple(line[:2]))
    return common.markdown(common.ACCURACY_TABLE, lines)


def draw(folder: Path, path: Path) -> None:
    """Attacked against clean accuracy of the main comparisons."""
    panels = {}
    for pair, kept in common.read_folder(folder).items():
        rows = [row for row in kept if row["part"] == "main" and row["model"] != "accurate"]
        clean, attacked = (common.accuracies(rows, column) for column in ("clean", "attacked"))
        if clean:
            panels[pair] = {model: (clean[model], attacked[model]) for model in clean}
    common.draw_trade_offs(path, panels)


if __name__ == "__main__":
    common.run(main, common.new_parser("mixednuts", PARTS, __doc__))
