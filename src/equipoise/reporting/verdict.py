"""The first screen of a report: one sentence, one figure, one table, and what speaks against it."""

from __future__ import annotations

from collections.abc import Sequence

from equipoise.core import format
from equipoise.core.aggregation import CLEAN, WORST
from equipoise.core.audits import Audit
from equipoise.core.results import Difference, Result
from equipoise.core.rows import CALIBRATION, AttackRow
from equipoise.reporting import certificates, charts, training
from equipoise.reporting.run_view import MIXED, ROLES, RunView
from equipoise.reporting.section import Records, Section, metric_name, result_table


def verdict(run: RunView) -> Section:
    """What the run found."""
    if run.summary.command == "train":
        return training.verdict(run)
    certified = certificates.verdict(run)
    if certified is not None:
        return certified
    text = []
    if run.summary.command == "fit" and run.promise:
        text.append(run.promise)
    lead = " ".join(_sentences(run))
    if lead or not text:
        text.append(lead or "This run has no accuracies.")
    text += _conditions(run)
    figures, tables = [], []
    records = _points(run)
    if records:
        title = "Clean against robust accuracy, with 95 % intervals"
        floor = _promised(run)
        figures.append(charts.trade_off("verdict", title, records, run.colours, floor=floor))
    if CLEAN in run.metrics:
        caption = "Share of images classified correctly, with 95 % intervals (Clopper-Pearson)."
        metrics = [metric for metric in (CLEAN, WORST) if metric in run.metrics]
        tables.append(result_table(run, caption, run.measured, metrics))
    return Section("Verdict", text, figures, tables)


def _sentences(run: RunView) -> list[str]:
    """The accuracies of the mixture, or of the most robust model, and what it gains and loses."""
    robust = [result for result in run.summary.results if result.metric == WORST]
    if not robust:
        clean = [result for result in run.summary.results if result.metric == CLEAN]
        return [f"{_classifies(run, result)}; nothing was attacked." for result in clean[:1]]
    best = max(robust, key=lambda result: (result.model == MIXED, result.value))
    clean_result = run.find(best.model, CLEAN, best.alpha)
    sentences = []
    if len(robust) > 1 and best.model != MIXED:
        sentences.append(f"The most robust of {len(robust)} models:")
    accuracy = f"robust accuracy is {format.percent(best.value)}."
    if clean_result is None:
        sentences.append(f"The {accuracy}")
    else:
        sentences.append(f"{_classifies(run, clean_result)}; its {accuracy}")
    # What the mixture keeps of the robust model is the question; the accurate one is in the table.
    compared = [item for item in run.summary.differences if item.versus == "robust"]
    compared = compared or list(run.summary.differences[:2])
    if compared:
        first = compared[0]
        sentences.append(
            difference_sentence(compared, run.spoken(first.model), run.spoken(first.versus))
        )
    return sentences + _kept(run)


def _kept(run: RunView) -> list[str]:
    """What was promised, and whether it was kept on these images."""
    sentences = []
    for check in run.summary.promises:
        kept = "kept" if check.kept else "exceeded"
        lost = f"{format.number(100 * check.value, 1)} {format.interval(check.low, check.high)}"
        sentences.append(
            f"At most {check.promised} was to be lost ({check.promised.kind}); {lost} was lost: the promise "
            f"was {kept}."
        )
    fit = run.summary.fit
    if (
        fit is not None
        and fit.promised is not None
        and not sentences
        and run.summary.command != "fit"
    ):
        sentences.append(f"At most {fit.promised} was to be lost ({fit.promised.kind}).")
    return sentences


def _classifies(run: RunView, clean: Result) -> str:
    name = run.spoken(clean.model, clean.alpha)
    if name in ROLES.values():
        name = name.capitalize()
    return f"{name} classifies {format.percent(clean.value)} of the clean images correctly"


def difference_sentence(listed: Sequence[Difference], model: str, versus: str) -> str:
    """What a model gains and loses compared with another on the same images."""
    changes, unclear = [], []
    for item in listed:
        what = metric_name(item.metric or "")
        if item.low <= 0 <= item.high:
            unclear.append(f"{what} ({format.points(item.value)} {format.bounds(item)})")
        else:
            changes.append(f"{format.points(item.value)} points {format.bounds(item)} {what}")
    if unclear:
        changes.append(f"no clear difference in {' and '.join(unclear)}")
    return f"Compared with {versus}, {model} has {' and '.join(changes)}."


