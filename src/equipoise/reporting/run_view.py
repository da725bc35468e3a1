"""A run folder as a report sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from equipoise.core import format, records, serialize
from equipoise.core.aggregation import CLEAN, MODELS, accuracies, base_models_first
from equipoise.core.checks import InputError
from equipoise.core.results import Result, Summary, read_summary
from equipoise.core.rows import SEARCH, AttackRow, Mixture, Row
from equipoise.core.threat import Threat

OTHER_COLOURS = ("other-1", "other-2", "other-3", "other-4", "other-5", "other-6")
MIXED = "mixed"
ROLES = {"accurate": "the accurate model", "robust": "the robust model", MIXED: "the mixture"}
AttackedImages = dict[
    str, dict[int, list[AttackRow]]
]  # model → image → its rows, the clean one first


@dataclass(frozen=True)
class RunView:
    """Everything a section may use; arrays are loaded from `folder` by those that need them."""

    folder: Path
    identity: Mapping[str, Any]
    settings: Mapping[str, Any]
    summary: Summary
    rows: list[Row]
    finished: bool = True

    @property
    def attacks(self) -> list[str]:
        """Names of the attacks of the run, without `clean`."""
        names = {row.attack for row in self.rows if isinstance(row, AttackRow)}
        return sorted(names - {CLEAN})

    @property
    def data(self) -> Mapping[str, Any]:
        """Name, split and count of the images, as far as they are recorded; of a demo, those it
        evaluated on."""
        for source in (self.identity, self.settings):
            data = source.get("data")
            if isinstance(data, Mapping):
                return data
        return {}

    @property
    def data_name(self) -> str:
        """The data set and its split."""
        name, split = self.data.get("name", ""), self.data.get("split")
        return f"{name} {split}" if split else str(name)

    @cached_property
    def threat(self) -> Threat | None:
        """The threat model, if the run had one."""
        given = self.identity.get("threat")
        if given:
            return serialize.from_plain(Threat, given, f"threat of {self.folder / 'run.toml'}")
        for result in self.summary.results:
            if result.threat is not None:
                return result.threat
        return None

    def table(self, name: str) -> Mapping[str, Any]:
        """A table of the identity; empty where it is not recorded."""
        value = self.identity.get(name)
        return value if isinstance(value, Mapping) else {}

    def setting(self, *path: str) -> Any:
        """A value of the identity, such as `plan`, `epochs`; None where it is not recorded."""
        value: Any = self.identity
        for key in path:
            if not isinstance(value, Mapping):
                return None
            value = value.get(key)
        return value

    @cached_property
    def metrics(self) -> list[str]:
        """Everything that the results measure."""
        return list(dict.fromkeys(result.metric for result in self.summary.results))

    @cached_property
    def measured(self) -> list[Mixture]:
        """Every model with results, and a mixture at each of its alphas, in their order."""
        return list(dict.fromkeys((result.model, result.alpha) for result in self.summary.results))

    @cached_property
    def mixtures(self) -> list[Mixture]:
        """Every model with results or rows: the two bases, their mixture, others."""
        seen = dict.fromkeys(self.measured)
        for row in self.rows:
            seen.setdefault((row.model, row.alpha))
        return sorted(seen, key=lambda mixture: base_models_first(mixture[0]))

    @cached_property
    def names(self) -> dict[Mixture, str]:
        """Short names, the same in every section; whole ones where short ones are the same."""
        names = format.mixture_names(self.mixtures)
        for model, alpha in names:
            if model == MIXED:
                names[model, alpha] = f"mixture{names[model, alpha].removeprefix(MIXED)}"
        if len(set(names.values())) == len(names):
            return names
        return {mixture: format.literal(format.label(*mixture)) for mixture in self.mixtures}

    def name(self, model: str, alpha: float | None = None) -> str:
        """The short name of a model, or of a mixture at one of several alphas."""
        mixture = (model, alpha)
        return self.names.get(mixture) or format.mixture_names([mixture])[mixture]

    @cached_property
    def colours(self) -> dict[str, str]:
        """Short name → colour of the palette: the bases and the mixture have their own, others take
        turns."""
        colours: dict[str, str] = {}
        others = 0
        for (model, alpha), name in self.names.items():
            role = model.rpartition(" ")[2]
            if role in MODELS and alpha is None and role not in colours.values():
                colours[name] = role
            else:
                colours[name] = OTHER_COLOURS[others % len(OTHER_COLOURS)]
                others += 1
        return colours

    def spoken(self, model: str, alpha: float | None = None) -> str:
        """A model in a sentence."""
        if alpha is None and model in ROLES:
            return ROLES[model]
        return self.name(model, alpha)

    def find(self, model: str, metric: str, alpha: float | None = None) -> Result | None:
        """The result of a model and metric, if there is one."""
        for result in self.summary.results:
            if (result.model, result.metric, result.alpha) == (model, metric, alpha):
                return result
        return None

    def alphas(self, model: str, metric: str) -> list[Result]:
        """The results of a mixture at each of its alphas, in order."""
        found = []
        for result in self.summary.results:
            if (result.model, result.metric) == (model, metric) and result.alpha is not None:
                found.append(result)
        return sorted(found, key=lambda result: result.alpha or 0.0)

    @cached_property
    def attacked_images(self) -> AttackedImages:
        """The rows of every model that was attacked, of the images that have all of them."""
        table: AttackedImages = {}
        for row in self.rows:
            if isinstance(row, AttackRow) and row.alpha is None:
                own = table.setdefault(row.model, {}).setdefault(row.index, [])
                own.insert(0 if row.attack == CLEAN else len(own), row)
        complete: AttackedImages = {}
        for model in sorted(table, key=base_models_first):
            most = max(len(rows) for rows in table[model].values())
            whole = {}
            for index, rows in sorted(table[model].items()):
                if len(rows) == most > 1 and rows[0].attack == CLEAN:
                    whole[index] = rows
            if whole:
                complete[model] = whole
        return complete

    @property
    def planned_rows(self) -> int:
        """How many rows the run will have; 0 if that is not recorded."""
        if self.summary.command == "train":
            return int(self.setting("plan", "epochs") or 0)
        jobs = len(self.table("models"))
        if self.summary.command != "certify":
            jobs = sum(map(len, self.table("attacks").values()))
        return jobs * int(self.data.get("count") or 0)

    @property
    def progress(self) -> str:
        """How many rows there are, of those that the run will have, if that is recorded."""
        unit = "epochs" if self.summary.command == "train" else "rows"
        if self.planned_rows:
            return f"{len(self.rows)} of {self.planned_rows} {unit}"
        return f"{len(self.rows)} {unit}"

    @property
    def promise(self) -> str:
        """What the fit of the run promises, as a sentence; empty where there is none."""
        fit, gate = self.summary.fit, self.summary.gate
        if fit is not None and fit.helped:
            return f"The mixture {fit.promise}."
        if fit is not None:
            return f"{fit.promise[:1].upper()}{fit.promise[1:]}."
        if gate is not None and gate.promise:
            return f"The mixture {gate.promise}."
        return ""

    def subrun(self, name: str) -> RunView | None:
        """A finished run in a subfolder, if there is one."""
        if not (self.folder / name / "summary.json").exists():
            return None
        return read_run(self.folder / name)


def read_run(folder: Path | str) -> RunView:
    """Open a run folder; the summary of a run that is not finished is that of its rows so far.

    The rows of the images that selected the map of a fit are left out, because they are optimistic.
    """
    return _read(Path(folder), with_rows=True)


def read_overview(folder: Path | str) -> RunView:
    """Open a run folder without the rows of a finished run, which takes little time."""
    return _read(Path(folder), with_rows=False)


def _read(folder: Path, with_rows: bool) -> RunView:
    if not (folder / "run.toml").exists():
        got = "no such folder"
        if folder.is_dir():
            got = "one without run.toml"
        elif folder.exists():
            got = "a file"
        raise InputError(f"{folder} must be a run folder, got {got}")
    description = records.read_description(folder / "run.toml")
    finished = (folder / "summary.json").exists()
    rows: list[Row] = []
    if with_rows or not finished:
        rows = records.read_rows(folder, description.identity)
    if finished:
        summary = read_summary(folder)
    else:
        summary = _summary_so_far(description.identity, rows)
    shown = [row for row in rows if getattr(row, "half", None) != SEARCH]
    return RunView(folder, description.identity, description.settings, summary, shown, finished)


def _summary_so_far(identity: Mapping[str, Any], rows: list[Row]) -> Summary:
    threat = None
    if "threat" in identity:
        threat = serialize.from_plain(Threat, identity["threat"], "threat")
    results = tuple(accuracies(rows, threat))
    command = str(identity.get("command", "run"))
    return Summary(command=command, seconds=0.0, results=results)
