"""Whether a network answers the same, to the last bit, in any company."""

from __future__ import annotations

import torch
from torch import Tensor

from equipoise.attacks.gradients import GradientSource
from equipoise.core import losses

# Not every size: a layer that rounds differently does so from some size on (measured over all sizes, layer by
# layer), so a ladder whose last rung is the largest batch finds it.
SIZES = (9, 12, 15, 16, 17, 19, 24, 31, 33, 48, 63, 64, 96, 127, 128, 191, 256, 512)


def indifferent(adversary: GradientSource, x: Tensor, y: Tensor, most: int) -> bool:
    """Measure whether an image gets from larger batches what it gets from a small one.

    Layers sum in an order that depends on the shape of the batch; some networks have none for which it shows
    (small ResNets on the CPU), others do (long matrix products), and then small blocks have to go alone. Many
    sizes are tried without gradients, a few with; the first difference ends it.

    Args:
        adversary: with `block` unset.
        x, y: the small batch.
        most: largest batch that will be used.
    """
    sizes = sorted({size for size in SIZES if len(x) < size < most} | ({most} if most > len(x) else set()))
    query, ascend = adversary.query(), adversary.ascend("company", _cross_entropy)
    alone = (adversary.logits(x), *query(x, y))
    for size in sizes:
        many, labels = _repeated(x, size), _repeated(y, size)
        if not _same((adversary.logits(many), *query(many, labels)), alone, size):
            return False
    ascended = ascend(x, y, None)
    return all(_same(ascend(_repeated(x, size), _repeated(y, size), None), ascended, size)
               for size in sizes[:: max(len(sizes) // 3, 1)])


def _cross_entropy(z: Tensor, y: Tensor, aim: Tensor | None) -> Tensor:
    return losses.cross_entropy(z, y)


def _repeated(values: Tensor, size: int) -> Tensor:
    """The rows again and again, `size` in all; unlike `repeat` it keeps the channels last in memory."""
    return torch.cat([values] * -(-size // len(values)))[:size]


def _same(many: tuple[Tensor, ...], alone: tuple[Tensor, ...], size: int) -> bool:
    return all(torch.equal(whole, _repeated(one, size)) for whole, one in zip(many, alone, strict=True))
