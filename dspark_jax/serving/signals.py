"""SIGTERM and SIGINT: a job ends within a grace time, and can go on later."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator


class StoppedAtOnce(BaseException):
    """A signal came where nothing was being decoded, or a second one came."""


class Stop:
    """Whether the job shall end, and by when.

    Args:
      grace_s: seconds from the first signal in which requests may finish.

    Attributes:
      requested: name of the signal, or None.
    """

    def __init__(self, grace_s: float):
        self._grace_s = grace_s
        self._deadline_s = float("inf")
        self._gently = False
        self.requested: str | None = None

    @property
    def overdue(self) -> bool:
        """Whether the grace time is over."""
        return time.monotonic() >= self._deadline_s

    @contextlib.contextmanager
    def gently(self) -> Iterator[None]:
        """In here a first signal only sets `requested`; elsewhere it raises `StoppedAtOnce`."""
        self._gently = True
        try:
            yield
        finally:
            self._gently = False

    def __call__(self, number: int, _frame: object = None) -> None:
        """Takes in a signal."""
        again = self.requested is not None
        self.requested = signal.Signals(number).name
        if again or not self._gently:
            raise StoppedAtOnce
        self._deadline_s = time.monotonic() + self._grace_s
        print(
            f"\n{self.requested}: no new requests; those being decoded have {self._grace_s:g} s",
            file=sys.stderr,
        )


@contextlib.contextmanager
def stop_on_signals(grace_s: float) -> Iterator[Stop]:
    """A `Stop` that hears the signals of this process while inside; only the main thread can have them."""
    stop = Stop(grace_s)
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
