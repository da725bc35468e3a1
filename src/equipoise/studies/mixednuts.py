"""The study of MixedNUTS [Bai2024nuts] on any two models: Figures 3 to 9, Tables 1 and 4 to 10, and
appendix D.

Several robust models are compared on one plot, as in Figures 5 and 9 of [Bai2024].
Every mixture is fitted on held-out images by `fit --rule paper`, in a run folder of its own under
`fits`. Test images are attacked by the adaptive list of a mixture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise import fitting
from equipoise.attacks import Apgd, Attack, Clean, Suite, TargetedApgd, make_attack
from equipoise.core.format import percent
from equipoise.core.modes import inference
from equipoise.core.records import Run
from equipoise.core.results import read_summary
from equipoise.core.rows import Row
from equipoise.core.text import slug
from equipoise.data import Dataset, pixels
from equipoise.evaluation import Conditions, Job
from equipoise.evaluation.adaptive import ADAPTIVE_VERSION, adaptive_attacks
from equipoise.evaluation.cost import costs
from equipoise.fitting.paper import PUBLISHED, published_for
from equipoise.fitting.result import Fit
from equipoise.mixing import LogitMap, MixedClassifier
from equipoise.mixing.formula import alpha_of_accuracy
from equipoise.mixing.logit_maps import layer_norm_map
from equipoise.studies.mixednuts_models import (
    RobustModel,
    RobustModels,
    load_models,
    train_digits_models,
)
from equipoise.studies.overview import Requirements
from equipoise.studies.settings import COUNT, StudySettings
from equipoise.studies.study import (
    ANY_DATA,
    GPU,
    PAIR,
    Study,
    jobs_for,
    require_part,
    smoke_requirements,
)

MIXEDNUTS, PLAIN, SWITCH, MAPPED = "MixedNUTS", "plain mixing", "confidence switch", "mapped robust"
FITS = "fits"
ATTACK = "adaptive"  # name in rows, followed by that of the attack that the lists were made from
STANDARD = "standard"


@dataclass(frozen=True)
class NutsStudySize:
    """How much is computed; the defaults are the full size."""

    attack: Attack | str = STANDARD  # of test images, or its name
    steps: int = 50  # of the attack of a fit
    targets: int = 9
    beta: float | None = None  # that of the paper if None
    betas: tuple[float, ...] = (
        1.0,
        0.96,
        0.93,
        0.8,
    )  # of the curve; at β = 0 the accurate model decides
    alphas: tuple[float, ...] = (0.5, 0.7, 0.8, 0.9)
    robust_betas: tuple[float, ...] = (0.96, 0.8)  # β and alpha of mixtures with every robust model
    robust_alphas: tuple[float, ...] = (0.5, 0.7, 0.9)
    counts: tuple[int, ...] = (100, 300, 1000)  # fitting images
    part_images: int = COUNT  # evaluated at most in every part but the main comparison
    batch_size: int = 500


SMOKE = NutsStudySize(
    attack=Suite((Apgd("ce", 10), TargetedApgd(10, (1, 2))), name="short"),
    steps=8,
    targets=2,
    beta=0.95,
    betas=(1.0, 0.93, 0.8),
    alphas=(0.6, 0.8),
    robust_betas=(0.93,),
    robust_alphas=(0.6, 0.8),
    counts=(50, 100, 200),
    part_images=60,
    batch_size=120,
)


class MixedNutsStudy(Study):
    """MixedNUTS beside its bases, plain mixing and our confidence switch, and the paper's
    ablations."""

    name = "mixednuts"
    paper = (
        "MixedNUTS: training-free accuracy-robustness balance via nonlinearly mixed classifiers [Bai2024nuts], "
        "Figures 3 to 9, Tables 1 and 4 to 10, appendix D"
    )
    requirements: ClassVar = {
        "smoke": smoke_requirements("3 minutes"),
        "full": Requirements(
            data=ANY_DATA,
            models=f"{PAIR}; --robust may be repeated: models of other kinds of "
            "training are compared with the first",
            device=GPU,
            time="by part below, with --attack "
            "fast and --part-count 500, on an H200 that other jobs used too; fit includes the main "
            "comparison",
        ),
    }
    minutes: ClassVar = {
        "fit": 3.2,
        "margins": 0.3,
        "clamps": 1.2,
        "counts": 2.8,
        "temperature": 1.6,
        "black-box": 1.1,
        "objective": 1.1,
    }
    own_settings = ("attack", "part_count")
    takes_several_robust = True
    sizes: ClassVar = {"smoke": SMOKE, "full": NutsStudySize()}
    compared = ((MIXEDNUTS, "robust"), (MIXEDNUTS, PLAIN))
    pair: RobustModels

    def __init__(
        self, main_run: Run, pair: RobustModels, size: NutsStudySize, conditions: Conditions
    ) -> None:
        super().__init__(main_run, pair, size, conditions)
        self.pair, self.size = pair, size

    @classmethod
    def size_for(cls, settings: StudySettings) -> NutsStudySize:
        """The size, with the attack and the images of a part that were given."""
        size: NutsStudySize = super().size_for(settings)
        return replace(
            size,
            attack=settings.attack or size.attack,
            part_images=settings.part_count or size.part_images,
        )

    @classmethod
    def identity(cls, settings: StudySettings) -> dict[str, Any]:
        """That of any study, and at full size the attack."""
        own = {"attack": settings.attack or STANDARD} if settings.size == "full" else {}
        return {**super().identity(settings), "adaptive_attacks": ADAPTIVE_VERSION, **own}

    @classmethod
    def load_models(cls, settings: StudySettings) -> RobustModels:
        """The accurate model and the robust ones that the settings name."""
        return load_models(settings)

    @classmethod
    def train_models(cls, folder: Path, conditions: Conditions) -> RobustModels:
        """Small networks on digits."""
        return train_digits_models(folder, conditions)

    def fit(
        self, name: str, *, data: Dataset | None = None, robust: str | None = None, **settings: Any
    ) -> Fit:
        """Fit a mixture on held-out images in a folder of its own, or read the one that an earlier
        run fitted."""
        if settings.get("lose_at_most") is None and settings.get("beta") is None:
            # One target for all rules, of which only MixedNUTS would take the paper's by itself.
            published = PUBLISHED[published_for(self.pair.held_out.num_classes)].beta
            settings["beta"] = published if self.size.beta is None else self.size.beta
        accurate, own = self.pair.references
        return fitting.fit(
            accurate,
            own if robust is None else robust,
            self.pair.held_out if data is None else data,
            threat=self.conditions.threat,
            out=self.folder / FITS / slug(name),
            device=self.conditions.device,
            batch_size=self.conditions.batch_size,
            seed=self.conditions.seed,
            load_options=self.pair.load_options,
            **{
                "rule": "paper",
                "steps": self.size.steps,
                "targets": self.size.targets,
                "pool": 1,
                **settings,
            },
        )

    @cached_property
    def attack(self) -> Attack:
        """The attack on test images."""
        given = self.size.attack
        return (
            make_attack(given, norm=self.conditions.threat.norm)
            if isinstance(given, str)
            else given
        )

    @property
    def attack_name(self) -> str:
        """The name of the attack in rows, `adaptive-fast` for example."""
        return f"{ATTACK}-{self.size.attack}" if isinstance(self.size.attack, str) else ATTACK

    def jobs(self, models: Mapping[str, nn.Module]) -> list[Job]:
        """Each model on clean images and under the attack, for a mixture its adaptive version."""
        jobs = []
        for name, model in models.items():
            own = self.attack
            if isinstance(model, MixedClassifier):
                own = adaptive_attacks(model, own).get("adaptive", own)
            jobs += jobs_for({name: model.eval()}, {"clean": Clean(), self.attack_name: own})
        return jobs

    def fit_main(self) -> None:
        """Algorithm 1 at the paper's β, its objective recomputed for the mapped model [Fig. 6 and
        9, Table 6, D.9]."""
        self.fit(MIXEDNUTS)
        self.fit(SWITCH, rule="switch", pool=2)

    @cached_property
    def mixednuts(self) -> MixedClassifier:
        """The mixture of :meth:`fit_main`."""
        require_part((self.folder / FITS / slug(MIXEDNUTS) / "summary.json").exists(), "fit")
        return self.fit(MIXEDNUTS).mixture

    def main_jobs(self) -> list[Job]:
        """Bases, plain mixing of equal clean accuracy, MixedNUTS and the switch [Fig. 5, Tables 1,
        4 and 5]."""
        jobs = self.jobs(self.pair.bases)
        if not (self.folder / FITS / slug(SWITCH) / "summary.json").exists():
            return jobs
        mixture = self.mixednuts
        assert mixture.logit_map is not None
        mapped = nn.Sequential(self.pair.robust, mixture.logit_map)
        jobs += self.jobs({MAPPED: mapped})
        plain = MixedClassifier(self.pair.accurate, self.pair.robust, self.equal_alpha(None, 1.0))
        switch = self.fit(SWITCH, rule="switch", pool=2).mixture
        return jobs + self.jobs({PLAIN: plain, MIXEDNUTS: mixture, SWITCH: switch})

    def main_sections(self, rows: Sequence[Row]) -> dict[str, Any]:
        """The cost of MixedNUTS [Table 5] and whether it helps, once it is fitted."""
        folder, place = self.folder / FITS / slug(MIXEDNUTS), self.conditions
        if not (folder / "summary.json").exists():
            return {}
        fit = read_summary(folder).fit
        notes = (
            ()
            if fit is None or fit.helped
            else (
                f"{MIXEDNUTS} at this target does not help: on its fitting images {percent(fit.clean)}, the robust model "
                f"{percent(fit.robust_clean)}; equipoise open {folder} shows why",
            )
        )
        return {
            "costs": tuple(costs(self.mixednuts, self.test, place.device, place.batch_size)),
            "notes": notes,
        }

    def equal_alpha(self, logit_map: LogitMap | None, temperature: float) -> float:
        """The largest alpha at which a mixture of the pair is as accurate as MixedNUTS on clean
        held-out images.

        The accurate side has a temperature > 0. If none is as accurate, the most accurate.
        """
        target, mixture = (
            self._clean_accuracy(self.mixednuts),
            self._mixture(0.5, logit_map, temperature),
        )
        with torch.no_grad():
            g, _, log_p_robust, _ = mixture.sides(*self._held_out_outputs)
        labels = self.pair.held_out.labels.to(self.conditions.device)
        return alpha_of_accuracy(F.log_softmax(g, dim=1), log_p_robust, labels, target)

    def _mixture(
        self, alpha: float, logit_map: LogitMap | None, temperature: float
    ) -> MixedClassifier:
        return (
            MixedClassifier(
                self.pair.accurate,
                self.pair.robust,
                alpha,
                logit_map=logit_map,
                accurate_temperature=temperature,
            )
            .to(self.conditions.device)
            .eval()
        )

    @torch.no_grad()
    def _clean_accuracy(self, mixture: MixedClassifier) -> float:
        outputs, labels = (
            self._held_out_outputs,
            self.pair.held_out.labels.to(self.conditions.device),
        )
        return float((mixture.from_base_outputs(*outputs).argmax(dim=1) == labels).float().mean())

    @cached_property
    def _held_out_outputs(self) -> tuple[Tensor, ...]:
        """Logits of both bases on the held-out images."""
        accurate, robust = self.pair.accurate, self.pair.robust
        parts = []
        with inference(accurate, robust), torch.no_grad():
            for start in range(0, len(self.pair.held_out), self.conditions.batch_size):
                x = pixels(
                    self.pair.held_out.images[start : start + self.conditions.batch_size].to(
                        self.conditions.device
                    )
                )
                parts.append((accurate(x), robust(x)))
        return tuple(torch.cat(side) for side in zip(*parts, strict=True))

    def _measure_first(
        self, part: str, models: Mapping[str, nn.Module], data: Dataset | None = None
    ) -> None:
        """Measure models in the folder of a part, on the first test images or some other images."""
        images = self.test if data is None else data
        count = min(self.size.part_images, len(images))
        self.measure_part(part, self.jobs(models), images.slice(0, count))

    def compare_margins(self) -> None:
        """Margins of robust models of several kinds of training, layer-normed, clean and attacked
        [Figure 7]."""
        normed = layer_norm_map().to(self.conditions.device)
        self._measure_first(
            "margins",
            {item.name: nn.Sequential(item.model, normed) for item in self.pair.all_robust},
        )

    def compare_curves(self) -> None:
        """Attacked against clean accuracy: MixedNUTS at several β, plain mixing at several alphas,
        and the robust models, such as TRADES with several weights [Figure 8].
        """
        named = self._mixtures_with(self.pair.all_robust[0], self.size.betas, self.size.alphas)
        self._measure_first("curves", {**self.pair.models, **named})

    def compare_robust_models(self) -> None:
        """Every robust model, alone and in mixtures with the accurate one, on one plot [Bai2024,
        Figures 5 and 9]."""
        named: dict[str, nn.Module] = {"accurate": self.pair.accurate}
        for item in self.pair.all_robust:
            mixtures = self._mixtures_with(
                item, self.size.robust_betas, self.size.robust_alphas, f" with {item.name}"
            )
            named |= {item.name: item.model, **mixtures}
        self._measure_first("robust-models", named)

    def _mixtures_with(
        self, robust: RobustModel, betas: Sequence[float], alphas: Sequence[float], label: str = ""
    ) -> dict[str, nn.Module]:
        """MixedNUTS at several β and plain mixing at several alphas with a robust model, by their
        names in rows."""
        mixed = {
            f"{MIXEDNUTS}{label}, beta {beta:g}": self.fit(
                f"beta {beta:g}{label}", beta=beta, robust=robust.reference
            ).mixture
            for beta in betas
        }
        plain = {
            f"{PLAIN}{label}, alpha {alpha:g}": MixedClassifier(
                self.pair.accurate, robust.model, alpha
            )
            for alpha in alphas
        }
        return {**mixed, **plain}

    def compare_clamps(self) -> None:
        """The clamping functions of the map [Table 7]: what Algorithm 1 returns with each."""
        for clamp in ("linear", "relu", "gelu"):
            self.fit(f"clamp {clamp}", clamp=clamp)

    def compare_counts(self) -> None:
        """Numbers of fitting images, and accuracies on images that were seen by Algorithm 1 or not
        [Tables 8 and 9]."""
        held_out = self.pair.held_out
        counts = sorted({min(count, len(held_out)) for count in self.size.counts})
        named = {
            f"{count} images": self.fit(f"count {count}", data=held_out.slice(0, count)).mixture
            for count in counts
        }
        self._measure_first("counts", named)
        self._measure_first("seen", {MIXEDNUTS: self.mixednuts}, held_out)

    def compare_temperatures(self) -> None:
        """The temperature of the accurate model, at equal clean accuracy on held-out images [Table
        10, D.4].

        At temperature 0 this is MixedNUTS itself.
        """
        logit_map = self.mixednuts.logit_map
        named = {
            f"temperature {temperature:g}": self._mixture(
                self.equal_alpha(logit_map, temperature), logit_map, temperature
            )
            for temperature in (1.0, 0.5)
        }
        self._measure_first("temperature", {**named, "temperature 0": self.mixednuts})

    def compare_black_box(self) -> None:
        """Algorithm 1 without gradients of the robust model: random search, and the map of another
        model [D.5]."""
        named = {"random search": self.fit("random search", gradient_free=True).mixture}
        for item in self.pair.further[:1]:
            other = self.fit(f"map of {item.name}", robust=item.reference)
            folder = self.folder / FITS / slug(f"map of {item.name}")
            assert other.mixture.logit_map is not None
            named[f"map of {item.name}"] = self.fit(
                f"transferred from {item.name}", like=f"mixture:{folder}"
            ).mixture
        self._measure_first("black-box", named)

    def compare_objectives(self) -> None:
        """The objective that counts only errors that the accurate model corrects [D.8.3]."""
        self._measure_first(
            "objective",
            {"conditional": self.fit("objective conditional", objective="conditional").mixture},
        )

    parts: ClassVar = {
        "fit": fit_main,
        "margins": compare_margins,
        "curves": compare_curves,
        "robust-models": compare_robust_models,
        "clamps": compare_clamps,
        "counts": compare_counts,
        "temperature": compare_temperatures,
        "black-box": compare_black_box,
        "objective": compare_objectives,
    }
