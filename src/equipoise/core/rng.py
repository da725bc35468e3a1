"""Random streams keyed by image index.

Every random number is a pure function of (seed, purpose, image index, position): the counter-based
generator Philox-4x32-10 [Salmon2011]. A :class:`Stream` holds the random numbers of some images; it
is sliced like a tensor, and gives an image the same numbers in any batch, process, resumed run or
device. The global random state is never read or written, except to make a model that draws from it
reproducible (:func:`seed_global`).
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> list[Tensor]:
    """Ten rounds of Philox-4x32 over 32-bit words held in int64 tensors (products wrap)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        # Only c0 and c2 are multiplied, so only they must be 32-bit here; c1 and c3 are cut at the
        # end.
        c0, c1 = (second >> 32).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(_WORD), second
        c2, c3 = (first >> 32).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(_WORD), first
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return [c0, c1.bitwise_and_(_WORD), c2, c3.bitwise_and_(_WORD)]


def key_words(key: int, device: torch.device) -> Tensor:
    """(2,) the two 32-bit words of a 64-bit key."""
    return torch.tensor([key & _WORD, key >> 32], device=device)


def random_blocks(
    key: Tensor, index: Tensor, size: int, sample: Tensor | None = None
) -> list[Tensor]:
    """Run Philox on every image: four tensors (R, ⌈size / 4⌉), which together hold `size` 32-bit
    words per row.

    The counter of a block is (block number, image index), each as two words. A sample of an image
    takes the block numbers that follow those of the sample before it; without samples every row is
    sample 0. `key` holds the (2,) words of :func:`key_words`, `index` (R,) image indices and
    `sample` (R,) sample numbers.
    """
    count = (size + 3) // 4
    block = torch.arange(count, device=index.device).unsqueeze(0)
    if sample is not None:
        block = sample.unsqueeze(1) * count + block
    image = index.unsqueeze(1)
    c0, c1, c2, c3 = torch.broadcast_tensors(block & _WORD, block >> 32, image & _WORD, image >> 32)
    k0, k1 = key.unbind()
    return philox((c0, c1, c2, c3), (k0, k1))


def random_words(key: Tensor, index: Tensor, size: int) -> Tensor:
    """(R, size) 32-bit words as int64."""
    return torch.stack(random_blocks(key, index, size), dim=2).flatten(1)[:, :size]


def random_normals(
    key: Tensor, index: Tensor, size: int, sample: Tensor | None = None, *, bits: int = 24
) -> Tensor:
    """(R, size) float32, standard normal, by the Box-Muller transform of pairs of uniforms.

    Two number formats are in use, and published results depend on both: a :class:`Stream` has
    uniforms of 24 bits, which float32 holds exactly (|z| < 5.9); the noise of randomized smoothing
    has 32 bits (|z| < 6.8).
    """
    first, second, third, fourth = random_blocks(key, index, size, sample)
    # Stacked once, at the end: a compiler then runs the generator once per four numbers.
    pairs = (*_box_muller(first, second, bits), *_box_muller(third, fourth, bits))
    return torch.stack(pairs, dim=2).flatten(1)[:, :size]


def _box_muller(first: Tensor, second: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    if bits < 32:
        first, second = first >> (32 - bits), second >> (32 - bits)
    # With 32 bits a word near 2³² rounds to 1, whose logarithm is the 0 it should be; none rounds
    # to 0.
    radius = first.to(torch.float32).add_(0.5).mul_(2.0**-bits).log_().mul_(-2).sqrt_()
    angle = second.to(torch.float32).mul_(2 * math.pi * 2.0**-bits)
    return radius * angle.cos(), radius * angle.sin()


def _digest(*words: int | str) -> int:
    """63 bits that identify a purpose; the same on any machine and Python version."""
    text = "\x1f".join(f"{type(word).__name__}:{word}" for word in words)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True)
class Stream:
    """Random numbers of B images for one purpose.

    >>> numbers = stream(0, "start", torch.arange(4))
    >>> torch.equal(numbers[2:].uniform(3, 5), numbers.uniform(3, 5)[2:])
    True
    >>> torch.equal(numbers.at("step", 1).uniform(3), numbers.at("step", 2).uniform(3))
    False
    """

    key: int
    index: Tensor  # (B,) int64: which image each row is

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, rows: Tensor | slice) -> Self:
        return replace(self, index=self.index[rows])

    def at(self, *words: int | str) -> Stream:
        """The stream of the same images for a further purpose, such as ("restart", 3)."""
        return Stream(_digest(self.key, *words), self.index)

    def to(self, device: torch.device | str) -> Self:
        """The same stream, drawn on another device."""
        return replace(self, index=self.index.to(device))

    def words(self, *shape: int) -> Tensor:
        """(B, *shape) 32-bit words as int64."""
        key = key_words(self.key, self.index.device)
        return random_words(key, self.index, math.prod(shape)).reshape(len(self), *shape)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """(B, *shape) float32, uniform in [low, high); 24 bits, so every value is exact."""
        return (self.words(*shape) >> 8).to(torch.float32).mul_(2.0**-24).mul_(high - low).add_(low)

    def normal(self, *shape: int) -> Tensor:
        """(B, *shape) float32, standard normal."""
        key = key_words(self.key, self.index.device)
        return random_normals(key, self.index, math.prod(shape)).reshape(len(self), *shape)

    def integers(self, high: int, *shape: int) -> Tensor:
        """(B, *shape) int64, uniform in 0 … high − 1 (bias below high / 2³²)."""
        return (self.words(*shape) * high) >> 32


def stream(seed: int, purpose: str, index: Tensor) -> Stream:
    """The random stream of the images numbered `index` in their data set, for a purpose such as
    "pgd"."""
    return Stream(_digest(seed, purpose), index.to(torch.int64))


@contextmanager
def seed_global(numbers: Stream) -> Iterator[None]:
    """Seed the global generators of torch, numpy and Python inside; outside they continue as
    before.

    For models that draw random numbers of their own: their outputs become a function of the
    stream's purpose and of its images, all of them, because such a model draws for a whole batch. A
    model with a generator of its own is not reached, and other threads that draw from the global
    generators meanwhile change what it draws.
    """
    seed, place = _digest(numbers.key, *numbers.index.tolist()), numbers.index.device
    python = random.getstate()
    array = np.random.get_state()  # noqa: NPY002 - models that draw from it are what this is for
    on_cuda = place.type == "cuda"
    with torch.random.fork_rng([place] if on_cuda else []):
        torch.default_generator.manual_seed(seed)
        if on_cuda:
            with torch.cuda.device(place):
                torch.cuda.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(array)  # noqa: NPY002
