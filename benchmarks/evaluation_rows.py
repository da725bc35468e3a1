"""Keep a run of `equipoise evaluate` as the two small files of `compare-rules --export`.

    python benchmarks/evaluation_rows.py RUN OUT --name "mixed=cascade" --name "robust=robust, six
    views"

writes OUT/rows.csv.gz, a row per model and image with the worst case over all attacks, and
OUT/methods.json. `--only mixed` keeps one model (it may be repeated), `--name` renames models.
`mixtures_table.py OUT` prints the table. The same rows give the same bytes.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from equipoise.core.comparison import ComparedMethod
from equipoise.studies.attack_list import ATTACKED
from equipoise.studies.comparison_table import Comparison, summarize

from equipoise.core import checks
from equipoise.core.aggregation import CLEAN, base_models_first, worst_row
from equipoise.core.results import Summary
from equipoise.core.rows import AttackRow, Row
from equipoise.reporting.section import RunView, read_run


def worst_cases(rows: Iterable[Row], names: Mapping[str, str]) -> list[Row]:
    """Of every image and model of `names` the clean row and the worst case over all attacks, by
    their new names."""
    by_image: dict[tuple[str, int], list[AttackRow]] = defaultdict(list)
    for row in rows:
        if isinstance(row, AttackRow) and row.alpha is None and row.model in names:
            by_image[row.model, row.index].append(row)
    attacks: dict[str, set[str]] = defaultdict(set)
    for (model, _), own in by_image.items():
        attacks[model] |= {row.attack for row in own}
    kept: list[Row] = []
    for (model, index), own in by_image.items():
        checks.require(
            {row.attack for row in own} == attacks[model] and len(attacks[model]) > 1,
            "run",
            "hold every image clean and under all attacks",
            f"{model}, image {index}",
        )
        (clean,), worst = [row for row in own if row.attack == CLEAN], worst_row(own)
        by = CLEAN if not clean.correct else f"{worst.attack}/{worst.broken_by or ''}".strip("/")
        kept += [
            replace(clean, model=names[model]),
            replace(
                clean,
                model=names[model],
                attack=ATTACKED,
                predicted=worst.predicted,
                correct=worst.correct,
                broken_by=None if worst.correct else by,
            ),
        ]
    return kept


def described(run: RunView, model: str, name: str) -> ComparedMethod:
    """A model as a method; for a mixture with its alpha."""
    settings = run.identity["models"][model].get("settings", {}).get("(root)", {})
    mixture = f"alpha {settings['alpha']:.3g}" if "alpha" in settings else ""
    shown = ", ".join(f"{key}={value}" for key, value in settings.items())
    return ComparedMethod(name=name, family=name, mixture=mixture, measured_as=name, settings=shown)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--name", action="append", default=[], metavar="MODEL=NAME", help="rename a model"
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="MODEL", help="keep only this model"
    )
    args = parser.parse_args()
    run = read_run(args.run)
    checks.require(
        run.finished and run.threat is not None,
        "run",
        "be a finished run under attack",
        str(args.run),
    )
    models = [model for model in run.identity["models"] if model in args.only or not args.only]
    renamed = dict(item.rsplit("=", 1) for item in args.name)
    for model in (*args.only, *renamed):
        checks.one_of("model", model, run.identity["models"])
    names = {model: renamed.get(model, model) for model in sorted(models, key=base_models_first)}
    rows, methods = (
        worst_cases(run.rows, names),
        [described(run, model, name) for model, name in names.items()],
    )
    summary = Summary(command="compare-rules", seconds=0.0, **summarize(rows, methods, run.threat))
    Comparison(summary, rows, None, run.threat).export(
        args.out, data=dict(run.data), attacks=run.attacks, command=run.settings.get("command")
    )


if __name__ == "__main__":
    main()
