"""Tables of the study of certified mixtures as text: radii by theorem, accuracy under attack,
Lipschitz constants."""

from __future__ import annotations

from pathlib import Path

from equipoise.core import format
from equipoise.core.records import read_description
from equipoise.core.results import read_summary
from equipoise.core.threat import Threat
from equipoise.evaluation.certification_text import alphas_table

SELECT, CERTIFY, ATTACK, ESTIMATE = (
    "select",
    "certify",
    "attack",
    "estimate",
)  # run folders of the parts


def part_tables(folder: Path) -> list[str]:
    """The tables of all parts that have been run."""
    finished = [
        part for part in (CERTIFY, ATTACK, ESTIMATE) if (folder / part / "summary.json").is_file()
    ]
    summaries = {part: read_summary(folder / part) for part in finished}
    identities = {part: read_description(folder / part / "run.toml").identity for part in finished}
    tables = []
    if CERTIFY in finished:
        tables.append(
            alphas_table(summaries[CERTIFY], float(identities[CERTIFY]["plan"]["failure"]))
        )
    if ATTACK in finished:
        curves = summaries[ATTACK].radius_curves
        table = format.new_table(
            "Median radius of confirmed perturbations, an upper bound, "
            f"{format.counts(curve.n for curve in curves)} images",
            "mixture",
            "radius",
        )
        for curve in curves:
            table.add_row(curve.model, format.median_radius(curve))
        tables.append(format.render(table))
    if ESTIMATE in finished:
        table = format.new_table(
            f"Local Lipschitz constants, {Threat(**identities[ESTIMATE]['threat'])}: estimates, "
            "not certificates, 95 % intervals",
            "network",
            "constant",
        )
        for result in summaries[ESTIMATE].results:
            if result.metric == "lipschitz":
                table.add_row(result.model, format.estimate(result))
        tables.append(format.render(table))
    return tables
