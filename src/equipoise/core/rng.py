"""Chance that follows the image, not the batch.

Every random number is a pure function of (seed, purpose, image index, position): the counter-based
generator Philox-4x32-10 [Salmon2011]. A :class:`Stream` is the chance of some images; it is sliced
like a tensor when survivors are repacked, and gives an image the same numbers in any batch, process,
resumed run or device. The global random state is never read or written.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Ten rounds of Philox-4x32 over 32-bit words held in int64 tensors (products wrap, as they should)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        # Only c0 and c2 are multiplied, so only they must be words here; c1 and c3 are cut when they are handed out.
        c0, c1 = (second >> 32).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(_WORD), second
        c2, c3 = (first >> 32).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(_WORD), first
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return [c0, c1.bitwise_and_(_WORD), c2, c3.bitwise_and_(_WORD)]


def _digest(*words: int | str) -> int:
    """63 bits that name a purpose; equal words on any machine and Python give equal bits."""
    text = "\x1f".join(f"{type(word).__name__}:{word}" for word in words)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True)
class Stream:
    """The chance of B images for one purpose.

    >>> chance = stream(0, "start", torch.arange(4))
    >>> torch.equal(chance[2:].uniform(3, 5), chance.uniform(3, 5)[2:])
    True
    >>> torch.equal(chance.at("step", 1).uniform(3), chance.at("step", 2).uniform(3))
    False
    """

    key: int
    index: Tensor  # (B,) int64: which image each row is

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, rows: Tensor | slice) -> Stream:
        return Stream(self.key, self.index[rows])

    def at(self, *words: int | str) -> Stream:
        """The chance of the same images for a further purpose, such as ("restart", 3)."""
        return Stream(_digest(self.key, *words), self.index)

    def to(self, device: torch.device | str) -> Stream:
        """The same chance, drawn on another device."""
        return Stream(self.key, self.index.to(device))

    def words(self, *shape: int) -> Tensor:
        """(B, *shape) 32-bit words as int64."""
        size = math.prod(shape)
        index = self.index.unsqueeze(1)
        block = torch.arange((size + 3) // 4, device=index.device).unsqueeze(0)
        counter = torch.broadcast_tensors(block & _WORD, block >> 32, index & _WORD, index >> 32)
        key = torch.tensor([self.key & _WORD, self.key >> 32], device=index.device).unbind()
        drawn = torch.stack(philox((counter[0], counter[1], counter[2], counter[3]), (key[0], key[1])), dim=2)
        return drawn.flatten(1)[:, :size].reshape(len(self), *shape)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """(B, *shape) float32, uniform in [low, high); 24 bits, so every value is exact."""
        return (self.words(*shape) >> 8).to(torch.float32).mul_(2.0**-24).mul_(high - low).add_(low)

    def normal(self, *shape: int) -> Tensor:
        """(B, *shape) float32, standard normal, by the Box-Muller transform of pairs."""
        size = math.prod(shape)
        pairs = (self.words((size + 1) // 2, 2) >> 8).to(torch.float32)
        radius = pairs[..., 0].add(0.5).mul_(2.0**-24).log_().mul_(-2).sqrt_()
        angle = pairs[..., 1].mul(2.0**-24 * 2 * math.pi)
        both = torch.stack((radius * angle.cos(), radius * angle.sin()), dim=-1)
        return both.flatten(1)[:, :size].reshape(len(self), *shape)

    def integers(self, high: int, *shape: int) -> Tensor:
        """(B, *shape) int64, uniform in 0 … high − 1 (bias below high / 2³²)."""
        return (self.words(*shape) * high) >> 32

    def permutation(self, size: int) -> Tensor:
        """(B, size) int64: a random order of 0 … size − 1 for every image."""
        return self.words(size).argsort(dim=1, stable=True)


def stream(seed: int, purpose: str, index: Tensor) -> Stream:
    """The chance of the images numbered `index` in their data set, for a purpose such as "pgd"."""
    return Stream(_digest(seed, purpose), index.to(torch.int64))
