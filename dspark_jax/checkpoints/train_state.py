"""Training checkpoints through orbax: saved in the background, complete or absent, resumed exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp

State = TypeVar("State")


class TrainCheckpoints:
    """The checkpoints of one run.

    Args:
      directory: a folder of its own; created when absent.
      keep: how many of the latest to keep.
    """

    def __init__(self, directory: Path, *, keep: int):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(directory.absolute(), options=options)

    def latest_step(self) -> int | None:
        """The newest complete checkpoint's step."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, data_state: dict) -> None:
        """Starts to save; the arrays are copied before this returns, so they may be donated afterwards."""
        self._manager.save(
            step,
            args=ocp.args.Composite(state=ocp.args.StandardSave(state), data=ocp.args.JsonSave(data_state)),
        )

    def restore(self, step: int, state: State, shardings: State) -> tuple[State, dict]:
        """Reads a checkpoint onto the shardings of this run.

        Args:
          step: one that `latest_step` named.
          state: arrays or shapes of the state.
          shardings: where each array goes; another mesh than the one that saved is fine.

        Returns:
          The state and the input pipeline's position.
        """
        abstract = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state, shardings
        )
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract), data=ocp.args.JsonRestore()),
        )
        return restored["state"], restored["data"]

    def close(self) -> None:
        """Waits for saves in progress."""
        self._manager.wait_until_finished()
        self._manager.close()
