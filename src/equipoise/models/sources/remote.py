"""`http://HOST/v2/models/NAME`: a classifier behind a server of the Open Inference Protocol
(version 2).

The server's metadata say what images it takes: NCHW or NHWC, floats or bytes, a fixed batch or not.
It returns scores, or classes alone (then `?num_classes=10` says how many there are, unless the data
do). There are no gradients: attacks search at random. Every query sends the images to the server.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import math
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from equipoise.core import checks
from equipoise.core.checks import InputError
from equipoise.core.text import literal
from equipoise.models.inspection import one_line
from equipoise.models.loaded import LoadedModel, ModelInfo
from equipoise.models.options import LoadOptions
from equipoise.models.sources.black_box import BlackBox, ImageInput

if TYPE_CHECKING:
    from equipoise.models.reference import Reference

TIMEOUT = 60.0  # seconds
ATTEMPTS, PAUSE = 3, 0.5  # tries to reach the server, and seconds between them
MAX_BYTES = 1 << 26  # of an answer
MAX_NUMBERS = 1 << 21  # of a question: more images are sent in several
MAX_BATCH = 1 << 24  # numbers of a fixed batch
FLOAT, BYTES = "FP32", "UINT8"


class RemoteModel(BlackBox):
    """A model behind a server."""

    description = ("remote", "address", "num_classes")

    def __init__(
        self, address: str, images: ImageInput, output: str, num_classes: int | None, digest: bytes
    ) -> None:
        super().__init__(num_classes, digest)
        self.address, self.images, self.output = address, images, output

    def query(self, x: Tensor) -> Tensor:
        """Scores or classes of images."""
        size = max(1, MAX_NUMBERS // max(1, x[0].numel())) if len(x) else 1
        parts = [
            self._ask(chunk)
            for part in self.images.chunks(x)
            for chunk in (part.split(size) if self.images.batch is None else [part])
        ]
        return torch.cat(parts)[: len(x)]

    def _ask(self, x: Tensor) -> Tensor:
        sent = self.images.arrange(x)
        question = {
            "inputs": [
                {
                    "name": self.images.name,
                    "shape": list(sent.shape),
                    "datatype": BYTES if self.images.is_bytes else FLOAT,
                    "data": sent.flatten().tolist(),
                }
            ],
            "outputs": [{"name": self.output}],
        }
        answer = request(f"{self.address}/infer", question)
        try:
            output = next(entry for entry in answer["outputs"] if entry["name"] == self.output)
            kind = (
                torch.float32 if str(output["datatype"]).startswith(("FP", "BF")) else torch.int64
            )
            values = torch.tensor(output["data"], dtype=kind).reshape(output["shape"])
        except (
            KeyError,
            TypeError,
            ValueError,
            OverflowError,
            RuntimeError,
            StopIteration,
        ) as error:
            raise InputError(
                f"the server {self.address} must answer with an output {self.output!r}, got "
                f"{literal(one_line(error))}"
            ) from None
        if values.dim() == 0 or len(values) != len(x):
            raise InputError(
                f"the server {self.address} must answer with a row per image, got "
                f"{values.shape[:1].numel()} for {len(x)} images"
            )
        return values


def load_reference(reference: Reference, options: LoadOptions) -> LoadedModel:
    """The loader of `http:` and `https:`."""
    body = reference.body
    address = (f"{reference.scheme}:{body}" if body.startswith("//") else body).rstrip("/")
    checks.require(
        address.startswith(("http://", "https://")) and "/v2/models/" in address,
        "model",
        "be the address of a model, such as http://localhost:8000/v2/models/NAME",
        reference.text,
    )
    metadata = request(address)
    inputs, outputs = (_tensors(metadata, key, address) for key in ("inputs", "outputs"))
    checks.require(
        len(inputs) == 1,
        "model",
        f"have one input at {address}",
        [entry["name"] for entry in inputs],
    )
    sizes = [size if size > 0 else None for size in inputs[0]["shape"]]
    checks.require(
        len(sizes) == 4, "model", f"take images as (N, C, H, W) or (N, H, W, C) at {address}", sizes
    )
    checks.one_of("type of images", inputs[0]["datatype"], (FLOAT, BYTES))
    images = ImageInput.of(inputs[0]["name"], sizes, is_bytes=inputs[0]["datatype"] == BYTES)
    checks.require(
        sizes[0] is None or math.prod(size or 1 for size in sizes) <= MAX_BATCH,
        "model",
        f"take batches of at most {MAX_BATCH} numbers at {address}",
        sizes,
    )
    scores = [
        entry
        for entry in outputs
        if entry["datatype"].startswith(("FP", "BF")) and len(entry["shape"]) == 2
    ]
    chosen = (scores or outputs)[0]
    classes = chosen["shape"][1] if scores and chosen["shape"][1] > 0 else None
    digest = hashlib.sha256(json.dumps([address, metadata], sort_keys=True).encode()).digest()
    network = RemoteModel(address, images, chosen["name"], classes or options.num_classes, digest)
    returned = "scores" if scores else "classes alone"
    name = literal(checks.shorten(str(metadata.get("name", "model")), 80))
    info = ModelInfo(
        f"{name} behind a server, {returned}, no gradients: attacked by random search",
        classes,
        images.known_shape,
        origin=address,
        is_remote=True,
    )
    return LoadedModel(network, info, preprocessing=images.preprocessing)


def _tensors(metadata: Mapping[str, Any], key: str, address: str) -> Sequence[dict[str, Any]]:
    """The description of all inputs or outputs, whose values have their types."""
    tensors: Any = metadata.get(key)
    valid = (
        isinstance(tensors, list)
        and tensors
        and all(
            isinstance(entry, dict)
            and isinstance(entry.get("name"), str)
            and isinstance(entry.get("datatype"), str)
            and isinstance(entry.get("shape"), list)
            and all(type(size) is int for size in entry["shape"])
            for entry in tensors
        )
    )
    if not valid:
        raise InputError(
            f"the server {address} must describe its {key} by name, datatype and shape, got "
            f"{checks.shown(tensors)}"
        )
    listed: list[dict[str, Any]] = tensors
    return listed


class _SameHost(urllib.request.HTTPRedirectHandler):
    """Follows a server to other addresses of its own only: the images are for nobody else."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        """The next question, unless it goes to another host."""
        before, after = urllib.parse.urlsplit(req.full_url), urllib.parse.urlsplit(newurl)
        if before.netloc != after.netloc or after.scheme not in (before.scheme, "https"):
            fp.close()
            raise InputError(
                f"the server {req.full_url} must answer itself, got a redirect to "
                f"{checks.shown(newurl)}"
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


_OPENER = urllib.request.build_opener(_SameHost)


def request(address: str, content: object = None) -> dict[str, Any]:
    """The server's answer to a question, or to none; what goes wrong becomes an
    :class:`InputError`."""
    data = None if content is None else json.dumps(content).encode()
    question = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with _OPENER.open(question, timeout=TIMEOUT) as answer:
                text = answer.read(MAX_BYTES + 1)
            break
        except urllib.error.HTTPError as error:
            raise InputError(
                f"the server {address} must answer, got {error.code}: {_reason(error)}"
            ) from None
        except InputError:
            raise
        except (OSError, ValueError, http.client.HTTPException) as error:  # URLError is an OSError
            if attempt == ATTEMPTS or isinstance(error, http.client.InvalidURL):
                raise InputError(
                    f"the server {address} must be reachable, got {literal(one_line(error))}"
                ) from None
            time.sleep(PAUSE)
    try:
        checks.require(len(text) <= MAX_BYTES, "answer", f"have at most {MAX_BYTES} bytes", "more")
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"the server {address} must answer with JSON, got {checks.shown(text[:60])} "
            f"({one_line(error)})"
        ) from None
    checks.require(isinstance(table, dict), "answer", "be a JSON object", type(table).__name__)
    return table  # type: ignore[no-any-return]


def _reason(error: urllib.error.HTTPError) -> str:
    """What the protocol's `{"error": …}` says, else the reason of the status."""
    try:
        table = json.loads(error.read(MAX_BYTES))
        return literal(checks.shorten(str(table["error"]), checks.VALUE_LENGTH))
    except (OSError, ValueError, KeyError, TypeError, RecursionError, http.client.HTTPException):
        return literal(checks.shorten(str(error.reason), checks.VALUE_LENGTH))
