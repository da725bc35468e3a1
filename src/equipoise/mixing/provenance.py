"""What a fitted mixture knows about its fit: the images that were used, and the other mixtures on
the frontier."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.core import checks, rng
from equipoise.core.promises import Target
from equipoise.core.serialize import Share
from equipoise.core.threat import Threat
from equipoise.data import Dataset
from equipoise.mixing.logit_maps import LogitMap

# Rules that choose a map and alpha, by the names that every table, report and message uses.
RULES = {
    "plain": "plain mixing",
    "paper": "MixedNUTS",
    "nuts": "NUTS map (ours)",
    "switch": "confidence switch",
    "cascade": "cascade of views",
    "robust": "robust model alone",
}
MAX_POSITIONS = 10_000_000  # images of a fit; longer ranges in a file are never expanded


def rule_of(logit_map: LogitMap | None, alpha: float) -> str:
    """The rule that gives such a mixture; only a record tells MixedNUTS from other fits of its
    family of maps."""
    if alpha == 1:
        return "robust"
    return "plain" if logit_map is None else "switch" if logit_map.settings.rivals == 0 else "nuts"


def gated_method(rule: str | None) -> str:
    """The name of a gate over the map of a rule (a key of `RULES`), or over plain mixing.

    >>> [gated_method(rule) for rule in (None, "plain", "paper", "nuts")]
    ['gate', 'gate', 'gate on MixedNUTS', 'gate on the NUTS map (ours)']
    """
    if rule in (None, "plain", "robust"):
        return "gate"
    return f"gate on {'' if rule == 'paper' else 'the '}{RULES[rule]}"


@dataclass(frozen=True)
class FittingImages:
    """Images that a fit used.

    They are recognized by their pixels, whatever data set, file name or split they come from.
    Folders of earlier versions, and published numbers, have no digests: there they are recognized
    by the name of the data set, the split and the position.
    """

    data: str
    split: str
    images: tuple[
        str, ...
    ] = ()  # positions in the split, such as "9000-9999"; none where they are unknown
    # Base64 of 8 bytes per image, see Dataset.image_digests
    digests: str = field(default="", kw_only=True)
    # Of the random halves: the first half selected the map; None if all images may have.
    seed: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        count = sum(high - low + 1 for low, high in self._ranges())
        stored = len(self._fitted())
        checks.require(
            stored in (0, count), "digests", f"be one for each of the {count} images", stored
        )

    def _fitted(self) -> NDArray[np.uint64]:
        """The digests of the fitting images."""
        try:
            return np.frombuffer(base64.b64decode(self.digests, validate=True), ">u8").astype(
                np.uint64
            )
        except ValueError:  # also of other characters, and of bytes that are no whole digests
            raise checks.InputError(
                f"`digests` must be base64 of 8 bytes per image, got {checks.shown(self.digests)}"
            ) from None

    def _ranges(self) -> list[tuple[int, int]]:
        """First and last position of every range."""
        return _parse(self.images)

    def overlap(self, data: Dataset) -> tuple[str, ...]:
        """The images of `data` that the fit used, as ranges; empty if there are none."""
        if self.digests:
            is_fitted = np.isin(data.image_digests(), self._fitted())
            return index_ranges(data.index[torch.from_numpy(is_fitted).to(data.index.device)])
        if (self.data, self.split) != (data.name, data.split) or not self.images:
            return ()
        # A range is never expanded. Of those that begin at or before an image, one that ends last
        # decides.
        lows, highs = np.array(sorted(self._ranges())).T
        before = np.searchsorted(lows, data.index.cpu().numpy(), side="right")
        last = np.concatenate([[-1], np.maximum.accumulate(highs)])[before]
        return index_ranges(data.index[data.index <= torch.from_numpy(last).to(data.index.device)])

    def selecting(self, data: Dataset) -> Tensor:
        """(M,) positions of the images of `data` that selected the map: at most those it was fitted
        on.

        Where the half that selected it is unknown, all of them may have.
        """
        shared = _positions(_parse(FittingImages.overlap(self, data)))
        ranges = self._ranges()
        same_split = (self.data, self.split) == (data.name, data.split)
        if (
            self.seed is None
            or not same_split
            or sum(high - low + 1 for low, high in ranges) > MAX_POSITIONS
        ):
            return shared
        index = _positions(ranges)
        return shared[torch.isin(shared, index[halves(index, self.seed)[0]])]


@dataclass(frozen=True)
class Provenance(FittingImages):
    """The fitting images, and what the fit promised; prevents evaluation on these images."""

    promise: str = ""
    rule: str | None = None  # a key of RULES; None in folders of versions that did not record it
    target: Target | None = None  # what the fit was to lose at most
    threat: Threat | None = None  # under attacks of this kind
    # Of the mixture whose map was reused: they selected it, and no other image did
    reused: FittingImages | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rule is not None:
            checks.one_of("rule", self.rule, RULES)

    @classmethod
    def of(
        cls,
        data: Dataset,
        promise: str,
        rule: str | None = None,
        *,
        target: Target | None = None,
        threat: Threat | None = None,
        seed: int | None = None,
        like: Provenance | None = None,
    ) -> Provenance:
        """The provenance of a mixture that was fitted on these images, with the map of the mixture
        `like` if given."""
        own = cls(
            data.name,
            data.split,
            index_ranges(data.index),
            promise,
            rule,
            target,
            threat,
            seed=seed,
            digests=_encode(data.image_digests()),
        )
        return own if like is None else own.with_images_of(like)

    def with_target(self, selected: FrontierMixture) -> Provenance:
        """The same images with the promise and the rule of another mixture of the frontier."""
        rule = (
            rule_of(selected.logit_map(), selected.alpha) if selected.first_q is None else "cascade"
        )
        target = Target(
            selected.lose_at_most,
            confidence=None if self.target is None else self.target.confidence,
        )
        return replace(
            self,
            rule=rule,
            target=target,
            promise=(
                f"loses at most {100 * selected.lose_at_most:.3g} points of robust accuracy {target.kind}, as one of "
                "several mixtures fitted on the same images"
            ),
        )

    def overlap(self, data: Dataset) -> tuple[str, ...]:
        """The images of `data` that the mixture, or the map that it reuses, was fitted on, as
        ranges."""
        own = super().overlap(data)
        if self.reused is None:
            return own
        return index_ranges(_positions(_parse([*own, *self.reused.overlap(data)])))

    def selecting(self, data: Dataset) -> Tensor:
        """(M,) positions of the images of `data` that selected the map; those of a reused map are
        of its own fit."""
        return super().selecting(data) if self.reused is None else self.reused.selecting(data)

    def with_images_of(self, other: Provenance) -> Provenance:
        """With the map of another mixture, which other images selected."""
        selected = FittingImages(
            other.data, other.split, other.images, digests=other.digests, seed=other.seed
        )
        return replace(self, reused=other.reused or selected, seed=None)


def _encode(digests: NDArray[np.uint64]) -> str:
    return base64.b64encode(digests.astype(">u8").tobytes()).decode()


def _parse(ranges: Iterable[str]) -> list[tuple[int, int]]:
    parsed = []
    for text in ranges:
        ends = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", text)
        low, high = (int(ends[1]), int(ends[2] or ends[1])) if ends else (0, -1)
        checks.require(low <= high, "images", 'be ranges of positions such as "9000-9999"', text)
        parsed.append((low, high))
    return parsed


def _positions(ranges: Iterable[tuple[int, int]]) -> Tensor:
    """All positions of some ranges, each once, in increasing order."""
    parts = [torch.arange(low, high + 1) for low, high in ranges]
    return torch.cat(parts).unique() if parts else torch.empty(0, dtype=torch.int64)


def halves(index: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Rows of a random half of some images to select a map on, and of the other one to set its
    threshold on.

    Both depend only on the seed and the positions of the images.
    """
    order = rng.stream(seed, "halves", index).words().argsort(stable=True)
    half = len(order) // 2
    return order[:half].sort().values, order[half:].sort().values


