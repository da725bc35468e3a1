"""MixedNUTS as released [Bai2024nuts]: its numbers, and its RobustBench entry as a mixture.

`robustbench:cifar10/Linf/Bai2024MixedNUTS` holds two networks; the numbers come from an
`optimal_spca.yaml` in RobustBench's folder, in the format of the official code, else they are those
below.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equipoise.core import checks
from equipoise.mixing.classifier import MixedClassifier
from equipoise.mixing.logit_maps import LogitMap
from equipoise.mixing.provenance import Provenance
from equipoise.models.options import ModelSettings
from equipoise.models.sources import robustbench

CONFIG = "optimal_spca.yaml"
ROBUST_NAMES = {
    "cifar10": "Peng2023Robust",
    "cifar100": "Wang2023Better_WRN-70-16",
    "imagenet": "Liu2023Comprehensive_Swin-L",
}


@dataclass(frozen=True)
class ReleasedNumbers:
    """s, p and c of the map, alpha, and the alpha of the surrogate (α_d).

    The first thousand images of CIFAR's test sets selected them; which images of ImageNet did is
    unknown.
    """

    s: float
    p: float
    c: float
    alpha: float
    surrogate_alpha: float
    split: str = "test"
    images: tuple[str, ...] = ("0-999",)

    def logit_map(self) -> LogitMap:
        """The map M."""
        return LogitMap(self.s, self.p, self.c, "gelu")


# As released; the c for CIFAR-100 is no point of its grid, but of one that ends at 0 instead of
# −0.4.
RELEASED = {
    "cifar10": ReleasedNumbers(5.0, 4.0, -1.1, 0.9987500602493457, 0.9570535356459247),
    "cifar100": ReleasedNumbers(
        0.6115753843212784,
        3.571428571428571,
        -2.142857142857143,
        0.9860300534207915,
        0.9706995384302841,
    ),
    "imagenet": ReleasedNumbers(
        0.023535468936502525,
        2.7142857142857144,
        -0.2857142857142858,
        0.9971266414518896,
        0.90683792395046,
        "val",
        (),
    ),
}


def released_provenance(name: str, path: Path | None = None) -> Provenance:
    """The images that selected the released numbers for a data set, or by assumption others in a
    file."""
    own, numbers = RELEASED[name], "published numbers" if path is None else f"numbers of {path}"
    return Provenance(
        name, own.split, own.images, f"promises nothing: {numbers} for {name}", "paper"
    )


def is_mixednuts(body: str) -> bool:
    """Whether the body of a `robustbench:` reference names this mixture."""
    entry = robustbench.catalog().get(body)
    return entry is not None and entry.arch == robustbench.MIXEDNUTS


def load_mixednuts(body: str, settings: ModelSettings) -> MixedClassifier:
    """The mixture of RobustBench's two files."""
    for name, value in settings.given().items():
        checks.require(
            name in ("weights", "preset"), name, "be left out for a mixture of RobustBench", value
        )
    entry = robustbench.find_entry(body)
    accurate, robust = robustbench.load_mixednuts_bases(entry, settings)
    own, source = RELEASED[entry.dataset], None  # the file of other numbers
    folder = robustbench.find_files(entry, settings.weights)[0].parent
    for path in (
        folder / CONFIG,
        folder.parent.parent / CONFIG,
    ):  # beside the files, or in the root
        if path.is_file():
            own = read_numbers(path, entry.dataset)
            source = None if own == RELEASED[entry.dataset] else path
            break
    return MixedClassifier(
        accurate,
        robust,
        float(f"{own.alpha:.15g}"),
        logit_map=own.logit_map(),
        hard=True,
        surrogate_alpha=own.surrogate_alpha,
        provenance=released_provenance(entry.dataset, source),
    ).eval()


def read_numbers(path: Path, dataset: str) -> ReleasedNumbers:
    """The numbers of a data set in a file like the `optimal_spca.yaml` of the official code."""
    try:
        rules = parse_nested(path.read_text(encoding="utf-8"))[dataset][ROBUST_NAMES[dataset]]
        mapped, plain = (_at_default_beta(rules[kind]) for kind in ("gelu", "none"))
        s, p, c, alpha = (checks.number(name, mapped[name]) for name in ("s", "p", "c", "alpha"))
        surrogate_alpha = checks.within("alpha", plain["alpha"], 0, 1)
        return ReleasedNumbers(s, p, c, checks.within("alpha", alpha, 0, 1), surrogate_alpha)
    except (KeyError, TypeError, ValueError) as error:
        raise checks.InputError(
            f"`{path}` must hold s, p, c and alpha of MixedNUTS for {dataset} and "
            f"{ROBUST_NAMES[dataset]}, got one that cannot be read ({error})"
        ) from None


def _at_default_beta(table: dict[str, Any]) -> dict[str, Any]:
    """The entry of the default beta: betas are keys, and 95 and 95.0 are the same."""
    beta = table["default_beta"]
    by_beta: dict[float, dict[str, Any]] = {
        float(key): value for key, value in table.items() if key != "default_beta"
    }
    return by_beta[beta]


def parse_nested(text: str) -> dict[str, Any]:
    """Parse nested tables of numbers written as YAML writes them: `key: value`, deeper ones
    indented.

    >>> parse_nested("a:\\n  b: 1.5\\n  c:\\n    d: -2")
    {'a': {'b': 1.5, 'c': {'d': -2.0}}}
    """
    root: dict[str, Any] = {}
    open_tables = [(-1, root)]
    for line in text.splitlines():
        content = line.partition("#")[0].rstrip()
        if not content:
            continue
        key, colon, value = content.strip().partition(":")
        if not colon:
            raise ValueError(f"no key in {line.strip()!r}")
        indent = len(content) - len(content.lstrip())
        while open_tables[-1][0] >= indent:
            open_tables.pop()
        table = open_tables[-1][1]
        table[key] = float(value) if value.strip() else {}
        if not value.strip():
            open_tables.append((indent, table[key]))
    return root
