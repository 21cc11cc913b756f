"""Keys and values of committed positions, in pages, one pair of buffers per layer.

A list of per-layer buffers, because that is what XLA updates in place when the cache is donated; stacked
buffers scanned over layers are copied (measured, docs/architecture.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import flax.struct
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from dspark_jax.nn.config import BlockConfig
from dspark_jax.nn.paged_cache import Paging, attend_rows, create_pages, write


@flax.struct.dataclass
class KVCache:
    """Per-layer pages of keys and values; a `Paging` says whose they are.

    A row is valid for a query at position p exactly when its own position is <= p: rows are rewritten from
    the committed length onwards before anything attends to them, so rejected rows need no clearing. That
    holds for layers with a window too: their pages are as many as all others', and only the mask is windowed.

    Attributes:
      keys_PKSH: one array per layer, rotated keys.
      values_PKSH: one array per layer.
    """

    keys_PKSH: tuple[Array, ...]
    values_PKSH: tuple[Array, ...]

    @classmethod
    def create(
        cls,
        layers: Sequence[BlockConfig],
        *,
        num_pages: int,
        page_len: int,
        dtype: DTypeLike = jnp.float32,
    ):
        """Zeros: `num_pages` pages of `page_len` positions in every layer."""

        def buffers():
            sizes = [(layer.num_kv_heads, layer.head_dim) for layer in layers]
            return tuple(
                create_pages(num_pages=num_pages, num_kv_heads=K, page_len=page_len, head_dim=H, dtype=dtype)
                for K, H in sizes
            )

        return cls(buffers(), buffers())

    @property
    def page_len(self) -> int:
        """Positions per page (a static number)."""
        return self.keys_PKSH[0].shape[2]

    def written(self, layer: int, keys: Array, values: Array, paging: Paging) -> tuple[Array, Array]:
        """One layer's keys and values with M rows [..., K, H] in their places."""

        def put(pages_PKSH: Array, rows: Array) -> Array:
            return write(pages_PKSH, rows.reshape(-1, *rows.shape[-2:]), paging.table_RN, paging.rows)

        return put(self.keys_PKSH[layer], keys), put(self.values_PKSH[layer], values)

    def extended(self, rows: Sequence[tuple[Array, Array]], paging: Paging) -> KVCache:
        """With keys and values [..., K, H] of M rows, given layer by layer."""
        pairs = [self.written(layer, *pair, paging) for layer, pair in enumerate(rows)]
        return KVCache(*(tuple(x) for x in zip(*pairs, strict=True)))


def write_and_attend(
    cache: KVCache,
    layer: int,
    q: Array,
    keys: Array,
    values: Array,
    paging: Paging,
    *,
    window: int | None = None,
) -> tuple[Array, tuple[Array, Array]]:
    """Writes a step's rows into a layer, then lets them attend to their own requests up to themselves.

    Args:
      cache: the pages.
      layer: its number.
      q: scaled queries [..., N, H] of M rows.
      keys: their keys [..., K, H].
      values: their values.
      paging: where they lie.
      window: a row sees this many positions, itself included; None: all.

    Returns:
      (mixed values [..., N, H], the layer's keys and values).
    """
    pair = cache.written(layer, keys, values, paging)
    mixed_MNH = attend_rows(
        q.reshape(-1, *q.shape[-2:]),
        *pair,
        paging.table_RN,
        paging.rows,
        rows_per_slot=paging.rows_per_slot,
        window=window,
    )
    return mixed_MNH.reshape(q.shape), pair