def index_ranges(index: Tensor) -> tuple[str, ...]:
    """Positions as ranges of consecutive numbers.

    >>> import torch
    >>> index_ranges(torch.tensor([3, 4, 5, 9]))
    ('3-5', '9')
    """
    # Within consecutive numbers, the difference between number and position is constant.
    runs = groupby(enumerate(sorted(index.tolist())), key=lambda item: item[1] - item[0])
    ends = [(run[0][1], run[-1][1]) for run in (list(items) for _, items in runs)]
    return tuple(f"{low}-{high}" if high > low else f"{low}" for low, high in ends)


@dataclass(frozen=True)
class FrontierMixture:
    """One mixture of the frontier between promised robustness and clean accuracy."""

    lose_at_most: Share  # promised upper bound of the robust accuracy lost, in [0, 1]
    clean: Share  # accuracy on clean images that were not used to select it
    alpha: Share
    clamp: str
    scale: float
    power: float
    shift: float
    rivals: float = 1.0
    unit: float = 0.0  # 0 is the layer norm
    first_q: Share | None = None  # of a cascade: threshold of the first view
    # Of a cascade: scale of the map for the first view; that of all views if None
    first_scale: float | None = None

    def logit_map(self) -> LogitMap:
        """The map of the robust side."""
        return LogitMap(
            self.scale,
            self.power,
            self.shift,
            self.clamp,
            rivals=self.rivals,
            unit=self.unit or None,
        )


Frontier = tuple[FrontierMixture, ...]


def pareto_frontier(mixtures: Iterable[FrontierMixture]) -> Frontier:
    """Sorted by the promise, only the mixtures that are more accurate than every mixture that loses
    less."""
    frontier: list[FrontierMixture] = []
    for mixture in sorted(mixtures, key=lambda m: (m.lose_at_most, -m.clean)):
        if not frontier or mixture.clean > frontier[-1].clean:
            frontier.append(mixture)
    return tuple(frontier)


def select_mixture(frontier: Frontier, lose_at_most: float) -> FrontierMixture:
    """The most accurate mixture that promises to lose at most so many points (of 100) of robust
    accuracy."""
    checks.require(len(frontier) > 0, "mixture", "have a fitted frontier", "none")
    checks.within("lose_at_most", lose_at_most, 0, 100)
    allowed = [
        mixture for mixture in frontier if mixture.lose_at_most <= lose_at_most / 100 + 1e-12
    ]
    least = 100 * min(mixture.lose_at_most for mixture in frontier)
    checks.require(
        bool(allowed),
        "lose_at_most",
        f"be at least {least:.3g}, the least that was fitted",
        lose_at_most,
    )
    return max(allowed, key=lambda mixture: mixture.clean)
