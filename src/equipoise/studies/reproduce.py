"""The public function `reproduce`: a study of a paper, from the first image to the report."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equipoise import models
from equipoise.core import checks, parallel
from equipoise.core.device import resolve
from equipoise.core.records import Run, nothing_left_on_refusal
from equipoise.core.registry import Registry
from equipoise.core.settings import Settings, setting
from equipoise.core.threat import Threat
from equipoise.evaluation import Conditions
from equipoise.studies.adaptive_smoothing import AdaptiveSmoothingStudy
from equipoise.studies.local_smoothing import LocalSmoothingStudy
from equipoise.studies.study import DIGITS_EPS, Study, load_pair, single_thread, train_digits_pair

STUDIES: Registry[type[Study]] = Registry(
    "equipoise.studies", "study", {study.name: study for study in (AdaptiveSmoothingStudy, LocalSmoothingStudy)})


@dataclass(frozen=True, kw_only=True)
class StudySettings(Settings):
    """What a study runs on; the fields are options of `equipoise reproduce`."""

    size: str = setting("smoke", "smoke (digits, a few minutes) or full (any two models).", among=("smoke", "full"))
    accurate: str | None = setting(None, "Reference of the accurate model, for full.")
    robust: str | None = setting(None, "Reference of the robust model, for full.")
    data: str | None = setting(None, "Data set of both models, for full; cifar10 if not given.")
    data_dir: Path | None = setting(None, "Folder of the data set.")  # noqa: RUF009
    norm: str | None = setting(None, "Norm of the perturbation, linf or l2, for full; linf if not given.",
                               among=("linf", "l2"))
    eps: float | None = setting(None, "Radius, for full; 8/255 in linf if not given.", fraction=True, positive=True)
    allow_code: bool = setting(False, "Run the code that a mixture folder names; only for folders whose author you "
                                      "trust.")
    seed: int = setting(0, "Random seed.", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        given = {name: getattr(self, name) for name in ("accurate", "robust", "data", "norm", "eps")}
        for name, value in given.items() if self.size == "smoke" else ():
            checks.require(value is None, name, "be left out for the smoke size, which has its own", value)
        for name in ("accurate", "robust") if self.size == "full" else ():
            checks.require(given[name] is not None, name, "be given for the full size", None)
        checks.require(self.norm != "l2" or self.eps is not None, "eps", "be given for the norm l2", None)

    def threat(self) -> Threat:
        """The threat of the study."""
        return Threat(self.norm or "linf", self.eps or (DIGITS_EPS if self.size == "smoke" else 8 / 255))


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
    for part in parts:
        checks.one_of("part", part, study.parts)
    size, threat, folder = study.sizes[options.size], options.threat(), Path(out or Path("runs") / name)
    conditions = Conditions(threat, resolve(device), options.seed, size.batch_size)
    identity: dict[str, Any] = {"command": "reproduce", "study": name, "size": options.size, "seed": options.seed,
                                "threat": threat.to_dict()}
    recorded = {**conditions.environment(), **({} if command is None else {"command": command})}
    pair = None
    if options.accurate is not None and options.robust is not None:
        # Loaded before the folder is created: an unknown name leaves no folder behind.
        pair = load_pair(options.accurate, options.robust, options.data or "cifar10", options.data_dir,
                         models.LoadOptions(allow_code=options.allow_code))
        identity |= {"models": {side: models.identity(model) for side, model in pair.models.items()},
                     "data": pair.test.describe()}
        recorded |= {"references": list(pair.references)}
    with nothing_left_on_refusal(folder), single_thread() if pair is None else nullcontext():
        run = Run(folder, identity, recorded)
        return study(run, pair or train_digits_pair(folder / "bases", conditions), size, conditions).run(parts)
