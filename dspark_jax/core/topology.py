"""TPU devices to compile for, on machines without a TPU (extra [tpu])."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from typing import Any

from jax.experimental import topologies

from dspark_jax.core.errors import InputError

# What libtpu asks for before it compiles without hardware; two processes may do so at the same time.
ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_LOG_DIR": "disabled",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


def tpu_devices(topology: str, slices: int = 1) -> Sequence[Any]:
    """Devices of a TPU topology, for shardings of programs that are compiled and never run.

    Args:
      topology: such as "v5e:4x4", "v5p:2x2x1" or "tpu7x:2x2x1".
      slices: so many of them, connected by a network.

    Raises:
      InputError: no TPU compiler is installed, or it does not know the topology.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise InputError(
            given="no TPU compiler (libtpu)",
            expected="the extra [tpu], on Linux x86-64",
            fix="pip install 'dspark_jax[tpu]'",
        )
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        several = {"num_slices": slices} if slices > 1 else {}
        return topologies.get_topology_desc(platform="tpu", topology_name=topology, **several).devices
    except (RuntimeError, ValueError) as error:  # jax's own messages name the legal topologies
        raise InputError(
            given=f"topology {topology!r}: {error}",
            expected="a name such as v5e:4x4, v5p:2x2x2, v6e:4x4 or tpu7x:2x2x1",
            fix="correct the name",
        ) from error
