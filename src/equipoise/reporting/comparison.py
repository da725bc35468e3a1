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
from equipoise.core.results import Difference
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
from equipoise.reporting.run_view import RunView, read_run
from equipoise.reporting.section import (
    MISSING,
    Cell,
    Figure,
    Records,
    Section,
    Table,
    metric_name,
    result_cell,
)
from equipoise.reporting.verdict import difference_sentence

# Commands that measure the same things.
KINDS = {"demo": "evaluate"}
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
    common = {item.name: common_images(runs[0], item) for item in runs[1:]}
    sections = [
        results(runs, common),
        fairness(runs, common),
        _fits(runs),
        _radii(runs),
        _certified(runs),
        _training(runs),
        settings(runs),
        _runs(runs, out),
    ]
    shown = [section for section in sections if section is not None]
    heading, facts = _heading(runs)
    page.write(out, page.COMPARISON, heading, facts, shown)
    return out


def read_runs(folders: Sequence[Path]) -> list[NamedRun]:
    """Read the runs, with names that distinguish them; refuse folders that cannot be compared."""
    given = [str(folder) for folder in folders]
    checks.require(len(folders) >= 2, "folders", "be at least two run folders", given)
    resolved = [str(folder.resolve()) for folder in folders]
    for number, place in enumerate(resolved):
        twice = place in resolved[:number]
        checks.require(not twice, "folders", "be different run folders", f"{place} twice")
    runs = []
    for number, (folder, name) in enumerate(zip(folders, short(resolved), strict=True)):
        runs.append(NamedRun(name, read_run(folder), COLOURS[number % len(COLOURS)]))
        kind, first = _kind(runs[-1].run), _kind(runs[0].run)
        if kind != first:
            raise InputError(
                f"`folders` must hold runs of one kind, got {first} in {folders[0]} and {kind} in {folder}"
            )
    return runs


def _kind(run: RunView) -> str:
    return KINDS.get(run.summary.command, run.summary.command)


def _heading(runs: Sequence[NamedRun]) -> tuple[str, str]:
    titles = list(dict.fromkeys(title(item.run)[0] for item in runs))
    heading = f"{titles[0]}: {len(runs)} runs compared"
    facts = [f"Equipoise compare · {len(runs)} runs"]
    facts += dict.fromkeys(item.run.data_name for item in runs)
    facts += dict.fromkeys(str(item.run.threat or "") for item in runs)
    return heading, " · ".join(fact for fact in facts if fact)


# ---- results ----


def results(runs: Sequence[NamedRun], common: Mapping[str, CommonImages]) -> Section:
    """All results, and differences from the first run."""
    paired = {item.name: differences(runs[0], item, common[item.name]) for item in runs[1:]}
    text = []
    for own in paired.values():
        if own:
            listed = own[main_model(list(own))]
            sentence = [item for item in listed if item.metric in (CLEAN, WORST, ACR)]
            text.append(_sentence(sentence))
    if _kind(runs[0].run) == "fit":
        text.append(
            "Accuracies are those on fitting images, so those of the mixtures are optimistic."
        )
    if _kind(runs[0].run) == "train":
        text.append(
            "A training has no rows of single images, so its differences are not paired. Evaluate the checkpoints "
            "on the same test images, and compare those evaluations."
        )
    else:
        text += [_matched(runs[0], name, own) for name, own in common.items()]
    tables = [_result_table(runs)]
    if any(paired.values()):
        tables.append(_difference_table(runs, paired))
    figure = _trade_off(runs)
    return Section("Results", [sentence for sentence in text if sentence], figure, tables)


def _sentence(listed: Sequence[Difference]) -> str:
    if not listed:
        return ""
    if listed[0].metric != ACR:
        return difference_sentence(listed, listed[0].model, listed[0].versus)
    item = listed[0]
    change = f"{format.number(item.value, 3)} [{format.number(item.low, 3)}, {format.number(item.high, 3)}]"
    clear = "" if item.low > 0 or item.high < 0 else ", no clear difference"
    return f"The average certified radius of {item.model} minus that of {item.versus} is {change}{clear}."


