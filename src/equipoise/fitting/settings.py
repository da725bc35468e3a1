"""Settings of a fit; their fields are the options of `equipoise fit`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from equipoise.core import checks
from equipoise.core.settings import Settings, setting
from equipoise.fitting import conformal
from equipoise.fitting.conformal import Target
from equipoise.mixing.logit_maps import CLAMPS


@dataclass(frozen=True, kw_only=True)
class FitSettings(Settings):
    """What to fit, and how to attack and search; the defaults serve any pair of models."""

    lose_at_most: float | None = setting(None, "Points (of 100) of robust accuracy that may be lost; 1 if no target is "
                                         "given.")
    beta: float | None = setting(None, "Share of the robust model's attacked accuracy to keep.")
    alpha: float | None = setting(None, "Plain mixing with this weight; nothing is fitted.", share=True)
    gate: str | None = setting(None, "A gate from `equipoise train gate`, file or folder, which gives every image an "
                               "alpha of its own over the fitted map.")
    objective: str = setting("mixture", "What the search maximizes: mixture (clean accuracy of the mixture) or "
                             "surrogate (the paper's, without predictions of the accurate model).",
                             among=("mixture", "surrogate"))
    clamp: str = setting("gelu-monotone", "gelu-monotone, gelu, relu, elu, softplus or linear.", among=CLAMPS)
    rule: str = setting("auto", "Maps to search: nuts (MixedNUTS), switch (the confidence switch) or auto (both).",
                        among=("auto", "nuts", "switch"))
    against: str = setting("any", "Adversary of the promise: any (the accurate model may predict any class at attacked "
                           "points) or pair (an attack on both models at once).", among=("any", "pair"))
    rounds: int = setting(1, "Attacks on the mapped model, each followed by a new search.", least=0, most=1000)
    steps: int = setting(50, "Steps of the margin attack.", least=1)
    targets: int = setting(9, "Target classes of the margin attack.", least=1, most=1000)
    pool: int = setting(3, "Attacked points kept per image and attack.", least=1, most=1000)
    gradient_free: bool = setting(False, "Attack by random search.")
    like: str | None = setting(None, "A mixture whose map is reused; only the threshold is fitted.")
    batch_size: int = setting(128, "Images per batch; halved when memory runs out.", least=1)
    seed: int = setting(0, "Random seed.", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [name for name in ("lose_at_most", "beta", "alpha") if getattr(self, name) is not None]
        checks.require(len(given) <= 1, "target", "be at most one of lose_at_most, beta and alpha", given)
        self.target()
        if self.gate is not None:
            checks.require(Path(self.gate).exists(), "gate", "be a file or folder that exists", self.gate)
            checks.require(self.alpha is None, "gate", "be left out with alpha, which fits nothing", self.gate)

    def target(self) -> Target:
        """What may be lost."""
        if self.beta is not None:
            return conformal.beta(self.beta)
        return conformal.lose_at_most(1.0 if self.lose_at_most is None else self.lose_at_most)
