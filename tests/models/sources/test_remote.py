"""A classifier behind a server: read from its metadata, asked in its own form, attacked without
gradients."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from inference_server import serve

import equipoise as eq
from equipoise import models
from equipoise.core.checks import InputError
from equipoise.core.rows import AttackRow
from equipoise.mixing import MixedClassifier
from equipoise.models import probe
from equipoise.models.sources import remote

NET = models.build("cnn_small", num_classes=6, image_shape=(3, 8, 8), seed=1).eval()
X = torch.rand(7, 3, 8, 8, generator=torch.Generator().manual_seed(0))
THREAT = eq.Threat("linf", 0.1)


def expected(x: torch.Tensor = X) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = NET(x)
    return logits


def labels() -> torch.Tensor:
    """The network's own classes, except for one of the last class: so the data have six."""
    y = expected().argmax(1)
    y[-1] = 5
    return y


def test_scores_of_a_server() -> None:
    with serve(NET, [-1, 3, 8, 8]) as (address, batches):
        for reference in (address, f"http:{address}", f"{address}/"):
            model = eq.load_model(reference)
            torch.testing.assert_close(model(X), expected(), rtol=1e-6, atol=1e-6)
        assert batches == [7, 7, 7]
        assert str(models.info_of(model)) == (
            "net behind a server, scores, no gradients: attacked by random search; 6 classes; input 3×8×8; "
            f"normalisation: none; weights: {address}"
        )
        assert not models.has_gradients(model)


def test_channels_last_bytes_and_a_fixed_batch() -> None:
    def from_bytes(x: torch.Tensor) -> torch.Tensor:
        return expected(x.permute(0, 3, 1, 2).float() / 255)

    with serve(from_bytes, [4, 8, 8, 3], datatype="UINT8") as (address, batches):
        logits = eq.load_model(address)(X)
    assert batches == [4, 4]
    torch.testing.assert_close(logits, expected((X * 255).round() / 255), rtol=1e-4, atol=1e-5)


def test_classes_alone_become_scores() -> None:
    with serve(lambda x: NET(x).argmax(1), [-1, 3, 8, 8], output="INT64", output_shape=(-1,)) as (
        address,
        _,
    ):
        logits = eq.load_model(f"{address}?num_classes=6")(X)
        assert logits.shape == (7, 6) and torch.equal(logits.argmax(1), expected().argmax(1))
        with pytest.raises(InputError, match=r"`num_classes` must be given \(\?num_classes=10\)"):
            eq.load_model(address)(X)
        with pytest.raises(InputError, match=r"classes of the model` must lie in 0\.\.1"):
            eq.load_model(f"{address}?num_classes=2")(X)


def test_many_images_are_sent_in_several_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MAX_NUMBERS", 3 * 3 * 8 * 8)
    with serve(NET, [-1, 3, 8, 8]) as (address, batches):
        torch.testing.assert_close(eq.load_model(address)(X), expected(), rtol=1e-6, atol=1e-6)
    assert batches == [3, 3, 1]


def test_attacked_by_random_search_and_said_so() -> None:
    """Square finds what the same search finds on the network itself."""
    y, threat = labels(), eq.Threat("linf", 0.5)
    with serve(NET, [-1, 3, 8, 8]) as (address, _):
        result = eq.evaluate(
            address, (X, y), threat=threat, attack="square", steps=30, batch_size=7
        )
        other = eq.evaluate(
            address, (X, y), threat=threat, attack="fast,square", steps=30, batch_size=7
        )
    direct = eq.evaluate(NET, (X, y), threat=threat, attack="square", steps=30, batch_size=7)
    found, wanted = (
        [row.correct for row in rows if isinstance(row, AttackRow) and row.attack == "square"]
        for rows in (result.rows, direct.rows)
    )
    assert found == wanted and len(set(found)) == 2  # some images break, others do not
    assert {row.attack for row in other.rows} == {"clean", "square"}
    assert "vanishing" not in str(result)
    assert "has no gradients and was attacked by random search alone (Square, 30 queries)" in str(
        result
    )
    assert "no gradients" not in str(direct)


def test_any_other_attack_becomes_a_random_search(monkeypatch: pytest.MonkeyPatch) -> None:
    from equipoise.evaluation import random_search

    monkeypatch.setattr(random_search, "QUERIES", 20)
    with serve(NET, [-1, 3, 8, 8]) as (address, _):
        result = eq.evaluate(address, (X, labels()), threat=THREAT, attack="fast", batch_size=7)
    assert {row.attack for row in result.rows} == {"clean", "square"}
    assert result.summary.audits == ()


