"""What can be reproduced, as values and as text."""

from __future__ import annotations

import pytest

from equipoise.core.checks import InputError
from equipoise.studies import STUDIES, list_studies
from equipoise.studies.overview import study_overview


def test_every_study_says_what_it_needs() -> None:
    overviews = list_studies()
    assert [overview.name for overview in overviews] == list(STUDIES)
    for overview in overviews:
        assert (
            overview.paper and overview.requirements.keys() == STUDIES[overview.name].sizes.keys()
        )
        assert all(all(vars(needed).values()) for needed in overview.requirements.values())
        assert [part.name for part in overview.parts] == list(STUDIES[overview.name].parts)
        assert all(part.description.endswith(".") for part in overview.parts)


def test_the_text_has_everything_and_no_long_line() -> None:
    for overview in list_studies():
        text = str(overview)
        assert max(map(len, text.splitlines())) <= 80
        words = " ".join(text.split())
        for needed in overview.requirements.values():
            assert all(value in words for value in vars(needed).values())
        for part in overview.parts:
            assert f" {part.name} " in words and part.description in words
            assert f"{part.description} ({part.time})" in words


def test_minutes_are_those_of_parts() -> None:
    def measure(self: object) -> None:
        """First sentence,
        on two lines.

        More.
        """

    overview = study_overview(
        "name", "paper", {"radii": measure, "trust": measure}, {}, {"radii": 2.5}
    )
    assert (overview.parts[0].description, overview.parts[0].minutes) == (
        "First sentence, on two lines.",
        2.5,
    )
    assert [part.time for part in overview.parts] == ["2.5 min", "not measured"]
    overview = study_overview("name", "paper", {"radii": measure}, {}, {"radii": 2.5}, "classifier")
    assert overview.parts[0].time == "2.5 min per classifier"
    with pytest.raises(InputError, match="did you mean 'radii'"):
        study_overview("name", "paper", {"radii": measure}, {}, {"radius": 2.5})
