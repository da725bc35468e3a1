"""Peak memory of two amounts of data, each in a process of its own; run by `test_memory_use.py`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

import torch
from torch import nn

import equipoise as eq
from equipoise.data.dataset import whole_split

SIDE, COUNTS = 48, (1024, 8192)
IMAGE_BYTES = 3 * SIDE * SIDE


def evaluate(attack: str, count: int) -> None:
    images = torch.randint(0, 256, (count, 3, SIDE, SIDE), dtype=torch.uint8)
    data = whole_split("noise", "test", images, torch.randint(0, 10, (count,)), tuple("0123456789"))
    model = nn.Sequential(nn.Conv2d(3, 1, 3, stride=8), nn.Flatten(), nn.Linear(36, 10))
    result = eq.evaluate(
        model, data, threat=eq.Threat("linf", 0.1), attack=attack, steps=1, device="cpu"
    )
    assert len(result.rows) == 2 * count


WORK: dict[str, Callable[[int], None]] = {
    "pgd": lambda count: evaluate("pgd", count),
    "apgd": lambda count: evaluate("apgd", count),
}


def peak(work: Callable[[int], None], count: int) -> int:
    """Bytes, measured in a child process, which does not pay for the imports again."""
    child = os.fork()
    if child == 0:
        work(count)
        os._exit(0)
    _, status, usage = os.wait4(child, 0)
    assert status == 0
    return 1024 * usage.ru_maxrss


def main() -> None:
    torch.set_num_threads(1)
    print(
        json.dumps({name: [peak(WORK[name], count) for count in COUNTS] for name in sys.argv[1:]})
    )


if __name__ == "__main__":
    main()
