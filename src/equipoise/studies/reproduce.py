"""The public function `reproduce`: a study of a paper, from the first image to the report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from equipoise.core import checks, parallel
from equipoise.core.device import resolve
from equipoise.core.registry import Registry
from equipoise.core.results import read_summary
from equipoise.evaluation import Conditions
from equipoise.studies.adaptive_smoothing import AdaptiveSmoothingStudy
from equipoise.studies.local_smoothing import LocalSmoothingStudy
from equipoise.studies.mixednuts import MixedNutsStudy
from equipoise.studies.mixing_classifiers import MixingClassifiersStudy
from equipoise.studies.overview import StudyOverview
from equipoise.studies.settings import StudySettings
from equipoise.studies.smoothmix import SmoothMixStudy
from equipoise.studies.study import Study

STUDIES: Registry[type[Study]] = Registry(
    "equipoise.studies",
    "study",
    {
        study.name: study
        for study in (
            AdaptiveSmoothingStudy,
            LocalSmoothingStudy,
            MixedNutsStudy,
            MixingClassifiersStudy,
            SmoothMixStudy,
        )
    },
)


def list_studies() -> tuple[StudyOverview, ...]:
    """What can be reproduced: every paper with its parts, what it needs and how long it takes."""
    return tuple(study.overview() for study in STUDIES.values())


def reproduce(
    name: str,
    *,
    out: Path | str | None = None,
    parts: Sequence[str] = (),
    device: str = "auto",
    report: bool = True,
    command: str | None = None,
    **settings: Any,
) -> Path:
    """Run a study of a paper and return its report, or without a report its summary.

    Args:
        name: of :data:`STUDIES`.
        out: run folder, `runs/NAME` if not given; the folder of the same study is resumed.
        parts: of the study's `parts`; all if none is named.
        report: whether to write one.
        command: recorded in `run.toml`.
        settings: fields of :class:`StudySettings`.
    """
    parallel.require_one_process("reproduce")
    study, options = STUDIES.get_entry(name), StudySettings(**settings)
    options.check_for(
        name,
        study.own_settings,
        uses_pair=study.uses_pair,
        takes_several_robust=study.takes_several_robust,
    )
    for part in parts:
        checks.one_of("part", part, study.parts)
    conditions = Conditions(
        options.threat(), resolve(device), options.seed, study.size_for(options).batch_size
    )
    recorded = {**conditions.environment(), **({} if command is None else {"command": command})}
    return study.reproduce(
        Path(out or Path("runs") / name), options, conditions, recorded, parts, report=report
    )


def results_table(folder: Path | str) -> str:
    """The results of a finished study as tables; empty where it has none, because its results lie
    in its parts."""
    study = read_summary(folder).study
    return STUDIES.get_entry(study).results_table(Path(folder)) if study else ""
