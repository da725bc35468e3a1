from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from equipoise.core.checks import InputError
from equipoise.data import cifar


def as_python_2(
    shape: tuple[int, int], data: bytes, labels: list[int], *, fortran: bool = False
) -> bytes:
    """The opcodes of the official files: protocol 2, byte strings, the old name of numpy's
    module."""

    def text(value: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(value)) + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n"
        + b"cnumpy\nndarray\n"
        + number(0)
        + b"\x85"
        + text(b"b")
        + b"\x87R"
        + b"("
        + number(1)
        + number(shape[0])
        + number(shape[1])
        + b"\x86"
        + b"cnumpy\ndtype\n"
        + text(b"u1")
        + number(0)
        + number(1)
        + b"\x87R"
        + b"("
        + number(3)
        + text(b"|")
        + b"NNN"
        + number(-1)
        + number(-1)
        + number(0)
        + b"tb"
        + (b"\x88" if fortran else b"\x89")
        + text(data)
        + b"tb"
    )
    numbers = b"](" + b"".join(number(label) for label in labels) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + numbers + b"u."


@pytest.mark.parametrize("fortran", [False, True])
def test_the_official_format_is_read(tmp_path: Path, fortran: bool) -> None:
    values = np.arange(6, dtype=np.uint8).reshape(2, 3)
    raw = as_python_2(
        (2, 3), values.tobytes(order="F" if fortran else "C"), [4, 1], fortran=fortran
    )
    assert np.array_equal(
        pickle.loads(raw, encoding="bytes")[b"data"], values
    )  # numpy agrees with the opcodes
    path = tmp_path / "batch"
    path.write_bytes(raw)
    content = cifar.load_pickle(path)
    assert np.array_equal(np.asarray(content[b"data"]), values)
    assert content[b"labels"] == [4, 1]


@pytest.mark.parametrize("protocol", range(2, 6))
def test_current_pickles_are_read(tmp_path: Path, protocol: int) -> None:
    values = np.arange(6, dtype=np.uint8).reshape(2, 3)
    path = tmp_path / "batch"
    path.write_bytes(pickle.dumps({b"data": values, b"labels": [0, 2]}, protocol))
    if protocol == 5:
        # Protocol 5 asks for a further numpy function; nobody distributes CIFAR that way.
        with pytest.raises(InputError, match=r"numeric\._frombuffer"):
            cifar.load_pickle(path)
        return
    assert np.array_equal(np.asarray(cifar.load_pickle(path)[b"data"]), values)


class _Call:
    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.function, self.arguments


@pytest.mark.parametrize("protocol", range(6))
def test_a_malicious_pickle_does_not_run(tmp_path: Path, protocol: int) -> None:
    import os

    created = tmp_path / "created"
    payload = pickle.dumps({b"data": _Call(os.mkdir, str(created))}, protocol)
    path = tmp_path / "batch"
    path.write_bytes(payload)
    with pytest.raises(
        InputError, match=rf"`{path}` must hold plain arrays and lists, got a call for \w+.mkdir"
    ):
        cifar.load_pickle(path)
    assert not created.exists()
    pickle.loads(payload)
    assert created.exists()  # it would have run


@pytest.mark.parametrize("function", [eval, getattr, np.load, pickle.loads, np.frombuffer])
def test_the_error_names_the_refused_function(
    tmp_path: Path, function: Callable[..., object]
) -> None:
    path = tmp_path / "batch"
    path.write_bytes(pickle.dumps(_Call(function, b"1")))
    with pytest.raises(
        InputError, match=rf"got a call for [\w.]+\.{function.__name__} \(refused\)"
    ):
        cifar.load_pickle(path)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "damaged"),
        (b"not a pickle", "damaged"),
        (as_python_2((2, 3), b"123456", [0])[:-20], "damaged"),
        (as_python_2((2, 3), b"12345", [0]), "as many bytes as their shape"),
        (as_python_2((-2, -3), b"123456", [0]), "damaged"),
        (
            as_python_2((2, 3), b"123456", [0]).replace(b"u1", b"O8"),
            "arrays of uint8, got an array of 'O8'",
        ),
        (pickle.dumps([1, 2]), "must hold a dict, got 'list'"),
        # An array without content, and state for a class rather than for an object.
        (b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n)\x81.", "must hold a dict"),
        (b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n}b.", "damaged"),
        (b"\x80\x02cnumpy\nndarray\n)R.", "damaged"),
    ],
)
def test_the_error_names_a_damaged_file_of_any_sort(
    tmp_path: Path, raw: bytes, message: str
) -> None:
    path = tmp_path / "batch"
    path.write_bytes(raw)
    with pytest.raises(InputError, match=message) as caught:
        cifar.load_pickle(path)
    assert f"`{path}`" in str(caught.value)
