"""Ctrl-C and SIGTERM: a command ends in one sentence; work with a state defers them until the state
is saved."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_Handler = Callable[[int, FrameType | None], None]


@dataclass
class Received:
    """The first signal, if one has come."""

    number: int | None = None
    error: KeyboardInterrupt | None = None

    @property
    def exit_code(self) -> int:
        """As a shell counts it: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + (self.number or signal.SIGINT)

    @property
    def message(self) -> str:
        """What the interrupted work says about itself; empty if it says nothing."""
        return "" if self.error is None else str(self.error)


@contextmanager
def as_exceptions() -> Iterator[Received]:
    """Raise KeyboardInterrupt for either signal; a second one ends the process at once."""
    received = Received()

    def handle(number: int, frame: FrameType | None) -> None:
        if received.number is not None and not _is_one_of_several():
            os._exit(received.exit_code)
        received.number, received.error = number, KeyboardInterrupt()
        raise received.error

    with installed(handle):
        yield received


@contextmanager
def deferred() -> Iterator[Received]:
    """Let the block see a signal and end where its state is saved; then the signal goes to its
    previous handler.

    A KeyboardInterrupt that the block raises after a signal passes its message on. A second signal
    is not deferred.
    """
    received, at_once = Received(), False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal at_once
        if received.number is not None and not _is_one_of_several():
            at_once = True
            _deliver(number, previous)
        received.number = number

    with installed(handle) as previous:
        try:
            yield received
        except KeyboardInterrupt as error:
            if received.number is None or at_once:
                raise
            received.error = error
    if received.number is not None:
        try:
            _deliver(received.number, previous)
        except KeyboardInterrupt as error:
            error.args = (received.message,) if received.message else ()
            raise


def _deliver(number: int, handlers: dict[int, _Handler | int]) -> None:
    handler = handlers[number]
    signal.signal(number, handler)
    if callable(handler):
        handler(number, None)
    else:
        signal.raise_signal(number)


@contextmanager
def installed(handle: _Handler) -> Iterator[dict[int, _Handler | int]]:
    """Handle the signals that are not ignored; yields the previous handlers. Only the main thread
    receives signals."""
    previous: dict[int, _Handler | int] = {}
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            handler = signal.getsignal(number)
            if handler is not None and handler is not signal.SIG_IGN:
                previous[number] = handler
                signal.signal(number, handle)
    try:
        yield previous
    finally:
        for changed, before in previous.items():
            signal.signal(changed, before)


def _is_one_of_several() -> bool:
    """Whether this is one of several processes: who started them forwards Ctrl-C that the terminal
    sent them, too."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1
