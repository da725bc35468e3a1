"""What differs between runs: their settings, and why a comparison of their figures may not be
fair."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from equipoise.core import checks, format
from equipoise.core.threat import Threat
from equipoise.reporting.differing_attacks import (
    ADAPTIVE,
    AttackSetting,
    attacks_by_model,
    differing_attacks,
)
from equipoise.reporting.paired_runs import CommonImages, NamedRun, distinct_names, shared_models
from equipoise.reporting.provenance import flatten
from equipoise.reporting.section import MISSING, Cell, Section, Table
from equipoise.reporting.title import data_name

FIRST = (
    "data",
    "fit_data",
    "threat",
    "attacks",
    "attack",
    "target",
    "plan",
    "models",
)  # groups in their order
LEFT_OUT = ("command",)  # settings that the list of runs shows
HASH, SHOWN = 64, 12  # characters of a digest, and how many are shown
LONG = 160  # characters of a value
MOST = 5  # settings of an attack in a sentence


def settings(runs: Sequence[NamedRun]) -> Section:
    """A table with the settings that are not the same in all runs: of attacks by attack, of models
    by weights."""
    names = _model_names(runs)
    lines = [
        (
            ".".join(filter(None, ["attacks", item.attack, item.setting])),
            f"of {', '.join(item.models)}",
            tuple(None if value is None else _written(value) for value in item.values),
        )
        for item in differing_attacks(runs, names)
    ]
    lines += [(".".join(path), "", values) for path, values in _differing(_tables(runs, names))]
    if not lines:
        return Section("Settings that differ", ["All settings of these runs are the same."])
    body = [
        [Cell(key, note), *(MISSING if value is None else Cell(value) for value in values)]
        for key, note, values in sorted(lines, key=lambda line: _group(line[0]))
    ]
    return Section(
        "Settings that differ",
        ["Every other setting that the runs record is the same; their commands are above."],
        [
            Table(
                f"Settings that differ; digests and hashes of weights by their first {SHOWN} characters. Models with the same "
                "weights are one model, also where their names differ.",
                ["setting", *(item.name for item in runs)],
                body,
                is_text=True,
            )
        ],
    )


def _group(key: str) -> int:
    """The place of a setting in the table."""
    group = key.split(".")[0]
    return FIRST.index(group) if group in FIRST else len(FIRST)


def _model_names(runs: Sequence[NamedRun]) -> list[dict[str, str]]:
    """For each run: its models, with the short names that they are listed under."""
    shared = shared_models(runs)
    short = distinct_names(name for own in shared for name in own.values())
    return [{name: short[listed] for name, listed in own.items()} for own in shared]


def _tables(runs: Sequence[NamedRun], names: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """Identity and settings of each run without its attacks; the threat in one line, models under
    shared names."""
    references = [item.run.settings.get("references") for item in runs]
    given = [
        own
        for own in references
        if isinstance(own, list) and all(isinstance(name, str) for name in own)
    ]
    short = distinct_names(
        [*(name for own in given for name in own), *(name for own in names for name in own)]
    )
    tables = []
    for item, own in zip(runs, names, strict=True):
        table = {
            key: value
            for key, value in {**item.run.identity, **item.run.settings}.items()
            if key not in LEFT_OUT
        }
        if attacks_by_model(item):
            del table["attacks"]  # compared by attack
        if item.run.threat is not None:
            table["threat"] = str(item.run.threat)
        if own:
            table["models"] = {
                listed: {"name": short[name], **_as_table(item.run.identity["models"][name])}
                for name, listed in own.items()
            }
        if table.get("references") in given:
            table["references"] = [short[name] for name in table["references"]]
        tables.append(table)
    return tables


def _as_table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {"weights": value}


def _differing(tables: Sequence[Any]) -> list[tuple[list[str], tuple[str | None, ...]]]:
    """The keys that lead to values that differ; a table that some do not have at all is one
    line."""
    rows: list[tuple[list[str], tuple[str | None, ...]]] = []
    for key in dict.fromkeys(key for table in tables for key in table):
        values = [table.get(key) for table in tables]
        if all(value == values[0] for value in values):
            continue
        if all(isinstance(value, Mapping) for value in values):
            rows += [([key, *path], own) for path, own in _differing(values)]
        else:
            rows.append(
                ([key], tuple(None if value is None else _written(value) for value in values))
            )
    return rows


def _written(value: Any) -> str:
    """A value in one line; of a table what names it best, of a long text its ends and a digest."""
    if isinstance(value, Mapping):
        named = next(
            (value[key] for key in ("weights", "attack", "name", "type") if value.get(key)), None
        )
        return ", ".join(value) if named is None else _written(named)
    text = flatten({"": [str(item) for item in value] if isinstance(value, list) else value})[""]
    if len(text) == HASH and set(text) <= set("0123456789abcdef"):
        return f"{text[:SHOWN]}…"
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:SHOWN]
    return text if len(text) <= LONG else f"{checks.shorten(text, LONG)} (digest {digest})"


def concerns(runs: Sequence[NamedRun], common: Mapping[str, CommonImages]) -> list[str]:
    """Why figures of the runs may not be comparable, a sentence each; the most important first."""
    sentences = [
        sentence for what, value, why in SHARED for sentence in _groups(runs, value, what, why)
    ]
    sentences += _attack_settings(runs)
    for other in runs[1:]:
        if not common[other.name].positions and other.run.summary.command != "train":
            reason = common[other.name].reason
            sentences.append(
                f"{other.name} and {runs[0].name} have no known image in common: {reason}. Their "
                "difference is not paired, and may come from the images."
            )
    for item in runs:
        if not item.run.finished:
            sentences.append(
                f"{item.name} is not finished; its figures are of the images measured so far, and "
                "attacked accuracies are too low until it ends."
            )
        sentences += [
            f"{item.name}: {format.overlap(model, images)}."
            for model, images in item.run.summary.overlap.items()
        ]
        if models := _alarmed(item):
            sentences.append(
                f"{item.name}: attacked accuracies of {', '.join(models)} may be overstated, because "
                "sanity checks raise an alarm; see its report."
            )
    return sentences


def _alarmed(item: NamedRun) -> list[str]:
    """Models with alarms that no adaptive attack answers."""
    performed = item.run.summary.sanity_checks
    return sorted(
        {check.model for check in performed if check.alarm} - format.covered_by_adaptive(performed)
    )


def _groups(
    runs: Sequence[NamedRun], value: Callable[[NamedRun], str | None], what: str, why: str
) -> list[str]:
    """One sentence if a property is not the same in all runs that have it."""
    names: dict[str, list[str]] = {}
    for item in runs:
        if (own := value(item)) is not None:
            names.setdefault(own, []).append(item.name)
    listed = "; ".join(f"{own} in {', '.join(named)}" for own, named in names.items())
    return [f"{what}: {listed}. Mind that {why}."] if len(names) > 1 else []


def threat_of(item: NamedRun) -> str | None:
    """The threat of a run; of a training, that of its objective, which also attacks the held-out
    images."""
    objective = item.run.identity.get("objective")
    norm, eps = (
        objective.get(key) if isinstance(objective, Mapping) else None for key in ("norm", "eps")
    )
    own = Threat(norm, eps) if item.run.threat is None and norm and eps else item.run.threat
    return None if own is None else str(own)


def _held_out(item: NamedRun) -> str | None:
    """How many images a training held out, and the seed that drew them."""
    plan = item.run.identity.get("plan")
    if (
        item.run.summary.command != "train"
        or not isinstance(plan, Mapping)
        or not plan.get("held_out")
    ):
        return None
    return f"{plan['held_out']} with seed {plan.get('seed')}"


def _attack_names(item: NamedRun) -> str | None:
    """The attacks of a run, except adaptive ones, which only mixtures have."""
    names = [name for name in item.run.attacks if not name.startswith(ADAPTIVE)]
    return ", ".join(names) or None


def _attack_settings(runs: Sequence[NamedRun]) -> list[str]:
    """A sentence for each attack with other settings, except those that depend on the attacked
    model."""
    other: dict[str, list[str]] = {}
    for item in differing_attacks(runs, _model_names(runs)):
        if item.setting and not item.of_one_model:
            other.setdefault(item.attack, []).append(_values(item, runs))
    return [
        f"Other settings of {attack}: {'; '.join(listed[:MOST])}{'; and more' * (len(listed) > MOST)}. Mind that a "
        "stronger attack leaves a lower accuracy to the same model."
        for attack, listed in other.items()
    ]


def _values(item: AttackSetting, runs: Sequence[NamedRun]) -> str:
    """A setting in words: "steps 5 in a and b, 4 in c"."""
    names: dict[str, list[str]] = {}
    for run, value in zip(runs, item.values, strict=True):
        if value is not None:
            names.setdefault(_written(value), []).append(run.name)
    listed = [f"{value} in {' and '.join(having)}" for value, having in names.items()]
    return f"{item.setting} {', '.join(listed)}"


def _images(item: NamedRun) -> str | None:
    if not item.data:
        return None
    digest = _text(item.data.get("digest"))
    return f"{data_name(item.run)}, n = {item.data.get('count')}{f', digest {digest[:SHOWN]}' if digest else ''}"


def _plan(item: NamedRun, key: str) -> str | None:
    plan = item.run.identity.get("plan")
    value = (
        plan.get(key)
        if isinstance(plan, Mapping) and item.run.summary.command == "certify"
        else None
    )
    return None if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


# What should be the same in all runs: its name where it is not, how a run has it, and what follows.
SHARED: tuple[tuple[str, Callable[[NamedRun], str | None], str], ...] = (
    ("Other threats", threat_of, "attacked accuracies under different threats cannot be compared"),
    (
        "Other attacks",
        _attack_names,
        "the worst case over more or stronger attacks is lower for the same model",
    ),
    ("Other images", _images, "only differences on common images are free of this"),
    ("Other held-out images", _held_out, "accuracies on other images differ by chance"),
    (
        "Other numbers of noisy samples",
        lambda item: _plan(item, "samples"),
        "more samples give larger certified radii",
    ),
    (
        "Other failure probabilities",
        lambda item: _plan(item, "failure"),
        "certificates that may fail more often have larger radii",
    ),
    (
        "Other versions of Equipoise",
        lambda item: _text(item.run.settings.get("equipoise")),
        "attacks of the same name may differ",
    ),
)