def test_the_accurate_side_of_a_mixture(tmp_path: Path) -> None:
    robust = models.build("resnet8", num_classes=6, image_shape=(3, 8, 8), seed=2).eval()
    eq.save(tmp_path / "robust.safetensors", robust)
    with serve(lambda x: NET(x).argmax(1), [-1, 3, 8, 8], output="INT64", output_shape=(-1,)) as (
        address,
        _,
    ):
        fit = eq.fit(
            f"{address}?num_classes=6",
            f"file:{tmp_path}/robust.safetensors",
            None,
            threat=THREAT,
            alpha=0.4,
            accurate_temperature=0,
            out=tmp_path / "m",
        )
        assert isinstance(fit.mixture, MixedClassifier)
        with pytest.raises(
            InputError, match="`allow_code` must be set"
        ):  # a folder must not send images anywhere
            eq.load_model(f"mixture:{tmp_path}/m")
        loaded = eq.load_model(f"mixture:{tmp_path}/m", allow_code=True)
        with torch.no_grad():
            assert torch.equal(loaded(X), fit.mixture(X))
        with pytest.raises(InputError, match="which runs on a server"):
            eq.save(tmp_path / "bundle", fit.mixture, bundle=True)


def test_a_robust_side_without_gradients_needs_the_gradient_free_fit() -> None:
    with (
        serve(NET, [-1, 3, 8, 8]) as (address, _),
        pytest.raises(InputError, match=r"`gradient_free` must be set \(--gradient-free\)"),
    ):
        eq.fit(NET, address, (X, labels()), threat=THREAT)


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (lambda body: {"outputs": []}, "must answer with an output 'out'"),
        (
            lambda body: {
                "outputs": [{"name": "out", "datatype": "FP32", "shape": [7, 6], "data": [1.0]}]
            },
            "RuntimeError",
        ),
        (
            lambda body: {
                "outputs": [{"name": "out", "datatype": "FP32", "shape": [1, 6], "data": [1.0] * 6}]
            },
            "a row per image, got 1 for 7 images",
        ),
        (lambda body: [1, 2], "`answer` must be a JSON object"),
        (lambda body: b"<html>", "must answer with JSON"),
    ],
)
def test_wrong_answers(answer: object, sentence: str) -> None:
    with serve(NET, [-1, 3, 8, 8], answer=answer) as (address, _):  # type: ignore[arg-type]
        model = eq.load_model(address)
        with pytest.raises(InputError, match=sentence):
            model(X)


def test_what_is_wrong_with_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PAUSE", 0.0)
    with serve(NET, [-1, 3, 8, 8]) as (address, _):
        with pytest.raises(InputError, match="got 404: no model at /v2/models/nett"):
            eq.load_model(f"{address}t")
        with pytest.raises(InputError, match="must be the address of a model, such as"):
            eq.load_model(address.removesuffix("/v2/models/net"))
    with pytest.raises(InputError, match="must be reachable"):
        eq.load_model(address)
    with (
        serve(NET, [-1, 12]) as (address, _),
        pytest.raises(InputError, match="must take images as"),
    ):
        eq.load_model(address)
    with (
        serve(NET, [-1, 3, 8, 8], datatype="INT8") as (address, _),
        pytest.raises(InputError, match="FP32, UINT8"),
    ):
        eq.load_model(address)


def test_a_server_that_changes_is_another_model() -> None:
    with serve(NET, [-1, 3, 8, 8]) as (address, _):
        first, again = (json.dumps(models.identity(eq.load_model(address))) for _ in range(2))
    assert first == again and address in first


def test_the_probe_sends_nothing() -> None:
    """Every image costs a request: the same few are not sent again and again."""
    with serve(NET, [-1, 3, 8, 8]) as (address, batches):
        model = eq.load_model(address)
        probe.warn_of_findings(
            {"a server": model, "wrapped": eq.load_model(f"tta:2:{address}")}, X, labels()
        )
        assert batches == []
        info = models.info_of(model)
        assert info is not None and info.is_remote


def raw_server(answer: bytes) -> Iterator[str]:
    """The address of a server that answers everything with these bytes."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def run() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.recv(65536)
                        connection.sendall(answer)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/v2/models/net"
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def body(text: bytes, status: bytes = b"200 OK", more: bytes = b"") -> bytes:
    return b"HTTP/1.0 " + status + b"\r\n" + more + b"Content-Length: %d\r\n\r\n" % len(text) + text


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"nonsense\x1b[31m\r\n\r\n", "must be reachable, got BadStatusLine"),
        (body(b"[" * 100_000), "must answer with JSON"),
        (body(b"[" * 100_000, b"500 no"), "got 500: no"),
        (
            body(json.dumps({"error": "red \x1b[31m"}).encode(), b"400 no"),
            r"got 400: red \\x1b\[31m",
        ),
        (
            body(b"", b"302 Found", b"Location: http://localhost:1/v2/models/net\r\n"),
            "a redirect to 'http://localhost:1/",
        ),
        (body(b"", b"302 Found", b"Location: ftp://localhost/x\r\n"), "redirect to"),
    ],
)
def test_strange_servers_are_one_sentence(
    answer: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "PAUSE", 0.0)
    with (
        contextlib.contextmanager(raw_server)(answer) as address,
        pytest.raises(InputError, match=message) as caught,
    ):
        eq.load_model(address)
    assert str(caught.value).isprintable()


def test_a_port_that_is_no_number_and_a_huge_batch() -> None:
    with pytest.raises(InputError, match="must be reachable, got InvalidURL"):
        eq.load_model("http://localhost:x/v2/models/net")
    with (
        serve(NET, [10**9, 3, 8, 8]) as (address, _),
        pytest.raises(InputError, match="take batches of at most"),
    ):
        eq.load_model(address)
