"""The attacks that a fit makes at most, in their order, so that its progress shows how many are to
come."""

from __future__ import annotations

from equipoise.fitting.margin_attack import CASCADE_TITLE, attack_title
from equipoise.fitting.settings import FitSettings

SURVIVORS = 0.6  # roughly the share of the images that the robust model survives, which later attacks are on
LOSSES = 2  # of the margin attack that have no target: cross-entropy and margin


def planned_attacks(settings: FitSettings, *, is_resumed: bool = False) -> list[tuple[str, float]]:
    """Titles of the attacks and their shares of the time, as :func:`equipoise.core.progress.plan`
    takes them.

    A fit leaves some out where nothing changes from round to round. One that is resumed has made
    the first ones.
    """
    rule, both = settings.rule, settings.against == "pair"
    full, switch = (
        float(LOSSES + settings.targets),
        LOSSES + 1.0,
    )  # to a switch all targets are the same
    first = [(attack_title(both=False, is_mapped=False), full)]
    if rule not in ("nuts", "paper"):
        first.append((attack_title(both=False, is_mapped=True), SURVIVORS * switch))
    mapped = (
        attack_title(both=both, is_mapped=True),
        SURVIVORS * (switch if rule in ("switch", "cascade") else full),
    )
    further = []
    if both and rule != "switch":
        further.append((attack_title(both=True, is_mapped=False), SURVIVORS * full))
    if both and rule != "nuts":
        further.append((attack_title(both=True, is_mapped=True), SURVIVORS * switch))
    if rule == "paper" or settings.like is None:  # a reused map is not attacked by our rules
        further += [mapped] * settings.rounds
    if rule == "cascade":
        further += [(CASCADE_TITLE, SURVIVORS * full)] * (
            settings.rounds + 2
        )  # the first view, then both stages
    return further if is_resumed else [*first, *further]
