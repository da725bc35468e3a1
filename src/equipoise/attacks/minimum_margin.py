"""The smallest margin an adversary can force, to which MixedNUTS is fitted [Bai2024nuts, Algorithm
1]."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equipoise.attacks.apgd import Apgd
from equipoise.attacks.attack_state import AttackState
from equipoise.attacks.engine import Driver
from equipoise.attacks.search_state import AttackBatch, SearchResult
from equipoise.attacks.suite import Attack, Suite
from equipoise.attacks.targeted import TargetedApgd, first_ranks
from equipoise.core import checks
from equipoise.core.rng import Stream
from equipoise.core.threat import Threat


@dataclass(frozen=True)
class MarginPoints:
    """P points per image, from the smallest margin upwards."""

    images: Tensor  # (P, B, C, H, W)
    margins: Tensor  # (P, B) signed probability margins of the true class; negative where another class wins
    # (P, B, …) what the observed part of the model returns there, if there is one
    observed: Tensor | None = None


def margin_suite(steps: int = 100, targets: int = 9) -> Suite:
    """APGD on cross-entropy and towards every target, as in MixedNUTS, and between them on the
    probability margin.

    For a model without gradients use `Square(queries=50 * steps, restarts=pool)` [Bai2024nuts,
    D.5].
    """
    return Suite(
        (Apgd("ce", steps), Apgd("margin", steps), TargetedApgd(steps, first_ranks(targets)))
    )


def minimum_margin(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    threat: Threat,
    stream: Stream,
    attack: Attack | None = None,
    pool: int = 1,
    skip_broken: bool = False,
    precision: str = "auto",
    batch_size: int | None = None,
    observe: nn.Module | None = None,
) -> MarginPoints:
    """For every image the perturbation with the smallest signed margin over all iterates, targets
    and attacks.

    A search goes on after a success. Each stage contributes its own best point, so a pool of
    several is diverse.

    Args:
        model, x, y, threat, stream, precision: see :meth:`Attack.__call__`.
        attack: what is run; :func:`margin_suite` if not given.
        pool: points kept per image.
        skip_broken: leave images that one stage has broken out of the next, as the official code
            does.
        batch_size: images attacked at a time, in passes of one size, which CUDA records once; all
            if not given.
        observe: a part of the model whose outputs at the points are wanted; the passes of the
            verdicts give them.
    """
    checks.whole("pool", pool, least=1)
    slots = (
        len(x)
        if batch_size is None
        else min(checks.whole("batch_size", batch_size, least=1), len(x))
    )
    batch, stages = (
        AttackBatch(x, y, stream).checked(),
        (margin_suite() if attack is None else attack).stages(),
    )
    if any(stage.gradients.repeats is not None for stage in stages):
        observe = None  # verdicts of several passes have no single output
    x = batch.x
    margins = x.new_full((pool, len(x)), torch.inf)
    kept: dict[str, Tensor] = {}  # (P, B, …) values of the points with these margins

    def keep_smallest(number: int, result: SearchResult) -> None:
        rows = result.rows.to(x.device)
        all_margins = torch.cat([margins[:, rows], result.margin.to(x.dtype).unsqueeze(0)])
        order = all_margins.argsort(dim=0, stable=True)[:pool]
        margins[:, rows] = all_margins.gather(0, order)
        for name, values in (("images", result.images), ("observed", result.observed)):
            if values is None:
                continue
            if name not in kept:
                kept[name] = values.new_zeros(pool, len(x), *values.shape[1:])
            candidates = torch.cat([kept[name][:, rows], values.unsqueeze(0)])
            kept[name][:, rows] = candidates[order, torch.arange(len(rows), device=x.device)]

    driver = Driver(
        model,
        batch.select,
        batch,
        threat=threat,
        precision=precision,
        slots=slots,
        block=None if batch_size is None else slots,
        stop_at_success=False,
        observe=observe,
    )
    state = AttackState.new([stage.name for stage in stages], len(x))
    driver.run(
        stages,
        state,
        keep_smallest,
        lambda state: state.margin > 0 if skip_broken else torch.ones_like(state.survived),
    )
    # A pool may be larger than the number of stages: the best point fills it up. Every image has
    # that of its verdict.
    best = torch.where(margins.isinf(), 0, torch.arange(pool, device=x.device).unsqueeze(1))
    own = torch.arange(len(x), device=x.device)
    return MarginPoints(
        margins=margins[best, own], **{name: values[best, own] for name, values in kept.items()}
    )
