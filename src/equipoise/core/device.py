"""The device to compute on, and the precision to compute in."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from equipoise.core import checks
from equipoise.core.settings import setting

DEVICES = ("auto", "cpu", "cuda")
PRECISIONS = ("auto", "fp32", "bf16")


def resolve(name: str | torch.device) -> torch.device:
    """The device of that name; `auto` is CUDA if available, and under `torchrun` the GPU of this
    process."""
    if isinstance(name, torch.device):
        return name
    checks.one_of("device", name, DEVICES)
    present = torch.cuda.is_available()
    checks.require(
        name != "cuda" or present, "device", "be one that is present (no CUDA device found)", name
    )
    if name == "cpu" or not present:
        return torch.device("cpu")
    processes, count = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    checks.require(
        processes <= count,
        "device",
        f"have a GPU for each of the {processes} processes",
        f"{count} GPUs",
    )
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


BF16_TRIAL = """
import torch
x, layer = torch.rand(8, 64), torch.nn.Linear(64, 16)
with torch.autocast("cpu", dtype=torch.bfloat16):
    layer(x).float().sum().backward()
    torch.nn.Conv2d(64, 16, 3)(torch.rand(8, 64, 8, 8)).float().sum().backward()
"""


@functools.cache
def has_bf16(kind: str) -> bool:
    """Whether this kind of device computes in bfloat16.

    Some CPUs, virtual ones above all, claim instructions on which they trap. That ends the process,
    so a separate one tries first.
    """
    if kind != "cpu":
        return True
    return (
        subprocess.run(
            [sys.executable, "-c", BF16_TRIAL], capture_output=True, check=False
        ).returncode
        == 0
    )


def check_precision(name: str, device: torch.device) -> str:
    """Check that this device has the precision of that name, and return the name."""
    checks.one_of("precision", name, PRECISIONS)
    checks.require(
        name != "bf16" or has_bf16(device.type),
        "precision",
        f"be auto or fp32 on this {device.type}, which cannot compute in bfloat16",
        name,
    )
    return name


_tf32_before: list[
    tuple[bool, bool]
] = []  # one entry per open context; the first is the user's setting
_tf32_lock = threading.Lock()
_cuda_lock = threading.RLock()


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Compute in full precision: no TF32, which torch allows in convolutions by default, and no
    autocast.

    TF32 is a setting of the whole process: of contexts that overlap in several threads the last one
    restores it.
    """
    convolutions, products = torch.backends.cudnn, torch.backends.cuda.matmul
    with _tf32_lock:
        _tf32_before.append((convolutions.allow_tf32, products.allow_tf32))
        convolutions.allow_tf32 = products.allow_tf32 = False
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        with _tf32_lock:
            before = _tf32_before.pop()
            if not _tf32_before:
                convolutions.allow_tf32, products.allow_tf32 = before


def exclusive(device: torch.device) -> AbstractContextManager[object]:
    """A context for attacks, which only one thread at a time enters on CUDA.

    There the precision is a setting of the whole process, so that another thread's passes would
    change the results.
    """
    return _cuda_lock if device.type == "cuda" else nullcontext()


def move(model: nn.Module, device: torch.device) -> nn.Module:
    """The model on that device; one that is there already is left alone, because other threads may
    be using it."""
    tensors = (*model.parameters(), *model.buffers())
    return model if all(_is_on(tensor, device) for tensor in tensors) else model.to(device)


def _is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)


def autocast(name: str, device: torch.device) -> AbstractContextManager[object]:
    """A context for forward passes: `bf16` computes convolutions and matrix products in bfloat16.

    `auto` is fp32, because a printed accuracy should not depend on the machine that measured it.
    """
    if check_precision(name, device) == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()


@contextmanager
def single_thread() -> Iterator[None]:
    """Compute on the CPU with one thread: numbers of small tensors then do not depend on how many
    cores there are.

    Several threads would wait for each other where other programs use the cores.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# Images attacked at a time; smaller batches leave a GPU idle
ATTACK_BATCH, CUDA_ATTACK_BATCH = 128, 512


def attack_batch_setting() -> Any:
    """The setting for :func:`attack_batch_size`."""
    return setting(
        None,
        f"Images per batch, {ATTACK_BATCH} or on CUDA {CUDA_ATTACK_BATCH} if not given; halved when "
        "memory runs out.",
        least=1,
    )


def attack_batch_size(given: int | None, place: torch.device) -> int:
    """Images attacked at a time: as given, or else as many as suit the device."""
    return (
        given if given is not None else CUDA_ATTACK_BATCH if place.type == "cuda" else ATTACK_BATCH
    )
