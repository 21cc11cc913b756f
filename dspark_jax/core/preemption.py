"""Being asked to stop: SIGTERM, as schedulers send it before they take a machine away."""

from __future__ import annotations

import signal
from types import TracebackType
from typing import Any

import jax
from jax.experimental import multihost_utils


class StopRequest:
    """Whether a run was asked to stop; a context in which SIGTERM no longer kills.

    Among several processes the signal may reach only some of them, at different steps: jax's preemption
    service, which catches it there, lets all of them agree on one step.
    """

    def __init__(self):
        self._asked = False
        self._before: Any = None

    def __enter__(self) -> StopRequest:
        if jax.process_count() == 1:
            self._before = signal.signal(signal.SIGTERM, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if jax.process_count() == 1:
            signal.signal(signal.SIGTERM, self._before)

    def reached(self, step: int) -> bool:
        """Whether to stop behind this step. To be asked once at every step, by every process."""
        if jax.process_count() > 1:
            return bool(multihost_utils.reached_preemption_sync_point(step))
        return self._asked

    def _ask(self, signum: int, frame: object) -> None:
        self._asked = True
