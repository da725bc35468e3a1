"""Whether a network answers the same, to the last bit, in any company."""

from __future__ import annotations

import torch
from torch import Tensor

from equipoise import losses
from equipoise.attacks.adversary import Adversary, Objective

STEPS = (2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # blocks per batch


def indifferent(adversary: Adversary, x: Tensor, y: Tensor, block: int, most: int) -> bool:
    """Measure whether passes over larger batches give every block of images what it would get alone.

    Layers sum in an order that depends on the shape of the batch; some networks have none for which it shows
    (small ResNets on the CPU), others do (long matrix products), and then each block has to go alone. Many
    multiples of the block are tried without gradients, a few with; the first difference ends it.

    Args:
        adversary: with `block` unset.
        x, y: exactly one block of images.
        block: its size.
        most: largest batch that will be used.
    """
    largest = -(-most // block)
    sizes = [block * copies for copies in sorted({*STEPS, largest}) if 1 < copies <= largest]
    query, judged = adversary.query(), adversary.logits(x)
    alone = query(x, y)
    for size in sizes:
        copies = size // block
        many, labels = torch.cat([x] * copies), y.repeat(copies)
        if not _all_equal((adversary.logits(many), *query(many, labels)), (judged, *alone), copies):
            return False
    raised: Objective = _cross_entropy
    ascend = adversary.ascend("company", raised)
    ascended = ascend(x, y, None)
    for size in sizes[:: max(len(sizes) // 3, 1)]:
        copies = size // block
        if not _all_equal(ascend(torch.cat([x] * copies), y.repeat(copies), None), ascended, copies):
            return False
    return True


def _cross_entropy(z: Tensor, y: Tensor, aim: Tensor | None) -> Tensor:
    return losses.cross_entropy(z, y)


def _all_equal(many: tuple[Tensor, ...], alone: tuple[Tensor, ...], copies: int) -> bool:
    return all(torch.equal(part, one) for whole, one in zip(many, alone, strict=True) for part in whole.chunk(copies))
