"""Keys and values of committed positions, one buffer per layer.

A list of per-layer buffers, because that is what XLA updates in place when the cache is donated; stacked
buffers scanned over layers are copied (measured, docs/architecture.md). Position p of a request lies at
index p.
"""

from __future__ import annotations

from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from dspark_jax.nn.config import BlockConfig


@flax.struct.dataclass
class KVCache:
    """Per-layer keys and values.

    A row is valid for a query at position p exactly when its index is <= p: rows are rewritten from the
    committed length onwards before anything attends to them, so rejected rows need no clearing. That holds
    for layers with a window too: their buffers are as long as all others, and only the mask is windowed.

    Attributes:
      keys_BKSH: one array per layer, rotated keys.
      values_BKSH: one array per layer.
    """

    keys_BKSH: tuple[Array, ...]
    values_BKSH: tuple[Array, ...]

    @classmethod
    def create(
        cls, layers: Sequence[BlockConfig], *, batch: int, length: int, dtype: DTypeLike = jnp.float32
    ):
        """Zeros for `batch` requests of at most `length` positions in every layer."""

        def buffers():
            shapes = [(batch, layer.num_kv_heads, length, layer.head_dim) for layer in layers]
            return tuple(jnp.zeros(shape, dtype) for shape in shapes)

        return cls(buffers(), buffers())

    @property
    def length(self) -> int:
        """Allocated positions per request (a static number)."""
        return self.keys_BKSH[0].shape[2]


def write_rows(buffer_BKSH: Array, rows_BTKH: Array, start_B: Array) -> Array:
    """Writes T rows per request at start_B; the caller keeps start_B + T within the allocation."""
    rows_BKTH = rows_BTKH.swapaxes(1, 2).astype(buffer_BKSH.dtype)
    if buffer_BKSH.shape[0] == 1:  # a plain slice update stays in place; the batched form becomes a scatter
        return jax.lax.dynamic_update_slice(buffer_BKSH, rows_BKTH, (0, 0, start_B[0], 0))
    update = jax.vmap(lambda buffer, rows, start: jax.lax.dynamic_update_slice(buffer, rows, (0, start, 0)))
    return update(buffer_BKSH, rows_BKTH, start_B)
