"""Chance inside a CUDA graph: keys that lie on the device and change from epoch to epoch.

A captured step repeats the same instructions, so the key of its streams cannot be a Python number. A
:class:`KeyTable` holds one key for every purpose the step draws for; :class:`GraphStream` is a stream that reads its
key from there. The numbers are those of the :class:`equipoise.core.rng.Stream` it stands for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise.core.rng import Stream, philox

Path = tuple[tuple[int | str, ...], ...]
_WORD = 0xFFFFFFFF
_CAPACITY = 64


class KeyTable:
    """Keys by purpose, on the device."""

    def __init__(self, device: torch.device, compiled: bool) -> None:
        self.keys = torch.zeros(_CAPACITY, 2, dtype=torch.int64, device=device)
        self.paths: list[Path] = []
        self.base: Stream | None = None
        self.words: Callable[..., Tensor] = _compiled(words) if compiled else words
        self.normal: Callable[..., Tensor] = _compiled(normal) if compiled else normal

    def begin(self, base: Stream) -> None:
        """From here on, streams stand for purposes of `base` (whose images do not matter)."""
        self.base = base
        for number, path in enumerate(self.paths):
            self._write(number, path)

    def key(self, path: Path) -> Tensor:
        """(2,) the halves of the key of a purpose; a new purpose can only come up outside a capture."""
        if path not in self.paths:
            self.paths.append(path)
            self._write(len(self.paths) - 1, path)
        return self.keys[self.paths.index(path)]

    def _write(self, number: int, path: Path) -> None:
        if self.base is None:
            raise RuntimeError("a table of keys begins with a stream")
        chance = self.base
        for words_ in path:
            chance = chance.at(*words_)
        self.keys[number] = torch.tensor([chance.key & _WORD, chance.key >> 32])


@dataclass(frozen=True)
class GraphStream(Stream):
    """The stream `table.base.at(*path[0]).at(*path[1])…` of the images `index`."""

    table: KeyTable
    path: Path = ()

    def __getitem__(self, rows: Tensor | slice) -> GraphStream:
        return GraphStream(self.key, self.index[rows], self.table, self.path)

    def at(self, *words: int | str) -> GraphStream:
        """See :meth:`Stream.at`."""
        return GraphStream(self.key, self.index, self.table, (*self.path, words))

    def to(self, device: torch.device | str) -> GraphStream:
        """See :meth:`Stream.to`."""
        return GraphStream(self.key, self.index.to(device), self.table, self.path)

    def words(self, *shape: int) -> Tensor:
        """See :meth:`Stream.words`."""
        return self.table.words(self.index, self.table.key(self.path), math.prod(shape)).reshape(len(self), *shape)

    def normal(self, *shape: int) -> Tensor:
        """See :meth:`Stream.normal`."""
        return self.table.normal(self.index, self.table.key(self.path), math.prod(shape)).reshape(len(self), *shape)


def words(index: Tensor, key: Tensor, size: int) -> Tensor:
    """(B, size) 32-bit words, as :meth:`Stream.words` draws them."""
    block = torch.arange((size + 3) // 4, device=index.device).unsqueeze(0)
    image = index.unsqueeze(1)
    counter = torch.broadcast_tensors(block & _WORD, block >> 32, image & _WORD, image >> 32)
    drawn = torch.stack(philox((counter[0], counter[1], counter[2], counter[3]), (key[0], key[1])), dim=2)
    return drawn.flatten(1)[:, :size]


def normal(index: Tensor, key: Tensor, size: int) -> Tensor:
    """(B, size) standard normal numbers, as :meth:`Stream.normal` draws them."""
    pairs = (words(index, key, 2 * ((size + 1) // 2)) >> 8).to(torch.float32).unflatten(1, (-1, 2))
    radius = pairs[..., 0].add(0.5).mul(2.0**-24).log().mul(-2).sqrt()
    angle = pairs[..., 1].mul(2.0**-24 * 2 * math.pi)
    return torch.stack((radius * angle.cos(), radius * angle.sin()), dim=-1).flatten(1)[:, :size]


def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    fused: Any = torch.compile(function, dynamic=False)
    return fused  # type: ignore[no-any-return]
