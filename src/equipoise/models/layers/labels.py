"""Class names and the order of classes: which outputs of a network are the classes of a data
set."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from equipoise.core import checks
from equipoise.core.checks import InputError
from equipoise.models.inspection import Described
from equipoise.models.options import expand_home, is_explicit_path

# Subsets of the 1000 classes of ImageNet, in the order of their own data sets (sorted by WordNet
# identifier).
SUBSETS = {
    "imagenette": (0, 217, 482, 491, 497, 566, 569, 571, 574, 701),
    "imagewoof": (155, 159, 162, 167, 182, 193, 207, 229, 258, 273),
}
IMAGENET = 1000  # classes
MAX_FILE = 10**7  # bytes of a file of labels


class SelectClasses(Described):
    """The logits of some classes of a network, in a given order: (B, K) → (B, number of
    classes)."""

    description = ("select-classes", "classes")

    def __init__(self, classes: tuple[int, ...]) -> None:
        super().__init__()
        self.classes = classes
        # No part of the state dict: the classes are settings.
        self.register_buffer("index", torch.tensor(classes), persistent=False)

    def forward(self, logits: Tensor) -> Tensor:
        """(B, K) → (B, number of classes)."""
        greatest = max(self.classes)
        checks.require(
            logits.dim() == 2 and logits.shape[1] > greatest,
            "labels",
            f"be classes of the model, which lie in 0..{logits.shape[-1] - 1}",
            greatest,
        )
        return logits.index_select(1, self.get_buffer("index"))


def parse_labels(
    text: str, names: tuple[str, ...] = (), num_classes: int | None = None
) -> tuple[int, ...]:
    """The classes of a setting `labels`: a subset by name, numbers such as 0,217,482, or an
    explicit path of a file with a number or a class name on every line. A subset is one of the 1000
    classes of ImageNet.

    >>> parse_labels("3,1,2")
    (3, 1, 2)
    """
    positions = {name: position for position, name in enumerate(names)}
    if text in SUBSETS:
        checks.require(
            num_classes in (None, IMAGENET),
            "labels",
            f"be numbers or a file for a model with other than the {IMAGENET} classes of ImageNet",
            f"{text!r} for {num_classes} classes",
        )
        return SUBSETS[text]
    if is_explicit_path(text):
        return _from_file(Path(expand_home(text)), positions)
    if "," in text or text.isdigit():
        parts = text.split(",")
    else:
        checks.one_of("labels", text, SUBSETS)
        raise AssertionError
    return _different(_class(part, positions) for part in parts)


def _different(numbers: Iterable[int]) -> tuple[int, ...]:
    classes = tuple(numbers)
    checks.require(
        len(set(classes)) == len(classes) >= 2,
        "labels",
        "be at least two different classes",
        classes,
    )
    return classes


def _from_file(path: Path, positions: dict[str, int]) -> tuple[int, ...]:
    """The classes of a file. Its lines are not shown: a folder from elsewhere may name any file."""
    classes = []
    for line in _read_lines(path):
        try:
            classes.append(_class(line, positions))
        except InputError:
            kind = "the number or the name of a class" if positions else "the number of a class"
            raise InputError(
                f"`labels` must be a file with {kind} of the model on every line, got another line "
                f"{len(classes) + 1} (without empty ones) in {checks.shown(str(path))}"
            ) from None
    return _different(classes)


def _class(part: str, positions: dict[str, int]) -> int:
    part = part.strip()
    if part.isascii() and part.isdigit() and len(part) < 7:
        return checks.whole("labels", int(part), most=checks.MAX_CLASSES)
    if not positions:
        raise InputError(
            f"`labels` must be numbers of classes for a model without class names, got "
            f"{checks.shown(part)}"
        )
    return positions[checks.one_of("labels", part, positions)]


def _read_lines(path: Path) -> list[str]:
    try:
        text = (
            path.read_text(encoding="utf-8")
            if path.is_file() and path.stat().st_size <= MAX_FILE
            else None
        )
    except (OSError, UnicodeDecodeError):
        text = None
    if text is None:
        raise InputError(
            f"`labels` must be a text file with one class per line, got {checks.shown(str(path))}"
        )
    lines = [line for line in text.splitlines() if line.strip()]
    checks.require(
        2 <= len(lines) <= checks.MAX_CLASSES, "labels", "have 2 or more lines", len(lines)
    )
    return lines
