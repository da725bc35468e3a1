"""One page over several runs: results with paired differences, what makes them unfair, figures of
all runs, and the settings that differ."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from equipoise.core import checks, format
from equipoise.core.aggregation import CLEAN, WORST
from equipoise.core.checks import InputError
from equipoise.core.results import Difference, Result
from equipoise.core.rows import Mixture, by_mixture
from equipoise.reporting import attacks, certificates, charts, fit, page, training
from equipoise.reporting.certificates import ACR, certified_metrics
from equipoise.reporting.paired_runs import (
    COLOURS,
    CommonImages,
    NamedRun,
    common_images,
    differences,
    main_model,
    short,
)
from equipoise.reporting.provenance import flatten, title
from equipoise.reporting.run_view import read_run
from equipoise.reporting.section import (
    MISSING,
    Cell,
    Figure,
    Records,
    Section,
    Table,
    cells,
    metric_name,
    metric_names,
    result_cell,
)
from equipoise.reporting.verdict import alarms_of, difference_sentence

ADAPTIVE = "adaptive"  # attacks whose names start so are there for mixtures only
OF_ONE_MODEL = ("surrogate", "source", "weights")  # attack settings that depend on the model
MOST = 5  # settings of one kind in a sentence
DIGEST, LONG = 12, 160  # characters of a digest, and of a value, that are shown
# Settings that should be the same in all runs, and what follows if they are not.
MEANING = {
    "threat": "Robust accuracies under different threats cannot be compared.",
    "attacks": "Robust accuracy under more or stronger attacks is lower for the same model.",
    "data": "Only differences on common images are free of this.",
    "plan.held_out": "Accuracies on other held-out images differ by chance.",
    "plan.samples": "More samples give larger certified radii.",
    "plan.failure": "Certificates that may fail more often have larger radii.",
    "equipoise": "Attacks of the same name may differ between versions.",
}


def write_comparison(folders: Sequence[Path], out: Path) -> Path:
    """Write one page over several runs."""
    runs = read_runs(folders)
    page.check_target(out, page.COMPARISON)
    sections = [results(runs), fairness(runs)]
    for figures in (radii(runs), certified(runs), epochs(runs)):
        if figures:
            sections.append(Section(figures[0].title.partition(",")[0], figures=figures))
    sections += [settings(runs), _runs(runs, out)]
    heading = f"{title(runs[0].run)[0]}: {len(runs)} runs compared"
    facts = dict.fromkeys(["Equipoise compare"])
    for item in runs:
        facts[item.run.data_name] = None
        facts[str(item.run.threat or "")] = None
    page.write(out, page.COMPARISON, heading, page.joined(facts), sections)
    return out


def read_runs(folders: Sequence[Path]) -> list[NamedRun]:
    """Read the runs, with names that distinguish them; refuse folders that cannot be compared."""
    places: list[str] = []
    for folder in folders:
        place = str(folder.resolve())
        checks.require(place not in places, "folders", "be different run folders", f"{place} twice")
        places.append(place)
    checks.require(len(places) >= 2, "folders", "be at least two run folders", places)
    runs: list[NamedRun] = []
    for folder, name in zip(folders, short(places), strict=True):
        runs.append(NamedRun(name, read_run(folder), COLOURS[len(runs) % len(COLOURS)]))
        first, kind = runs[0].kind, runs[-1].kind
        if kind != first:
            raise InputError(
                f"`folders` must hold runs of one kind, got {first} in {folders[0]} and {kind} in {folder}"
            )
    return runs


# ---- results ----


def results(runs: Sequence[NamedRun]) -> Section:
    """All results, and differences from the first run."""
    first, text, changes = runs[0], [], []
    for item in runs[1:]:
        common = common_images(first, item)
        paired = differences(first, item, common)
        if paired:
            text.append(_sentence(paired[main_model(list(paired))]))
        if first.kind != "train":
            text.append(_matched(first, item, common))
        for mixture, listed in paired.items():
            versus = "" if mixture in first.models else f" − {listed[0].versus}"
            name = Cell(item.name, f"{item.run.name(*mixture)}{versus}", item.colour)
            changes.append((name, {change.metric: change for change in listed}))
    if first.kind == "fit":
        text.append(
            "Accuracies are those on fitting images, so those of the mixtures are optimistic."
        )
    if first.kind == "train":
        text.append(
            "A training has no rows of single images, so its differences are not paired. Evaluate the checkpoints "
            "on the same test images, and compare those evaluations."
        )
    tables = [_result_table(runs)]
    if changes:
        tables.append(_difference_table(first, changes))
    return Section("Results", text, _trade_off(runs), tables)


def _difference_table(
    first: NamedRun, changes: Sequence[tuple[Cell, Mapping[str | None, Difference]]]
) -> Table:
    metrics: dict[str | None, None] = {}
    for _, found in changes:
        metrics |= dict.fromkeys(found)
    rows = []
    for name, found in changes:
        row = [name]
        counts = {item.n for item in found.values()}
        for metric in metrics:
            row.append(_difference_cell(found.get(metric)))
        rows.append([*row, Cell(format.counts(counts))])
    caption = (
        f"Paired differences from {first.name} on common images in points, with 95 % intervals (Bonett-Price; "
        "average radius: Student). Robust accuracies under other threats are not subtracted."
    )
    head = ["run and model", *metric_names(metric or "" for metric in metrics), "common images"]
    return Table(caption, head, rows)


def _sentence(listed: Sequence[Difference]) -> str:
    """The change of the decisive metrics."""
    decisive = [item for item in listed if item.metric in (CLEAN, WORST)]
    if decisive:
        return difference_sentence(decisive, decisive[0].model, decisive[0].versus)
    item = listed[0]
    change = f"{format.number(item.value, 3)} {_bounds(item)}"
    clear = "" if item.low > 0 or item.high < 0 else ", no clear difference"
    return f"{metric_name(item.metric or '')} of {item.model} minus that of {item.versus}: {change}{clear}."


def _matched(first: NamedRun, other: NamedRun, common: CommonImages) -> str:
    count = len(common.positions)
    if not count:
        return f"No image of {other.name} is known to be an image of {first.name}: {common.reason}."
    return f"{count} images of {other.name} are also images of {first.name}: {common.reason}."


def _metrics(runs: Sequence[NamedRun]) -> list[str]:
    """All metrics, the decisive ones first; certified accuracies by their radius."""
    everything: list[Result] = []
    for item in runs:
        everything += item.run.summary.results
    known = dict.fromkeys(result.metric for result in everything)
    order = dict.fromkeys([CLEAN, WORST, ACR, *certified_metrics(everything)]) | known
    return [metric for metric in order if metric in known]


def _result_table(runs: Sequence[NamedRun]) -> Table:
    metrics = _metrics(runs)
    rows: dict[Mixture, list[list[Cell]]] = {}
    for item in runs:
        for model, alpha in item.models:
            row = [Cell(item.name, item.run.name(model, alpha), item.colour)]
            counts = set()
            for metric in metrics:
                found = item.run.find(model, metric, alpha)
                row.append(result_cell(found))
                if found is not None:
                    counts.add(found.n)
            rows.setdefault((model, alpha), []).append([*row, Cell(format.counts(counts))])
    ordered = []
    for own in rows.values():  # models of one name below each other
        ordered += own
    caption = "Results with 95 % intervals; radii are ℓ2, in [0, 1] pixels."
    return Table(caption, ["run and model", *metric_names(metrics), "n"], ordered)


def _difference_cell(item: Difference | None) -> Cell:
    if item is None:
        return MISSING
    if item.metric != ACR:
        return Cell(format.points(item.value), format.bounds(item))
    return Cell(f"{'+' * (item.value > 0)}{format.number(item.value, 3)}", _bounds(item))


def _bounds(item: Difference) -> str:
    return f"[{format.number(item.low, 3)}, {format.number(item.high, 3)}]"


def _trade_off(runs: Sequence[NamedRun]) -> list[Figure]:
    """Clean against robust accuracy of every model of every run, in the colour of the run."""
    records: Records = []
    colours: dict[str, str] = {}
    for item in runs:
        for model, alpha in item.models:
            clean, robust = item.run.find(model, CLEAN, alpha), item.run.find(model, WORST, alpha)
            if clean is None or robust is None:
                continue
            name = item.label(model, alpha)
            colours[name] = item.colour
            record = {"model": name, "step": len(records), "n": robust.n}
            records.append(record | charts.fields(clean, "clean") | charts.fields(robust, "robust"))
        if item.kind == "fit":
            name = f"{item.name}: frontier on fitting images"
            colours[name] = item.colour
            for clean_share, robust_share in fit.frontier_on_fitting_images(item.run):
                shares = {"clean": round(clean_share, 5), "robust": round(robust_share, 5)}
                records.append({"model": name, "step": len(records), **shares})
    if not records:
        return []
    figure_title = "Clean against robust accuracy of every model of every run, with 95 % intervals"
    joined = len(records) > 5
    return [charts.trade_off("trade-off", figure_title, records, colours, joined=joined)]


# ---- what makes it unfair ----


def fairness(runs: Sequence[NamedRun]) -> Section:
    """Why figures of the runs may not be comparable."""
    found, text = concerns(runs), []
    if not found:
        text.append(
            "Nothing that the runs record makes it unfair: threat, attacks and images are the same."
        )
    return Section("Is the comparison fair?", text, alarms=found)


def concerns(runs: Sequence[NamedRun]) -> list[tuple[str, str]]:
    """What differs or is wrong, and what follows; the most important first."""
    differing = _differing(runs)
    found = []
    for what, meaning in MEANING.items():
        listed = []
        for key, values in differing.items():
            if f"{key}.".startswith(f"{what}.") and not _is_of_one_model(key):
                listed.append(f"{key}: {_grouped(runs, values)}")
        if listed:
            found.append((f"Other {what} ({'; '.join(listed[:MOST])}).", meaning))
    for item in runs[1:]:
        common = common_images(runs[0], item)
        if not common.positions and item.kind != "train":
            text = f"{item.name} and {runs[0].name} have no known image in common: {common.reason}."
            found.append((text, "Their difference is not paired, and may come from the images."))
    for item in runs:
        for text, meaning in alarms_of(item.run):
            found.append((f"{item.name}: {text}", meaning))
    return found


def _grouped(runs: Sequence[NamedRun], values: Sequence[str]) -> str:
    """The different values with the runs that have them."""
    names: dict[str, list[str]] = {}
    for item, value in zip(runs, values, strict=True):
        names.setdefault(value, []).append(item.name)
    groups = [f"{value} in {' and '.join(having)}" for value, having in names.items()]
    return ", ".join(groups)


# ---- figures of all runs ----


def radii(runs: Sequence[NamedRun]) -> list[Figure]:
    """Accuracy against the radius, of runs with one norm."""
    curves, names, colours = [], [], {}
    for item in runs:
        for curve in item.run.summary.radius_curves:
            curves.append(curve)
            names.append(item.label(curve.model))
            colours[names[-1]] = item.colour
    norms = {curve.norm for curve in curves}
    if len(norms) != 1:
        return []
    return [attacks.radius_figure(curves, names, colours)]


def certified(runs: Sequence[NamedRun]) -> list[Figure]:
    """Certified accuracy against the radius; not of runs that decided a single one."""
    own_radii, colours = {}, {}
    for item in runs:
        if item.run.setting("plan", "decide_radius") is None:
            for mixture, rows in by_mixture(item.run.rows).items():
                own_radii[item.label(*mixture)] = certificates.radii_of(rows)
                colours[item.label(*mixture)] = item.colour
    if not own_radii:
        return []
    return [
        certificates.figure("certified", "Certified accuracy against radius", own_radii, colours)
    ]


def epochs(runs: Sequence[NamedRun]) -> list[Figure]:
    """Loss and accuracies of every epoch of every run; losses of other objectives are others."""
    figures = []
    colours = {item.name: item.colour for item in runs}
    for name, label in {"loss": "loss", **training.LABELS}.items():
        records: Records = []
        for item in runs:
            for row in training.epochs(item.run):
                value = training.measured(row).get(name)
                if value is not None:
                    records.append({"model": item.name, "x": row.index + 1, "y": round(value, 6)})
        if records:
            figures.append(
                training.curve(name, f"Training, {label} of each epoch", label, records, colours)
            )
    return figures


# ---- settings and runs ----


def settings(runs: Sequence[NamedRun]) -> Section:
    """The settings that are not the same in all runs."""
    rows = []
    for key, values in _differing(runs).items():
        rows.append(cells(key, *values))
    if not rows:
        return Section("Settings that differ", ["All settings of these runs are the same."])
    head = ["setting", *(item.name for item in runs)]
    text = "Every other setting that the runs record is the same."
    return Section("Settings that differ", tables=[Table(text, head, rows, is_text=True)])


def _differing(runs: Sequence[NamedRun]) -> dict[str, list[str]]:
    tables = [_settings_of(item) for item in runs]
    keys: dict[str, str] = {}
    for table in tables:
        keys |= table
    differing = {}
    for key in keys:
        values = [table.get(key, MISSING.text) for table in tables]
        if len(set(values)) > 1:
            differing[key] = values
    return differing


def _settings_of(item: NamedRun) -> dict[str, str]:
    """Identity and settings in one level; attacks by attack, whatever the models are called."""
    table: dict[str, Any] = {**item.run.identity, **item.run.settings}
    for key in ("command", "references", "attacks"):
        table.pop(key, None)
    if item.run.threat is not None:
        table["threat"] = str(item.run.threat)
    flat = flatten(table)
    for own in item.run.table("attacks").values():
        for key, value in flatten({"attacks": own}).items():
            known = flat.setdefault(key, value)
            if value not in known.split("; "):
                flat[key] = f"{known}; {value}"
    for key, value in flat.items():
        flat[key] = _shortened(value)
    return flat


def _shortened(text: str) -> str:
    """A digest by its first characters, and a long text with a digest of the whole."""
    if len(text) == 64 and set(text) <= set("0123456789abcdef"):
        return f"{text[:DIGEST]}…"
    if len(text) <= LONG:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:DIGEST]
    return f"{checks.shorten(text, LONG)} (digest {digest})"


def _is_of_one_model(key: str) -> bool:
    """Whether a setting of an attack depends on the attacked model."""
    if key.startswith(f"attacks.{ADAPTIVE}"):
        return True
    return any(part in OF_ONE_MODEL for part in key.split("."))


def _runs(runs: Sequence[NamedRun], out: Path) -> Section:
    """What each run is, what it promises, and where its report is."""
    rows, commands = [], []
    for item in runs:
        name, facts = title(item.run)
        state = "" if item.run.finished else "not finished"
        link = page.link_to(item.run.folder, out)
        first = Cell(item.name, state, item.colour, link)
        rows.append(cells(first, Cell(name, facts), item.run.promise))
        commands.append(str(item.run.settings.get("command", "")))
    caption = "The others are compared with the first."
    table = Table(caption, ["run", "what it is", "promise"], rows, is_text=True)
    return Section("Runs", tables=[table], code="\n".join(filter(None, commands)))
