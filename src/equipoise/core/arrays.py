"""Arrays of a run, kept in `arrays.npz` for its report.

Each group of arrays is a dataclass; its fields are stored under a prefix, such as `fit.landscape`.
"""

from __future__ import annotations

import dataclasses
import math
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from equipoise.core import checks, files

ARRAYS = "arrays.npz"
MAX_BYTES = 1 << 32  # of all arrays of one file
Array = NDArray[Any]


class _Group:
    """Saving and loading of a dataclass whose fields are arrays, numbers, strings or tuples of
    strings.

    A field with a default may be missing from the file.
    """

    prefix: ClassVar[str]

    def to_dict(self) -> dict[str, Array]:
        """The fields under their names in `arrays.npz`; those without a value are left out."""
        values = {name: getattr(self, name) for name in _fields(type(self))}
        return {
            f"{self.prefix}.{name}": np.asarray(value)
            for name, value in values.items()
            if value is not None and not (isinstance(value, tuple) and not value)
        }

    @classmethod
    def load(cls, folder: Path | str) -> Self | None:
        """Read the group from a run folder; None if the folder has none."""
        path, values = Path(folder) / ARRAYS, {}
        stored = (
            {name: _value(array) for name, array in read_npz(path).items()} if path.exists() else {}
        )
        for name in _fields(cls):
            value = stored.get(f"{cls.prefix}.{name}")
            if value is not None:
                values[name] = value
        required = {
            name for name, field in _fields(cls).items() if field.default is dataclasses.MISSING
        }
        if not required & values.keys():
            return None
        missing = sorted(required - values.keys())
        checks.require(
            not missing, str(path), f"hold all arrays of {cls.__name__}", f"no {', '.join(missing)}"
        )
        for name, value in values.items():
            hint = str(_fields(cls)[name].type)
            expected = next(kind for start, kind in _KINDS.items() if hint.startswith(start))
            checks.require(
                isinstance(value, expected), f"{cls.prefix}.{name}", f"be {hint} in {path}", value
            )
        try:
            return cls(**values)
        except checks.InputError as error:
            raise checks.InputError(f"{error}, in {path}") from None

    def _check_shapes(self, **shapes: tuple[int | None, ...]) -> None:
        """Refuse arrays of other shapes, or without numbers; None is any length."""
        for name, shape in shapes.items():
            array = getattr(self, name)
            if array is None:
                continue
            fits = array.ndim == len(shape) and all(
                want in (None, have) for want, have in zip(shape, array.shape, strict=True)
            )
            checks.require(fits, f"{self.prefix}.{name}", f"have shape {shape}", array.shape)
            checks.require(
                array.dtype.kind in "biuf",
                f"{self.prefix}.{name}",
                "hold numbers",
                str(array.dtype),
            )


