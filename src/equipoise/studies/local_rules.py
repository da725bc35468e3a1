"""Rules of local smoothing over one pair of models, the attacks on them, and what else the study
measures."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.attacks import Attack, FunctionAttack, Pgd, TransferPgd, cached
from equipoise.attacks.fused import fuse
from equipoise.core import aggregation, device, losses, memory, rng
from equipoise.core.arrays import GradientArrays
from equipoise.core.records import Run
from equipoise.core.rng import Stream
from equipoise.core.rows import AttackRow, Row
from equipoise.core.threat import Threat
from equipoise.data import Dataset, pixels
from equipoise.evaluation import Conditions
from equipoise.evaluation.measure import measure_batches
from equipoise.local_smoothing import jacobian
from equipoise.local_smoothing.crossing import attack_at_strengths
from equipoise.local_smoothing.jacobian import SoftplusSurrogate
from equipoise.local_smoothing.policy import TARGETS
from equipoise.local_smoothing.smoothing import SmoothedClassifier
from equipoise.studies.study import Pair

TARGETED = "aimed"  # attacks at a fixed target strength, in rows


def with_fallback(first: Attack, second: Attack, settings: Mapping[str, Any]) -> FunctionAttack:
    """An attack, and a second one on the images that survive the first."""

    def run(
        model: nn.Module, x: Tensor, y: Tensor, *, threat: Threat, stream: Stream, **_: object
    ) -> Tensor:
        x_adv = first(model, x, y, threat=threat, stream=stream).clone()
        with torch.no_grad(), device.full_precision(x.device):
            survived = (model(x_adv).argmax(dim=1) == y).nonzero().squeeze(1)
        if len(survived):
            x_adv[survived] = second(
                model, x[survived], y[survived], threat=threat, stream=stream[survived]
            )
        return x_adv

    return FunctionAttack(name="with-fallback", function=run, settings=settings)


class Bfloat16Copy(nn.Module):
    """A copy of a classifier in bfloat16, for gradients only; success is always decided by the
    model itself.

    Batch norms are folded into convolutions where possible (the second derivative of one takes
    about twenty kernels); `x` are a few images, on which the folded copy must agree with the model.
    """

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        super().__init__()
        # Copied again, because `fuse` returns the model itself where there is nothing to fold.
        self.model = copy.deepcopy(fuse(model, x)).to(torch.bfloat16).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, K) in the precision of x."""
        logits: Tensor = self.model(x.to(torch.bfloat16)).to(x.dtype)
        return logits


class RuleSet:
    """Every rule of local smoothing over one pair of models, and PGD with `steps` steps through it.

    On CUDA gradients come from copies of the models in bfloat16; success is decided by the models
    themselves.
    """

    def __init__(self, pair: Pair, conditions: Conditions, steps: int) -> None:
        self.pair, self.conditions, self.steps = pair, conditions, steps
        self.sources = pair.models
        if conditions.device.type == "cuda":
            images = self.first_images(pair.held_out, 8)
            self.sources = {
                name: Bfloat16Copy(model, images) for name, model in pair.models.items()
            }
        self.on_accurate, self.on_robust = (
            cached(
                TransferPgd(source=source, steps=steps),
                conditions.seed,
                {"attack": "transfer-pgd", "version": 1, "steps": steps, "source": name},
            )
            for name, source in self.sources.items()
        )

    def rule(
        self,
        oracle: nn.Module,
        gamma: float,
        trust: str,
        space: str = "logits",
        *,
        accurate: nn.Module | None = None,
        soft: bool = False,
    ) -> SmoothedClassifier:
        """A rule over the accurate model, or over another one in its place."""
        # Over logits ‖∇g‖ of a ReLU network is piecewise constant: detached, it saves the second
        # derivatives.
        rule = SmoothedClassifier(
            accurate or self.pair.accurate,
            oracle,
            gamma,
            trust=trust,
            space=space,
            norm=self.conditions.threat.norm,
            attached=soft or space == "probabilities",
        )
        return rule.to(self.conditions.device)

    def attacks_through(
        self, oracle: nn.Module, gamma: float, trust: str, space: str = "logits"
    ) -> dict[str, Attack]:
        """PGD through a rule; where its trust term depends on gradients, also with softened ReLUs,
        on what survives."""
        rule, soft = (
            self.rule(oracle, gamma, trust, space, accurate=self.sources["accurate"], soft=soft)
            for soft in (False, True)
        )
        settings = {
            "attack": "pgd",
            "version": 1,
            "steps": self.steps,
            "surrogate": rule.describe(),
        }
        pgd = cached(Pgd(steps=self.steps, surrogate=rule), self.conditions.seed, settings)
        if trust == "constant" or gamma == math.inf:
            return {"pgd": pgd}
        return {
            "pgd": pgd,
            "pgd-soft": with_fallback(
                pgd,
                Pgd(steps=self.steps, surrogate=SoftplusSurrogate(soft)),
                {"first": settings, "second": {**settings, "softened": True}},
            ),
        }

    def trust_scale(self, trust: str, space: str) -> float:
        """The median of the trust term on held-out images."""
        rule = self.rule(self.pair.robust, 1.0, trust, space)
        with torch.no_grad(), device.full_precision(self.conditions.device):
            return float(rule.sides_and_trust(self.first_images(self.pair.held_out))[2].median())

    def first_images(self, data: Dataset, count: int = 256) -> Tensor:
        """The first images of a data set, on the device."""
        return pixels(data.images[:count].to(self.conditions.device))


