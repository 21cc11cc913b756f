"""Training checkpoints through orbax: saved in the background, complete or absent, resumed exactly.

A checkpoint is written under a temporary name, committed by a marker and renamed (on gs:// the marker alone
commits). What a crash leaves behind is never taken for a checkpoint, and neither is a directory that was
copied or deleted by half: it is set aside under another name.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers

from dspark_jax.core.distributed import barrier, is_main
from dspark_jax.core.errors import InputError

State = TypeVar("State")
_COMMITTED = "_CHECKPOINT_METADATA"
_FILES = ("state/_METADATA", "state/manifest.ocdbt", "data/metadata")
_INCOMPLETE = ".incomplete"
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retention:
    """Which checkpoints stay: the union of these.

    Attributes:
      latest: so many of the newest.
      best: so many of those with the best metric.
      metric: the name of the metric; a checkpoint saved without it is never among the best.
      lowest: whether a smaller metric is better.
      every_steps: all at multiples of this step; None: none.
    """

    latest: int
    best: int = 0
    metric: str = ""
    lowest: bool = False
    every_steps: int | None = None

    def options(self) -> dict[str, Any]:
        """As orbax takes them."""

        def worth(metrics: Mapping[str, float]) -> float:
            return -metrics[self.metric] if self.lowest else metrics[self.metric]

        policies: list[Any] = [checkpoint_managers.LatestN(self.latest)]
        if self.every_steps is not None:
            policies.append(checkpoint_managers.EveryNSteps(self.every_steps))
        if self.best:
            policies.append(
                checkpoint_managers.BestN(
                    get_metric_fn=worth, n=self.best, keep_checkpoints_without_metrics=False
                )
            )
        # orbax stores metrics only where it is told what is best.
        best = {"best_fn": worth} if self.best else {}
        return {**best, "preservation_policy": checkpoint_managers.AnyPreservationPolicy(policies)}


class TrainCheckpoints:
    """The checkpoints of one run. All processes call the same methods in the same order.

    Args:
      directory: a folder of its own, local or gs://, that all processes see; created when absent.
      keep: which checkpoints stay.
    """

    def __init__(self, directory: epath.PathLike, *, keep: Retention):
        self._directory, self._keep = _absolute(directory), keep
        if is_main():
            _set_aside_incomplete(self._directory)
        barrier()
        options = ocp.CheckpointManagerOptions(create=True, enable_async_checkpointing=True, **keep.options())
        self._manager = ocp.CheckpointManager(self._directory, options=options)

    def latest_step(self) -> int | None:
        """The newest complete checkpoint's step."""
        return self._manager.latest_step()

    def save(
        self, step: int, state: Any, data_state: dict, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Starts to save; the arrays are copied before this returns, so they may be donated afterwards.

        Args:
          step: optimiser steps done; greater than every step saved before.
          state: arrays.
          data_state: the input pipeline's position and the like; plain JSON.
          metrics: of which the best checkpoints are told.
        """
        known = metrics if metrics and math.isfinite(metrics.get(self._keep.metric, math.nan)) else None
        saved = self._manager.save(
            step,
            args=ocp.args.Composite(state=ocp.args.StandardSave(state), data=ocp.args.JsonSave(data_state)),
            metrics=dict(known) if known else None,
        )
        if not saved:
            raise RuntimeError(f"{self._directory} already holds a checkpoint of step {step} or a later one")

    def restore(self, step: int, state: State, shardings: State) -> tuple[State, dict]:
        """Reads a checkpoint onto the shardings of this run: `restore_checkpoint`."""
        return _restore(self._manager, self._directory, step, state, shardings)

    def close(self) -> None:
        """Waits for saves in progress."""
        self._manager.wait_until_finished()
        self._manager.close()


def restore_checkpoint(path: epath.PathLike, state: State, shardings: State) -> tuple[State, dict]:
    """Reads a checkpoint of another run, which stays as it is.

    Args:
      path: the run's checkpoints, of which the newest complete one counts, or one of them.
      state: arrays or shapes of the state.
      shardings: where each array goes; another mesh than the one that saved is fine.

    Returns:
      The state and what was saved with it as `data_state`.

    Raises:
      InputError: there is no complete checkpoint, or it holds another kind of state.
    """
    directory = _absolute(path)
    if directory.name.isdecimal():
        steps, directory = [int(directory.name)], directory.parent
    else:
        steps = _steps(directory)
    complete = [step for step in steps if not _missing(directory / str(step))]
    if not complete:
        raise InputError(
            given=f"no complete checkpoint in {path}",
            expected="the directory `checkpoints` of a run, or one step in it",
            fix="check the path",
        )
    options = ocp.CheckpointManagerOptions(read_only=True)
    with ocp.CheckpointManager(directory, options=options) as manager:
        return _restore(manager, directory, max(complete), state, shardings)


def _restore(
    manager: ocp.CheckpointManager, directory: epath.Path, step: int, state: State, shardings: State
) -> tuple[State, dict]:
    abstract = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state, shardings
    )
    try:
        restored = manager.restore(
            step,
            args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract), data=ocp.args.JsonRestore()),
        )
    except (ValueError, KeyError, FileNotFoundError) as error:
        raise InputError(
            given=f"{directory / str(step)}: {error}",
            expected="a whole checkpoint of a run with the same drafter and the same optimiser",
            fix="give the configuration that it was saved with, or move this checkpoint away to go on from "
            "the one before",
        ) from error
    return restored["state"], restored["data"]


def _absolute(path: epath.PathLike) -> epath.Path:
    path = epath.Path(path)
    return path if path.is_absolute() else epath.Path(Path.cwd()) / path


def _steps(directory: epath.Path) -> list[int]:
    if not directory.exists():
        return []
    return [int(path.name) for path in directory.iterdir() if path.name.isdecimal()]


def _missing(checkpoint: epath.Path) -> list[str]:
    """What a directory lacks to be a complete checkpoint."""
    missing = [name for name in _FILES if not (checkpoint / name).exists()]
    try:
        committed = json.loads((checkpoint / _COMMITTED).read_text()).get("commit_timestamp_nsecs")
    except (OSError, ValueError):
        committed = None
    return missing if committed else [*missing, _COMMITTED]


def _set_aside_incomplete(directory: epath.Path) -> None:
    """Renames what only looks like a checkpoint, so that it is neither restored nor counted."""
    for step in _steps(directory):
        checkpoint = directory / str(step)
        if missing := _missing(checkpoint):
            aside = directory / f"{step}{_INCOMPLETE}"
            if aside.exists():
                aside.rmtree()
            checkpoint.rename(aside)
            _log.warning("%s is not complete (no %s): set aside", checkpoint, ", ".join(missing))