# The values that a field may hold, by the beginning of its type.
_KINDS: dict[str, tuple[type, ...]] = {
    "float": (float, int),
    "str": (str,),
    "tuple": (tuple,),
    "Array": (np.ndarray,),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class FitArrays(_Group):
    """A fitted mixture: margins of the robust model before and after the logit map, the search, the
    trade-off.

    Margins are those of the N fitting images, clean and at the attacked points of the smallest
    margin.
    """

    prefix = "fit"

    q: float  # threshold of the margin below which the accurate model decides
    clean_before: Array  # (N,) margins without the map
    clean_after: Array  # (N,) margins with the map
    clean_correct: Array  # (N,) bool
    attacked_before: Array
    attacked_after: Array
    attacked_correct: Array
    landscape: Array  # (C, P, S) score of every candidate of the grid
    usable: Array  # (C, P, S) bool: the candidate was not rejected
    axis_s: Array  # (S,) scales
    axis_p: Array  # (P,) powers
    axis_c: Array  # (C,) shifts
    landscape_family: str = "maps"  # which family of maps the landscape shows
    objective: str = "mixture"  # what the score is: "mixture" (clean accuracy) or "surrogate"
    families: tuple[str, ...] = ()
    # Best score of each family; −inf if every candidate was rejected
    family_scores: Array | None = None
    selected: Array | None = None  # numbers of the selected map: s, p, c, …
    # (T, 2) clean and attacked accuracy of fitted maps that may lose more and more
    map_curve: Array | None = None
    plain_curve: Array | None = None  # (T, 2) the same for plain mixing

    def __post_init__(self) -> None:
        count, grid = (
            len(self.clean_before),
            tuple(
                len(axis) if axis.ndim else 0 for axis in (self.axis_c, self.axis_p, self.axis_s)
            ),
        )
        margins = (
            "clean_before",
            "clean_after",
            "clean_correct",
            "attacked_before",
            "attacked_after",
            "attacked_correct",
        )
        self._check_shapes(
            **dict.fromkeys(margins, (count,)),
            landscape=grid,
            usable=grid,
            axis_c=grid[:1],
            axis_p=grid[1:2],
            axis_s=grid[2:],
            family_scores=(len(self.families),),
            selected=(None,),
            map_curve=(None, 2),
            plain_curve=(None, 2),
        )
        checks.require(
            count > 0 and min(grid) > 0,
            "fit",
            "hold at least one image and one candidate",
            (count, grid),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class ExampleArrays(_Group):
    """A few images before and after an attack, and what the three models predict for the attacked
    ones."""

    prefix = "examples"

    clean: Array  # (n, 1 or 3, H, W) uint8
    attacked: Array  # (n, 1 or 3, H, W) uint8
    label: Array  # (n,)
    predicted: Array  # (n, 3) by the accurate model, the robust model and the mixture
    class_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        shape = self.clean.shape
        checks.require(
            self.clean.ndim == 4 and shape[1] in (1, 3) and min(shape) > 0,
            "examples.clean",
            "have shape (n, 1 or 3, H, W)",
            shape,
        )
        self._check_shapes(clean=shape, attacked=shape, label=shape[:1], predicted=(shape[0], 3))
        for name, kinds in (
            ("clean", "u"),
            ("attacked", "u"),
            ("label", "iu"),
            ("predicted", "iu"),
        ):
            dtype = getattr(self, name).dtype
            checks.require(
                dtype.kind in kinds,
                f"examples.{name}",
                "be whole numbers (uint8 for images)",
                str(dtype),
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class AttackedArrays(_Group):
    """A few images of an evaluation before and after an attack on one of its models."""

    prefix = "attacked"

    clean: Array  # (n, 1 or 3, H, W) in [0, 1]; some rows and columns of a large image
    attacked: Array  # (n, 1 or 3, H, W) in [0, 1]; the clean image where nothing broke it
    index: Array  # (n,)
    label: Array  # (n,)
    predicted: Array  # (n,) for the attacked image
    model: str
    attack: str
    alpha: float | None = None  # of a model that was evaluated at several
    class_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        shape = self.clean.shape
        checks.require(
            self.clean.ndim == 4 and shape[1] in (1, 3) and min(shape) > 0,
            "attacked.clean",
            "have shape (n, 1 or 3, H, W)",
            shape,
        )
        self._check_shapes(
            clean=shape, attacked=shape, index=shape[:1], label=shape[:1], predicted=shape[:1]
        )
        for name, kind in (
            ("clean", "f"),
            ("attacked", "f"),
            ("index", "i"),
            ("label", "i"),
            ("predicted", "i"),
        ):
            array = getattr(self, name)
            checks.require(
                array.dtype.kind == kind and bool(np.isfinite(array).all()),
                f"attacked.{name}",
                "be finite numbers" if kind == "f" else "be whole numbers",
                str(array.dtype),
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class PictureArrays(_Group):
    """Images of an evaluation before and after the attacks on one model, and what up to three
    models say about them."""

    prefix = "pictures"

    index: Array  # (P,)
    clean: Array  # (P, 1 or 3, H, W) uint8; some rows and columns of a large image
    attacked: Array  # (P, 1 or 3, H, W) uint8, the attacked point of the smallest margin, rounded
    model: str  # that was attacked
    models: tuple[str, ...]  # M names
    top_classes: Array  # (2, M, P, T) most probable classes of clean and attacked images, the true one among them
    top_probabilities: Array  # (2, M, P, T)
    class_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        shape, top = self.clean.shape, self.top_classes.shape
        checks.require(
            self.clean.ndim == 4 and shape[1] in (1, 3) and min(shape) > 0 and len(top) == 4,
            "pictures.clean",
            "have shape (P, 1 or 3, H, W)",
            shape,
        )
        self._check_shapes(
            index=shape[:1],
            clean=shape,
            attacked=shape,
            top_probabilities=top,
            top_classes=(2, len(self.models), shape[0], None),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class FrontierArrays(_Group):
    """What T mixtures of one pair, of the fitted frontier and then of one map at other alphas,
    predict for N images."""

    prefix = "frontier"

    index: Array  # (N,)
    alpha: Array  # (T,)
    lost: Array  # (T,) what a mixture of the frontier may lose; NaN for the others
    predicted: Array  # (T, N) classes of clean images
    # (T, N) bool: the accurate model can change the prediction for the clean image
    by_accurate: Array
    standing: Array  # (T, N) bool: correct, clean and at every attacked point, whatever the accurate model says there
    gaps: Array  # (2, N) largest minus second largest probability of the robust model, without and with the map
    margins: Array  # (2, N) its smallest signed margin over clean and attacked points, without and with the map
    evaluated: float  # alpha of the mixture that was attacked
    names: tuple[str, ...]  # of the accurate base, the robust base and the mixture in rows
    # (2, N) its signed margin on the clean image, without and with the map
    clean_margins: Array | None = None

    def __post_init__(self) -> None:
        grid = steps, count = self.alpha.size, self.index.size
        self._check_shapes(
            index=(count,),
            alpha=(steps,),
            lost=(steps,),
            predicted=grid,
            by_accurate=grid,
            standing=grid,
            gaps=(2, count),
            margins=(2, count),
            clean_margins=(2, count),
        )


def save(folder: Path | str, *groups: _Group | None) -> None:
    """Write all groups into `arrays.npz` of a run folder, whole or not at all; what was there
    before is replaced."""
    content: dict[str, Any] = {}
    for group in groups:
        content |= {} if group is None else group.to_dict()
    with files.atomic_writer(Path(folder) / ARRAYS) as file:
        np.savez_compressed(file, **content)


def _fields(cls: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(cls)}


def read_npz(path: Path) -> dict[str, Array]:
    """All arrays of an `.npz` file by name; numbers, booleans and text only, and at most
    :data:`MAX_BYTES` in all."""
    try:
        with (
            path.open("rb") as file,
            zipfile.ZipFile(file) as archive,
        ):  # numpy would not close a damaged archive
            size = sum(entry.file_size for entry in archive.infolist())
            checks.require(
                size <= MAX_BYTES,
                str(path),
                f"hold at most {MAX_BYTES >> 20} MiB",
                f"{size >> 20} MiB",
            )
            stored = {
                entry.filename.removesuffix(".npy"): _read_npy(archive, entry)
                for entry in archive.infolist()
            }
    except checks.InputError:
        raise
    except OSError as error:
        raise checks.InputError(f"cannot read {path}: {error.strerror or error}") from None
    except Exception as error:  # a damaged archive can raise almost anything
        raise checks.InputError(
            f"{path} must be an .npz file of plain arrays, got one that cannot be read "
            f"({type(error).__name__})"
        ) from None
    for name, array in stored.items():
        checks.require(
            array.dtype.kind in "biufU", name, f"be numbers or text in {path}", str(array.dtype)
        )
    return stored


def _read_npy(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Array:
    """One array; its header is checked first, so that a few bytes cannot ask for more memory than
    they fill."""
    with archive.open(entry) as file:
        version = np.lib.format.read_magic(file)
        read_header = {
            1: np.lib.format.read_array_header_1_0,
            2: np.lib.format.read_array_header_2_0,
        }[version[0]]
        shape, _, dtype = read_header(file)
        if dtype.hasobject or dtype.itemsize * math.prod(shape) > entry.file_size:
            raise ValueError("objects, or a shape that is too large")
    with archive.open(entry) as file:
        array: Array = np.lib.format.read_array(file, allow_pickle=False)
    return array


def _value(array: Array) -> Any:
    """Numbers and strings as Python values, lists of strings as tuples, everything else as it
    is."""
    if array.ndim == 0:
        return array.item()
    return tuple(array.tolist()) if array.dtype.kind == "U" else array
