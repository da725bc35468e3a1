"""Keep the rows of a SmoothMix study as one small file: every certificate, and every confidence under attack.

    python benchmarks/smoothmix_rows.py RUN OUT     writes OUT/certificates.csv.gz and OUT/confidences.csv.gz

The same rows give the same bytes.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
from collections.abc import Iterable
from pathlib import Path

from equipoise.core.records import read_rows
from equipoise.core.rows import CertificateRow, ConfidenceRow, MixingRatioRow

CERTIFICATE = ("recipe", "sigma", "index", "label", "predicted", "radius", "samples")
CONFIDENCE = ("part", "recipe", "index", "label", "measurement", "true", "off", "ratio")


def write(path: Path, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    write(args.out / "certificates.csv.gz", CERTIFICATE, (
        (folder.name, row.sigma, row.index, row.label, row.predicted, row.radius, row.samples)
        for folder in sorted((args.study / "certificates").iterdir()) for row in read_rows(folder)
        if isinstance(row, CertificateRow)))
    write(args.out / "confidences.csv.gz", CONFIDENCE, (
        (part, folder.name, row.index, row.label, row.attack,
         *((row.true, row.off, "") if isinstance(row, ConfidenceRow) else ("", "", row.ratio)))
        for part in ("table-1", "figures-2-3") if (args.study / part).is_dir()
        for folder in sorted((args.study / part).iterdir()) for row in read_rows(folder)
        if isinstance(row, ConfidenceRow | MixingRatioRow)))


if __name__ == "__main__":
    main()
