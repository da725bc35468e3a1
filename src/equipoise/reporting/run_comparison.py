"""One page over several runs: accuracies with paired differences, overlaid figures, settings, and
what is not fair."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from equipoise.core import checks, format
from equipoise.core.aggregation import CLEAN, WORST
from equipoise.core.results import Difference
from equipoise.core.rows import Mixture
from equipoise.reporting import accuracy, differing_settings, overlays, page
from equipoise.reporting.certificates import CERTIFIED_AT, radius_of
from equipoise.reporting.differing_settings import threat_of
from equipoise.reporting.paired_runs import (
    ACR,
    CommonImages,
    NamedRun,
    common_images,
    differences,
    distinct_names,
    main_model,
)
from equipoise.reporting.render import files_agree
from equipoise.reporting.section import (
    INTERVALS,
    MISSING,
    Cell,
    RunView,
    Section,
    Table,
    read_run,
    result_cell,
)
from equipoise.reporting.title import data_name, title

COMPARISON = Path("comparison.html")
# Commands that measure the same things, and what they are called in a sentence.
KINDS = {
    "evaluate": "evaluation",
    "demo": "evaluation",
    "certify": "certification",
    "fit": "fit",
    "train": "training",
    "estimate": "estimate",
}
METRICS = {ACR: "average radius", "clean-estimate": "clean, estimated", "samples": "noisy samples"}
LAST = ("abstained", "samples")
MOST, LONGEST_HEADING = 4, 140  # names in a list, and characters


def compare(folders: Sequence[Path | str], out: Path | str = COMPARISON) -> Path:
    """Write one self-contained page over several runs of one kind; the runs are only read, nothing
    is computed anew.

    The page has the results of all runs with paired differences from the first one on common
    images, trade-offs, certified and training curves in one figure each, the settings that differ,
    and what makes the comparison unfair. It is a pure function of the runs.

    Args:
        folders: at least two run folders, finished or not; the first is the one that others are
            compared with.
        out: the HTML file, outside of runs; an earlier comparison there is replaced, any other file
            is refused.

    Returns:
        The path of the page.
    """
    checks.require(
        isinstance(folders, list | tuple),
        "folders",
        "be a list of run folders",
        type(folders).__name__,
    )
    for folder in folders:
        checks.path("folders", checks.instance("folders", folder, (str, Path), "be paths"))
    checks.path("out", checks.instance("out", out, (str, Path), "be a path"))
    path = Path(out)
    runs = _read([Path(folder) for folder in folders])
    page.check_target(path, page.COMPARISON)
    with files_agree(" or ".join(str(item.run.folder) for item in runs)):
        common = {other.name: common_images(runs[0], other) for other in runs[1:]}
        worries = differing_settings.concerns(runs, common)
        sections = [
            _results(runs, common, worries),
            _fairness(worries),
            _runs(runs, path),
            *_fits(runs),
            *overlays.sections(runs),
            differing_settings.settings(runs),
        ]
        page.write(path, page.COMPARISON, _heading(runs), _details(runs), sections)
    return path


def _read(folders: Sequence[Path]) -> list[NamedRun]:
    """Read the runs, with names that distinguish them; refuse folders that cannot be compared."""
    checks.require(
        len(folders) >= 2,
        "folders",
        "be at least two run folders",
        [str(folder) for folder in folders],
    )
    resolved = [str(folder.resolve()) for folder in folders]
    twice = next(
        (folder for number, folder in enumerate(resolved) if folder in resolved[:number]), None
    )
    checks.require(twice is None, "folders", "be different run folders", f"{twice} twice")
    runs = [read_run(folder) for folder in folders]
    kinds = [_kind(run) for run in runs]
    other = next((number for number, kind in enumerate(kinds) if kind != kinds[0]), 0)
    if other:
        raise checks.InputError(
            f"`folders` must hold runs of one kind, got {kinds[0]} in {folders[0]} and "
            f"{kinds[other]} in {folders[other]}"
        )
    names = distinct_names(resolved)
    return [
        NamedRun(names[folder], run, number)
        for number, (folder, run) in enumerate(zip(resolved, runs, strict=True))
    ]


def _kind(run: RunView) -> str:
    return KINDS.get(run.summary.command, run.summary.command)


def _heading(runs: Sequence[NamedRun]) -> str:
    """What was done, with which models: "Evaluation of a compared with b"."""
    first, *others = dict.fromkeys(title(item.run)[0] for item in runs)
    if not others:
        return f"{first}: {len(runs)} runs compared"
    what, of, _ = first.partition(" of ")
    heading = f"{first} compared with {_listed([name.removeprefix(what + of) if of else name for name in others])}"
    if len(heading) <= LONGEST_HEADING:
        return heading
    return f"{first} compared with {'another run' if len(runs) == 2 else f'{len(runs) - 1} other runs'}"


def _details(runs: Sequence[NamedRun]) -> str:
    """The line above the heading: data, number of images, threats and dates, several where the runs
    differ."""
    data = list(filter(None, (data_name(item.run) for item in runs)))
    counts = [count for item in runs if isinstance(count := item.run.data.get("count"), int)]
    threats = [threat for item in runs if (threat := threat_of(item)) is not None]
    dates = [str(item.run.settings["date"]) for item in runs if item.run.settings.get("date")]
    return " · ".join(
        filter(
            None,
            [
                f"Equipoise · compare · {len(runs)} runs ({_kind(runs[0].run)})",
                _listed(data),
                f"n = {format.counts(counts)}" if counts else "",
                _listed(threats),
                _listed(sorted(dates)),
            ],
        )
    )


def _listed(names: Iterable[str]) -> str:
    """Different names as in a sentence; of many, the first ones."""
    distinct = list(dict.fromkeys(names))
    shown = (
        distinct
        if len(distinct) <= MOST
        else [*distinct[: MOST - 1], f"{len(distinct) - MOST + 1} more"]
    )
    return " and ".join(filter(None, [", ".join(shown[:-1]), *shown[-1:]]))


def _results(
    runs: Sequence[NamedRun], common: Mapping[str, CommonImages], worries: Sequence[str]
) -> Section:
    """All results, model by model, and differences from the first run."""
    paired = {other.number: differences(runs[0], other, common[other.name]) for other in runs[1:]}
    prose = [_sentence(own[main_model(list(own))]) for own in paired.values() if own]
    if worries:
        prose.append(
            f"{len(worries)} {'thing limits' if len(worries) == 1 else 'things limit'} this comparison: "
            "see the next section."
        )
    if runs[0].run.summary.command == "fit":
        prose.append(
            "Accuracies are those on fitting images, so those of the mixtures are optimistic."
        )
    prose += _matches(runs, common)
    tables = [_result_table(runs)]
    if any(paired.values()):
        tables.append(_difference_table(runs, paired))
    return Section("Results", [text for text in prose if text], tables)


def _sentence(listed: Sequence[Difference]) -> str:
    """The difference between two models in words."""
    radius = next((item for item in listed if item.metric == ACR), None)
    if radius is None:
        return (
            accuracy.comparison(listed)
            if any(item.metric in (CLEAN, WORST) for item in listed)
            else ""
        )
    clear = "" if radius.low > 0 or radius.high < 0 else ", which is no clear difference"
    return (
        f"The average certified radius of {radius.model} is {format.number(abs(radius.value), 3)} "
        f"{'larger' if radius.value > 0 else 'smaller'} than that of {radius.versus} on the same images{clear}."
    )


def _matches(runs: Sequence[NamedRun], common: Mapping[str, CommonImages]) -> list[str]:
    if runs[0].run.summary.command == "train":
        return [
            "A training has no rows of single images, so its differences are not paired. Evaluate the checkpoints "
            "on the same test images, and compare those evaluations."
        ]
    return [
        f"{len(own.positions)} images of {name} are also images of {runs[0].name}: {own.reason}."
        if own.positions
        else f"No image of {name} is known to be an image of {runs[0].name}: {own.reason}."
        for name, own in common.items()
    ]


def _result_table(runs: Sequence[NamedRun]) -> Table:
    """A row for each model of each run, models of one name below each other; a column for each
    metric."""
    results = {
        (item.number, result.model, result.alpha, result.metric): result
        for item in runs
        for result in item.run.summary.results
    }
    metrics = _ordered(list(dict.fromkeys(metric for *_, metric in results)), runs)
    body = []
    for mixture in dict.fromkeys((model, alpha) for _, model, alpha, _ in results):
        for item in runs:
            own = [results.get((item.number, *mixture, metric)) for metric in metrics]
            n = [result.n for result in own if result is not None]
            if n:
                body.append(
                    [
                        _model_cell(item, mixture),
                        *(MISSING if result is None else result_cell(result) for result in own),
                        Cell(format.counts(n)),
                    ]
                )
    caption = INTERVALS if metrics[:1] == [CLEAN] else "Results with 95 % intervals"
    caption += "; radii are ℓ2, in [0, 1] pixels" if ACR in metrics else ""
    return Table(f"{caption}.", ["run and model", *map(_metric_name, metrics), "n"], body)


def _model_cell(item: NamedRun, mixture: Mixture) -> Cell:
    return Cell(item.name, format.mixture_names(item.models)[mixture], item.color)


def _metric_name(metric: str) -> str:
    """A metric in words."""
    name, _, radius = metric.partition("@")
    return f"{METRICS.get(name, name)}{f' at {radius}' if radius else ''}"


def _ordered(metrics: Iterable[str], runs: Sequence[NamedRun]) -> list[str]:
    """The decisive metrics first, as a phone shows no more; certified accuracies by their
    radius."""
    first = [CLEAN, WORST] if any(item.run.attacks for item in runs) else [ACR]
    known = set(metrics)
    certified = sorted(
        (metric for metric in known if metric.startswith(CERTIFIED_AT)), key=radius_of
    )
    order = [*(metric for metric in first if metric in known), *certified]
    rest = [metric for metric in metrics if metric not in order and metric not in LAST]
    return [*order, *rest, *(metric for metric in LAST if metric in known)]


def _difference_table(
    runs: Sequence[NamedRun], paired: Mapping[int, Mapping[Mixture, Sequence[Difference]]]
) -> Table:
    """A row for each model of each other run, a column for each metric."""
    metrics = list(
        dict.fromkeys(
            item.metric or ""
            for others in paired.values()
            for own in others.values()
            for item in own
        )
    )
    body = []
    for other in runs[1:]:
        for mixture, listed in paired[other.number].items():
            by_metric = {item.metric: _difference_cell(item) for item in listed}
            versus = "" if mixture in runs[0].models else f" − {listed[0].versus}"
            named = f"{format.mixture_names(other.models)[mixture]}{versus}"
            body.append(
                [
                    Cell(other.name, named, other.color),
                    *(by_metric.get(metric, MISSING) for metric in metrics),
                    Cell(format.counts(item.n for item in listed)),
                ]
            )
    student = "; average radius in pixels, with Student's intervals" if ACR in metrics else ""
    left_out = (
        " Attacked accuracies under other threats are not subtracted."
        if len({item.run.threat for item in runs}) > 1
        else ""
    )
    return Table(
        f"Paired differences from {runs[0].name} on common images in percentage points, with 95 % intervals "
        f"(Bonett-Price{student}).{left_out}",
        ["run and model", *map(_metric_name, metrics), "common images"],
        body,
    )


def _difference_cell(item: Difference) -> Cell:
    if item.metric == ACR:
        sign = "+" if item.value > 0 else ""
        return Cell(
            f"{sign}{format.number(item.value, 3)}",
            f"[{format.number(item.low, 3)}, {format.number(item.high, 3)}]",
        )
    return Cell(format.points(item.value), format.bounds(item))


def _fairness(worries: Sequence[str]) -> Section:
    if not worries:
        return Section(
            "Is the comparison fair?",
            [
                "Nothing that the runs record makes it unfair: threat, attacks and "
                "images are the same, as far as the runs have them."
            ],
        )
    return Section("Is the comparison fair?", list(worries))


def _runs(runs: Sequence[NamedRun], out: Path) -> Section:
    """What each run is, and where its report is."""
    body = []
    for item in runs:
        name, details = title(item.run)
        state, link = (
            "" if item.run.finished else "not finished",
            page.link_to(item.run.folder, out),
        )
        body.append(
            [Cell(item.name, state, item.color, link=link), Cell(name, details.partition(" · ")[2])]
        )
    commands = [
        str(item.run.settings["command"]) for item in runs if item.run.settings.get("command")
    ]
    return Section(
        "Runs",
        [f"The others are compared with the first, {runs[0].name}."],
        [
            Table(
                "The runs, with links to their reports where they have one.",
                ["run", "what it is"],
                body,
                is_text=True,
            )
        ],
        code="\n".join(commands),
    )


def _fits(runs: Sequence[NamedRun]) -> list[Section]:
    """What each fit selected, and what it promises."""
    body = [
        [
            Cell(item.name, "", item.color),
            Cell(fit.method or fit.rule or MISSING.text),
            Cell(f"{fit.alpha:.4g}"),
            Cell(fit.promise),
        ]
        for item in runs
        if (fit := item.run.summary.fit) is not None
    ]
    if not body:
        return []
    return [
        Section(
            "Fits",
            [],
            [
                Table(
                    "What each fit selected, and what it promises.",
                    ["run", "rule", "alpha", "promise"],
                    body,
                    is_text=True,
                )
            ],
        )
    ]
