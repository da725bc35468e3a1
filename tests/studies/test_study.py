"""What the studies share."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
from small_pair import conditions, study_run, untrained_pair, write_models
from small_pair import without_report as without_report

from equipoise.attacks import Clean
from equipoise.core.checks import InputError
from equipoise.core.records import read_rows
from equipoise.core.results import read_summary
from equipoise.evaluation import Job
from equipoise.studies.study import Study, load_pair, require_part


class CountingStudy(Study):
    """Two parts that note when they run; the second measures the robust model."""

    name = "counting"
    sizes: ClassVar = {}
    compared = (("robust", "accurate"),)

    def first(self) -> None:
        self.size.append("first")

    def second(self) -> None:
        self.size.append("second")
        self.measure_part(
            "second", [Job("robust", self.pair.robust, "clean", Clean())], clean_target=0.5
        )

    def main_jobs(self) -> list[Job]:
        return [Job(name, model, "clean", Clean()) for name, model in self.pair.models.items()]

    parts: ClassVar = {"first": first, "second": second}


pytestmark = pytest.mark.usefixtures("without_report")


def run_parts(folder: Path, parts: list[str]) -> list[str]:
    """The parts that were run, in their order."""
    done: list[str] = []
    CountingStudy(study_run(folder, "counting"), untrained_pair(), done, conditions()).run(parts)
    return done


def test_parts_run_in_the_order_of_the_study(tmp_path: Path) -> None:
    assert run_parts(tmp_path, ["second", "first"]) == ["first", "second"]
    assert run_parts(tmp_path, ["second"]) == ["second"]
    assert run_parts(tmp_path, []) == ["first", "second"]
    with pytest.raises(InputError, match="did you mean 'second'"):
        run_parts(tmp_path, ["secon"])


def test_a_part_has_its_own_rows_and_summary(tmp_path: Path) -> None:
    run_parts(tmp_path, ["second"])
    assert {row.model for row in read_rows(tmp_path / "second")} == {"robust"}
    assert {row.model for row in read_rows(tmp_path)} == {"accurate", "robust"}
    part, whole = read_summary(tmp_path / "second"), read_summary(tmp_path)
    assert (part.command, part.clean_target, part.differences) == ("evaluate", 0.5, ())
    assert (whole.command, whole.study) == ("reproduce", "counting")
    assert [(row.model, row.versus) for row in whole.differences] == [("robust", "accurate")]


def test_a_missing_part_is_named() -> None:
    require_part(True, "train")
    with pytest.raises(InputError, match="must come after the part train"):
        require_part(False, "train")


def test_no_image_of_a_loaded_pair_has_two_uses(tmp_path: Path) -> None:
    pair = load_pair(*write_models(tmp_path), "digits", None)
    test, held_out = (set(images.index.tolist()) for images in (pair.test, pair.held_out))
    assert test and len(test) == len(held_out) and not test & held_out
    assert (pair.training.split, pair.test.split) == ("train", "test")


def test_the_images_of_a_pair_can_be_sampled(tmp_path: Path) -> None:
    drawn = load_pair(*write_models(tmp_path), "digits", None, count=40, sample="stratified")
    assert drawn.test.sample == drawn.held_out.sample == "stratified, seed 0"
    assert not set(drawn.test.index.tolist()) & set(drawn.held_out.index.tolist())
    assert (
        drawn.test.index.tolist()
        != load_pair(*write_models(tmp_path), "digits", None, count=40).test.index.tolist()
    )
