"""The downloader against a server of our own on 127.0.0.1; nothing here leaves the machine."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import pickle
import socket
import struct
import tarfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from equipoise.core.checks import InputError
from equipoise.data import cifar, mnist
from equipoise.data.download import Remote, fetch, unpack

DATA = np.random.default_rng(8).integers(0, 256, 1_000_000, np.uint8).tobytes()


class Server(ThreadingHTTPServer):
    """Serves `files`; can interrupt a response, ignore ranges, and records the requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.ranges = True
        self.break_after: list[
            int
        ] = []  # bytes sent before each of the next responses is interrupted
        self.requests: list[tuple[str, str | None]] = []

    def remote(self, file: str, data: bytes) -> Remote:
        self.files[f"/{file}"] = data
        return Remote(f"{self.address}{file}", hashlib.sha256(data).hexdigest())

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, Server)
        wanted = self.headers.get("Range")
        server.requests.append((self.path, wanted))
        data = server.files.get(self.path)
        if data is None:
            self.send_error(404)
            return
        start = (
            int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and server.ranges else 0
        )
        if start and start >= len(data):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        stop = start + server.break_after.pop(0) if server.break_after else len(data)
        self.wfile.write(data[start:stop])


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_a_file_arrives_once(server: Server, tmp_path: Path) -> None:
    remote = server.remote("x.gz", DATA)
    for _ in range(2):
        assert fetch(remote, tmp_path / "deep" / "er", needed=["x"]).read_bytes() == DATA
    assert server.requests == [("/x.gz", None)]
    assert [path.name for path in (tmp_path / "deep" / "er").iterdir()] == ["x.gz"]


def test_an_interrupted_connection_is_resumed(server: Server, tmp_path: Path) -> None:
    remote = server.remote("x.gz", DATA)
    server.break_after = [300_000, 200_000]
    assert fetch(remote, tmp_path, needed=["x"]).read_bytes() == DATA
    assert server.requests == [
        ("/x.gz", None),
        ("/x.gz", "bytes=300000-"),
        ("/x.gz", "bytes=500000-"),
    ]


def test_a_later_call_continues(server: Server, tmp_path: Path) -> None:
    remote = server.remote("x.gz", DATA)
    server.break_after = [300_000, 0]
    with pytest.raises(InputError, match=r"got neither them nor a download of .*x\.gz"):
        fetch(remote, tmp_path, needed=["x"])
    assert (tmp_path / "x.gz.part").read_bytes() == DATA[:300_000]
    assert not (tmp_path / "x.gz").exists()
    server.requests.clear()
    assert fetch(remote, tmp_path, needed=["x"]).read_bytes() == DATA
    assert server.requests == [("/x.gz", "bytes=300000-")]
    assert not (tmp_path / "x.gz.part").exists()


def test_a_server_without_ranges_starts_over(server: Server, tmp_path: Path) -> None:
    remote = server.remote("x.gz", DATA)
    server.ranges = False
    (tmp_path / "x.gz.part").write_bytes(DATA[:1000])
    assert fetch(remote, tmp_path, needed=["x"]).read_bytes() == DATA


@pytest.mark.parametrize(
    "left", [DATA, b"another file", DATA + b"more"], ids=["complete", "foreign", "longer"]
)
def test_partial_files_of_an_earlier_call_are_checked(
    server: Server, tmp_path: Path, left: bytes
) -> None:
    remote = server.remote("x.gz", DATA)
    (tmp_path / "x.gz.part").write_bytes(left)
    assert fetch(remote, tmp_path, needed=["x"]).read_bytes() == DATA
    assert len(server.requests) == (1 if left == DATA else 2)


def test_a_wrong_checksum_is_an_error_and_leaves_nothing(server: Server, tmp_path: Path) -> None:
    remote = server.remote("x.gz", DATA)
    server.files["/x.gz"] = DATA[:-1] + b"?"
    with pytest.raises(
        InputError, match=rf"^`{tmp_path / 'x.gz'}` must have the SHA-256 checksum {remote.sha256}"
    ):
        fetch(remote, tmp_path, needed=["x"])
    assert not (tmp_path / "x.gz").exists()
    assert (tmp_path / "x.gz.part").read_bytes() == b""
    server.files["/x.gz"] = DATA
    assert fetch(remote, tmp_path, needed=["x"]).read_bytes() == DATA


def test_a_file_put_there_by_hand_is_checked_too(server: Server, tmp_path: Path) -> None:
    remote = server.remote("x.gz", DATA)
    (tmp_path / "x.gz").write_bytes(b"not it")
    with pytest.raises(InputError, match="must have the SHA-256 checksum"):
        fetch(remote, tmp_path, needed=["x"])
    assert (tmp_path / "x.gz").read_bytes() == b"not it"
    assert server.requests == []


def test_simultaneous_calls_download_once(server: Server, tmp_path: Path) -> None:
    remote = server.remote("x.gz", DATA)
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: fetch(remote, tmp_path, needed=["x"]), range(4)))
    assert {path.read_bytes() == DATA for path in paths} == {True}
    assert len(server.requests) == 1


