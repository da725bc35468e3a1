"""Attacked images that several jobs share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from equipoise.attacks.batch_attacks import FunctionAttack
from equipoise.attacks.suite import Attack
from equipoise.core import rng
from equipoise.core.rng import Stream
from equipoise.core.threat import Threat


def cached(attack: Attack, seed: int, settings: Mapping[str, Any] | None = None) -> FunctionAttack:
    """An attack whose images several jobs share: computed once per batch, with a random stream of
    its own.

    It must not depend on the attacked model (:class:`~equipoise.attacks.TransferPgd`), or be used
    for one model only. `settings` describe it in identities; those of the attack if not given.
    """
    images: dict[tuple[Threat, tuple[int, ...]], Tensor] = {}

    def run(
        model: nn.Module, x: Tensor, y: Tensor, *, threat: Threat, stream: Stream, **_: object
    ) -> Tensor:
        key = threat, tuple(stream.index.tolist())
        if key not in images:
            images[key] = attack(
                model, x, y, threat=threat, stream=rng.stream(seed, "once", stream.index)
            )
        return images[key]

    return FunctionAttack(
        name="cached", function=run, settings=attack.describe() if settings is None else settings
    )
