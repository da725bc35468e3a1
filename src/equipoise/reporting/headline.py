"""The main finding: who answers how many images rightly, clean and under attack."""

from __future__ import annotations

from collections.abc import Sequence

from equipoise.core.records import Row
from equipoise.core.threat import Threat
from equipoise.reporting import numbers
from equipoise.reporting.section import Cell, Section, Table
from equipoise.reporting.style import MODELS
from equipoise.reporting.view import RunView

Results = dict[str, dict[str, Row]]  # model → metric → result
OF = {"clean": "of clean images", "worst": "of attacked images"}
WHERE = {"clean": "on clean images", "worst": "under attack"}


def headline(view: RunView) -> Section:
    """Models × (clean, each attack, worst), the finding in words, and what was allowed."""
    results = by_model(view)
    if not results:
        return Section("What was found", ["This run holds no accuracies."])
    metrics = [metric for metric in ("clean", *view.attacks, "worst")
               if any(metric in own for own in results.values())]
    prose = [finding(results), " ".join(map(comparison, _pairs(view.differences))),
             " ".join(_method(metrics, view.threat))]
    tables = [_accuracies(results, metrics)]
    if view.differences:
        tables.append(_differences(view.differences))
    return Section("What was found", [text for text in prose if text], tables)


def by_model(view: RunView) -> Results:
    """Accuracies of the summary, the three models first; other metrics have sections of their own."""
    shown = {"clean", "worst", *view.attacks}
    found: Results = {}
    for row in view.results:
        if row["metric"] in shown:
            name = row["model"] if "alpha" not in row else f"{row['model']} (alpha {row['alpha']:g})"
            found.setdefault(name, {})[row["metric"]] = row
    return {name: found[name] for name in [*(m for m in MODELS if m in found), *(m for m in found if m not in MODELS)]}


def finding(results: Results) -> str:
    """The numbers as a sentence; the mixture speaks first where there is one."""
    order = ["mixed", *(m for m in results if m != "mixed")] if "mixed" in results else list(results)
    metrics = [metric for metric in OF if all(metric in results[model] for model in order[:3])]
    if not metrics:
        return "The models of this run were not all measured alike; the table holds what there is."
    shares = [[numbers.percent(results[model][metric]["value"]) for metric in metrics] for model in order[:3]]
    first = " and ".join(f"{share} {OF[metric]}" for share, metric in zip(shares[0], metrics, strict=True))
    rest = [f"{_called(model)} {' and '.join(own)}" for model, own in zip(order[1:3], shares[1:], strict=True)]
    name = _called(order[0])
    opening = f"{name[:1].upper()}{name[1:]} answers {first} rightly"
    return f"{opening}; {', '.join(rest)}." if rest else f"{opening}."


def comparison(rows: Sequence[Row]) -> str:
    """What one model gains and loses against another; a difference whose interval holds zero is not claimed."""
    said = " and ".join(map(_change, rows))
    return f"Against {_called(rows[0]['versus'])}, image by image, {_called(rows[0]['model'])} {said}."


def _change(row: Row) -> str:
    where = WHERE.get(row["metric"], f"under {row['metric']}")
    if row["low"] <= 0 <= row["high"]:
        return f"shows no clear difference {where}"
    verb = "gains" if row["value"] > 0 else "loses"
    return f"{verb} {numbers.points(abs(row['value'])).lstrip('+')} points {where}"


def _called(model: str) -> str:
    return {"mixed": "the mixture", "accurate": "the accurate model", "robust": "the robust model"}.get(model, model)


def _pairs(differences: Sequence[Row]) -> list[list[Row]]:
    pairs: dict[tuple[str, str], list[Row]] = {}
    for row in differences:
        pairs.setdefault((row["model"], row["versus"]), []).append(row)
    return list(pairs.values())


def _method(metrics: Sequence[str], threat: Threat | None) -> list[str]:
    said = []
    if threat is not None:
        sign, _, most = str(threat).partition(" ≤ ")
        said.append(f"The attacker may change every pixel by up to {most} of its range ({sign})."
                    if threat.norm == "linf" else
                    f"The attacker may change the whole image by up to {most} in Euclidean length ({sign}).")
    if "worst" in metrics:
        said.append("In the worst case an image counts only if it is answered rightly clean and under every attack.")
    return said


def _accuracies(results: Results, metrics: Sequence[str]) -> Table:
    counts = {row["n"] for own in results.values() for row in own.values()}
    same = f"; n = {min(counts)} images" if len(counts) == 1 else ""
    body = [[Cell(name, model=name if name in MODELS else ""),
             *(_share(own.get(metric), with_n=not same) for metric in metrics)] for name, own in results.items()]
    caption = f"Images answered rightly, with exact 95 % intervals (Clopper-Pearson){same}."
    return Table(caption, ["model", *metrics], body)


def _share(row: Row | None, *, with_n: bool) -> Cell:
    if row is None:
        return Cell("–")
    count = f", n = {row['n']}" if with_n else ""
    return Cell(numbers.percent(row["value"]), numbers.interval(row["low"], row["high"]) + count)


def _differences(rows: Sequence[Row]) -> Table:
    body = [[Cell(f"{row['model']} − {row['versus']}"), Cell(row["metric"]),
             Cell(numbers.points(row["value"]), numbers.interval(row["low"], row["high"])), Cell(str(row["n"]))]
            for row in rows]
    caption = "Paired differences on the same images in percentage points, with 95 % intervals (Bonett-Price)."
    return Table(caption, ["models", "metric", "difference", "n"], body)