def gamma_for_weight(weight: float, scale: float) -> float:
    """γ at which the robust model has this weight where the trust term equals `scale`.

    It is rounded to three digits: the scale is measured, rounds differently on another device, and
    names rows, which a run resumed there would not recognize.
    """
    return float(f"{weight / (1 - weight) / scale:.3g}")


def alpha_of(gamma: float) -> float:
    """γ as a weight in [0, 1]."""
    return 1.0 if gamma == float("inf") else gamma / (1 + gamma)


def measure_target_strengths(
    run: Run,
    rule: SmoothedClassifier,
    models: Mapping[str, nn.Module],
    data: Dataset,
    conditions: Conditions,
    steps: int,
) -> None:
    """Rows of every model on images attacked at every target strength γ_t; alpha is γ_t / (1 +
    γ_t)."""

    def compute(batch: Dataset) -> list[Row]:
        x, y = pixels(batch.images.to(conditions.device)), batch.labels.to(conditions.device)
        x_adv = attack_at_strengths(
            rule,
            x,
            y,
            TARGETS,
            threat=conditions.threat,
            steps=steps,
            batch_size=conditions.batch_size,
        )
        rows: list[Row] = []
        for (name, model), (gamma, images) in product(
            models.items(), zip(TARGETS, x_adv, strict=True)
        ):
            with torch.no_grad(), device.full_precision(x.device):
                logits = model(images)
            predicted, margin = logits.argmax(dim=1), losses.probability_margin(logits, y)
            columns = zip(
                batch.index.tolist(), y.tolist(), predicted.tolist(), margin.tolist(), strict=True
            )
            rows += [
                AttackRow(
                    index=index,
                    model=name,
                    attack=TARGETED,
                    alpha=alpha_of(gamma),
                    label=label,
                    predicted=answer,
                    correct=answer == label,
                    margin=round(value, 6),
                )
                for index, label, answer, value in columns
            ]
        return rows

    alphas = [alpha_of(gamma) for gamma in TARGETS]
    measure_batches(
        run,
        data,
        keys=lambda index: [(index, *key) for key in product(models, (TARGETED,), alphas)],
        compute=compute,
        batch_size=conditions.batch_size,
        title=f"attacks at {len(TARGETS)} target strengths",
    )


def correct_at_targets(rows: Sequence[Row], model: str) -> Tensor:
    """(T, N) bool: which images a model classifies correctly at which target strength."""
    return correct_at(rows, model, TARGETED, TARGETS)


def correct_at(rows: Sequence[Row], model: str, attack: str, gammas: Sequence[float]) -> Tensor:
    """(T, N) bool: which images a model classifies correctly under the attack with each of the
    strengths."""
    by_attack = aggregation.correct_by_attack(rows)
    by_target = [by_attack[model, alpha_of(gamma)][attack] for gamma in gammas]
    return torch.tensor([[correct[index] for index in sorted(correct)] for correct in by_target])


def gradient_norms(pair: Pair, conditions: Conditions, steps: int) -> GradientArrays:
    """Norms of the gradients of both models, on clean test images and on images attacked on either
    model."""
    data = pair.test.slice(0, min(500, len(pair.test)))

    def compute(rows: slice) -> dict[str, Tensor]:
        x, y = (
            pixels(data.images[rows].to(conditions.device)),
            data.labels[rows].to(conditions.device),
        )
        stream = rng.stream(conditions.seed, "gradients", data.index[rows].to(conditions.device))
        inputs = {"clean": x} | {
            f"attacked_{name}": Pgd(steps=steps)(
                model, x, y, threat=conditions.threat, stream=stream
            )
            for name, model in pair.models.items()
        }
        return {
            f"{images}_of_{name}": _norms(model, at, conditions.threat.norm).cpu()
            for images, at in inputs.items()
            for name, model in pair.models.items()
        }

    parts = [part for _, part in memory.in_batches(compute, len(data), conditions.batch_size)]
    return GradientArrays(
        **{name: torch.cat([part[name] for part in parts]).numpy() for name in parts[0]}
    )


@torch.no_grad()
def _norms(model: nn.Module, x: Tensor, norm: str) -> Tensor:
    return jacobian.class_gradient_norms(lambda at: (model(at), ()), x, norm)[1]
