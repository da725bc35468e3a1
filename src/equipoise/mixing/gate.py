"""The mixing network [Bai2024, Section 4.3]: from features of both bases to one number for every image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from equipoise import models
from equipoise.core import checks
from equipoise.core.modes import inference
from equipoise.models import formats
from equipoise.models.feature_hooks import Maps, Taps, find_taps, matched, tapped
from equipoise.models.preact_resnet import PreActBlock
from equipoise.models.resnet import he_init

WIDTH = 96  # 6.3 million parameters for a pair of ResNet-18
OFFICIAL = 256  # the official network for that pair: 44 million
SIDES = ("accurate", "robust")
Pair = tuple[Taps, Taps]  # taps of the accurate and of the robust base


class Gate(nn.Module):
    """One number for every image from maps of two depths of both bases [Bai2024, Figure 10].

    Three stages of two pre-activation blocks, each halving the map: the first on the joined shallow maps; its output
    meets the joined deep maps (through a 1×1 convolution where the channels differ, averaged where the sizes do);
    global average; a linear layer without bias; normalised over the images without a scale of its own, so that it
    cannot become ever more cautious. The statistics are the batch's in training mode and running ones otherwise;
    nothing else depends on the mode.

    Args:
        taps: where it looks, which is a part of what it has learnt.
        shallow, deep: channels of the joined maps of both bases.
        width: channels of the first stage; the next have twice and four times as many.
        momentum: how fast the running statistics of the output follow.
    """

    def __init__(self, taps: Pair, shallow: int, deep: int, width: int = WIDTH, momentum: float = 0.05) -> None:
        super().__init__()
        self.taps, self.shape = taps, (shallow, deep, checks.whole("width", width, least=1))
        self.first = _stage(shallow, width)
        self.join: nn.Module = nn.Identity() if deep == width else nn.Conv2d(deep, width, 1, bias=False)
        self.second = _stage(width, 2 * width)
        self.third = _stage(2 * width, 4 * width)
        self.fc = nn.Linear(4 * width, 1, bias=False)
        self.output = nn.BatchNorm1d(1, affine=False, momentum=momentum)
        he_init(self)

    def forward(self, seen: Sequence[Maps]) -> Tensor:
        """(B,) from the maps of the accurate and of the robust base; about standard normal on training images."""
        shallow, deep = (torch.cat(matched([maps[depth] for maps in seen]), dim=1) for depth in (0, 1))
        checks.require((shallow.shape[1], deep.shape[1]) == self.shape[:2], "bases", "be those of the gate, with "
                       f"{self.shape[0]} and {self.shape[1]} channels at its taps", (shallow.shape[1], deep.shape[1]))
        met = matched([self.first(shallow), self.join(deep)])
        last = self.third(self.second(met[0] + met[1])).mean(dim=(2, 3))
        # Eight bits of this one number would hide from an attack what it gains by moving it.
        with torch.autocast(last.device.type, enabled=False):
            answer: Tensor = self.output(self.fc(last.to(self.fc.weight.dtype)))
        return answer.squeeze(1)

    def extra_repr(self) -> str:
        """Where it looks."""
        return f"taps={self.taps}, width={self.shape[2]}"


def _stage(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(PreActBlock(inputs, outputs, 2), PreActBlock(outputs, outputs, 1))


def new_gate(accurate: nn.Module, robust: nn.Module, example: Tensor, *, taps: Pair | None = None, width: int = WIDTH,
             momentum: float = 0.05, seed: int = 0) -> Gate:
    """A gate with fresh weights for two bases.

    Args:
        accurate, robust: images (B, C, H, W) in [0, 1] → logits (B, K); channels are found by a look at their maps.
        example: a few images.
        taps: two submodule names per base; :func:`~equipoise.models.feature_hooks.find_taps` if not given.
        width, momentum: of the :class:`Gate`.
        seed: the same seed gives the same weights.
    """
    bases = (accurate, robust)
    paired = taps is None or [len(names) if isinstance(names, tuple | list) else 0 for names in taps] == [2, 2]
    checks.require(paired, "taps", "hold two names for the accurate and two for the robust base", taps)
    with torch.no_grad(), inference(*bases):
        taps = taps or (find_taps(accurate, example), find_taps(robust, example))
        caught = [tapped(base, names, example)[1] for base, names in zip(bases, taps, strict=True)]
    shallow, deep = (sum(maps[depth].shape[1] for maps in caught) for depth in (0, 1))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return Gate(taps, shallow, deep, width, momentum)


def save_gate(path: Path | str, gate: Gate, accurate: nn.Module, robust: nn.Module,
              facts: Mapping[str, str] | None = None) -> None:
    """Write the gate alone; its metadata say where it looks and which bases it was trained for."""
    told = {"taps": ";".join(",".join(names) for names in gate.taps), "shape": ",".join(map(str, gate.shape)),
            **{side: models.weights_digest(base) for side, base in zip(SIDES, (accurate, robust), strict=True)}}
    state = {key: value.detach().cpu().contiguous() for key, value in sorted(gate.state_dict().items())}
    formats.write_safetensors(Path(path), state, {**(facts or {}), **told})


def load_gate(path: Path | str, accurate: nn.Module, robust: nn.Module) -> Gate:
    """The gate of a file, in evaluation mode; bases other than its own are refused."""
    state, told = formats.read_safetensors(Path(path))
    missing = [key for key in ("taps", "shape", *SIDES) if key not in told]
    checks.require(not missing, str(path), "hold a gate, with " + ", ".join(missing), sorted(told))
    for side, base in zip(SIDES, (accurate, robust), strict=True):
        digest = models.weights_digest(base)
        checks.require(digest == told[side], side, f"be the base that {path} was trained for, with weights "
                       f"{told[side][:12]}", digest[:12])
    first, second = (tuple(names.split(",")) for names in told["taps"].split(";"))
    shallow, deep, width = map(int, told["shape"].split(","))
    gate = Gate(((first[0], first[1]), (second[0], second[1])), shallow, deep, width)
    wanted = {key: value.shape for key, value in gate.state_dict().items()}
    checks.require({key: value.shape for key, value in state.items()} == wanted, str(path),
                   f"hold the {len(wanted)} tensors of this gate", f"{len(state)}, not all of their names and shapes")
    gate.load_state_dict(state)
    return gate.eval()
