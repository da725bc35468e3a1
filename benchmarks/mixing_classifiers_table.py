"""Tables of `docs/results/mixing-classifiers.md` from a run of `equipoise reproduce
mixing-classifiers`.

    PYTHONPATH=src python benchmarks/mixing_classifiers_table.py RUN [--export
    docs/results/mixing-classifiers/NAME]

`--export` keeps the rows of all parts, compressed; such a folder can be given as RUN again.
"""

from __future__ import annotations

import argparse
import gzip
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

from equipoise.certification.mixture import SmoothedBase
from equipoise.core import format, stats
from equipoise.core.results import Result
from equipoise.core.rows import by_mixture
from equipoise.reporting.certified_mixtures import certified_and_attacked, equal_clean
from equipoise.reporting.section import RunView, Table, read_run

PARTS, FILES = (
    (".", "select", "certify", "attack", "estimate"),
    ("run.toml", "rows.jsonl", "summary.json"),
)
PAPER_CONSTANT = 3.986  # [Bai2024, C.3]: TRADES WideResNet-34-10, linf 8/255
OFFICIAL_IMAGES = 10_000
# Certified accuracy in percent by (theorem, sigma, alpha): {radius: value}, read from the figures
# stored in visualizations/certified_radius.ipynb of Bai-YT/AdaptiveSmoothing, commit 51f0198, to
# half a point, and to 1.5 points where a curve is steep (ResNet-110 of Cohen et al. with means of
# 10,000 samples; the accurate model is a ConvNeXt-T). They are Figure 3 of [Bai2024mixing].
OFFICIAL: dict[tuple[str, float, float], dict[float, float]] = {
    ("A.2", 0.25, 1.0): {0.1: 73.3, 0.2: 66.8, 0.3: 59.5, 0.4: 51.8},
    ("A.2", 0.5, 0.76): {0.15: 49.0, 0.2: 43.9, 0.25: 38.2, 0.3: 30.2},
    ("A.2", 1.0, 0.67): {0.25: 19.8, 0.3: 16.6, 0.35: 12.7, 0.4: 7.5},
    ("A.2", 0.5, 1.0): {0.2: 61.6, 0.3: 56.7, 0.4: 51.6, 0.8: 32.7, 0.9: 28.2},
    ("A.2", 1.0, 0.76): {0.3: 28.6, 0.4: 23.5, 0.5: 18.0, 0.6: 11.9},
    ("3.5", 0.25, 1.0): {0.1: 64.3, 0.2: 0.0},
    ("3.5", 0.5, 0.76): {0.15: 39.5, 0.2: 23.7, 0.25: 0.0},
    ("3.5", 1.0, 0.67): {0.25: 13.3, 0.3: 5.6},
    ("3.5", 0.5, 1.0): {0.2: 48.0, 0.3: 21.8, 0.4: 0.0},
    ("3.5", 1.0, 0.76): {0.3: 19.3, 0.4: 7.5},
}


def official_table(run: RunView) -> list[str]:
    """Ours at the same sigma, alpha, theorem and radius as the official figures, and the
    difference."""
    bases: dict[float, SmoothedBase] = {}
    for rows in by_mixture(run.rows).values():
        bases.setdefault(rows[0].sigma, SmoothedBase.of_rows(rows))
    lines = [
        "| theorem | σ | α | radius | official | ours | difference (standard error) | our radius |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (theorem, sigma, alpha), values in OFFICIAL.items():
        for radius, official in values.items() if sigma in bases else ():
            shares = [
                stats.share(bases[sigma].radius(alpha, name) >= radius)
                for name in (theorem, "ours")
            ]
            own = shares[0]
            error = 100 * math.sqrt(
                own.value * (1 - own.value) / own.n
                + official / 100 * (1 - official / 100) / OFFICIAL_IMAGES
            )
            difference = format.number(100 * own.value - official, 1)
            lines.append(
                f"| {theorem} | {sigma:g} | {alpha:g} | {radius:g} | {official:.1f} % | "
                f"{format.percent(own.value)} | {difference} ({error:.1f}) | "
                f"{format.percent(shares[1].value)} |"
            )
    return lines


def markdown(table: Table) -> list[str]:
    """A table of the report, each value with its interval."""
    lines = [table.caption, "", f"| {' | '.join(table.head)} |", "|---" * len(table.head) + "|"]
    return [
        *lines,
        *(
            f"| {' | '.join(' '.join(filter(None, [cell.text, cell.note])) for cell in row)} |"
            for row in table.body
        ),
        "",
    ]


def constants_table(results: Sequence[Result]) -> list[str]:
    """Mean local Lipschitz constants beside the paper's."""
    lines = [
        "| network | local Lipschitz constant, mean | n |",
        "|---|---|---|",
        f"| TRADES WideResNet-34-10 [Bai2024, C.3] | {PAPER_CONSTANT} | all test images |",
    ]
    return [
        *lines,
        *(
            f"| {item.model} | {item.value:.3f} [{item.low:.3f}, {item.high:.3f}] | {item.n} |"
            for item in results
            if item.metric == "lipschitz"
        ),
    ]


def export(run: Path, out: Path) -> None:
    """Keep the rows of all parts, and what identifies them, compressed."""
    for path in (run / part / name for part in PARTS for name in FILES):
        if path.exists():
            target = out / f"{path.relative_to(run)}.gz"
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as packed:
                packed.write(path.read_bytes())


def unpack(exported: Path, out: Path) -> None:
    """The files of an exported run."""
    for path in exported.rglob("*.gz"):
        target = out / path.relative_to(exported).with_suffix("")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(gzip.decompress(path.read_bytes()))


def print_tables(run: RunView) -> None:
    """All tables, as Markdown."""
    certify, estimate = run.subrun("certify"), run.subrun("estimate")
    if certify is not None:
        if certify.identity["data"]["name"] == "cifar10":
            print("\n".join(official_table(certify)), end="\n\n")
        for section in filter(None, (certified_and_attacked(run), equal_clean(run))):
            print(f"### {section.title}\n\n{section.prose[-1]}\n")
            print("\n".join(line for table in section.tables for line in markdown(table)))
    if estimate is not None:
        print("\n".join(constants_table(estimate.summary.results)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--export", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if (args.run / "run.toml.gz").exists():
            unpack(args.run, Path(folder))
            print_tables(read_run(folder))
        else:
            print_tables(read_run(args.run))
    if args.export is not None:
        export(args.run, args.export)


if __name__ == "__main__":
    main()
