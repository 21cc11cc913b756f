"""Watching a run: metrics one step late, a stop where the loss goes wrong, profiler traces."""

from __future__ import annotations

import collections
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from dspark_jax.core.distributed import is_main
from dspark_jax.core.files import atomic_write
from dspark_jax.core.metrics import MetricsWriter
from dspark_jax.training.config import WatchConfig
from dspark_jax.training.goodput import GoodputClock

OnLog = Callable[[int, dict[str, Any]], None]
_SHOWN_IDS = 20


class Diverged(RuntimeError):
    """A step whose loss or gradient is no number, or whose loss is far above the ones before."""


class LossGuard:
    """Says what is wrong with a step.

    Args:
      config: factor and window; the median forgets what lies before the window, and what was refused.
    """

    def __init__(self, config: WatchConfig):
        self._factor = config.spike_factor
        self._losses: collections.deque[float] = collections.deque(maxlen=config.spike_window_steps)

    def problem(self, *, loss: float, gradient_norm: float) -> str | None:
        """What is wrong, or None."""
        if not (math.isfinite(loss) and math.isfinite(gradient_norm)):
            return "not a finite number"
        if self._factor and 2 * len(self._losses) >= (self._losses.maxlen or 0):
            usual = statistics.median(self._losses)
            if loss > self._factor * usual:
                return f"more than {self._factor:g} times {usual:.4g}, the median of the last steps"
        self._losses.append(loss)
        return None


class Watcher:
    """Reads every step's values when the device is busy with the next step, checks them and logs some.

    Args:
      config: what counts as wrong.
      run_dir: where process 0 writes.
      clock: of the run.
      start: steps done before.
      tokens: of a step, padding included.
      ideal_step_s: seconds of a step at the devices' stated peak, once it is compiled; None: not known.
      progress: the bar to write beside.
      on_log: called with (step, metrics) for every line.
    """

    def __init__(
        self,
        config: WatchConfig,
        *,
        run_dir: Path,
        clock: GoodputClock,
        start: int,
        tokens: int,
        ideal_step_s: Callable[[], float | None],
        progress: tqdm,
        on_log: OnLog | None,
    ):
        self._guard, self._run_dir, self._clock = LossGuard(config), run_dir, clock
        self._tokens, self._ideal_step_s = tokens, ideal_step_s
        self._progress, self._on_log = progress, on_log
        self._writer = MetricsWriter(run_dir) if is_main() else None
        self._held: tuple[int, dict[str, Any], bool] | None = None
        self._ids: Callable[[], list[str]] = list
        self._checked = False
        self._line = (start, time.monotonic(), clock.step_s)
        self._since_save: dict[str, list[float]] = collections.defaultdict(list)

    def hold(self, step: int, values: dict[str, Any], *, ids: Callable[[], list[str]], log: bool) -> None:
        """Settles the step before and keeps this one's values, still on the device.

        Args:
          step: its number.
          values: what it says.
          ids: says which records its batch holds, on all processes together.
          log: whether it gets a line.
        """
        self.settle()
        self._ids = ids
        self._held, self._checked = (step, values, log), False

    def busy(self) -> bool:
        """Whether the device still works on the step held."""
        return self._held is not None and not self._held[1]["loss"].is_ready()

    def check(self) -> None:
        """Waits for the step held and looks at it.

        Raises:
          Diverged: with the ids of the batch; all of them are written into the run directory.
        """
        if self._held is None or self._checked:
            return
        step, values, _ = self._held
        found = {name: float(values[name]) for name in ("loss", "gradient_norm")}
        if problem := self._guard.problem(**found):
            self._stop(step, found, problem)
        self._checked = True

    def settle(self, extra: Mapping[str, float] | None = None) -> None:
        """Checks the step held and, if it is due or there is something to add, writes its line."""
        self.check()
        if self._held is None:
            return
        step, values, log = self._held
        self._held = None
        if log or extra:
            self._log(step, {**jax.device_get(values), **(extra or {})})

    def means_since_save(self) -> dict[str, float]:
        """Mean of every scalar over the lines since the last call."""
        means = {name: statistics.fmean(values) for name, values in self._since_save.items()}
        self._since_save.clear()
        return means

    def close(self) -> None:
        """Flushes what was written."""
        if self._writer is not None:
            self._writer.close()

    def _log(self, step: int, values: dict[str, Any]) -> None:
        before, before_s, before_step_s = self._line
        self._line = (step, time.monotonic(), self._clock.step_s)
        steps_per_s = (step - before) / (self._line[1] - before_s)
        row = {
            **values,
            "steps_per_s": steps_per_s,
            "tokens_per_s": steps_per_s * self._tokens,
            **self._clock.summary(),
        }
        step_s = (self._clock.step_s - before_step_s) / (step - before)
        ideal_step_s = self._ideal_step_s()
        if ideal_step_s is not None and step_s > 0:
            row["model_flop_utilisation"] = ideal_step_s / step_s
        for name, value in row.items():
            if getattr(value, "ndim", 0) == 0:
                self._since_save[name].append(float(value))
        if self._writer is not None:
            row = self._writer.write(step, row)
            if self._on_log is not None:
                self._on_log(step, row)
        shown = {"loss": "loss", "expected_tau": "tau", "goodput": "goodput"}
        shown |= {"model_flop_utilisation": "mfu", "accepted_length": "accepted"}
        self._progress.set_postfix(
            {short: f"{row[name]:.3f}" for name, short in shown.items() if name in row}
        )

    def _stop(self, step: int, found: dict[str, float], problem: str) -> None:
        ids = self._ids()
        path = self._run_dir / f"diverged-{step}.json"
        if is_main():
            with atomic_write(path, "w") as file:
                json.dump({"step": step, **{k: str(v) for k, v in found.items()}, "ids": ids}, file)
        shown = ", ".join(ids[:_SHOWN_IDS])
        more = f" and {len(ids) - _SHOWN_IDS} more (all in {path})" if len(ids) > _SHOWN_IDS else ""
        raise Diverged(
            f"step {step}: loss {found['loss']:.4g}, gradient norm {found['gradient_norm']:.4g}: {problem}. "
            f"The batch holds the records {shown}{more}. Nothing since the last checkpoint was saved. "
            "Look at these records, lower the learning rate, or raise --watch.spike-factor to go on."
        )


class TraceWindow:
    """A profiler trace over some steps, by process 0.

    Args:
      steps: first and last step, or None.
      directory: of the trace, for TensorBoard or Perfetto.
    """

    def __init__(self, steps: tuple[int, int] | None, directory: Path):
        self._steps = steps if is_main() else None
        self._directory = directory
        self._running = False

    def before(self, step: int) -> None:
        """Starts the trace, if this is the first step; a run that resumed within them starts at once."""
        if self._steps and self._steps[0] <= step <= self._steps[1] and not self._running:
            jax.profiler.start_trace(str(self._directory))
            self._running = True

    def after(self, step: int, values: Any) -> None:
        """Stops the trace behind the last step, once the device has done it."""
        if self._running and self._steps and step >= self._steps[1]:
            jax.block_until_ready(values)
            self.close()

    def close(self) -> None:
        """Stops a trace that the run did not reach the end of."""
        if self._running:
            jax.profiler.stop_trace()
            self._running = False