def _matched(first: NamedRun, name: str, own: CommonImages) -> str:
    if not own.positions:
        return f"No image of {name} is known to be an image of {first.name}: {own.reason}."
    return f"{len(own.positions)} images of {name} are also images of {first.name}: {own.reason}."


def _metrics(runs: Sequence[NamedRun]) -> list[str]:
    """All metrics, the decisive ones first; certified accuracies by their radius."""
    everything = [result for item in runs for result in item.run.summary.results]
    known = dict.fromkeys(result.metric for result in everything)
    first = [metric for metric in (CLEAN, WORST, ACR) if metric in known]
    first += certified_metrics(everything)
    return first + [metric for metric in known if metric not in first]


def _result_table(runs: Sequence[NamedRun]) -> Table:
    metrics = _metrics(runs)
    rows = []
    for mixture in dict.fromkeys(model for item in runs for model in item.models):
        for item in runs:
            if mixture not in item.models:
                continue
            row = [Cell(item.name, item.run.name(*mixture), item.colour)]
            counts = set()
            for metric in metrics:
                found = item.run.find(mixture[0], metric, mixture[1])
                row.append(result_cell(found))
                counts |= {found.n} if found else set()
            rows.append([*row, Cell(format.counts(counts))])
    caption = "Results with 95 % intervals; radii are ℓ2, in [0, 1] pixels."
    return Table(caption, ["run and model", *map(metric_name, metrics), "n"], rows)


def _difference_table(
    runs: Sequence[NamedRun], paired: Mapping[str, Mapping[Mixture, Sequence[Difference]]]
) -> Table:
    metrics: dict[str, None] = {}
    for own in paired.values():
        for listed in own.values():
            metrics |= dict.fromkeys(item.metric or "" for item in listed)
    rows = []
    for item in runs[1:]:
        for mixture, listed in paired[item.name].items():
            versus = "" if mixture in runs[0].models else f" − {listed[0].versus}"
            cells = {found.metric: _difference_cell(found) for found in listed}
            row = [Cell(item.name, f"{item.run.name(*mixture)}{versus}", item.colour)]
            row += [cells.get(metric, MISSING) for metric in metrics]
            rows.append([*row, Cell(format.counts(found.n for found in listed))])
    caption = (
        f"Paired differences from {runs[0].name} on common images in points, with 95 % intervals (Bonett-Price; "
        "average radius: Student). Robust accuracies under other threats are not subtracted."
    )
    return Table(caption, ["run and model", *map(metric_name, metrics), "common images"], rows)


def _difference_cell(item: Difference) -> Cell:
    if item.metric != ACR:
        return Cell(format.points(item.value), format.bounds(item))
    sign = "+" if item.value > 0 else ""
    bounds = f"[{format.number(item.low, 3)}, {format.number(item.high, 3)}]"
    return Cell(f"{sign}{format.number(item.value, 3)}", bounds)


def _trade_off(runs: Sequence[NamedRun]) -> list[Figure]:
    """Clean against robust accuracy of every model of every run, in the colour of the run."""
    records: Records = []
    colours: dict[str, str] = {}
    for item in runs:
        for step, (model, alpha) in enumerate(item.models):
            clean, robust = item.run.find(model, CLEAN, alpha), item.run.find(model, WORST, alpha)
            if clean is None or robust is None:
                continue
            name = f"{item.name}: {item.run.name(model, alpha)}"
            colours[name] = item.colour
            record = {"model": name, "step": step, "n": robust.n}
            records.append(record | charts.fields(clean, "clean") | charts.fields(robust, "robust"))
        frontier = fit.fitted_curves(item.run) if _kind(item.run) == "fit" else {}
        frontier.pop("plain mixing", None)
        for points in frontier.values():
            name = f"{item.name}: frontier on fitting images"
            colours[name] = item.colour
            for step, (x, y) in enumerate(points.tolist()):
                shares = {"clean": round(x, 5), "robust": round(y, 5)}
                records.append({"model": name, "step": step, **shares})
    if not records:
        return []
    title = "Clean against robust accuracy of every model of every run, with 95 % intervals"
    return [charts.trade_off("trade-off", title, records, colours, joined=len(records) > 5)]


