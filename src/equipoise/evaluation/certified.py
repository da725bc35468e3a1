"""Certificates over a data set: rows, appended as they come, and what they add up to."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from equipoise import __version__
from equipoise.certification import ABSTAIN, Certificate, Engine, SmoothingPlan, certify, mixture, smooth
from equipoise.core import checks, device, progress, rng
from equipoise.core.modes import inference
from equipoise.core.records import Row, Run, key_of, rows_of
from equipoise.data import Dataset, pixels
from equipoise.evaluation.certified_summary import ATTACK, down, results_of
from equipoise.evaluation.evaluation import usable
from equipoise.models import model_identity

_POOL = {"cpu": 100_000, "cuda": 10_000_000}  # samples between two writes


@dataclass(frozen=True)
class CertificationJob:
    """A base classifier to be smoothed, the accurate one it is mixed with, if any, and a plan of its own, if any."""

    name: str
    model: nn.Module
    accurate: nn.Module | None = None
    plan: SmoothingPlan | None = None


@dataclass(frozen=True)
class CertificationConditions:
    """What is the same for every subject of a certification."""

    plan: SmoothingPlan
    device: torch.device
    seed: int = 0
    batch_size: int | None = None
    precision: str = "auto"
    compiled: bool = False

    def __post_init__(self) -> None:
        device.usable(self.precision, self.device)

    def of(self, subject: CertificationJob) -> CertificationConditions:
        """The same with the subject's own plan."""
        return self if subject.plan is None else replace(self, plan=subject.plan)

    def facts(self) -> dict[str, Any]:
        """What may differ between two sittings of the same run."""
        return {"batch_size": Engine(self.batch_size).batch_on(self.device), "compiled": self.compiled,
                "device": str(self.device), "equipoise": __version__, "torch": torch.__version__,
                "python": platform.python_version()}


class AlphaChoice(Protocol):
    """What fixes the alpha of every mixture before anything is certified."""

    def facts(self) -> dict[str, Any]:
        """What it is, for the identity of the run."""

    def __call__(self, subjects: Sequence[CertificationJob], run: Run, terms: CertificationConditions) -> list[CertificationJob]:
        """The subjects with their plans, less those that cannot do what is wanted."""

    def told(self, subjects: Sequence[CertificationJob], rows: Sequence[Row], terms: CertificationConditions) -> dict[str, Any]:
        """What was chosen and what came of it, for `summary.json`."""


class CertificateProbe(Protocol):
    """Something else to be done with certified images."""

    @property
    def name(self) -> str:
        """As in its rows."""

    def __call__(self, subject: CertificationJob, data: Dataset, rows: Sequence[Row], run: Run, terms: CertificationConditions) -> None:
        """Append rows."""

    def results(self, rows: Sequence[Row], terms: CertificationConditions) -> list[Row]:
        """What they add up to."""


def certified(
    subjects: Sequence[CertificationJob], data: Dataset, terms: CertificationConditions, out: Path | str, also: Sequence[CertificateProbe] = (),
    choice: AlphaChoice | None = None, settings: Mapping[str, Any] | None = None,
) -> list[Row]:
    """Certify every image of `data` for every subject; a folder that holds a part of this run is resumed.

    Args:
        subjects: bases by the name they get in the rows.
        data: the images.
        terms: plan, seed, batch size, device, precision.
        out: run folder.
        also: looks that add rows of their own, such as a cross-check.
        choice: fixes the alpha of every mixture first, on other images.
        settings: further facts for `run.toml`, such as the command; they do not make it another run.

    Returns:
        Results as in `summary.json`: `acr`, `certified@R`, `abstained`, `clean`, `samples`.
    """
    start = time.monotonic()
    names = [subject.name for subject in subjects]
    checks.require(len(set(names)) == len(names), "models", "be different, or have different sigmas", names)
    for subject in subjects:
        for name, module in ((subject.name, subject.model), ("accurate", subject.accurate)):
            if module is not None:
                usable(name, module.to(terms.device), data, terms.device)
    asked = identity(subjects, data, terms) | ({"choice": choice.facts()} if choice else {})
    run = Run(out, asked, {**terms.facts(), **(settings or {})})
    if choice is not None:
        subjects = choice(subjects, run, terms)
    for subject in subjects:
        certify_all(subject, data, run, terms.of(subject))
    rows = run.finish()
    for look in also:
        for subject in subjects:
            look(subject, data, rows, run, terms.of(subject))
        rows = run.finish()
    results = results_of(rows, terms.plan) + [result for look in also for result in look.results(rows, terms)]
    more = choice.told(subjects, rows, terms) if choice is not None else {}
    run.summarise("certify", time.monotonic() - start, results, **more)
    return results


