"""The mixture as a module: images in, logits out, like any other classifier."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.core import checks
from equipoise.data.dataset import as_images
from equipoise.mixing.formula import gate_of, mix
from equipoise.mixing.logit_maps import LogitMap, at_least_float32, one_hot, require_classes
from equipoise.mixing.provenance import RULES, Frontier, Provenance, rule_of, select_mixture
from equipoise.mixing.surrogates import Hinges, Surrogate
from equipoise.models.inspection import Described, name_failing_model
from equipoise.models.layers.tta import TTAClassifier
from equipoise.models.sources.black_box import has_gradients

TOLERANCE = 1e-5  # margins this close to q count as ties, because fp32 cannot distinguish them


class MixedClassifier(Described):
    """log((1 − α)·p_g(x) + α·softmax(M(h(x)))) [Bai2024, Eq. (3.4)] [Bai2024nuts, Eq. (5)].

    Args:
        accurate: g, images (B, C, H, W) in [0, 1] → logits (B, K); with `hard` it may return
            classes (B,).
        robust: h, images → logits (B, K).
        alpha: weight of the robust side, in [0, 1].
        logit_map: M, on the robust side; None is the identity.
        hard: p_g is the one-hot vector of g's class (temperature 0) instead of softmax(g(x)/T).
        accurate_temperature: T > 0, without `hard` [Bai2024nuts, D.4].
        surrogate_alpha: α_d of :meth:`surrogate`.
        frontier: the mixtures that :meth:`with_target` selects from.
        provenance: which images it was fitted on.
    """

    description: tuple[str, ...] = ("mixture", "alpha", "hard", "surrogate_alpha")
    settings_buffers = ("gate",)
    stages = 1  # of the robust side
    gate: Tensor

    def __init__(
        self,
        accurate: nn.Module,
        robust: nn.Module,
        alpha: float,
        *,
        logit_map: LogitMap | None = None,
        hard: bool = False,
        accurate_temperature: float = 1.0,
        surrogate_alpha: float = 0.9,
        frontier: Frontier = (),
        provenance: Provenance | None = None,
    ) -> None:
        super().__init__()
        for side, base in (("accurate", accurate), ("robust", robust)):
            checks.instance(side, base, nn.Module, "be a torch module")
        checks.optional("logit_map", logit_map, LogitMap, "be a LogitMap")
        checks.require(isinstance(hard, bool), "hard", "be true or false", hard)
        checks.instance("frontier", frontier, tuple, "be a tuple of mixtures")
        checks.optional("provenance", provenance, Provenance, "be a Provenance")
        # Kept, because log-odds do not give back every digit
        self.alpha = float(checks.within("alpha", alpha, 0, 1))
        self.register_buffer("gate", gate_of(self.alpha))
        self.accurate, self.robust, self.logit_map, self.hard = accurate, robust, logit_map, hard
        self.surrogate_alpha = checks.within("surrogate_alpha", surrogate_alpha, 0, 1)
        checks.positive("accurate_temperature", accurate_temperature)
        checks.require(
            not hard or accurate_temperature == 1,
            "accurate_temperature",
            "be left out with hard labels",
            accurate_temperature,
        )
        self.accurate_temperature = float(accurate_temperature)
        self.frontier, self.provenance = frontier, provenance

    @property
    def rule(self) -> str:
        """The key in :data:`RULES` of what chose the map and alpha; of a mixture that was not
        fitted, its form."""
        recorded = None if self.provenance is None else self.provenance.rule
        return recorded or rule_of(self.logit_map, self.alpha)

    @property
    def method(self) -> str:
        """The name of the rule in tables and reports."""
        return RULES[self.rule]

    def describe(self) -> dict[str, Any]:
        """The settings as plain values; the temperature of the accurate side only where it is not
        1."""
        tempered = self.accurate_temperature != 1
        return {
            **super().describe(),
            **({"accurate_temperature": self.accurate_temperature} if tempered else {}),
        }

    @property
    def q(self) -> float:
        """(1 − α)/α: a robust side with a larger margin than this decides the class [Bai2024, Lemma
        3.2]."""
        return math.exp(min(-float(self.gate), 700.0))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, K) log-probabilities, which serve as logits."""
        return self.from_base_outputs(*self.base_outputs(x))

    def base_outputs(self, x: Tensor) -> tuple[Tensor, ...]:
        """What both bases return for images (B, C, H, W): everything else about a mixture is a
        function of it."""
        outputs = self.robust_outputs(x)
        return self.accurate(x), *outputs

    def robust_outputs(self, x: Tensor) -> tuple[Tensor, ...]:
        """What :meth:`base_outputs` holds of the robust base: its logits (B, K)."""
        return (self.robust(x),)

    def from_base_outputs(self, *outputs: Tensor) -> Tensor:
        """(B, K) log-probabilities of the mixture from :meth:`base_outputs`."""
        return mix(*self._log_probabilities(*outputs), self.gate)

    def reads_bases_of(self, model: nn.Module) -> bool:
        """Whether :meth:`from_base_outputs` is for the base outputs of this model."""
        return model is self

    def log_probabilities(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, K) log-probabilities of the accurate side, and of the robust one."""
        return self._log_probabilities(*self.base_outputs(x))

    def _log_probabilities(self, g: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        robust = self.map_robust(h)
        return self._accurate_log_probabilities(g, robust), robust

    def alphas(self, x: Tensor) -> Tensor:
        """(B,) the weight of the robust side for every image: here the same for all."""
        return torch.sigmoid(self.gate).to(x.dtype).expand(x.shape[0])

    def map_robust(self, h: Tensor) -> Tensor:
        """(B, K) logits of h → log-probabilities, in fp32 at least: half precision would round
        margins to a tie."""
        return self._mapped(h, self.logit_map)

    def _mapped(self, h: Tensor, logit_map: LogitMap | None) -> Tensor:
        require_classes(h, f"logits of {self._name_of('robust')}")
        return F.log_softmax(at_least_float32(h) if logit_map is None else logit_map(h), dim=1)

    def robust_side(self, h: Tensor, *_: Tensor) -> Tensor:
        """(B, K) log-probabilities of the robust side from :meth:`robust_outputs`, by which g may
        change the class."""
        return self.map_robust(h)

    def _accurate_log_probabilities(self, g: Tensor, h: Tensor) -> Tensor:
        """(B, K) from the logits (B, K) or classes (B,) of g, and the log-probabilities of the
        robust side."""
        returns_classes = self.hard and g.dim() == 1
        checks.require(
            g.shape == (h.shape[:1] if returns_classes else h.shape),
            "accurate and robust",
            "have equal numbers of classes",
            (tuple(g.shape), tuple(h.shape)),
        )
        if not self.hard:
            return F.log_softmax(at_least_float32(g) / self.accurate_temperature, dim=1)
        if not returns_classes:
            return one_hot(g.argmax(dim=1), h.shape[1], h.dtype)
        classes = g.long()
        if g.device.type == "cpu" and not (
            torch._C._get_tracing_state() or torch.compiler.is_compiling()
        ):
            checks.labels(classes, h.shape[1], name=f"classes of {self._name_of('accurate')}")
        # Elsewhere without waiting for the values: NaN, which everything that judges logits
        # refuses.
        valid = classes.clamp(0, h.shape[1] - 1)
        return one_hot(valid, h.shape[1], h.dtype).masked_fill(
            (valid != classes).unsqueeze(1), math.nan
        )

    @name_failing_model
    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        """(B,) classes, the same as `forward(x).argmax(1)`, with g run only on the images it can
        change.

        Bytes are converted to [0, 1], and images to the precision of the robust base. Unlike
        `forward`, which never waits for a value, it refuses images outside of [0, 1], and bases
        that return NaN or +inf where they are run.
        """
        x = as_images(x)
        x = x.to(
            next(
                (weight.dtype for weight in self.robust.parameters() if weight.is_floating_point()),
                x.dtype,
            )
        )
        version = None if x.is_inference() else x._version
        classes = self._predict(x)
        if version is not None and x._version != version:
            raise checks.InputError(
                f"{self._name_of('robust')} must not change its images in place; work on a copy"
            )
        return classes

    def _predict(self, x: Tensor) -> Tensor:
        """(B,) classes of valid images."""
        logits, features = self._robust_with_features(x)
        h = self.map_robust(checks.logits(logits, len(x), f"logits of {self._name_of('robust')}"))
        return self._predict_by_margin(x, h, features)

    def _predict_by_margin(self, x: Tensor, h: Tensor, features: Sequence[Tensor] = ()) -> Tensor:
        """(B,) classes, given the log-probabilities h of the robust side; g runs where its margin
        is small."""
        classes = h.argmax(dim=1)
        rows = self.needs_accurate(h).nonzero().squeeze(1)
        if len(rows):
            classes[rows] = self._predict_with_accurate(
                x[rows], h[rows], [maps[rows] for maps in features]
            )
        return classes

    @property
    def views(self) -> int:
        """Network passes of the robust base for one image: more than one with test-time
        augmentation."""
        return self.robust.count if isinstance(self.robust, TTAClassifier) else 1

    def passes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B,) network passes of the robust base that :meth:`predict` makes, and (B,) bool where it
        runs g."""
        needs_accurate = self.needs_accurate(self.map_robust(self.robust(x)))
        return torch.full_like(needs_accurate, self.views, dtype=torch.float32), needs_accurate

    def _robust_with_features(self, x: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """Logits of h, and what else of its pass :meth:`_predict_with_accurate` needs: one tensor
        per row and kind."""
        return self.robust(x), ()

    def _predict_with_accurate(self, x: Tensor, h: Tensor, features: Sequence[Tensor]) -> Tensor:
        """(B,) classes of the mixture, given the log-probabilities h of the robust side."""
        g, name = self.accurate(x), self._name_of("accurate")
        if self.hard and isinstance(g, Tensor) and g.dim() == 1:
            checks.require(
                not g.is_floating_point(), f"classes of {name}", "be whole numbers", g.dtype
            )
            checks.labels(g.long(), h.shape[1], len(x), f"classes of {name}")
        else:
            checks.logits(g, len(x), f"logits of {name}")
        return self.mix_sides(g, h).argmax(dim=1)

    def mix_sides(self, g: Tensor, h: Tensor) -> Tensor:
        """(B, K) logits of the mixture from the output of g and the log-probabilities h of the
        robust side."""
        return mix(self._accurate_log_probabilities(g, h), h, self.gate)

    def _name_of(self, side: str) -> str:
        return f"the {side} model {type(getattr(self, side)).__name__}"

    def needs_accurate(self, h: Tensor) -> Tensor:
        """(B,) where g can change the prediction: the margin of the robust side's log-probabilities
        is at most q."""
        top = h.exp().topk(2, dim=1).values
        return top[:, 0] - top[:, 1] <= self.q + TOLERANCE

    @property
    def differentiable(self) -> bool:
        """Whether the mixture's own gradients are useful: no logit map, no hard labels, and
        gradients of g."""
        return self.logit_map is None and not self.hard and has_gradients(self.accurate)

    def surrogate(self, *, stand_in: nn.Module | None = None) -> nn.Module:
        """The differentiable mixture that adaptive attacks take gradients from [Bai2024nuts, Eq.
        (8)].

        A stand-in replaces an accurate model that returns classes; without one, only the robust
        side has a gradient.
        """
        return Surrogate(
            stand_in or self.accurate, self.robust, self.logit_map, self.surrogate_alpha
        )

    def tempered_surrogate(self, *, stand_in: nn.Module | None = None) -> nn.Module:
        """:meth:`surrogate` with the mixture's own alpha, at the temperature at which its map
        works."""
        q = None if self.logit_map is None else self.q
        return Surrogate(stand_in or self.accurate, self.robust, self.logit_map, self.alpha, q)

    def hinges(self, *, stand_in: nn.Module | None = None) -> nn.Module:
        """Scores for an attack on both sides at once; see :meth:`surrogate`."""
        return Hinges(stand_in or self.accurate, self.robust, self.logit_map, self.q)

    def sides(self, *outputs: Tensor) -> tuple[Tensor, ...]:
        """Logits of g (or classes (B,)) and of h (B, K), log-probabilities of the robust side, and
        log q (B,).

        A robust side with several stages has the last three for each of them.
        """
        g, h = outputs
        g = g if self.accurate_temperature == 1 else g / self.accurate_temperature
        return g, h, self.map_robust(h), -self.gate.to(h.dtype).expand(len(h))

    def with_target(self, lose_at_most: float) -> MixedClassifier:
        """The most accurate mixture of the frontier that loses at most so many points (of 100) of
        robust accuracy."""
        from equipoise.mixing.cascade import mixture_at  # whose mixtures are subclasses of this one

        selected = select_mixture(self.frontier, lose_at_most)
        provenance = self.provenance and self.provenance.with_target(selected)
        mixture = mixture_at(
            selected,
            self.accurate,
            self.robust,
            surrogate_alpha=self.surrogate_alpha,
            frontier=self.frontier,
            provenance=provenance,
        )
        return mixture.to(self.gate.device).train(self.training)

    def extra_repr(self) -> str:
        """The settings on one line, with those of the map."""
        return f"{super().extra_repr()}, logit_map={self.logit_map}"


class HardLabels(Described):
    """Any function from images to classes as an accurate side: a service, another framework, …"""

    description = ("hard-labels",)

    def __init__(self, function: object) -> None:
        super().__init__()
        checks.require(callable(function), "accurate", "be callable", type(function).__name__)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B,) classes."""
        classes = torch.as_tensor(self.function(x.detach()), device=x.device)  # type: ignore[operator]
        valid = classes.shape == (len(x),) and not classes.is_floating_point()
        checks.require(
            valid, "accurate", f"return {len(x)} classes", f"{classes.dtype} {tuple(classes.shape)}"
        )
        return classes.long()
