"""AutoAttack as data: which attacks, in which order, with which budgets."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from equipoise.attacks.apgd import Apgd, apgd_stages
from equipoise.attacks.fab import Fab, fab_stages
from equipoise.attacks.gradients import Extra
from equipoise.attacks.square import Square, square_stages
from equipoise.attacks.targeted import Targeted, targeted_stages
from equipoise.attacks.worst_case import Stage, strike
from equipoise.core import checks
from equipoise.core.rng import Stream
from equipoise.core.threat import Threat


def standard() -> list[Stage]:
    """The standard version [Croce2020]: APGD-CE, APGD-T, FAB-T (100 steps, 9 targets each) and Square (5000)."""
    return [*apgd_stages(), *targeted_stages(), *fab_stages(), *square_stages()]


def fast() -> list[Stage]:
    """The same verdict for a fraction of the passes.

    A short run on the probability margin breaks almost everything that can be broken. FallbackAttack every target gets
    a short run, the nearest by linearised distance first. Only images whose smallest margin so far is near
    the boundary are worth long runs and FAB. A short Square run remains for every image, because where it
    finds anything at all the gradients are masked, and the standard version should be asked.
    """
    near, nearer = 0.1, 0.03
    return [
        Apgd("margin", 20),
        *[Targeted(rank, 20, "distance") for rank in range(1, 4)],
        Apgd("ce", 20),
        *[Targeted(rank, 10, "distance") for rank in range(4, 10)],
        Apgd("margin", 100, within=near),
        *[Targeted(rank, 50, "distance", within=near) for rank in range(1, 5)],
        *[Targeted(rank, 100, "distance", within=nearer) for rank in range(1, 4)],
        *[Fab(rank, 30, within=nearer) for rank in range(1, 3)],
        Square(100),
    ]


VERSIONS: Mapping[str, Callable[[], list[Stage]]] = {"standard": standard, "fast": fast}


def auto_attack(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    threat: Threat,
    stream: Stream,
    surrogate: nn.Module | None = None,
    extra: Extra | None = None,
    version: str = "standard",
    follow: str = "model",
    precision: str = "auto",
) -> Tensor:
    """The worst case over a list of complementary attacks, each on the images that the ones before left standing.

    For whole data sets use :func:`~equipoise.attacks.worst_case.worst_case`, which keeps batches full.

    Args and result are those of :func:`~equipoise.attacks.apgd.apgd`, with
        version: standard or fast.
    """
    stages = VERSIONS[checks.one_of("version", version, VERSIONS)]()
    return strike(stages, model, x, y, threat=threat, stream=stream, surrogate=surrogate, extra=extra,
                  follow=follow, precision=precision)
