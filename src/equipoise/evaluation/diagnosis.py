"""How confident a smoothed classifier is along an attack: SmoothMix's diagnostics as rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from equipoise import attacks
from equipoise.certification import Averaged, Engine, diagnostics
from equipoise.core import device, progress, rng, stats
from equipoise.core.records import Row, Run
from equipoise.core.threat import Threat
from equipoise.data import Dataset, pixels
from equipoise.evaluation.certified import CertificationConditions, CertificationJob

RADII = (0.0, 0.25, 0.5, 1.0, 2.0)
RATIO = "mixing-ratio"
_FAR, _STEPS, _COPIES, _SAMPLES = 8.0, 50, 8, 200
_BATCH = 16


@dataclass(frozen=True)
class Diagnosis:
    """Vote shares at adversarial images of growing radius, and equal-confidence mixing ratios [SmoothMix].

    The shares are estimates from a few hundred votes. The ratio is taken towards an adversarial image within
    a very wide ball (ℓ2 ≤ 8, 50 steps); images voted wrongly from the start, or never, have none.
    """

    at: tuple[float, ...] = RADII

    @property
    def name(self) -> str:
        """As its chance is called."""
        return "diagnose"

    def __call__(self, subject: CertificationJob, data: Dataset, rows: Sequence[Row], run: Run, terms: CertificationConditions) -> None:
        """Rows `confidence@R` with `true` and `off`, and `mixing-ratio` with `ratio`, per image."""
        averaged = Averaged(subject.model, terms.plan.sigma, data.image_shape, copies=_COPIES,
                            seed=terms.seed).to(terms.device)
        parts = torch.arange(len(data)).split(_BATCH)[run.world.rank :: run.world.size]
        with progress.task(f"{subject.name}, diagnose", total=sum(map(len, parts))) as task:
            for part in parts:
                batch = data.take(part)
                if any((i, subject.name, RATIO, None) not in run.done for i in batch.index.tolist()):
                    run.append(self._rows(subject, averaged, batch, terms))
                task.advance(len(part))

    def _rows(self, subject: CertificationJob, averaged: Averaged, batch: Dataset, terms: CertificationConditions) -> list[Row]:
        x, y = pixels(batch.images.to(terms.device)), batch.labels.to(terms.device)
        chance = rng.stream(terms.seed, self.name, batch.index.to(terms.device))
        plan = replace(terms.plan, samples=max(_SAMPLES, terms.plan.n0), tolerance=None, decide_radius=None,
                       sound=False)
        engine = Engine(terms.batch_size)

        def attack(images: Tensor, labels: Tensor, radius: float) -> Tensor:
            return attacks.pgd(averaged, images, labels, threat=Threat("l2", radius),
                               stream=chance.at("attack", str(radius)))

        with device.precision(terms.precision, terms.device):
            found = diagnostics.confidences(subject.model, x, y, attack=attack, at=self.at, plan=plan,
                                            stream=chance, engine=engine)
            far = attacks.pgd(averaged, x, y, threat=Threat("l2", _FAR), stream=chance.at("far"), steps=_STEPS)
            ratios = diagnostics.mixing_ratios(subject.model, x, far, y, plan=plan, stream=chance, engine=engine)
        columns: dict[str, list[dict[str, Any]]] = {
            f"confidence@{one.radius:.2f}": [{"true": round(t, 4), "off": round(o, 4), "correct": t > o}
                                             for t, o in zip(one.true.tolist(), one.off.tolist(), strict=True)]
            for one in found}
        columns[RATIO] = [{"ratio": None if ratio in (0.0,) or ratio != ratio else round(ratio, 4),
                           "correct": ratio != 0} for ratio in ratios.tolist()]
        return [{"index": index, "model": subject.name, "attack": name, "label": label, **column}
                for name, told in columns.items()
                for index, label, column in zip(batch.index.tolist(), batch.labels.tolist(), told, strict=True)]

    def results(self, rows: Sequence[Row], terms: CertificationConditions) -> list[Row]:
        """Mean confidences per radius [SmoothMix, Table 1] and the mean mixing ratio [Figure 3]."""
        found: list[Row] = []
        for model in dict.fromkeys(row["model"] for row in rows):
            own = [row for row in rows if row["model"] == model]
            for radius in self.at:
                seen = [row for row in own if row["attack"] == f"confidence@{radius:.2f}"]
                found += [_mean(model, f"{key}@{radius:.2f}", [row[key] for row in seen]) for key in ("true", "off")
                          if seen]
            ratios = [row["ratio"] for row in own if row["attack"] == RATIO and row["ratio"] is not None]
            if ratios:
                found.append(_mean(model, "ratio", ratios))
        return found


def _mean(model: str, metric: str, values: Sequence[float]) -> Row:
    e = stats.mean(values)
    return {"model": model, "metric": metric, "value": e.value, "low": max(e.low, 0.0), "high": min(e.high, 1.0),
            "n": e.n}
