from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core import config
from equipoise.core.checks import InputError

text = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=8)
plain = st.one_of(text, st.integers(-(2**53), 2**53), st.booleans(), st.floats(allow_nan=False, allow_infinity=False),
                  st.lists(st.integers(0, 9), max_size=3))
tables = st.dictionaries(text, st.one_of(plain, st.dictionaries(text, st.one_of(plain, st.dictionaries(text, plain)))))


@settings(deadline=None)
@given(tables)
def test_what_is_written_is_read_back(table: dict[str, object]) -> None:
    assert tomllib.loads(config.dumps(table)) == table


def test_malformed_and_missing(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("a = = 3")
    with pytest.raises(InputError, match=r"bad\.toml must be TOML"):
        config.read(tmp_path / "bad.toml")
    with pytest.raises(InputError, match="No such file"):
        config.read(tmp_path / "none.toml")