# ---- what makes it unfair ----


def fairness(runs: Sequence[NamedRun], common: Mapping[str, CommonImages]) -> Section:
    """Why figures of the runs may not be comparable."""
    found = concerns(runs, common)
    if found:
        return Section("Is the comparison fair?", alarms=found)
    text = "Nothing that the runs record makes it unfair: threat, attacks and images are the same."
    return Section("Is the comparison fair?", [text])


def concerns(runs: Sequence[NamedRun], common: Mapping[str, CommonImages]) -> list[tuple[str, str]]:
    """What differs or is wrong, and what follows; the most important first."""
    differing = _differing(runs)
    found = []
    for what, meaning in MEANING.items():
        listed = []
        for key, values in differing.items():
            if (key == what or key.startswith(f"{what}.")) and not _is_of_one_model(key):
                listed.append(f"{key}: {_grouped(runs, values)}")
        if listed:
            found.append((f"Other {what} ({'; '.join(listed[:MOST])}).", meaning))
    for name, own in common.items():
        if not own.positions and _kind(runs[0].run) != "train":
            text = f"{name} and {runs[0].name} have no known image in common: {own.reason}."
            found.append((text, "Their difference is not paired, and may come from the images."))
    for item in runs:
        found += _own_concerns(item)
    return found


def _own_concerns(item: NamedRun) -> list[tuple[str, str]]:
    found = []
    summary = item.run.summary
    if not item.run.finished:
        text = f"{item.name} is not finished; its figures are of the images measured so far."
        found.append((text, "Robust accuracies are too low until it ends."))
    for model, images in summary.overlap.items():
        text = f"{item.name}: {format.overlap(model, images)}."
        found.append((text, "Compare on images that were not used for fitting."))
    alarmed = {check.model for check in summary.sanity_checks if check.alarm}
    alarmed -= format.covered_by_adaptive(summary.sanity_checks)
    if alarmed:
        text = f"{item.name}: sanity checks of {', '.join(sorted(alarmed))} raise an alarm."
        found.append((text, "Their robust accuracy may be overstated; see its report."))
    return found


def _grouped(runs: Sequence[NamedRun], values: Sequence[str | None]) -> str:
    """The different values with the runs that have them."""
    names: dict[str, list[str]] = {}
    for item, value in zip(runs, values, strict=True):
        names.setdefault("none" if value is None else value, []).append(item.name)
    return ", ".join(f"{value} in {' and '.join(having)}" for value, having in names.items())


# ---- figures of all runs ----


def _fits(runs: Sequence[NamedRun]) -> Section | None:
    rows = []
    for item in runs:
        own = item.run.summary.fit
        if own is not None:
            method = Cell(own.method or own.rule or MISSING.text)
            rows.append(
                [
                    Cell(item.name, colour=item.colour),
                    method,
                    Cell(f"{own.alpha:.4g}"),
                    Cell(own.promise),
                ]
            )
    if not rows:
        return None
    table = Table(
        "What each fit selected, and what it promises.",
        ["run", "rule", "alpha", "promise"],
        rows,
        True,
    )
    return Section("Fits", tables=[table])


def _radii(runs: Sequence[NamedRun]) -> Section | None:
    curves, names, colours = [], [], {}
    for item in runs:
        for curve in item.run.summary.radius_curves:
            curves.append(curve)
            names.append(f"{item.name}: {item.run.name(curve.model)}")
            colours[names[-1]] = item.colour
    if not curves:
        return None
    if len({curve.norm for curve in curves}) > 1:
        return Section(
            "Accuracy against radius",
            ["The runs have radii in different norms; see their reports."],
        )
    return Section(
        "Accuracy against radius", figures=[attacks.radius_figure(curves, names, colours)]
    )


