"""Small inputs that would exhaust memory or time, tried in one process; run by
`test_exhausting_inputs.py`."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import pickle
import resource
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import equipoise as eq
from equipoise.cli.main import run
from equipoise.core.checks import InputError
from equipoise.data.conversion import as_dataset
from equipoise.mixing.provenance import Provenance

MEMORY = 2**29  # bytes that a refusal may take, far more than it needs
ZEROS = bytes(2**26)
IMAGES = np.zeros((4, 3, 8, 8), np.uint8)
HUGE = str(10**12)

EVALUATE = ["evaluate", "zoo:cnn_small", "--data", "digits", "--out", "out"]
CERTIFY = ["certify", "zoo:cnn_small", "--data", "digits", "--out", "out"]
FIT = [
    "fit",
    "--accurate",
    "zoo:cnn",
    "--robust",
    "zoo:cnn_small",
    "--data",
    "digits",
    "--out",
    "out",
]
TRAIN = ["train", "standard", "--arch", "cnn_small", "--data", "digits", "--out", "out"]
COMMANDS: dict[str, tuple[list[str], str]] = {
    "exponent": ([*EVALUATE, "--eps", "1e999999999"], "`eps` must be finite, got '1e999999999'"),
    "negative exponent": ([*EVALUATE, "--eps", "1e-999999999"], "`eps` must be positive"),
    "division by zero": ([*EVALUATE, "--eps", "1/0"], "`eps` must be a number or a fraction"),
    "hexadecimal": ([*EVALUATE, "--eps", "8/0x10"], "`eps` must be a number or a fraction"),
    "exponent in a fraction": (
        [*EVALUATE, "--eps", "1/1e99999999"],
        "`eps` must be a number or a fraction",
    ),
    "long number": (
        [*EVALUATE, "--eps", "1" * 10**6],
        "`eps` must be a number of at most 100 characters",
    ),
    "l2 radius": (
        [*EVALUATE, "--norm", "l2", "--eps", "1e300"],
        "`eps` must be at most 10000 for l2",
    ),
    "count": ([*EVALUATE, "--count", HUGE], "`count` must be at most"),
    "start": ([*EVALUATE, "--start", "9" * 40], "`start` must be at most"),
    "every": ([*EVALUATE, "--every", "9" * 40], "`every` must be at most"),
    "steps": ([*EVALUATE, "--steps", HUGE], "`steps` must be at most 1000000"),
    "restarts": (
        [*EVALUATE, "--attack", "apgd", "--restarts", HUGE],
        "`restarts` must be at most 1000",
    ),
    "batch size": ([*EVALUATE, "--batch-size", "9" * 40], "`batch_size` must be at most"),
    "seed": ([*EVALUATE, "--seed", str(2**64)], "`seed` must be less than 2**63"),
    "digits of a seed": ([*EVALUATE, "--seed", "9" * 5000], "Invalid value for '--seed'"),
    "adaptive kinds": (
        [*EVALUATE, "--adaptive", "surrogate," * 10**6],
        "`adaptive` must be one of",
    ),
    "unknown attack": ([*EVALUATE, "--attack", "x" * 10**6], "`attack` must be one of"),
    "sigma": ([*CERTIFY, "--sigma", "1e300"], "`sigma` must be at most 100"),
    "many sigmas": (
        [*CERTIFY, "--sigma", "0.1," * 10**6 + "0.1"],
        "`sigma` must be at most 100 numbers, got 1000001",
    ),
    "samples": ([*CERTIFY, "--sigma", "0.1", "--samples", HUGE], "`samples` must be at most"),
    "targets": ([*FIT, "--targets", HUGE], "`targets` must be at most 1000"),
    "pool": ([*FIT, "--pool", HUGE], "`pool` must be at most 1000"),
    "rounds": ([*FIT, "--rounds", HUGE], "`rounds` must be at most 1000"),
    "pad": ([*TRAIN, "--pad", "100000"], "`pad` must be at most 1024"),
    "epochs": ([*TRAIN, "--epochs", HUGE], "`epochs` must be at most 1000000"),
    "means": (
        [*TRAIN, "--mean", "0.1," * 10**6 + "0.1"],
        "`mean or std` must be at most 1 numbers, got 1000001",
    ),
    "means of a reference": (
        [*EVALUATE, "--mean", "0.1," * 10**6 + "0.1"],
        "`mean` must be at most 1000 numbers",
    ),
}


def array_file(shape: str, data: bytes) -> bytes:
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}}}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + data


def archive(**files: bytes) -> Path:
    with zipfile.ZipFile("x.npz", "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in files.items():
            file.writestr(f"{name}.npy", content)
    return Path("x.npz")


def read_archive(**files: bytes) -> None:
    labels = io.BytesIO()
    np.save(labels, np.zeros(4, np.int64))
    eq.load_data(f"npz:{archive(**{'labels': labels.getvalue(), **files})}")


def large_label() -> None:
    np.savez("labels.npz", images=IMAGES, labels=np.array([0, 1, 2, 2**40]))
    eq.load_data("npz:labels.npz")


def compressed_zeros() -> None:
    read_archive(images=array_file("(2, 64, 1024, 1024)", ZEROS * 2))


def gzip_bomb() -> None:
    """An IDX header and 6.4 GB of zeros, in 6 MB."""
    folder = Path("idx/MNIST/raw")
    folder.mkdir(parents=True)
    header = gzip.compress(b"\x00\x00\x08\x03" + struct.pack(">3I", 10, 28, 28))
    (folder / "t10k-images-idx3-ubyte.gz").write_bytes(header + gzip.compress(ZEROS) * 100)
    (folder / "t10k-labels-idx1-ubyte.gz").write_bytes(
        gzip.compress(b"\x00\x00\x08\x01\x00\x00\x00\x0a" + bytes(10))
    )
    eq.load_data("mnist", data_dir="idx")


def idx_header() -> None:
    folder = Path("idx2/mnist")
    folder.mkdir(parents=True)
    (folder / "t10k-images-idx3-ubyte").write_bytes(
        b"\x00\x00\x08\x03" + struct.pack(">3I", *[2**32 - 1] * 3)
    )
    (folder / "t10k-labels-idx1-ubyte").write_bytes(b"\x00\x00\x08\x01" + struct.pack(">I", 0))
    eq.load_data("mnist", data_dir="idx2")


def sparse_file() -> None:
    Path("cifar").mkdir()
    with Path("cifar/test_batch.bin").open("wb") as file:
        file.truncate(3073 * 10**8)
    eq.load_data("cifar10", data_dir="cifar")


def pickle_memo() -> None:
    Path("memo").mkdir()
    Path("memo/test_batch").write_bytes(b"\x80\x02}r\xff\xff\xff\x7f.")
    eq.load_data("cifar10", data_dir="memo")


def pickle_length() -> None:
    Path("length").mkdir()
    Path("length/test_batch").write_bytes(
        b"\x80\x05" + pickle.BYTEARRAY8 + struct.pack("<Q", 2**40) + b"."
    )
    eq.load_data("cifar10", data_dir="length")


def picture(side: int) -> None:
    """A black RGB image of side × side pixels."""
    Path(f"pictures{side}/a").mkdir(parents=True)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    rows = zlib.compressobj(1)
    data = b"".join([*(rows.compress(bytes(1 + 3 * side)) for _ in range(side)), rows.flush()])
    header = struct.pack(">2I5B", side, side, 8, 2, 0, 0, 0)
    Path(f"pictures{side}/a/0.png").write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    )
    eq.load_data(f"folder:pictures{side}")


def ranges(*images: str) -> str:
    data = eq.load_data("digits", count=20)
    return str(Provenance("digits", "test", images, "").overlap(data))


FUNCTIONS: dict[str, tuple[Callable[[], object], str]] = {
    "label in an npz": (
        large_label,
        "`labels in labels.npz` must be less than 100000, got 1099511627776",
    ),
    "label in a tensor": (
        lambda: as_dataset((torch.zeros(2, 1, 2, 2), torch.tensor([0, 2**40]))),
        "`labels` must be less than 100000, got 1099511627776",
    ),
    "shape in an npz": (
        lambda: read_archive(images=array_file("(1000000000000, 3, 8, 8)", bytes(768))),
        "instead of the 192000000000000 of its shape",
    ),
    "compressed npz": (compressed_zeros, "`images` with 134217728 bytes, compressed to"),
    "gzip": (gzip_bomb, "must hold 7840 values, as its header says, got 7841 or more"),
    "idx header": (idx_header, "must hold at most 47040000 values"),
    "sparse file": (sparse_file, "must hold at most 160000000 bytes"),
    "memo of a pickle": (pickle_memo, "got a damaged file (a memo of 2147483647 entries)"),
    "length in a pickle": (pickle_length, "must be a pickle, got a damaged file"),
    "large picture": (
        lambda: picture(6000),
        "must have at most 16777216 pixels, got '6000 x 6000'",
    ),
    "larger picture": (lambda: picture(13500), "must be an image, got a damaged file"),
    "range": (lambda: ranges("5-99999999999"), "('5-19',)"),
    "many ranges": (lambda: ranges(*["7-8", "3-99999999999"] * 10**5), "('3-19',)"),
    "end of a range": (
        lambda: ranges("0-" + "9" * 30),
        "`images` must be ranges of positions such as",
    ),
    "number": (lambda: eq.Threat("linf", 10**400), "`eps` must be finite"),
    "digits of a number": (
        lambda: eq.Threat("linf", 10**9999),
        "`eps` must be finite, got a number of 33216 bits",
    ),
}


def outcome(name: str) -> str:
    if name in COMMANDS:
        output = io.StringIO()
        with contextlib.redirect_stderr(output):
            code = run(COMMANDS[name][0])
        return output.getvalue() if code == 2 else f"exit code {code}"
    try:
        return str(FUNCTIONS[name][0]())
    except InputError as error:
        return str(error)


def main() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**32, used + 2**32))
    for name in [*COMMANDS, *FUNCTIONS]:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        text = outcome(name)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(
            json.dumps({"name": name, "text": text, "bytes": 1024 * (after - before)}), flush=True
        )
    assert not Path("out").exists()


if __name__ == "__main__":
    main()
