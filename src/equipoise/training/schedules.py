"""The learning rate as a function of time, and nothing else: no state, so a resumed run needs none."""

from __future__ import annotations

import math

from equipoise.training.plan import TrainingPlan


def rate(plan: TrainingPlan, step: int, steps_per_epoch: int) -> float:
    """The learning rate of optimiser step `step` (from 0 on).

    With t in epochs, E epochs in all and a rise of w epochs:

    - the rise is lr · (step + 1) / (w · steps per epoch), for every schedule;
    - constant: lr; step: lr · factor^⌊t / step_epochs⌋;
    - cosine: lr · (1 + cos(π (t − w) / (E − w))) / 2;
    - one-cycle: after the rise, a straight line that would reach zero one step after the last.
    """
    rise = plan.warmup
    if plan.schedule == "one-cycle" and rise == 0:
        rise = plan.epochs / 3
    rising = rise * steps_per_epoch
    if step + 1 < rising:
        return plan.lr * (step + 1) / rising
    match plan.schedule:
        case "step":
            return plan.lr * plan.step_factor ** (step // (plan.step_epochs * steps_per_epoch))
        case "cosine" | "one-cycle":
            total = plan.epochs * steps_per_epoch
            past = min(1.0, (step - rising) / max(total - rising, 1))
            if plan.schedule == "one-cycle":
                return plan.lr * (1 - max(past, 0.0))
            return plan.lr * (1 + math.cos(math.pi * max(past, 0.0))) / 2
    return plan.lr
