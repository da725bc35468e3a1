"""The rules of local smoothing for one pair: what is judged, and what attacks on it follow."""

from __future__ import annotations

import copy
import math
from functools import partial

import torch
from torch import Tensor, nn

from equipoise.attacks import pgd, transfer
from equipoise.attacks.fused import swift
from equipoise.core import device
from equipoise.data import Dataset, pixels
from equipoise.evaluation import Attack, Conditions
from equipoise.local_smoothing.jacobian import Softened
from equipoise.local_smoothing.smoothing import SmoothedClassifier
from equipoise.studies.local_attacks import CachedAttack, FallbackAttack
from equipoise.studies.local_pair import Pair
from equipoise.studies.local_size import LocalStudySize


class Bfloat16Copy(nn.Module):
    """A copy of a classifier in bfloat16: where gradients come from on a device that gains by it, never a verdict.

    Batch norms are folded away where they can be: the second derivative of one is some twenty operations, and a GPU
    waits for the host that asks for them. A ResNet-18 asks for a third of what it did.

    Args:
        model: in evaluation mode.
        x: a few images, on which the folded copy must agree with the model.
    """

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        super().__init__()
        # A copy of the copy, because where there is nothing to fold it is the model itself.
        self.model = copy.deepcopy(swift(model, x)).to(torch.bfloat16).requires_grad_(False)
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, K) in the precision of x."""
        logits: Tensor = self.model(x.to(torch.bfloat16)).to(x.dtype)
        return logits


class RuleSet:
    """Every rule of the family over one pair, and PGD through it.

    On CUDA gradients come from copies in bfloat16; every verdict is that of the models themselves.
    """

    def __init__(self, pair: Pair, size: LocalStudySize, conditions: Conditions) -> None:
        self.pair, self.size, self.conditions = pair, size, conditions
        on_cuda = conditions.device.type == "cuda"
        self.sources = [Bfloat16Copy(base, self.few(pair.held_out, 8)) if on_cuda else base
                        for base in (pair.accurate, pair.robust)]
        self.on_accurate, self.on_robust = (CachedAttack(partial(transfer, source=source, steps=size.steps), conditions.seed)
                                            for source in self.sources)

    def rule(self, oracle: nn.Module, gamma: float, trust: str, space: str = "logits") -> SmoothedClassifier:
        """A rule with the accurate model itself."""
        return self._rule(self.pair.accurate, oracle, gamma, trust, space)

    def through(self, oracle: nn.Module, gamma: float, trust: str, space: str = "logits") -> dict[str, Attack]:
        """PGD through a rule; where it has a steepness, also softened, on what the first leaves."""
        once = CachedAttack(self.pgd(self._rule(self.sources[0], oracle, gamma, trust, space)), self.conditions.seed)
        attacks: dict[str, Attack] = {"pgd": once}
        if trust != "constant" and gamma < math.inf:
            soft = self._rule(self.sources[0], oracle, gamma, trust, space, soft=True)
            attacks["pgd-soft"] = FallbackAttack(once, self.pgd(Softened(soft)))
        return attacks

    def _rule(self, accurate: nn.Module, oracle: nn.Module, gamma: float, trust: str, space: str,
              soft: bool = False) -> SmoothedClassifier:
        # Over logits a ReLU network's ‖∇g‖ has no slope: leaving it out saves the second derivatives.
        rule = SmoothedClassifier(accurate, oracle, gamma, trust=trust, space=space, norm=self.conditions.threat.norm,
                                  attached=soft or space == "probabilities")
        return rule.to(self.conditions.device)

    def pgd(self, source: nn.Module) -> Attack:
        """PGD that follows `source`, whatever the model under attack."""
        return partial(pgd, steps=self.size.steps, surrogate=source)

    def aim(self) -> SmoothedClassifier:
        """The policy's rule with a strength to be set, for attacks that aim."""
        return SmoothedClassifier(self.sources[0], self.sources[1], 1.0, trust=self.size.trust, attached=False,
                                  norm=self.conditions.threat.norm).to(self.conditions.device)

    def scale(self, trust: str, space: str) -> float:
        """The median of R on held-out images."""
        rule = self.rule(self.pair.robust, 1.0, trust, space)
        with torch.no_grad(), device.exactly(self.conditions.device):
            return float(rule.parts(self.few(self.pair.held_out))[2].median())

    def few(self, data: Dataset, most: int = 256) -> Tensor:
        """The first images, on the device."""
        return pixels(data.images[:most].to(self.conditions.device))