def _conditions(run: RunView) -> list[str]:
    """The threat, what robust accuracy is, and which images were measured."""
    text = []
    if run.threat is not None and WORST in run.metrics:
        attacks = format.literal(", ".join(run.attacks))
        text.append(
            f"Robust accuracy: the share of images classified correctly clean and under every attack of the "
            f"run ({attacks}) within {run.threat}."
        )
    if run.summary.command == "fit" and run.summary.results:
        text.append(_fitting_images(run))
    fit = run.summary.fit
    if fit is not None and fit.method:
        text.append(f"The mixture is made by this rule: {fit.method}.")
    else:
        for model, rule in run.summary.methods.items():
            text.append(f"The rule of the {run.name(model)}: {rule}.")
    return text


def _fitting_images(run: RunView) -> str:
    """What the images of a fit were used for, because accuracies on them are optimistic."""
    if run.summary.gate is not None:
        return "These images selected the range of the gate, so its accuracies are optimistic."
    half = set()
    for row in run.rows:
        if isinstance(row, AttackRow) and row.half == CALIBRATION:
            half.add(row.index)
    if any(result.n > len(half) for result in run.summary.results):
        return "These are the fitting images, which selected the mixture, so its accuracies are optimistic."
    return (
        f"These are fitting images: the half that did not select the map, n = {len(half)}. It set the "
        "threshold, so the robust accuracy of the mixture is what the target allows, not a measurement."
    )


def _points(run: RunView) -> Records:
    """Clean and robust accuracy of every model that has both."""
    records: Records = []
    for model, alpha in run.measured:
        clean, robust = run.find(model, CLEAN, alpha), run.find(model, WORST, alpha)
        if clean is not None and robust is not None:
            record = {"model": run.name(model, alpha), "n": robust.n}
            records.append(record | charts.fields(clean, "clean") | charts.fields(robust, "robust"))
    return records


def _promised(run: RunView) -> float | None:
    """The robust accuracy that the mixture was to keep on these images."""
    versus, target = "robust", None
    if run.summary.fit is not None:
        target = run.summary.fit.promised
    for item in run.summary.promises:
        versus, target = item.versus, item.promised
    robust = run.find(versus, WORST)
    if target is None or robust is None:
        return None
    return round(target.least_accuracy(robust.value), 5)


def alarms(run: RunView) -> Section | None:
    """What speaks against the verdict, and what it means for the claim."""
    found = alarms_of(run)
    if not found:
        return None
    return Section("What speaks against it", alarms=found)


def alarms_of(run: RunView) -> list[tuple[str, str]]:
    """What was found and what it means, the most important first."""
    found = _unfinished(run)
    found += _failed_checks(run)
    for audit in run.summary.audits:
        if audit.is_poor:
            found.append(_poor_audit(run, audit))
    for item in run.summary.promises:
        if not item.kept:
            found.append(
                (f"{run.name(item.model)}: {item.explanation}.", "The promise does not hold here.")
            )
    for model, images in run.summary.overlap.items():
        text = f"{format.overlap(run.name(model), images)}."
        found.append((text, "Evaluate it on images that were not used for fitting."))
    for note in run.summary.notes:
        found.append((f"Note: {note}.", "Accuracies on new images may be others."))
    for result in run.summary.results:
        if result.allowed is not None and result.count > result.allowed:
            text = f"{result.count} of {result.n} certificates of {run.name(result.model, result.alpha)} were broken"
            found.append((f"{text}; {result.allowed} are allowed.", "The certificates are wrong."))
    return found


def _failed_checks(run: RunView) -> list[tuple[str, str]]:
    covered = format.covered_by_adaptive(run.summary.sanity_checks)
    by_meaning: dict[tuple[str, str, str], list[str]] = {}
    for check in run.summary.sanity_checks:
        if check.alarm and check.model not in covered:
            key = (check.name, check.explanation, check.advice or "")
            by_meaning.setdefault(key, []).append(
                f"{run.name(check.model)}, {check.attack}: {check.value:.2g}"
            )
    found = []
    for (name, explanation, advice), where in by_meaning.items():
        text = f"Sanity check “{name}” ({'; '.join(where)}): {explanation}."
        meaning = f"Read the robust accuracy as an upper bound. {advice}"
        found.append((text, meaning.strip()))
    return found


def _poor_audit(run: RunView, audit: Audit) -> tuple[str, str]:
    text = f"Audit of {run.name(audit.model)}: {audit.explanation}."
    gap = format.number(100 * audit.gap, 1)
    return text, f"The accuracy under {audit.attack} may be up to {gap} points too high."


def _unfinished(run: RunView) -> list[tuple[str, str]]:
    if run.finished:
        return []
    text = f"This run is not finished: {run.progress} so far. Repeat the command to go on."
    meaning = "All figures are of what was measured so far."
    if not run.rows:
        meaning = "Nothing has been measured yet."
    elif run.planned_rows == len(run.rows):
        meaning = "Everything is measured; sanity checks and the summary are missing."
    elif run.attacks:
        meaning += " A suite breaks images early, so robust accuracies are too low until it ends."
    return [(text, meaning)]
