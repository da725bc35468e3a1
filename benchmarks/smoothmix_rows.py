"""Keep the rows of a SmoothMix study as small files, and compare them with the logs of the official
code.

    python benchmarks/smoothmix_rows.py RUN OUT          writes OUT/certificates.csv.gz and
    OUT/confidences.csv.gz, and
                                                         the settings of every training and
                                                         certification
    python benchmarks/smoothmix_rows.py OUT --log LOG    ACR of ours and of a log on the same
    images, and the difference

The same rows give the same bytes. A file without rows is not written, and the rows of an unfinished
run are kept too. LOG is a file of `data/certify` of a clone of jh-jeong/smoothmix; our radii are
rounded as there before the comparison.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import shutil
from pathlib import Path

import numpy as np
from common import print_json, write_table
from numpy.typing import NDArray

from equipoise.core.records import read_rows
from equipoise.core.rows import CertificateRow, ConfidenceRow, MixingRatioRow

CERTIFICATE = ("recipe", "sigma", "index", "label", "predicted", "radius", "samples")
CERTIFICATES, CONFIDENCES = "certificates.csv.gz", "confidences.csv.gz"
CONFIDENCE = ("part", "recipe", "index", "label", "measurement", "true", "off", "ratio")


def keep(study: Path, out: Path) -> None:
    """Write the rows of a study, and the settings by which they were made."""
    certificates = [
        (folder.name, row.sigma, row.index, row.label, row.predicted, row.radius, row.samples)
        for folder in folders(study / "certificates")
        for row in read_rows(folder)
        if isinstance(row, CertificateRow)
    ]
    confidences = [
        (
            part,
            folder.name,
            row.index,
            row.label,
            row.attack,
            *((row.true, row.off, "") if isinstance(row, ConfidenceRow) else ("", "", row.ratio)),
        )
        for part in ("table-1", "figures-2-3")
        for folder in folders(study / part)
        for row in read_rows(folder)
        if isinstance(row, ConfidenceRow | MixingRatioRow)
    ]
    for name, columns, rows in (
        (CERTIFICATES, CERTIFICATE, certificates),
        (CONFIDENCES, CONFIDENCE, confidences),
    ):
        if rows:
            write_table(out / name, columns, rows)
    for part in ("training", "certificates"):
        for folder in folders(study / part):
            shutil.copyfile(folder / "run.toml", out / f"{folder.name}.{part}.toml")


def folders(part: Path) -> list[Path]:
    """The run folders of a part; none if it has not been run."""
    return sorted(part.iterdir()) if part.is_dir() else []


def read_kept(folder: Path) -> dict[str, dict[int, float]]:
    """Radii by recipe and index of the image, 0 where the class is wrong or the classifier
    abstained."""
    radii: dict[str, dict[int, float]] = {}
    with gzip.open(folder / CERTIFICATES, "rt", newline="") as file:
        for line in csv.DictReader(file):
            radius = float(line["radius"]) if line["label"] == line["predicted"] else 0.0
            radii.setdefault(line["recipe"], {})[int(line["index"])] = radius
    return radii


def read_log(path: Path) -> NDArray[np.float64]:
    """(10,000,) radii of a released log; 0 where wrong or abstained."""
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file, delimiter="\t"))
    assert [int(line["idx"]) for line in lines] == list(range(10_000)), path
    return np.array([float(line["radius"]) * int(line["correct"]) for line in lines])


def as_logged(radii: NDArray[np.float64]) -> NDArray[np.float64]:
    """Radii with three significant digits, as in the logs: 1.9057, the largest at sigma 0.5, is
    1.91 there."""
    return np.array([float(f"{radius:.3}") for radius in radii])


def standard_error(values: NDArray[np.float64]) -> float:
    return float(values.std(ddof=1) / len(values) ** 0.5)


def compare(kept: Path, log: Path) -> None:
    """Print the ACR of every kept recipe and that of the log on the same images."""
    logged = read_log(log)
    for recipe, radii in read_kept(kept).items():
        ours, official = np.array(list(radii.values())), logged[list(radii)]
        difference = as_logged(ours) - official
        print_json(
            recipe=recipe,
            images=len(ours),
            acr=float(ours.mean()),
            acr_standard_error=standard_error(ours),
            log_on_all_images=float(logged.mean()),
            log=float(official.mean()),
            difference=float(difference.mean()),
            standard_error=standard_error(difference),
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", type=Path)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--log", type=Path)
    args = parser.parse_args()
    if (args.out is None) == (args.log is None):
        parser.error("give either OUT or --log")
    if args.out is not None:
        keep(args.study, args.out)
    else:
        compare(args.study, args.log)


if __name__ == "__main__":
    main()
