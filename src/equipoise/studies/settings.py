"""Settings of the studies, which are also the options of `equipoise reproduce`, and of
`compare-rules`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from equipoise.certification.certificate import MAX_SIGMAS
from equipoise.core import checks
from equipoise.core.settings import Settings, setting
from equipoise.core.threat import Threat
from equipoise.data import Dataset, DataSettings
from equipoise.data.sampling import SAMPLES
from equipoise.models import LoadOptions

DIGITS_EPS = 0.12  # in [0, 1] pixels
COUNT = 1000
TOLERANCE = 0.005  # of certificates in the SmoothMix study: the ACR stays within 0.002 of that of all samples
# Settings that only some studies have.
OWN_SETTINGS = (
    "sigma",
    "samples",
    "empirical",
    "method",
    "tolerance",
    "configs",
    "join",
    "attack",
    "part_count",
    "gate_epochs",
)
PAIR_SETTINGS = (
    "accurate",
    "robust",
    "count",
    "sample",
    "norm",
    "eps",
)  # of studies about two given models


@dataclass(frozen=True, kw_only=True)
class StudySettings(Settings):
    """What a study runs on; the fields are options of `equipoise reproduce`."""

    size: str = setting(
        "smoke",
        "smoke (digits, a few minutes) or full (any two models; smoothmix: its recipes).",
        among=("smoke", "full"),
    )
    accurate: str | None = setting(None, "Reference of the accurate model, for full.")
    robust: str | list[str] | None = setting(  # noqa: RUF009
        None,
        "Reference of the robust model, for full; may be repeated where several are compared "
        "(mixing-classifiers, mixednuts).",
    )
    sigma: str | float | list[float] | None = setting(  # noqa: RUF009
        None,
        "Standard deviation of the noise with which the robust models are smoothed, in [0, 1] pixels; several by "
        "commas: one per model, or all for the one model (full mixing-classifiers). For smoothmix: only these.",
    )
    samples: int | None = setting(
        None,
        "Noisy copies per image, 100000 if not given (full mixing-classifiers).",
        least=100,
        most=checks.MAX_COUNT,
    )
    empirical: str | None = setting(
        None,
        "Reference of an empirically robust model, whose local Lipschitz constants "
        "are also estimated (full mixing-classifiers).",
    )
    method: str | None = setting(
        None, "Only these training methods, by commas, e.g. gaussian,smoothmix (smoothmix)."
    )
    tolerance: float | None = setting(
        None,
        "Stop sampling when a radius is within this of what all samples are "
        f"expected to give; for full {TOLERANCE:g} if not given (smoothmix).",
        positive=True,
    )
    configs: Path | None = setting(  # noqa: RUF009
        None, "Folder of the recipes, configs if not given (full smoothmix)."
    )
    join: str | list[str] | None = setting(  # noqa: RUF009
        None,
        "Run folder of the same study with another seed, whose certificates are averaged with those of this one; "
        "may be repeated. Nothing is trained unless a part is named (smoothmix).",
    )
    attack: str | None = setting(
        None,
        "Attack on test images, from which the adaptive lists of mixtures are made: "
        "standard (AutoAttack) if not given, or fast, which takes less time (full "
        "mixednuts).",
        among=("fast", "standard"),
    )
    part_count: int | None = setting(
        None,
        f"Images to evaluate at most in every part but the main comparison; {COUNT} "
        "if not given (full mixednuts).",
        least=1,
        most=checks.MAX_COUNT,
    )
    gate_epochs: int | None = setting(
        None,
        "Passes over the training images for every gate but those of the ablation, "
        "which have 1; 10 if not given (full adaptive-smoothing).",
        least=1,
    )
    data: str | None = setting(
        None,
        "Data set of both models, for full; cifar10 if not given. For smoothmix at smoke "
        "size: mnist or digits; mnist if its files are there.",
    )
    count: int | None = setting(
        None,
        f"Images to evaluate, for full; {COUNT} if not given. As many from the end of "
        "the test set are held out.",
        least=1,
        most=checks.MAX_COUNT,
    )
    sample: str | None = setting(
        None,
        "Order in which they are taken, for full: first (that of the split), random or "
        "stratified (class shares of the split); if not given, stratified for folder: and "
        "npz:, else first.",
        among=SAMPLES,
    )
    data_dir: Path | None = setting(None, "Folder of the data set.")  # noqa: RUF009
    norm: str | None = setting(
        None,
        "Norm of the perturbation, linf or l2, for full; linf if not given.",
        among=("linf", "l2"),
    )
    eps: float | None = setting(
        None, "Radius, for full; 8/255 in linf if not given.", fraction=True, positive=True
    )
    allow_code: bool = setting(
        False, "Run the code that a mixture folder names; only for folders whose author you trust."
    )
    seed: int = setting(0, "Random seed.", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        for reference in self.robust_references:
            checks.instance("robust", reference, str, "be a model reference")
        for folder in self.join if isinstance(self.join, list) else ():
            checks.instance("join", folder, str, "be a run folder")
        checks.require(
            self.norm != "l2" or self.eps is not None, "eps", "be given for the norm l2", None
        )

    @property
    def robust_references(self) -> tuple[str, ...]:
        """The references of the robust models."""
        return (self.robust,) if isinstance(self.robust, str) else tuple(self.robust or ())

    @property
    def joined_folders(self) -> tuple[Path, ...]:
        """The run folders of other seeds."""
        return tuple(map(Path, [self.join] if isinstance(self.join, str) else self.join or ()))

    @property
    def load_options(self) -> LoadOptions:
        """How references are loaded."""
        return LoadOptions(allow_code=self.allow_code)

    def sigmas(self) -> list[float]:
        """The noise of every smoothed model."""
        checks.require(self.sigma is not None, "sigma", "be given for the full size", None)
        return checks.fractions("sigma", self.sigma, most=MAX_SIGMAS)

    def threat(self) -> Threat:
        """The threat of the study."""
        return Threat(
            self.norm or "linf", self.eps or (DIGITS_EPS if self.size == "smoke" else 8 / 255)
        )

    def check_for(
        self, study: str, own: tuple[str, ...], *, uses_pair: bool, takes_several_robust: bool
    ) -> None:
        """Refuse settings of other studies, and too few for the full size.

        `own` are those of :data:`OWN_SETTINGS` that the study has; `uses_pair`: whether it is about
        given models; `takes_several_robust`: whether it compares several robust ones.
        """
        foreign = [
            *(name for name in OWN_SETTINGS if name not in own),
            *(() if uses_pair else PAIR_SETTINGS),
            *(["data"] if not uses_pair and self.size == "full" else []),
        ]
        self._refuse(foreign, f"the study {study}")
        if uses_pair:
            if self.size == "smoke":
                self._refuse(
                    (*PAIR_SETTINGS, *OWN_SETTINGS, "data"), "the smoke size, which has its own"
                )
            else:
                for name in ("accurate", "robust"):
                    checks.require(
                        bool(getattr(self, name)), name, "be given for the full size", None
                    )
            checks.require(
                len(self.robust_references) <= 1 or takes_several_robust,
                "robust",
                f"be one model for the study {study}",
                list(self.robust_references),
            )

    def _refuse(self, names: Iterable[str], reason: str) -> None:
        for name in names:
            value = getattr(self, name)
            checks.require(value is None or value == [], name, f"be left out for {reason}", value)


@dataclass(frozen=True, kw_only=True)
class FitImages(Settings):
    """Which images are fitted on, of the data that are evaluated on; the fields are options of
    `compare-rules`."""

    fit_start: int | None = setting(
        None, "First fitting image; those after the evaluated ones if not given.", least=0
    )
    fit_count: int = setting(256, "Number of fitting images.", least=1)

    def load(self, data: DataSettings, evaluated: Dataset) -> Dataset:
        """The fitting images, where `data` are the settings of the evaluated ones."""
        after = data.start + (len(evaluated) if data.count is None else data.count)
        start = after if self.fit_start is None else self.fit_start
        return replace(data, start=start, count=self.fit_count, every=1).load()