def _certified(runs: Sequence[NamedRun]) -> Section | None:
    radii, colours = {}, {}
    for item in runs:
        if item.run.setting("plan", "decide_radius") is None:
            for mixture, rows in by_mixture(item.run.rows).items():
                name = f"{item.name}: {item.run.name(*mixture)}"
                radii[name] = certificates.radii_of(rows)
                colours[name] = item.colour
    if not radii:
        return None
    figure = certificates.figure("certified", "Certified accuracy against radius", radii, colours)
    return Section("Certified accuracy", figures=[figure])


def _training(runs: Sequence[NamedRun]) -> Section | None:
    figures = []
    palette = {item.name: item.colour for item in runs}
    for name, label in {"loss": "loss", **training.LABELS}.items():
        records: Records = []
        for item in runs:
            for row in training.epochs(item.run):
                value = row.loss if name == "loss" else training.accuracies(row).get(name)
                if value is not None:
                    records.append({"model": item.name, "x": row.index + 1, "y": round(value, 6)})
        if records:
            title, is_share = f"Training: {label} of each epoch", name != "loss"
            figures.append(
                charts.curves(
                    f"training-{name}",
                    title,
                    records,
                    palette,
                    x="epoch",
                    y=label,
                    is_share=is_share,
                    dots=True,
                )
            )
    text = ["Losses of different objectives cannot be compared."]
    return Section("Training", text, figures) if figures else None


# ---- settings and runs ----


def settings(runs: Sequence[NamedRun]) -> Section:
    """The settings that are not the same in all runs."""
    differing = _differing(runs)
    if not differing:
        return Section("Settings that differ", ["All settings of these runs are the same."])
    rows = []
    for key, values in differing.items():
        cells = [MISSING if value is None else Cell(value) for value in values]
        rows.append([Cell(key), *cells])
    text = "Every other setting that the runs record is the same."
    table = Table(text, ["setting", *(item.name for item in runs)], rows, is_text=True)
    return Section("Settings that differ", tables=[table])


def _differing(runs: Sequence[NamedRun]) -> dict[str, list[str | None]]:
    tables = [_settings_of(item) for item in runs]
    differing = {}
    for key in dict.fromkeys(key for table in tables for key in table):
        values = [table.get(key) for table in tables]
        if len(set(values)) > 1:
            differing[key] = values
    return differing


def _settings_of(item: NamedRun) -> dict[str, str]:
    """Identity and settings in one level; attacks by attack, whatever the models are called."""
    table: dict[str, Any] = {}
    for key, value in {**item.run.identity, **item.run.settings}.items():
        if key not in ("command", "references", "attacks"):
            table[key] = value
    if item.run.threat is not None:
        table["threat"] = str(item.run.threat)
    by_attack: dict[str, set[str]] = {}
    given = item.run.setting("attacks")
    for own in given.values() if isinstance(given, Mapping) else []:
        for key, value in flatten({"attacks": own}).items():
            by_attack.setdefault(key, set()).add(value)
    flat = {key: "; ".join(sorted(values)) for key, values in by_attack.items()}
    return {key: _shortened(value) for key, value in (flatten(table) | flat).items()}


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
    """What each run is, and where its report is."""
    rows, commands = [], []
    for item in runs:
        name, facts = title(item.run)
        state = "" if item.run.finished else "not finished"
        link = page.link_to(item.run.folder, out)
        rows.append([Cell(item.name, state, item.colour, link), Cell(name, facts)])
        if item.run.settings.get("command"):
            commands.append(str(item.run.settings["command"]))
    table = Table(
        "The others are compared with the first.", ["run", "what it is"], rows, is_text=True
    )
    return Section("Runs", tables=[table], code="\n".join(commands))
