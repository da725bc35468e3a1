"""Keep a study of MixedNUTS as two small files: every attacked image, and every fit.

    python benchmarks/mixednuts_rows.py RUN OUT     writes OUT/rows.csv.gz and OUT/fits.csv.gz

The same rows give the same bytes.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Iterator
from pathlib import Path

from common import write_table

from equipoise.core.records import read_rows
from equipoise.core.results import read_summary
from equipoise.core.rows import AttackRow
from equipoise.reporting.mixednuts import FITS, PARTS

MAIN = "main"
ROW = ("part", "model", "attack", "index", "label", "predicted", "correct", "margin")
FIT = ("fit", "s", "p", "c", "alpha", "objective", "recomputed")


def rows(study: Path) -> Iterator[tuple[object, ...]]:
    """The main run and every part that was run."""
    for part in (MAIN, "margins", *PARTS):
        folder = study if part == MAIN else study / part
        if (folder / "summary.json").is_file():
            for row in read_rows(folder):
                if isinstance(row, AttackRow):
                    yield (
                        part,
                        row.model,
                        row.attack,
                        row.index,
                        row.label,
                        row.predicted,
                        int(row.correct),
                        row.margin,
                    )


def fits(study: Path) -> Iterator[tuple[object, ...]]:
    """What every fit returned."""
    for folder in sorted((study / FITS).iterdir()):
        fit, chosen = (
            read_summary(folder).fit,
            tomllib.loads((folder / "mixture.toml").read_text()).get("logit_map"),
        )
        if fit is not None and chosen is not None:
            yield (
                folder.name,
                chosen["scale"],
                chosen["power"],
                chosen["shift"],
                fit.alpha,
                fit.objective,
                fit.recomputed_objective,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    write_table(args.out / "rows.csv.gz", ROW, rows(args.study))
    write_table(args.out / "fits.csv.gz", FIT, fits(args.study))


if __name__ == "__main__":
    main()
