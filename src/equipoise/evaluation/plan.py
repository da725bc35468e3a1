"""Which models an evaluation measures under which attacks."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from equipoise.attacks import ATTACKS, Attack, Clean, Suite, make_attack, standard
from equipoise.core import aggregation, checks, format
from equipoise.core.promises import Target
from equipoise.core.records import Run
from equipoise.core.results import Cost
from equipoise.core.threat import Threat
from equipoise.data import Dataset, pixels
from equipoise.evaluation.adaptive import KINDS, OWN_GRADIENTS, adaptive_attacks, with_logits
from equipoise.evaluation.audit import AUDITED, COUNT
from equipoise.evaluation.cost import costs
from equipoise.evaluation.job import AuditPlan, Conditions, Job
from equipoise.evaluation.points import PointRecorder
from equipoise.evaluation.random_search import to_random_search
from equipoise.mixing import MixedClassifier
from equipoise.models import full_reference_of, has_gradients, identity

SOURCES = {"std": "accurate", "rob": "robust", "mix": None}
Attacks = str | Attack | Sequence[str | Attack]
Versions = Callable[
    [str, Attack], Mapping[str, Attack]
]  # name in rows and attack → versions of it for one model


def select_attacks(given: Attacks, norm: str, **settings: Any) -> dict[str, Attack]:
    """The attacks by their name in rows: one or several, by name (as text with commas or a list) or
    as objects.

    `norm` is that of the threat. A setting such as `steps=50` is for those attacks by name that
    have it; None is "not given".
    """
    kind = "be the name of an attack, an Attack (attacks.from_callable makes one of a function), or several of them"
    checks.instance("attack", given, (str, Attack, list, tuple), kind)
    listed = (
        [name.strip() for name in given.split(",")]
        if isinstance(given, str)
        else ([given] if isinstance(given, Attack) else list(given))
    )
    listed = [
        item
        for place, item in enumerate(listed)
        if not isinstance(item, str) or item not in listed[:place]
    ]
    checks.require(len(listed) > 0, "attack", "name at least one attack", [])
    names = [
        item if isinstance(item, str) else checks.instance("attack", item, Attack, kind).name
        for item in listed
    ]
    checks.require(len(set(names)) == len(names), "attack", "name every attack once", names)
    values = {key: value for key, value in settings.items() if value is not None}
    if len(listed) == 1 and isinstance(listed[0], str):
        return {names[0]: make_attack(names[0], norm=norm, **settings)}
    own = {
        item: {key: value for key, value in values.items() if key in _settings_of(item)}
        for item in listed
        if isinstance(item, str)
    }
    for key, value in values.items():
        checks.require(
            any(key in used for used in own.values()),
            key,
            "be left out beside an attack object, which has its own"
            if not own
            else f"be left out for the attacks {', '.join(names)}, none of which has such a setting",
            value,
        )
    return {
        name: make_attack(item, norm=norm, **own[item]) if isinstance(item, str) else item
        for name, item in zip(names, listed, strict=True)
    }


def _settings_of(name: str) -> set[str]:
    return {
        *inspect.signature(ATTACKS.get_entry(name)).parameters,
        "eot",
        "repeats",
    }  # every attack has these two


class EvaluationPlan:
    """The jobs of an evaluation, and the pairs of models that are compared; a mixture comes with
    its two bases, and several mixtures of one pair come with them once.

    Args:
        named: models by their name in rows.
        data: the images.
        attacks: by their name in rows.
        norm: of the threat.
        audit: images in the sample of the audit; None for the default number.
        source, adaptive: those of :class:`~equipoise.evaluation.EvaluationSettings`.
        stand_in: differentiable model in place of an accurate base without gradients.
        device: where models are tried.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Module],
        data: Dataset,
        attacks: Mapping[str, Attack],
        *,
        norm: str,
        audit: int | None,
        source: str,
        adaptive: Sequence[str],
        stand_in: nn.Module | None,
        device: torch.device,
    ) -> None:
        self.data, self.attacks, self.stand_in, self.device = data, attacks, stand_in, device
        self.norm = norm
        self.source, self.adaptive = SOURCES[source], adaptive
        listed = (
            f"attacks {', '.join(attacks)}" if len(attacks) > 1 else f"attack {next(iter(attacks))}"
        )
        self.audited = {
            name for name, attack in attacks.items() if name == AUDITED and attack.repeats is None
        }
        checks.require(
            bool(self.audited) or not audit,
            "audit",
            "be left out where passes are repeated"
            if AUDITED in attacks
            else f"be left out for the {listed}: only {AUDITED} is audited",
            audit,
        )
        self.audit = COUNT if audit is None else audit
        self.jobs: list[Job] = []
        self.pairs: list[tuple[str, str]] = []
        self.mixtures: dict[str, MixedClassifier] = {}
        self.robust: dict[str, nn.Module] = {}
        one_pair = _are_of_one_pair(list(named.values()))
        for name, model in named.items():
            if isinstance(model, MixedClassifier):
                if len(named) == 1:
                    self._add_mixture("", "mixed", model)
                elif one_pair:  # which is measured once
                    self._add_mixture("", name, model)
                else:
                    self._add_mixture(f"{name} ", f"{name} mixed", model)
            else:
                self.robust[name] = model
                self._add_jobs(
                    name, model, lambda name, attack: {name: attack}, not has_gradients(model)
                )
        checks.require(
            source == "mix" or bool(self.pairs),
            "source",
            "be mix where no model is a mixture",
            source,
        )

    def _add_mixture(self, prefix: str, mixed: str, model: MixedClassifier) -> None:
        accurate, robust = (f"{prefix}{side}" for side in ("accurate", "robust"))
        self.pairs += [(mixed, robust), (mixed, accurate)]
        self.mixtures[mixed], self.robust[robust] = model, model.robust
        image = pixels(self.data.images[:1].to(self.device))
        measured = {job.name for job in self.jobs}
        for name, base in ((accurate, model.accurate), (robust, model.robust)):
            if name in measured:
                continue
            with_scores = with_logits(name, base, self.data.num_classes, image)
            # A model that returns classes has no gradients: they come from a stand-in or from the
            # robust model. One that computes outside of torch is searched at random without a
            # stand-in.
            surrogate = (
                self.stand_in
                if not has_gradients(base)
                else (None if with_scores is base else self.stand_in or model.robust)
            )
            self._add_jobs(
                name,
                with_scores,
                partial(_with_surrogate, surrogate),
                surrogate is None and not has_gradients(base),
            )
        source = None if self.source is None else getattr(model, self.source)

        def versions(name: str, attack: Attack) -> dict[str, Attack]:
            kinds = [kind for kind in self.adaptive if kind != OWN_GRADIENTS]
            adaptive = adaptive_attacks(model, attack, kinds, self.stand_in)
            mark = f"-{name}" if len(self.attacks) > 1 else ""
            # The adaptive version of a suite includes the mixture's own gradients.
            replaced = (
                KINDS["surrogate"] in adaptive
                and isinstance(attack, Suite)
                and source is None
                and OWN_GRADIENTS not in self.adaptive
            )
            own = {} if replaced else _with_surrogate(source, name, attack)
            return {**own, **{f"{key}{mark}": other for key, other in adaptive.items()}}

        self._add_jobs(mixed, model, versions, not has_gradients(model.robust))
        if (
            has_gradients(model.robust)
            and not has_gradients(model.accurate)
            and self.stand_in is None
        ):
            # Gradients are those of the robust side: a random search sees the other one as well.
            self.jobs += [
                Job(mixed, model, key, own)
                for key, own in to_random_search(self.attacks).items()
                if key not in self.attacks
            ]

    def _add_jobs(
        self, name: str, model: nn.Module, versions: Versions, by_random_search: bool
    ) -> None:
        """Add the clean images and the versions of every attack for this model, or a random search
        in their place.

        Each is audited by the same version of the stronger attack, except for an attack that
        adaptive versions follow: it is known to be weak on a mixture.
        """
        repeats = max(
            (attack.repeats for attack in self.attacks.values() if attack.repeats is not None),
            default=None,
        )
        self.jobs.append(Job(name, model, aggregation.CLEAN, Clean(repeats=repeats)))
        if by_random_search:
            self.jobs += [
                Job(name, model, key, own) for key, own in to_random_search(self.attacks).items()
            ]
            return
        for attack_name, attack in self.attacks.items():
            audits = {}
            if self.audit and attack_name in self.audited:
                stronger = versions(attack_name, standard(norm=self.norm))
                audits = {
                    key: AuditPlan("standard", own, self.audit)
                    for key, own in stronger.items()
                    if key != attack_name or len(stronger) == 1
                }
            self.jobs += [
                Job(name, model, key, own, audit=audits.get(key))
                for key, own in versions(attack_name, attack).items()
            ]

    def overlap(self) -> dict[str, tuple[str, ...]]:
        """Images that a mixture was fitted on, with a warning: its accuracy on them is
        overstated."""
        shared = {
            name: both
            for name, mixture in self.mixtures.items()
            if mixture.provenance is not None
            and (both := tuple(mixture.provenance.overlap(self.data)))
        }
        for name, both in shared.items():
            warnings.warn(format.overlap(name, both), checks.EquipoiseWarning, stacklevel=4)
        return shared

    def methods(self) -> dict[str, str]:
        """The rule that chose the map and alpha of every mixture, by its name in reports."""
        return {name: mixture.method for name, mixture in self.mixtures.items()}

    def promised(self, threat: Threat, fitted_on: Container[str]) -> dict[tuple[str, str], Target]:
        """What the fits of mixtures promised, by the names of the mixture and its robust base.

        A promise is about attacks of its own threat or weaker ones, and images that the mixture was
        not `fitted_on`.
        """
        promised = {}
        for name, robust in self.pairs:
            mixture = self.mixtures[name]
            known = mixture.provenance
            if (
                known is None
                or known.target is None
                or known.threat is None
                or robust not in self.robust
                or name in fitted_on
                or mixture.alpha == 1
            ):
                continue
            if known.threat.norm == threat.norm and threat.eps <= known.threat.eps + 1e-12:
                promised[name, robust] = known.target
        return promised

    def points(self, run: Run, conditions: Conditions) -> PointRecorder | None:
        """What records the attacked points; with a mixture beside other models, it is the one that
        is shown."""
        if len(self.mixtures) != 1:
            return PointRecorder(run, self.data, conditions, self.jobs)
        mixed, mixture = next(iter(self.mixtures.items()))
        (_, robust), (_, accurate) = self.pairs
        return PointRecorder(
            run, self.data, conditions, self.jobs, mixture, (accurate, robust, mixed)
        )

    def cost(self, conditions: Conditions) -> list[Cost]:
        """Cost of a prediction, if there is one mixture."""
        if len(self.mixtures) != 1:
            return []
        mixture = next(iter(self.mixtures.values())).to(conditions.device)
        return costs(mixture, self.data, conditions.device, conditions.batch_size)


def _are_of_one_pair(models: Sequence[nn.Module]) -> bool:
    """Whether all models are mixtures of the same two bases."""
    return all(
        isinstance(model, MixedClassifier)
        and isinstance(models[0], MixedClassifier)
        and _is_same(model.accurate, models[0].accurate)
        and _is_same(model.robust, models[0].robust)
        for model in models
    )


def _is_same(model: nn.Module, other: nn.Module) -> bool:
    """Whether two models are one, or were loaded from the same place."""
    if model is other:
        return True
    ours, theirs = full_reference_of(model), full_reference_of(other)
    if ours is None or theirs is None:
        return False
    # Mixture folders refer to their bases by paths from where they are.
    same_place = os.path.normpath(ours) == os.path.normpath(theirs)
    return same_place and identity(model) == identity(other)


def _with_surrogate(surrogate: nn.Module | None, name: str, attack: Attack) -> dict[str, Attack]:
    return {name: replace(attack, surrogate=surrogate)}
