"""Mesh axes and the one table that maps logical axes of arrays onto them. No other file names a mesh axis."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from dspark_jax.core.errors import InputError

MESH_AXES = ("data", "fsdp", "expert", "tensor")

# Logical axis -> mesh axes. Parameters: "embed" is cut for memory (FSDP), the others for arithmetic.
RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp", "expert"),
    "embed": ("fsdp",),
    "vocab": ("tensor",),
    "token": ("tensor",),  # rows of a table that a sequential head looks up
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "expert": ("expert",),
    "norm": (),
    "rank": (),
    "features": (),
}


def make_mesh(*, data: int = 1, fsdp: int = 1, expert: int = 1, tensor: int = 1, devices=None) -> Mesh:
    """A mesh over (data, fsdp, expert, tensor); one size may be -1 and takes the remaining devices.

    Slices of a TPU pod that only a network connects are parts of the data axis: nothing but gradients
    crosses between them.

    Raises:
      InputError: the sizes do not multiply to the number of devices, or slices do not divide the data axis.
    """
    devices = jax.devices() if devices is None else devices
    sizes = [data, fsdp, expert, tensor]
    if sizes.count(-1) == 1:
        known = int(np.prod([size for size in sizes if size != -1]))
        sizes[sizes.index(-1)] = max(len(devices) // known, 1)
    if int(np.prod(sizes)) != len(devices):
        axes = f"data={data}, fsdp={fsdp}, expert={expert}, tensor={tensor}"
        raise InputError(
            given=f"mesh {axes} over {len(devices)} devices",
            expected="sizes whose product is the number of devices",
            fix="set one of the sizes to -1, or pass fewer devices",
        )
    return Mesh(_slice_by_slice(devices, sizes), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def _slice_by_slice(devices: Any, sizes: list[int]) -> np.ndarray:
    slices: dict[int, list[Any]] = {}
    for device in devices:
        # Other platforms number their machines so, which are no reason to keep parameters apart.
        number = getattr(device, "slice_index", 0) if device.platform == "tpu" else 0
        slices.setdefault(number, []).append(device)
    if sizes[0] % len(slices):
        raise InputError(
            given=f"mesh data={sizes[0]} over {len(slices)} slices",
            expected="a multiple of the number of slices, which lie along the data axis",
            fix=f"set --mesh.data to {len(slices)} or a multiple",
        )
    parts = [np.asarray(slices[number]).reshape(-1, *sizes[1:]) for number in sorted(slices)]
    return np.concatenate(parts).reshape(sizes)


def partition_spec(
    mesh: Mesh | AbstractMesh, axes: tuple[str | None, ...], shape: tuple[int, ...] | None = None
) -> PartitionSpec:
    """Logical axes -> PartitionSpec. Mesh axes that do not divide an axis are left out, the last one first.

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
        parts.append((mesh_axes if shape is None else _dividing(mesh, mesh_axes, shape[i])) or None)
    return PartitionSpec(*parts)


def _dividing(mesh: Mesh | AbstractMesh, mesh_axes: tuple[str, ...], size: int) -> tuple[str, ...]:
    """The first of the mesh axes, as many as divide an array axis of this size."""
    while size % int(np.prod([mesh.shape[name] for name in mesh_axes])):
        mesh_axes = mesh_axes[:-1]
    return mesh_axes


def param_sharding(
    mesh: Mesh, axes: tuple[str | None, ...], shape: tuple[int, ...] | None = None
) -> NamedSharding:
    """The sharding of an array with these logical axes."""
    return NamedSharding(mesh, partition_spec(mesh, axes, shape))


def serving_axes(axes: tuple[str | None, ...]) -> tuple[str | None, ...]:
    """Logical axes of a parameter while serving: a head's table is whole, looking up is no collective."""
    return tuple(None if axis == "token" else axis for axis in axes)


def replicated(mesh: Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def mesh_of(arrays: Any) -> Mesh | None:
    """The mesh on which a tree of arrays lies; None on a single device."""
    mesh = getattr(jax.tree.leaves(arrays)[0].sharding, "mesh", None)
    return mesh if isinstance(mesh, Mesh) else None


def on_mesh(mesh: Mesh | None) -> contextlib.AbstractContextManager:
    """Inside, while a program is traced, the functions below speak of this mesh."""
    if mesh is None or mesh.size == 1:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def divided_over(axis: str, size: int) -> tuple[str, ...]:
    """Axes of the mesh of `on_mesh` that divide a logical axis of this size; none if it stays whole."""
    mesh = _mesh()
    return () if mesh is None else _dividing(mesh, RULES[axis], size)


def mesh_axes(axis: str) -> tuple[str, ...]:
    """All axes of the mesh of `on_mesh` that may divide a logical axis, which is padded if need be."""
    return () if _mesh() is None else RULES[axis]


def axes_size(axes: tuple[str, ...]) -> int:
    """Into how many parts these axes of the mesh of `on_mesh` divide an array; also within `by_device`."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else int(np.prod([mesh.shape[name] for name in axes]))


def divide_batch(x: Array) -> Array:
    """Keeps the batch, the first axis, divided over the mesh of `on_mesh`; the compiler divides the others.

    Left alone with weights that are cut for memory, it lets activations travel instead of weights: every
    device then holds all sequences.
    """
    axes = divided_over("batch", x.shape[0])
    if not axes:
        return x
    free = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)
    return jax.lax.with_sharding_constraint(x, PartitionSpec(axes, *free))


def whole(x: Array) -> Array:
    """Has an array gathered on every device of the mesh of `on_mesh`, here and once."""
    return x if _mesh() is None else jax.lax.with_sharding_constraint(x, PartitionSpec())


def by_device(function: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """The function on each device's part of its arguments; the function itself without a mesh.

    The compiler cannot divide a kernel by itself, and it divides a loss as it likes.

    Args:
      function: of arrays; its collectives name the axes that `divided_over` gives.
      in_specs: a PartitionSpec for every argument, a prefix of the argument's tree.
      out_specs: the same for the result.
    """
    if _mesh() is None:
        return function
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _mesh() -> AbstractMesh | None:
    """The mesh of `on_mesh`; None without one, and within `by_device`."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if AxisType.Auto in mesh.axis_types else None