def test_the_error_names_the_missing_files_and_their_folder(server: Server, tmp_path: Path) -> None:
    message = f"^`data_dir` must hold a, b in {tmp_path}, got neither them nor a download of .* "
    with pytest.raises(InputError, match=message + r"\(HTTP Error 404: Not Found\)$"):
        fetch(Remote(f"{server.address}absent", ""), tmp_path, needed=["a", "b"])
    with pytest.raises(InputError, match=message + r"\(.*refused.*\)$"):
        fetch(Remote(f"http://127.0.0.1:{closed_port()}/x", ""), tmp_path, needed=["a", "b"])


def test_mnist_without_a_network(tmp_path: Path) -> None:
    offline = dataclasses.replace(mnist.MNIST, address=f"http://127.0.0.1:{closed_port()}/")
    files = "t10k-images-idx3-ubyte.gz, t10k-labels-idx1-ubyte.gz"
    with pytest.raises(InputError, match=f"must hold {files} in {tmp_path / 'MNIST' / 'raw'}, got"):
        mnist.read(offline, "test", tmp_path)


def test_mnist_is_downloaded(server: Server, tmp_path: Path) -> None:
    images, labels = np.full((4, 5, 7), 9, np.uint8), np.array([1, 2, 3, 4], np.uint8)
    checksums = {}
    for file, values in (("t10k-images-idx3-ubyte", images), ("t10k-labels-idx1-ubyte", labels)):
        raw = (
            bytes((0, 0, 8, values.ndim))
            + struct.pack(f">{values.ndim}I", *values.shape)
            + values.tobytes()
        )
        checksums[f"{file}.gz"] = server.remote(f"{file}.gz", gzip.compress(raw)).sha256
    local = dataclasses.replace(mnist.MNIST, address=server.address, checksums=checksums)
    for _ in range(2):
        assert mnist.read(local, "test", tmp_path).labels.tolist() == [1, 2, 3, 4]
    assert len(server.requests) == 2
    assert (tmp_path / "MNIST" / "raw" / "t10k-images-idx3-ubyte.gz").is_file()


def make_archive(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def test_cifar_is_downloaded_and_unmake_archive(server: Server, tmp_path: Path) -> None:
    batch = pickle.dumps({b"data": np.full((2, 3072), 7, np.uint8), b"labels": [3, 8]}, 2)
    remote = server.remote("c.tar.gz", make_archive({"cifar-10-batches-py/test_batch": batch}))
    local = dataclasses.replace(cifar.CIFAR10, archive=remote)
    for _ in range(2):
        assert cifar.read(local, "test", tmp_path).labels.tolist() == [3, 8]
    assert len(server.requests) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.tar.gz", "cifar-10-batches-py"]


def test_an_archive_put_there_by_hand_is_unmake_archive(server: Server, tmp_path: Path) -> None:
    batch = pickle.dumps({b"data": np.full((2, 3072), 7, np.uint8), b"labels": [3, 8]}, 2)
    raw = make_archive({"cifar-10-batches-py/test_batch": batch})
    (tmp_path / "c.tar.gz").write_bytes(raw)
    local = dataclasses.replace(cifar.CIFAR10, archive=server.remote("c.tar.gz", raw))
    assert len(cifar.read(local, "test", tmp_path)) == 2
    assert server.requests == []


@pytest.mark.parametrize("name", ["../outside", "/outside"])
def test_an_archive_cannot_write_elsewhere(server: Server, tmp_path: Path, name: str) -> None:
    root = tmp_path / "root"
    remote = server.remote("c.tar.gz", make_archive({name: b"x"}))
    with pytest.raises(InputError, match="`data_dir` must hold b in"):
        unpack(remote, root, "folder", needed=["b"])
    assert not (tmp_path / "outside").exists()
    assert not Path("/outside").exists()


def test_links_and_other_folders_of_an_archive_are_left_out(server: Server, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, kind in (
            ("f/link", tarfile.SYMTYPE),
            ("f/hard", tarfile.LNKTYPE),
            ("f/pipe", tarfile.FIFOTYPE),
            ("f/sub/x", tarfile.REGTYPE),
            ("g/x", tarfile.REGTYPE),
            ("f/..", tarfile.REGTYPE),
            ("f/b", tarfile.REGTYPE),
        ):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname, entry.mode = kind, "/etc/passwd", 0o4777
            tar.addfile(entry)
    unpack(server.remote("c.tar.gz", buffer.getvalue()), tmp_path, "f", needed=["b"])
    assert [path.name for path in (tmp_path / "f").iterdir()] == ["b"]
    assert (tmp_path / "f" / "b").stat().st_mode & 0o7111 == 0


def test_every_address_is_https_and_every_download_has_a_checksum() -> None:
    for source in (mnist.MNIST, mnist.FASHION_MNIST):
        assert source.address.startswith("https://")
        assert {
            f"{file}.gz" for files in mnist.FILES.values() for file in files
        } <= source.checksums.keys()
    for remote in (cifar.CIFAR10.archive, cifar.CIFAR100.archive):
        assert remote.url.startswith("https://") and len(remote.sha256) == 64


def test_cifar_without_a_network(tmp_path: Path) -> None:
    archive = dataclasses.replace(
        cifar.CIFAR100.archive, url=f"http://127.0.0.1:{closed_port()}/c.tar.gz"
    )
    offline = dataclasses.replace(cifar.CIFAR100, archive=archive)
    with pytest.raises(
        InputError, match=f"must hold cifar-100-python/train in {tmp_path}, got neither"
    ):
        cifar.read(offline, "train", tmp_path)
