"""The smallest margin an adversary can force, which is what MixedNUTS is fitted to [Bai2024nuts, Algorithm 1]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equipoise.attacks.apgd import Apgd
from equipoise.attacks.engine import AttackBatch, BatchShape, hunt
from equipoise.attacks.gradients import Extra, GradientSource
from equipoise.attacks.square import Square
from equipoise.attacks.targeted import targeted_stages
from equipoise.attacks.worst_case import Stage
from equipoise.core import checks
from equipoise.core.modes import inference
from equipoise.core.rng import Stream
from equipoise.core.threat import Threat


@dataclass(frozen=True)
class MarginPoints:
    """P points per image, from the smallest margin upwards."""

    images: Tensor  # (P, B, C, H, W)
    margins: Tensor  # (P, B) signed probability margins of the true class; negative where another class wins


def minimum_margin(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    threat: Threat,
    stream: Stream,
    surrogate: nn.Module | None = None,
    extra: Extra | None = None,
    pool: int = 1,
    gradient_free: bool = False,
    steps: int = 100,
    targets: int = 9,
    spare_broken: bool = False,
    follow: str = "model",
    precision: str = "auto",
) -> MarginPoints:
    """For every image the perturbation with the smallest signed margin over all iterates, targets and attacks.

    APGD on cross-entropy and on the probability margin, then APGD towards every target; a run goes on after
    a success. Each attack and target hands in its own best point, so a pool of several is diverse.

    Args:
        model, x, y, threat, stream, surrogate, extra, follow, precision: see :func:`~equipoise.attacks.apgd.apgd`.
        pool: points kept per image.
        gradient_free: Square instead, lowering the same margin of probabilities, for a model without gradients
            [Bai2024nuts, D.5]: one start per point of the pool, and 50 queries for a step.
        steps: gradient steps per run.
        targets: classes tried per image, at most K − 1.
        spare_broken: leave images that one attack has broken out of the next, as the official code does.
    """
    checks.images(x)
    checks.whole("pool", pool, least=1)
    checks.require(len(stream) == len(x), "stream", f"be the chance of {len(x)} images", len(stream))
    x = x.detach()
    stages: Sequence[Stage] = [
        Square(50 * steps, restart=start) for start in range(pool)] if gradient_free else [
        Apgd("ce", steps), Apgd("margin", steps), *targeted_stages(steps=steps, targets=targets)]
    with inference(model, surrogate):
        adversary = GradientSource(model, surrogate, extra, follow, precision, x, persist=True)
        checks.labels(y, adversary.classes, len(x))
        images = x.unsqueeze(0).expand(pool, *x.shape).clone()
        margins = x.new_full((pool, len(x)), torch.inf)
        margins[0] = adversary.judge(x, y).margin.to(x.dtype)

        def fetch(jobs: Tensor) -> AttackBatch:
            rows = jobs.to(x.device)
            return AttackBatch(x[rows], y[rows], stream[jobs.to(stream.index.device)].to(x.device))

        for stage in stages:
            search = stage.search(adversary, threat)
            jobs = torch.arange(len(x))
            if spare_broken:
                jobs = jobs[(margins[0] > 0).cpu()]
            if search is None or len(jobs) == 0:
                continue
            grain = BatchShape(len(jobs), 1) if x.device.type == "cuda" else BatchShape()
            for found in hunt(search, adversary, fetch, jobs, slots=len(jobs), grain=grain):
                rows = found.jobs.to(x.device)
                both = torch.cat([margins[:, rows], found.margin.to(x.dtype).unsqueeze(0)])
                order = both.argsort(dim=0, stable=True)[:pool]
                shown = torch.cat([images[:, rows], found.nearest.unsqueeze(0)])
                images[:, rows] = shown[order, torch.arange(len(rows), device=x.device)]
                margins[:, rows] = both.gather(0, order)
    # A pool may be larger than the number of attacks: the best point fills it up.
    missing = margins.isinf()
    return MarginPoints(torch.where(missing[..., None, None, None], images[:1], images),
                        torch.where(missing, margins[:1], margins))

