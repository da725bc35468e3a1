from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core import config
from equipoise.core.checks import InputError

text = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=8)
plain = st.one_of(
    text,
    st.integers(-(2**53), 2**53),
    st.booleans(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.lists(st.integers(0, 9), max_size=3),
)
tables = st.dictionaries(
    text, st.one_of(plain, st.dictionaries(text, st.one_of(plain, st.dictionaries(text, plain))))
)


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


@pytest.mark.parametrize("text", ["a\x7fb", "a\x00\x1b[31mb", '[red]"\\', "a\nb\u2028"])
def test_any_name_is_read_back(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.toml"
    path.write_text(config.dumps({text: text, "table": {text: [text]}}), encoding="utf-8")
    assert config.read(path) == {text: text, "table": {text: [text]}}


def test_a_file_name_that_is_not_unicode_can_be_recorded(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(config.dumps({"command": "a\udcff"}), encoding="utf-8")
    assert config.read(path) == {"command": "a\\udcff"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe", "must be text in UTF-8"),
        (b"a" + b".a" * 2000 + b" = 1", "at most 50 levels"),
        (b"a = " + b"[" * 5000, "at most 50 levels"),
        (b"a = 1\na = 2", "must be TOML"),
        (b"a = " + b"9" * 5000, "must be TOML"),
        (b"\0", "must be TOML"),
    ],
)
def test_strange_toml(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.toml").write_bytes(content)
    with pytest.raises(InputError, match=message):
        config.read(tmp_path / "x.toml")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1]", r"must be a table, got \[1\]"),
        ('{"a": NaN}', "NaN is not a JSON number"),
        ('{"a": 1, "a": 2}', "key twice"),
        ("[" * 100_000, "at most 50 levels"),
        ('{"a": ' + "9" * 5000 + "}", "must be JSON"),
        ("", "must be JSON"),
    ],
)
def test_strange_json(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(InputError, match=message):
        config.read_json(tmp_path / "x.json")


def test_folders_and_large_files_are_not_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="must be a file, got a folder"):
        config.read(tmp_path)
    with (tmp_path / "large.toml").open("wb") as file:
        file.truncate(config.MAX_BYTES + 1)  # a hole: it takes no space
    with pytest.raises(InputError, match="must have at most 64 MiB, got 64 MiB"):
        config.read(tmp_path / "large.toml")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"schema": 3}, r"by a newer version of Equipoise \(schema 3\)"),
        (
            {"schema": 3, "version": "0.5.1"},
            r"x was written by Equipoise 0.5.1 \(schema 3\) and needs that version; this "
            r"is .*, which reads schema 2",
        ),
        ({"schema": 10**400}, "newer version"),
        ({"schema": 1}, r"x was written by an old version .* in a new folder"),
        ({}, "`schema` must be 2 in x, got None"),
        ({"schema": True}, "got True"),
        ({"schema": "2"}, "got '2'"),
        ({"schema": 0}, "got 0"),
        ({"schema": 2.0}, "got 2.0"),
    ],
)
def test_other_schemas_are_refused(table: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        config.check_schema(table, Path("x"))
