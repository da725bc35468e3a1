"""Arrays of a run folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from equipoise.core import arrays
from equipoise.core.arrays import ExampleArrays, FitArrays
from equipoise.core.checks import InputError

GRID = np.arange(8.0).reshape(2, 2, 2)


def _fit(**more: Any) -> FitArrays:
    flags, values = np.array([True, False]), np.array([0.25, 0.5])
    return FitArrays(
        q=0.3,
        clean_before=values,
        clean_after=values,
        clean_correct=flags,
        attacked_before=values,
        attacked_after=values,
        attacked_correct=flags,
        landscape=GRID,
        usable=GRID > 1,
        axis_s=values,
        axis_p=values,
        axis_c=values,
        **more,
    )


def _examples() -> ExampleArrays:
    images = np.zeros((2, 1, 3, 3), dtype=np.uint8)
    return ExampleArrays(
        clean=images,
        attacked=images,
        label=np.array([0, 1]),
        predicted=np.zeros((2, 3), dtype=int),
        class_names=("cat", "dog"),
    )


def _content(group: FitArrays | ExampleArrays | None) -> dict[str, Any]:
    assert group is not None
    return {name: value.tolist() for name, value in group.to_dict().items()}


def test_groups_share_one_file(tmp_path: Path) -> None:
    fit, examples = (
        _fit(families=("a", "b"), family_scores=np.array([0.5, 0.75]), objective="surrogate"),
        _examples(),
    )
    arrays.save(tmp_path, fit, None, examples)
    assert _content(FitArrays.load(tmp_path)) == _content(fit)
    assert _content(ExampleArrays.load(tmp_path)) == _content(examples)


def test_names_in_the_file_have_a_prefix(tmp_path: Path) -> None:
    arrays.save(tmp_path, _examples())
    with np.load(tmp_path / "arrays.npz") as archive:
        assert set(archive.files) == {
            f"examples.{name}"
            for name in ("clean", "attacked", "label", "predicted", "class_names")
        }


def test_the_same_arrays_give_the_same_bytes(tmp_path: Path) -> None:
    arrays.save(tmp_path, _fit())
    content = (tmp_path / "arrays.npz").read_bytes()
    arrays.save(tmp_path, _fit())
    assert (tmp_path / "arrays.npz").read_bytes() == content


def test_a_missing_file_has_no_arrays(tmp_path: Path) -> None:
    assert FitArrays.load(tmp_path) is None


def test_optional_arrays_may_be_missing(tmp_path: Path) -> None:
    arrays.save(tmp_path, _fit())
    fit = FitArrays.load(tmp_path)
    assert (
        fit is not None
        and fit.selected is None
        and fit.families == ()
        and fit.objective == "mixture"
    )


def test_an_incomplete_group_is_refused(tmp_path: Path) -> None:
    content: dict[str, Any] = {"examples.clean": np.zeros((2, 1, 3, 3))}
    np.savez(tmp_path / "arrays.npz", **content)
    with pytest.raises(
        InputError,
        match="must hold all arrays of ExampleArrays, got 'no attacked, label, predicted'",
    ):
        ExampleArrays.load(tmp_path)


def test_examples_of_the_wrong_shape_are_refused() -> None:
    with pytest.raises(InputError, match=r"`examples.predicted` must have shape \(2, 3\)"):
        replace(_examples(), predicted=np.zeros((2, 2), dtype=int))
