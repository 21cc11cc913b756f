"""Writing the tensors of a Hugging Face directory: one safetensors file, or shards with an index."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from dspark_jax.checkpoints.sources import INDEX, SINGLE
from dspark_jax.core.files import atomic_write

MAX_SHARD_BYTES = 5 * 10**9

Tensors = Mapping[str, Callable[[], np.ndarray]]
"""Name -> a function that makes the tensor: only one shard is in memory at a time."""


def write_tensors(directory: Path, tensors: Tensors, *, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Writes tensors, every file whole or not at all.

    Args:
      directory: created when absent; what an earlier call left behind is removed.
      tensors: what to write, in this order.
      max_shard_bytes: above this size shards are written. A tensor is never divided.
    """
    directory.mkdir(parents=True, exist_ok=True)
    shards = _shards(tensors, max_shard_bytes)
    current, following = next(shards), next(shards, None)
    if following is None:
        _write(directory / SINGLE, current)
        _remove(directory, keep=[SINGLE])
        return
    # How many there are is in their names, and known only at the end.
    parts: list[tuple[str, dict[str, int]]] = []
    while current is not None:
        name = f".part-{len(parts) + 1}"
        _write(directory / name, current)
        parts.append((name, {tensor: array.nbytes for tensor, array in current.items()}))
        current, following = following, next(shards, None)
    weight_map, total_bytes = {}, 0
    for number, (part, sizes) in enumerate(parts, start=1):
        name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        (directory / part).replace(directory / name)
        weight_map |= dict.fromkeys(sizes, name)
        total_bytes += sum(sizes.values())
    with atomic_write(directory / INDEX, "w") as file:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        json.dump(index, file, indent=2, sort_keys=True)
    _remove(directory, keep=[INDEX, *weight_map.values()])


def _shards(tensors: Tensors, max_shard_bytes: int) -> Iterator[dict[str, np.ndarray]]:
    shard: dict[str, np.ndarray] = {}
    for name, make in tensors.items():
        array_np = np.ascontiguousarray(make())
        if shard and sum(other.nbytes for other in shard.values()) + array_np.nbytes > max_shard_bytes:
            yield shard
            shard = {}
        shard[name] = array_np
    yield shard


def _write(path: Path, shard: dict[str, np.ndarray]) -> None:
    with atomic_write(path) as file:
        file.write(save(shard, metadata={"format": "pt"}))


def _remove(directory: Path, *, keep: list[str]) -> None:
    """Removes weights that a reader could take for those just written."""
    for path in (*directory.glob("model*.safetensors"), directory / INDEX):
        if path.name not in keep:
            path.unlink(missing_ok=True)
