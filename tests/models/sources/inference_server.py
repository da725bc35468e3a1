"""A server of the Open Inference Protocol for tests."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]


@contextmanager
def serve(
    function: Function,
    shape: list[int],
    *,
    datatype: str = "FP32",
    output: str = "FP32",
    output_shape: tuple[int, ...] = (-1, 6),
    answer: Callable[[dict[str, Any]], Any] | None = None,
) -> Iterator[tuple[str, list[int]]]:
    """The address of a model, and the sizes of the batches that it was asked for."""
    batches: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

        def reply(self, content: object, status: int = 200) -> None:
            text = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def do_GET(self) -> None:
            if self.path != "/v2/models/net":
                self.reply({"error": f"no model at {self.path}"}, 404)
                return
            self.reply(
                {
                    "name": "net",
                    "versions": ["1"],
                    "platform": "test",
                    "inputs": [{"name": "images", "datatype": datatype, "shape": shape}],
                    "outputs": [{"name": "out", "datatype": output, "shape": list(output_shape)}],
                }
            )

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if answer is not None:
                self.reply(answer(body))
                return
            (given,) = body["inputs"]
            assert (
                self.path == "/v2/models/net/infer"
                and given["name"] == "images"
                and given["datatype"] == datatype
            )
            kind = torch.uint8 if datatype == "UINT8" else torch.float32
            x = torch.tensor(given["data"], dtype=kind).reshape(given["shape"])
            batches.append(len(x))
            with torch.no_grad():
                z = function(x)
            self.reply(
                {
                    "model_name": "net",
                    "outputs": [
                        {
                            "name": "out",
                            "datatype": output,
                            "shape": list(z.shape),
                            "data": z.flatten().tolist(),
                        }
                    ],
                }
            )

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v2/models/net", batches
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
