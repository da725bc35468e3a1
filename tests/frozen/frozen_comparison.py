"""The engine of today against the frozen verdicts, cell by cell."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch
from frozen_cells import DATA, VERDICTS, Run, Verdicts, evaluate, lay_out

import equipoise as eq

RESTARTS, STEPS = 10, 50  # of the independent attack on images whose verdicts differ


@dataclass(frozen=True)
class Comparison:
    """A cell: what differs, in a line per image and one for the cell, and whether the table of runs allows it."""

    lines: list[str]
    allowed: bool

    def __str__(self) -> str:
        return "\n".join(self.lines)


def compare_run(run: Run, root: Path, **settings: object) -> list[Comparison]:
    """Evaluate a run in an empty folder, and compare each of its cells; `settings` replace those of the run."""
    lay_out(root)
    data = eq.load_data(DATA[run.pair], count=run.count)
    found = evaluate(run, data, root, root / "run", **settings)
    comparisons = []
    for model in run.models:
        frozen = Verdicts.read(VERDICTS / f"{run.cell(model)}.json")
        differing = differing_rows(frozen, found[model])
        restarted = attack_again(run, model, data, differing, root) if differing else []
        comparisons.append(compare(run, model, frozen, found[model], restarted))
    return comparisons


def differing_rows(frozen: Verdicts, found: Verdicts) -> list[int]:
    """The rows of the images that survived once and do not now, or the other way round."""
    assert found.index == frozen.index, "the images must be those of the frozen cell"
    assert found.label == frozen.label, "the labels must be those of the frozen cell"
    rows = range(len(frozen.index))
    return [row for row in rows if found.survives[row] != frozen.survives[row]]


def attack_again(run: Run, model: str, data: eq.Dataset, rows: list[int], root: Path) -> list[bool]:
    """Whether an independent attack breaks these images: PGD with other random numbers and many restarts."""
    few = data.take(torch.tensor(rows))
    alone = dataclasses.replace(run, model=model, attack="pgd", settings={})
    out = root / f"again-{model}"
    verdicts = evaluate(alone, few, root, out, steps=STEPS, restarts=RESTARTS, seed=1)[model]
    by_image = dict(zip(verdicts.index, verdicts.survives, strict=True))
    return [not by_image[image] for image in few.index.tolist()]


def compare(
    run: Run, model: str, frozen: Verdicts, found: Verdicts, restarted: list[bool]
) -> Comparison:
    """Compare a cell; `restarted` says of every image that differs whether :func:`attack_again` breaks it."""
    differing = differing_rows(frozen, found)
    lines = []
    for row, broken in zip(differing, restarted, strict=True):
        verb = "break" if broken else "do not break"
        lines.append(
            f"{run.cell(model)}, image {frozen.index[row]}: it {_verdict(frozen, row)}; "
            f"now it {_verdict(found, row)}; {RESTARTS} restarts of PGD {verb} it"
        )
    larger = _larger_radii(run, frozen, found)
    lines += [f"{run.cell(model)}, {line}" for line in larger]
    before, after = sum(frozen.survives), sum(found.survives)
    grown = _growth_of_margins(frozen, found)
    lines.append(
        f"{run.cell(model)}: {after} of {len(frozen.index)} survive, {before} did ({run.more} more are allowed); "
        f"{len(differing)} differ ({run.differ} are allowed); {len(larger)} radii grew; "
        f"margins of survivors grew by {grown:.4f} on average ({run.margin:g} is allowed)"
    )
    same_verdicts = len(differing) <= run.differ and after <= before + run.more
    allowed = same_verdicts and not larger and grown <= run.margin
    return Comparison(lines, allowed)


def _growth_of_margins(frozen: Verdicts, found: Verdicts) -> float:
    """By how much the mean margin grew over the images that survived and still do; 0 without any."""
    growths = []
    for row in range(len(frozen.index)):
        if frozen.survives[row] and found.survives[row]:
            growths.append(found.margin[row] - frozen.margin[row])
    return sum(growths) / len(growths) if growths else 0.0


def _verdict(verdicts: Verdicts, row: int) -> str:
    stage = verdicts.broken_by[row]
    margin = f"margin {verdicts.margin[row]:.4f}"
    if stage is None:
        return f"survives ({margin})"
    return f"is taken for class {verdicts.predicted[row]} by {verdicts.stages[stage]} ({margin})"


def _larger_radii(run: Run, frozen: Verdicts, found: Verdicts) -> list[str]:
    """The images whose smallest perturbation is larger than it was by more than the factor of the run."""
    if frozen.radius is None:
        return []
    assert found.radius is not None, "the rows of minimum-norm must hold radii"
    lines = []
    for index, old, new in zip(frozen.index, frozen.radius, found.radius, strict=True):
        if old is not None and new is not None and new > run.radius_factor * old + 1e-6:
            lines.append(
                f"image {index}: radius {new:.5f}, it was {old:.5f} ({run.radius_factor:g} times are allowed)"
            )
    return lines
