"""The public function `reproduce`: a study of a paper, from the first image to the report."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from equipoise import models
from equipoise.core import checks, parallel
from equipoise.core.device import resolve
from equipoise.core.records import Run, nothing_left_on_refusal
from equipoise.core.registry import Registry
from equipoise.evaluation import Conditions
from equipoise.studies.adaptive_smoothing import AdaptiveSmoothingStudy
from equipoise.studies.local_smoothing import LocalSmoothingStudy
from equipoise.studies.mixednuts import MixedNutsStudy
from equipoise.studies.mixing_classifiers import MixingClassifiersStudy
from equipoise.studies.overview import StudyOverview
from equipoise.studies.settings import StudySettings
from equipoise.studies.smoothmix import SmoothMixStudy
from equipoise.studies.study import Study, single_thread

STUDIES: Registry[type[Study]] = Registry(
    "equipoise.studies", "study", {study.name: study for study in (
        AdaptiveSmoothingStudy, LocalSmoothingStudy, MixedNutsStudy, MixingClassifiersStudy, SmoothMixStudy)})


def list_studies() -> tuple[StudyOverview, ...]:
    """What can be reproduced: every paper with its parts, what it needs and how long it takes."""
    return tuple(study.overview() for study in STUDIES.values())


def reproduce(name: str, *, out: Path | str | None = None, parts: Sequence[str] = (), device: str = "auto",
              command: str | None = None, **settings: Any) -> Path:
    """Run a study of a paper and return its report.

    Args:
        name: of :data:`STUDIES`.
        out: run folder, `runs/NAME` if not given; the folder of the same study is resumed.
        parts: of the study's `parts`; all if none is named.
        command: recorded in `run.toml`.
        settings: fields of :class:`StudySettings`.
    """
    parallel.require_one_process("reproduce")
    study, options = STUDIES.get_entry(name), StudySettings(**settings)
    options.check_for(name, study.smoothing_settings, study.uses_pair)
    for part in parts:
        checks.one_of("part", part, study.parts)
    size, threat, folder = study.size_for(options), options.threat(), Path(out or Path("runs") / name)
    conditions = Conditions(threat, resolve(device), options.seed, size.batch_size)
    identity: dict[str, Any] = {"command": "reproduce", "study": name, "size": options.size, "seed": options.seed,
                                "threat": threat.to_dict()}
    recorded = {**conditions.environment(), **({} if command is None else {"command": command})}
    if issubclass(study, SmoothMixStudy):
        return study.run_recipes(folder, options, conditions, recorded, parts)
    pair = None
    if options.size == "full":
        # Loaded before the folder is created: an unknown name leaves no folder behind.
        pair = study.load_models(options)
        identity |= {"models": {side: models.identity(model) for side, model in pair.models.items()},
                     "data": pair.test.describe()}
        recorded |= {"references": list(pair.all_references)}
    with nothing_left_on_refusal(folder), single_thread() if pair is None else nullcontext():
        run = Run(folder, identity, recorded)
        return study(run, pair or study.train_models(folder / "bases", conditions), size, conditions).run(parts)
