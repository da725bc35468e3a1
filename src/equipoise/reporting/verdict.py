"""The first screen of a report: one sentence, one figure, one table, and what speaks against it."""

from __future__ import annotations

from collections.abc import Sequence

from equipoise.core import format
from equipoise.core.aggregation import CLEAN, WORST
from equipoise.core.audits import Audit
from equipoise.core.results import Difference
from equipoise.core.rows import CALIBRATION, AttackRow, Mixture
from equipoise.reporting import certificates, charts, training
from equipoise.reporting.run_view import MIXED, ROLES, RunView
from equipoise.reporting.section import Figure, Records, Section, metric_name, result_table


def verdict(run: RunView) -> Section:
    """What the run found."""
    if run.summary.command == "train":
        return training.verdict(run)
    certified = certificates.verdict(run)
    if certified is not None:
        return certified
    measured = measured_models(run)
    text = _promise_of_the_fit(run)
    text += _sentences(run, measured)
    text += _conditions(run)
    figure = trade_off(run, measured)
    metrics = [CLEAN, WORST]
    if not any(result.metric == WORST for result in run.summary.results):
        metrics = [CLEAN]
    caption = "Share of images classified correctly, with 95 % intervals (Clopper-Pearson)."
    tables = [result_table(run, caption, measured, metrics)] if measured else []
    return Section("Verdict", text, [figure] if figure else [], tables)


def measured_models(run: RunView) -> list[Mixture]:
    """Models with a clean or robust accuracy."""
    measured = []
    for mixture in run.mixtures:
        found = [run.find(mixture[0], metric, mixture[1]) for metric in (CLEAN, WORST)]
        if found != [None, None]:
            measured.append(mixture)
    return measured


def _promise_of_the_fit(run: RunView) -> list[str]:
    fit, gate = run.summary.fit, run.summary.gate
    if run.summary.command != "fit":
        return []
    if fit is not None and not fit.helped:
        return [f"{fit.promise[:1].upper()}{fit.promise[1:]}."]
    promise = gate.promise if fit is None and gate is not None else fit.promise if fit else None
    return [f"The mixture {promise}."] if promise else []


def _sentences(run: RunView, measured: Sequence[Mixture]) -> list[str]:
    """The accuracies of the mixture, or of the best model, and what it gains and loses."""
    attacked = [mixture for mixture in measured if run.find(mixture[0], WORST, mixture[1])]
    if not attacked:
        if not measured:
            return [] if run.summary.command == "fit" else ["This run has no accuracies."]
        return [_clean_only(run, measured[0])]
    sentences = []
    if (MIXED, None) in attacked:
        sentences.append(_both(run, (MIXED, None)))
    elif len(attacked) == 1:
        sentences.append(_both(run, attacked[0]))
    else:
        best = max(attacked, key=lambda mixture: _value(run, mixture, WORST))
        sentences.append(f"Of {len(attacked)} models this one has the most robust accuracy: ")
        sentences[0] += _both(run, best)
    for model, versus in _compared(run):
        listed = []
        for item in run.summary.differences:
            if (item.model, item.versus) == (model, versus):
                listed.append(item)
        sentences.append(difference_sentence(listed, run.spoken(model), run.spoken(versus)))
    for check in run.summary.promises:
        kept = "kept" if check.kept else "exceeded"
        lost = f"{format.number(100 * check.value, 1)} {format.interval(check.low, check.high)}"
        sentences.append(
            f"At most {check.promised} was to be lost ({check.promised.kind}); {lost} was lost: the promise "
            f"was {kept}."
        )
    fit = run.summary.fit
    if not run.summary.promises and run.summary.command != "fit" and fit and fit.promised:
        sentences.append(f"At most {fit.promised} was to be lost ({fit.promised.kind}).")
    return [" ".join(sentences)]


def _compared(run: RunView) -> list[tuple[str, str]]:
    pairs = dict.fromkeys((item.model, item.versus) for item in run.summary.differences)
    # What the mixture keeps of the robust model is the question; the accurate one is in the table.
    first = [pair for pair in pairs if pair == (MIXED, "robust")]
    return first or list(pairs)[:2]


