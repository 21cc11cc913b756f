"""Several processes as one program: joining them, dividing batches among them, gathering what one writes.

Every process runs the same program on its own devices. Whatever only one of them does (log lines, exports)
touches the host alone; arrays are placed and gathered by all of them together.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from dspark_jax.core.errors import InputError, require
from dspark_jax.core.sharding import param_sharding, replicated

EXIT_LOST_PEER = 75  # EX_TEMPFAIL: the same command, given again, goes on
BARRIER_TIMEOUT_S = 3600
_BARRIERS = itertools.count()
_NOTHING_DETECTED = "coordinator_address should be defined"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """How processes find one another. TPU pods, GKE and SLURM say it themselves; elsewhere give all three."""

    coordinator: str | None = None
    """host:port of process 0, free to listen on."""
    num_processes: int | None = None
    """Processes of the job."""
    process_id: int | None = None
    """This one, from 0."""
    heartbeat_timeout_s: int = 100
    """Silence after which a process counts as dead."""

    def __post_init__(self):
        given = (self.coordinator, self.num_processes, self.process_id)
        require(
            given.count(None) in (0, 3),
            given=f"coordinator={self.coordinator}, num_processes={self.num_processes}, "
            f"process_id={self.process_id}",
            expected="all three of them, or none where the environment tells",
            fix="give the missing ones",
        )


def join_processes(config: DistributedConfig) -> None:
    """Connects this process to the others of its job, if there are any. Comes before any use of a device."""
    explicit: dict[str, Any] = {}
    if config.coordinator is not None:
        explicit = {
            "coordinator_address": config.coordinator,
            "num_processes": config.num_processes,
            "process_id": config.process_id,
        }
    try:
        jax.distributed.initialize(**explicit, heartbeat_timeout_seconds=config.heartbeat_timeout_s)
    except ValueError as error:
        if explicit or _NOTHING_DETECTED not in str(error):
            raise
        return  # no cluster: this process is alone
    print(
        f"process {jax.process_index()} of {jax.process_count()}: {jax.local_device_count()} of "
        f"{jax.device_count()} devices",
        file=sys.stderr,
        flush=True,
    )


def is_main() -> bool:
    """Whether this process writes logs and exports."""
    return jax.process_index() == 0


def on_main(function: Callable[[], None]) -> None:
    """Calls the function in process 0, while the others wait for the outcome.

    Raises:
      InputError: what the function refuses; in the other processes, that process 0 refused.
    """
    refusal = None
    if is_main():
        try:
            function()
        except InputError as error:
            refusal = error
    barrier()  # for as long as the function takes; a collective would run out of time
    if jax.process_count() > 1 and multihost_utils.broadcast_one_to_all(np.int32(refusal is not None)):
        refusal = refusal or InputError(
            given="a refusal by process 0", expected="see its output", fix="see its output"
        )
    if refusal is not None:
        raise refusal


def leave_at_once(code: int) -> NoReturn:
    """Ends this process without waiting for the others, which learn of it by that.

    An orderly end would wait for processes that are dead, or that wait for this one.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def local_rows(mesh: Mesh, batch_size: int) -> range:
    """Rows of every global batch that this process's devices hold, and which it therefore reads.

    Raises:
      InputError: they do not follow one another.
    """
    sharding = param_sharding(mesh, ("batch",), (batch_size,))
    parts: Any = sharding.addressable_devices_indices_map((batch_size,)).values()
    rows = sorted({row for (part,) in parts for row in range(batch_size)[part]})
    require(
        rows == list(range(rows[0], rows[-1] + 1)),
        given=f"devices of process {jax.process_index()} with the rows {rows} of a batch of {batch_size}",
        expected="rows that follow one another",
        fix="choose mesh sizes that divide the devices of a process, or are multiples of their number",
    )
    return range(rows[0], rows[-1] + 1)


def from_local_rows(array_np: np.ndarray, sharding: NamedSharding, batch_size: int) -> jax.Array:
    """A global array [batch_size, ...] of which every process brings its `local_rows`."""
    return jax.make_array_from_process_local_data(sharding, array_np, (batch_size, *array_np.shape[1:]))


def place(array_np: Any, sharding: NamedSharding) -> jax.Array:
    """A global array that every process holds whole on its host; each device takes its part of it."""
    if sharding.is_fully_addressable:
        return jax.device_put(array_np, sharding)
    return jax.make_array_from_callback(array_np.shape, sharding, lambda index: array_np[index])


def gather(tree: Any, mesh: Mesh) -> Any:
    """A tree of global arrays as numpy arrays on every host, one array at a time on the devices."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    whole = jax.jit(lambda x: x, out_shardings=replicated(mesh))
    return jax.tree.map(lambda x: np.asarray(whole(x).addressable_data(0)), tree)


def from_main(tree: Any) -> Any:
    """A tree of host arrays as process 0 has it, on every process."""
    return tree if jax.process_count() == 1 else multihost_utils.broadcast_one_to_all(tree)


def sum_over_processes(values_np: np.ndarray) -> np.ndarray:
    """The elementwise sum of one host array of every process, on every process."""
    barrier()
    return np.asarray(multihost_utils.process_allgather(values_np)).reshape(-1, *values_np.shape).sum(0)


def barrier() -> None:
    """Waits on the host until every process is here; all pass the same barriers in the same order."""
    if jax.process_count() > 1:
        import orbax.checkpoint as ocp  # takes a second to import, and one process has no need of it

        wait = ocp.multihost.get_barrier_sync_fn()
        assert wait is not None
        wait(key=f"dspark {next(_BARRIERS)}", timeout_ms=1000 * BARRIER_TIMEOUT_S)


def run_together(program: Any, *arguments: Any) -> Any:
    """Compiles a jitted function and runs it when all processes have done so.

    They compile at different speeds, and the first collectives may wait for one another for half a minute.
    """
    compiled = program.lower(*arguments).compile()
    barrier()
    return compiled(*arguments)
