"""A headless Chromium, driven by the DevTools protocol over a pair of pipes."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), "")
PATIENCE = 120  # seconds for one answer, on a busy machine
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--no-first-run",
    "--mute-audio",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--force-color-profile=srgb",
    "--remote-debugging-pipe",
)


class Page:
    """One page: what it logs, what it requests, what its script returns.

    Args:
        width, height: of the window in CSS pixels.
        dark: the preferred colour scheme.
        downloads: folder for what the page saves.
    """

    def __init__(
        self,
        width: int = 1280,
        height: int = 900,
        *,
        dark: bool = False,
        downloads: Path | None = None,
    ) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        read_here, write_there = os.pipe()
        read_there, write_here = os.pipe()
        self._read, self._write, self._buffer, self._number = read_here, write_here, b"", 0

        def connect() -> None:
            """In the new process: Chromium reads commands from descriptor 3 and answers on 4."""
            ends = [
                fcntl.fcntl(descriptor, fcntl.F_DUPFD, 10)
                for descriptor in (read_there, write_there)
            ]
            for number, end in enumerate(ends, start=3):
                os.dup2(end, number)

        self._process = subprocess.Popen(
            [CHROMIUM, *FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"],
            preexec_fn=connect,
            pass_fds=(3, 4),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for descriptor in (read_there, write_there):
            os.close(descriptor)
        try:
            self._start(width, height, dark, downloads)
        except BaseException:
            self.close()
            raise

    def _start(self, width: int, height: int, dark: bool, downloads: Path | None) -> None:
        if downloads is not None:
            self._send("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(downloads))
        targets = self._send("Target.getTargets")["targetInfos"]
        target = next(item["targetId"] for item in targets if item["type"] == "page")
        self._session = self._send("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Network", "Log", "DOM", "Accessibility"):
            self._send(f"{domain}.enable")
        self._send("Emulation.setFocusEmulationEnabled", enabled=True)
        self.resize(width, height, dark=dark)

    def resize(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Another size of the window, and perhaps another colour scheme."""
        self._send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self._send(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the browser, and remove its profile."""
        self._process.terminate()
        self._process.wait()
        for descriptor in (self._read, self._write):
            os.close(descriptor)
        self._profile.cleanup()

    def open(self, path: Path, fragment: str = "") -> None:
        """Load a file, and wait until its script has run."""
        self._send("Page.navigate", url="about:blank")
        self._send("Page.navigate", url=path.resolve().as_uri() + fragment)
        self.wait_for(
            "document.readyState === 'complete' && location.protocol === 'file:' && "
            "document.documentElement.dataset.ready"
        )

    def js(self, expression: str) -> Any:
        """The value of an expression, awaited if it is a promise."""
        answer = self._send(
            "Runtime.evaluate",
            expression=expression,
            returnByValue=True,
            awaitPromise=True,
            userGesture=True,
        )
        if "exceptionDetails" in answer:
            raise AssertionError(
                answer["exceptionDetails"].get("exception", {}).get("description", answer)
            )
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + PATIENCE
        while not self.js(f"Boolean({expression})"):
            if time.monotonic() > end:
                raise AssertionError(f"never true: {expression}")
            time.sleep(0.02)

    def press(self, *keys: str) -> None:
        """Press keys by name, such as ArrowDown."""
        for key in keys:
            text = {"text": "\r"} if key == "Enter" else {}
            code = {
                "Enter": 13,
                "Escape": 27,
                "Tab": 9,
                "End": 35,
                "Home": 36,
                "ArrowLeft": 37,
                "ArrowUp": 38,
                "ArrowRight": 39,
                "ArrowDown": 40,
                "PageDown": 34,
                "+": 187,
            }[key]
            for kind in ("keyDown", "keyUp"):
                self._send(
                    "Input.dispatchKeyEvent",
                    type=kind,
                    key=key,
                    code=key,
                    windowsVirtualKeyCode=code,
                    **text,
                )

    def mouse(self, kind: str, x: float, y: float) -> None:
        """Move, press or release the left button at a place of the window."""
        name = {"move": "mouseMoved", "press": "mousePressed", "release": "mouseReleased"}[kind]
        button = {} if kind == "move" else {"button": "left", "clickCount": 1}
        self._send("Input.dispatchMouseEvent", type=name, x=x, y=y, **button)

    def names(self) -> list[dict[str, str]]:
        """Role and name of everything that assistive technology sees and that can be operated."""
        nodes = self._send("Accessibility.getFullAXTree")["nodes"]
        return [
            {"role": node["role"]["value"], "name": node.get("name", {}).get("value", "")}
            for node in nodes
            if not node.get("ignored") and "role" in node
        ]

    def emulate_print(self, path: Path) -> None:
        """Print the page into a PDF, without waiting for anything before."""
        answer = self._send("Page.printToPDF", printBackground=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Save the visible part, or the whole page, as PNG."""
        shot = self._send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if hasattr(self, "_session"):
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], PATIENCE)
            part = os.read(self._read, 1 << 20) if ready else b""
            if not part:
                raise AssertionError("the browser does not answer")
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _note(self, event: dict[str, Any]) -> None:
        values = event.get("params", {})
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])
        elif event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(values["exceptionDetails"])[:500])
        elif event.get("method") == "Runtime.consoleAPICalled" and values["type"] in (
            "error",
            "warning",
        ):
            self.errors.append(json.dumps(values["args"])[:500])
        elif event.get("method") == "Log.entryAdded" and values["entry"]["level"] in (
            "error",
            "warning",
        ):
            self.errors.append(values["entry"]["text"])


@pytest.fixture(scope="module")
def downloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder for what the page saves."""
    return tmp_path_factory.mktemp("downloads")


@pytest.fixture(scope="module")
def page(downloads: Path) -> Iterator[Page]:
    """A page for the tests of a module, during which nothing may fail or reach for the network."""
    with Page(downloads=downloads) as page:
        yield page
        assert page.errors == []
        assert {url.partition(":")[0] for url in page.requests} <= {"file", "data", "about", "blob"}


def saved(downloads: Path, name: str) -> bytes:
    """The content of a file that a page saves, which is removed."""
    end = time.monotonic() + 60
    while not (path := downloads / name).exists() or not path.stat().st_size:
        assert time.monotonic() < end, sorted(path.name for path in downloads.iterdir())
        time.sleep(0.05)
    content = path.read_bytes()
    path.unlink()
    return content