def identity(subjects: Sequence[CertificationJob], data: Dataset, terms: CertificationConditions) -> dict[str, Any]:
    """What makes two runs the same run: models, images, plan, seed and precision; looks may be added later."""
    digests = {subject.name: model_identity(subject.model) for subject in subjects}
    accurate = {subject.name: model_identity(subject.accurate) for subject in subjects if subject.accurate is not None}
    sigmas = {subject.name: subject.plan.sigma for subject in subjects if subject.plan is not None}
    return {
        "verb": "certify", "seed": terms.seed, "precision": terms.precision, "models": digests,
        "accurate": accurate, "plan": terms.plan.facts(), "norm": "l2",
        "data": data.facts(),
        **({"sigma": sigmas} if sigmas else {}),
    }


def certify_all(subject: CertificationJob, data: Dataset, run: Run, terms: CertificationConditions, attack: str = ATTACK) -> None:
    """Pools of images: large enough to fill the device, small enough to lose little when stopped."""
    size = min(max(_POOL[terms.device.type] // terms.plan.samples, 1), 256)
    pools = torch.arange(len(data)).split(size)[run.world.rank :: run.world.size]
    alpha = _alpha_of(subject, terms.plan)
    each = terms.plan.samples + terms.plan.n0
    begun, drawn = time.monotonic(), 0
    with progress.task(f"{subject.name}, {attack}", total=sum(map(len, pools)) * each) as task:
        for rows in pools:
            batch, left = data.take(rows), len(rows) * each

            def watch(samples: int) -> None:
                nonlocal drawn, left
                drawn, shown = drawn + samples, min(samples, left)
                left -= shown
                task.advance(shown, speed=f"{_short(drawn / (time.monotonic() - begun))} samples/s")

            if any((i, subject.name, attack, alpha) not in run.done for i in batch.index.tolist()):
                found = rows_for(subject, batch, terms, Engine(terms.batch_size, terms.compiled, watch))
                told = [{**row, "attack": attack} for row in found]
                run.append([row for row in told if key_of(row) not in run.done])
            if left:  # samples that were not needed
                task.advance(left)


def rows_for(subject: CertificationJob, batch: Dataset, terms: CertificationConditions, engine: Engine) -> list[Row]:
    """The rows of some images."""
    plan = terms.plan
    x, y = pixels(batch.images.to(terms.device)), batch.labels
    chance = rng.stream(terms.seed, ATTACK, batch.index.to(terms.device))
    with device.precision(terms.precision, terms.device):
        found = certify(subject.model, x, plan=plan, stream=chance, engine=engine)
        theirs = _classes(subject.accurate, x) if subject.accurate is not None else None
    checks.labels(y, found.votes.shape[1])
    columns: dict[str, Any] = {}
    if theirs is not None:
        gap = mixture.gap_of(found, theirs)
        columns = {"accurate": theirs.tolist(), "gap": [round(value, 6) for value in gap.tolist()]}
    rows = rows_of(batch.index.tolist(), model=subject.name, attack=ATTACK, label=y.tolist(),
                   predicted=found.predicted.tolist(), correct=(found.predicted == y).tolist(),
                   radius=[down(value) for value in found.radius.tolist()],
                   lower=[down(value) for value in found.lower.tolist()], samples=found.samples.tolist(),
                   top=found.chosen.tolist(), answer=answers(found, theirs, plan).tolist(), sigma=float(plan.sigma),
                   **columns)
    alpha = _alpha_of(subject, plan)
    return rows if alpha is None else [{**row, "alpha": alpha} for row in rows]


def answers(found: Certificate, accurate: Tensor | None, plan: SmoothingPlan) -> Tensor:
    """(B,) PREDICT from the votes of a certificate, or ABSTAIN; a certified class needs no further test."""
    if plan.soft:
        # Means of probabilities carry one bound only, which the certificate has used.
        return found.predicted
    votes, n, failure = found.votes.numpy(), found.counted.double().numpy(), found.failure.numpy()
    if accurate is None:
        said = smooth.decide(votes, failure)
    else:
        said = mixture.answer(votes, n, found.chosen.numpy(), accurate.numpy(), plan.alpha, failure)
    return torch.where(found.predicted != ABSTAIN, found.predicted, torch.from_numpy(said))


@torch.no_grad()
def _classes(model: nn.Module, x: Tensor) -> Tensor:
    with inference(model):
        return torch.cat([model(part).argmax(dim=1) for part in x.split(128)]).cpu()


def _alpha_of(subject: CertificationJob, plan: SmoothingPlan) -> float | None:
    return None if subject.accurate is None else plan.alpha


def _short(number: float) -> str:
    return f"{number / 1e3:.1f}k" if number >= 1e3 else f"{number:.0f}"
