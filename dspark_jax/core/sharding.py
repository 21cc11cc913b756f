"""Mesh axes and the one table that maps logical axes of arrays onto them. No other file names a mesh axis."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dspark_jax.core.errors import InputError

MESH_AXES = ("data", "fsdp", "tensor")

# Logical axis -> mesh axes. Parameters: "embed" is cut for memory (FSDP), the others for arithmetic (tensor).
RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "embed": ("fsdp",),
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "norm": (),
    "rank": (),
    "features": (),
}


def make_mesh(*, data: int = 1, fsdp: int = 1, tensor: int = 1, devices=None) -> Mesh:
    """A mesh over (data, fsdp, tensor); one size may be -1 and takes the remaining devices.

    Raises:
      InputError: the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = [data, fsdp, tensor]
    if sizes.count(-1) == 1:
        known = int(np.prod([size for size in sizes if size != -1]))
        sizes[sizes.index(-1)] = max(len(devices) // known, 1)
    if int(np.prod(sizes)) != len(devices):
        raise InputError(
            given=f"mesh data={data}, fsdp={fsdp}, tensor={tensor} over {len(devices)} devices",
            expected="sizes whose product is the number of devices",
            fix="set one of the sizes to -1, or pass fewer devices",
        )
    return Mesh(np.asarray(devices).reshape(sizes), MESH_AXES, axis_types=(AxisType.Auto,) * 3)


def partition_spec(
    mesh: Mesh, axes: tuple[str | None, ...], shape: tuple[int, ...] | None = None
) -> PartitionSpec:
    """Logical axes -> PartitionSpec. An axis that a mesh size does not divide stays whole.

    Raises:
      InputError: an unknown logical axis, or two axes of one array on the same mesh axis.
    """
    used: set[str] = set()
    parts = []
    for i, axis in enumerate(axes):
        if axis is not None and axis not in RULES:
            raise InputError(
                given=f"logical axis {axis!r}", expected=f"one of {sorted(RULES)}", fix="add a rule for it"
            )
        mesh_axes = RULES[axis] if axis is not None else ()
        if used & set(mesh_axes):
            raise InputError(
                given=f"axes {axes}, two of them on mesh axes {sorted(used & set(mesh_axes))}",
                expected="every mesh axis at most once per array",
                fix="give one of the axes another logical name",
            )
        used |= set(mesh_axes)
        size = int(np.prod([mesh.shape[name] for name in mesh_axes]))
        divides = shape is None or shape[i] % size == 0
        parts.append(mesh_axes if mesh_axes and divides else None)
    return PartitionSpec(*parts)


def param_sharding(
    mesh: Mesh, axes: tuple[str | None, ...], shape: tuple[int, ...] | None = None
) -> NamedSharding:
    """The sharding of an array with these logical axes."""
    return NamedSharding(mesh, partition_spec(mesh, axes, shape))


def replicated(mesh: Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())
