"""Where the wall time of a run goes, over all of its starts: steps, or something else."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

Kind = Literal["step", "startup", "input", "save", "evaluation"]
LOST: tuple[Kind, ...] = ("startup", "input", "save", "evaluation")


class GoodputClock:
    """Divides the time since a run was first started.

    Time is told afterwards: `lap("input")` says what the time since the lap before was spent on. What the
    laps do not cover (the time between a kill and the next start, and steps that are done again because no
    checkpoint kept them) is lost to restarts.

    Args:
      now: seconds since the epoch; passes while no process runs.
    """

    def __init__(self, now: Callable[[], float] = time.time):
        self._now = now
        self._mark = self._first_start_s = now()
        self._spent_s: dict[str, float] = dict.fromkeys(("step", *LOST), 0.0)

    def resume(self, state: dict) -> None:
        """Adds the time of earlier starts, from `get_state` as it was saved; this start began before."""
        self._first_start_s = state["first_start_s"]
        for kind, spent_s in state["spent_s"].items():
            self._spent_s[kind] += spent_s

    def get_state(self) -> dict:
        """Plain JSON, to be kept with a checkpoint."""
        return {"first_start_s": self._first_start_s, "spent_s": dict(self._spent_s)}

    def lap(self, kind: Kind) -> None:
        """Counts the time since the lap before as spent on this."""
        now = self._now()
        self._spent_s[kind] += now - self._mark
        self._mark = now

    @property
    def step_s(self) -> float:
        """Seconds spent on steps that count."""
        return self._spent_s["step"]

    def summary(self) -> dict[str, float]:
        """Goodput, the share of all time that went into steps, and the seconds lost to everything else."""
        total_s = max(self._now() - self._first_start_s, 1e-9)
        open_s = self._now() - self._mark
        restart_s = max(total_s - sum(self._spent_s.values()) - open_s, 0.0)
        lost = {f"lost_{kind}_s": self._spent_s[kind] for kind in LOST}
        return {"goodput": self.step_s / total_s, **lost, "lost_restart_s": restart_s}