def _value(run: RunView, mixture: Mixture, metric: str) -> float:
    result = run.find(mixture[0], metric, mixture[1])
    return -1.0 if result is None else result.value


def _both(run: RunView, mixture: Mixture) -> str:
    name = _spoken(run, mixture)
    clean, robust = _value(run, mixture, CLEAN), _value(run, mixture, WORST)
    if clean < 0:
        return f"{name} has a robust accuracy of {format.percent(robust)}."
    return (
        f"{name} classifies {format.percent(clean)} of the clean images correctly; its robust accuracy is "
        f"{format.percent(robust)}."
    )


def _clean_only(run: RunView, mixture: Mixture) -> str:
    share = format.percent(_value(run, mixture, CLEAN))
    return f"{_spoken(run, mixture)} classifies {share} of the clean images correctly; nothing was attacked."


def _spoken(run: RunView, mixture: Mixture) -> str:
    spoken = ROLES.get(mixture[0]) if mixture[1] is None else None
    return f"{spoken[:1].upper()}{spoken[1:]}" if spoken else run.name(*mixture)


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
    if run.threat is not None and any(result.metric == WORST for result in run.summary.results):
        attacks = ", ".join(format.literal(name) for name in run.attacks)
        text.append(
            f"Robust accuracy: the share of images classified correctly clean and under every attack of the "
            f"run ({attacks}) within {run.threat}."
        )
    if run.summary.command == "fit":
        text.append(_fitting_images(run))
    fit = run.summary.fit
    if fit is not None and fit.method:
        text.append(f"The mixture is made by this rule: {fit.method}.")
    rules = [f"{run.name(model)}: {rule}" for model, rule in run.summary.methods.items()]
    if rules and (fit is None or not fit.method):
        text.append(f"Rules of the mixtures: {'; '.join(rules)}.")
    return [sentence for sentence in text if sentence]


def _fitting_images(run: RunView) -> str:
    """What the images of a fit were used for, because accuracies on them are optimistic."""
    if run.summary.gate is not None:
        return "These images selected the range of the gate, so its accuracies are optimistic."
    if run.summary.fit is None or not run.summary.results:
        return ""
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


def trade_off(run: RunView, measured: Sequence[Mixture]) -> Figure | None:
    """Clean against robust accuracy of every model that has both, and what was promised."""
    records: Records = []
    for model, alpha in measured:
        clean, robust = run.find(model, CLEAN, alpha), run.find(model, WORST, alpha)
        if clean is not None and robust is not None:
            record = {"model": run.name(model, alpha), "n": robust.n}
            records.append(record | charts.fields(clean, "clean") | charts.fields(robust, "robust"))
    if not records:
        return None
    title = "Clean against robust accuracy, with 95 % intervals"
    return charts.trade_off("verdict", title, records, run.colours, floor=_promised(run))


def _promised(run: RunView) -> float | None:
    """The robust accuracy that the mixture was to keep on these images."""
    promised = run.summary.fit.promised if run.summary.fit is not None else None
    versus = "robust"
    for item in run.summary.promises:
        promised, versus = item.promised, item.versus
    robust = run.find(versus, WORST)
    if promised is None or robust is None:
        return None
    return round(promised.least_accuracy(robust.value), 5)


def alarms(run: RunView) -> Section | None:
    """What speaks against the verdict, and what it means for the claim."""
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
    return Section("What speaks against it", alarms=found) if found else None


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
    done, planned = len(run.rows), run.planned_rows
    unit = "epochs" if run.summary.command == "train" else "rows"
    share = f"{done} of {planned} {unit}" if planned else f"{done} {unit}"
    text = f"This run is not finished: {share} so far. Repeat the command to go on."
    meaning = "All figures are of what was measured so far."
    if not run.rows:
        meaning = "Nothing has been measured yet."
    elif planned == done:
        meaning = "Everything is measured; sanity checks and the summary are missing."
    elif run.attacks:
        meaning += " A suite breaks images early, so robust accuracies are too low until it ends."
    return [(text, meaning)]
