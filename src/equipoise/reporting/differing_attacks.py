"""Settings of attacks that differ between runs, attack by attack, whatever the models are
called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from equipoise.reporting.paired_runs import NamedRun
from equipoise.reporting.provenance import flatten

ADAPTIVE = "adaptive"  # attacks whose names start so are there for mixtures only
OF_ONE_MODEL = ("surrogate", "source", "weights")  # settings that depend on what is attacked
Settings = dict[
    str, dict[str, list[str]]
]  # setting → its value → the models that are attacked with it


@dataclass(frozen=True)
class AttackSetting:
    """A setting of an attack that is not the same in all runs, with its value in each of them.

    Without `setting` it is the attack itself, which some runs do not have.
    """

    attack: str
    setting: str
    values: tuple[str | None, ...]
    models: tuple[str, ...]

    @property
    def of_one_model(self) -> bool:
        """Whether it depends on the attacked model, so that other models have other values."""
        return self.attack.startswith(ADAPTIVE) or any(
            part in OF_ONE_MODEL for part in self.setting.split(".")
        )


def differing_attacks(
    runs: Sequence[NamedRun], names: Sequence[Mapping[str, str]]
) -> list[AttackSetting]:
    """Attacks that some runs do not have, and settings that differ between the runs that have an
    attack.

    Args:
        runs: all runs.
        names: for each run, what its models are called.
    """
    listed = [_attacks(item, own) for item, own in zip(runs, names, strict=True)]
    rows = []
    for attack in dict.fromkeys(name for own in listed for name in own):
        having = [own.get(attack) for own in listed]
        models = tuple(
            dict.fromkeys(
                model
                for own in having
                if own
                for values in own.values()
                for listed_models in values.values()
                for model in listed_models
            )
        )
        if None in having:
            kinds = tuple(
                None if own is None else _written(own.get("attack", {})) or attack for own in having
            )
            rows.append(AttackSetting(attack, "", kinds, models))
        for setting in dict.fromkeys(name for own in having if own for name in own):
            values = tuple(
                None if own is None else _written(own.get(setting, {})) or "not set"
                for own in having
            )
            if len(set(values) - {None}) > 1:
                rows.append(AttackSetting(attack, setting, values, models))
    return rows


def attacks_by_model(item: NamedRun) -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    """The attacks of each model with their settings; empty for a run that describes its attacks in
    another way."""
    given = item.run.identity.get("attacks")
    tables = list(given.values()) if isinstance(given, Mapping) else [None]
    are_settings = (
        isinstance(table, Mapping) and all(isinstance(own, Mapping) for own in table.values())
        for table in tables
    )
    return given if isinstance(given, Mapping) and all(are_settings) else {}


def _attacks(item: NamedRun, names: Mapping[str, str]) -> dict[str, Settings]:
    """The attacks of a run by name."""
    attacks: dict[str, Settings] = {}
    for model, table in attacks_by_model(item).items():
        for attack, own in table.items():
            settings = attacks.setdefault(attack, {})
            for setting, value in flatten(own).items():
                settings.setdefault(setting, {}).setdefault(value, []).append(
                    names.get(model, model)
                )
    return attacks


def _written(values: Mapping[str, Sequence[str]]) -> str:
    """One value, or several with the models that they belong to."""
    if len(values) == 1:
        return next(iter(values))
    return "; ".join(
        f"{value} for {', '.join(sorted(models))}" for value, models in sorted(values.items())
    )
