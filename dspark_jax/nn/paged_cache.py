"""Keys and values in pages, and attention of flattened rows over them.

A request's positions lie in pages of fixed length; a table says which. A step works on M rows of any
requests, in any mixture of lengths: markers say whose row it is and where it stands. Dense layers never look
at the markers; only `write` and `attend_rows` do.

One buffer per layer, donated, for the reason that `kv_cache` gives.
"""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from dspark_jax.nn.attention import attend
from dspark_jax.nn.paged_kernel import paged_attention_kernel


@flax.struct.dataclass
class Rows:
    """Whose row each of the M rows of a step is.

    Rows of one request are neighbours, at ascending positions. Padding rows have slot B, one past the last.

    Attributes:
      slots_M: slot of the request, int32.
      positions_M: position of the row's token, int32.
      places_M: place of the row among the rows of its request in this step, from 0, int32.
    """

    slots_M: Array
    positions_M: Array
    places_M: Array

    @classmethod
    def ragged(cls, starts_B: Array, lengths_B: Array, num_rows: int) -> Rows:
        """lengths_B rows of every slot from starts_B on, flattened into `num_rows`; the rest is padding.

        The caller sees to it that they fit: rows beyond `num_rows` are lost.
        """
        B = starts_B.shape[0]
        ends_B = jnp.cumsum(lengths_B)
        row_M = jnp.arange(num_rows)
        slots_M = jnp.searchsorted(ends_B, row_M, side="right").astype(jnp.int32)
        places_M = row_M - jnp.where(slots_M > 0, ends_B[slots_M - 1], 0)
        inside_M = slots_M < B
        starts_M = jnp.where(inside_M, starts_B[jnp.minimum(slots_M, B - 1)], 0)
        return cls(slots_M, jnp.where(inside_M, starts_M + places_M, 0), jnp.where(inside_M, places_M, 0))


def create_pages(
    *, num_pages: int, num_kv_heads: int, page_len: int, head_dim: int, dtype: DTypeLike = jnp.float32
) -> Array:
    """Empty pages [P, K, S, H] of one layer's keys or values."""
    return jnp.zeros((num_pages, num_kv_heads, page_len, head_dim), dtype)


def write(pages_PKSH: Array, rows_MKH: Array, table_BN: Array, rows: Rows) -> Array:
    """Puts every row where its position lies; padding rows are dropped.

    Args:
      pages_PKSH: one layer's pages; donated by the caller's program.
      rows_MKH: keys or values.
      table_BN: page of positions n S .. (n + 1) S - 1 of each slot.
      rows: markers.
    """
    P, _, S, _ = pages_PKSH.shape
    pages_M = table_BN.at[rows.slots_M, rows.positions_M // S].get(mode="fill", fill_value=P)
    return pages_PKSH.at[pages_M, :, rows.positions_M % S].set(rows_MKH.astype(pages_PKSH.dtype), mode="drop")


def attend_rows(
    q_MNH: Array,
    keys_PKSH: Array,
    values_PKSH: Array,
    table_BN: Array,
    rows: Rows,
    *,
    rows_per_slot: int,
    window: int | None = None,
) -> Array:
    """Every row attends to its own request's positions up to its own; a Pallas kernel on TPUs.

    Args:
      q_MNH: scaled queries.
      keys_PKSH: pages that already hold the keys of these rows.
      values_PKSH: the values.
      table_BN: page tables.
      rows: markers.
      rows_per_slot: most rows that one request has in a step; static.
      window: a row sees this many positions, itself included; None: all.

    Returns:
      Mixed values [M, N, H], float32; anything at padding rows.
    """
    kernel = functools.partial(paged_attention_kernel, window=window)
    plain = functools.partial(attend_rows_plain, rows_per_slot=rows_per_slot, window=window)
    arguments = (q_MNH, keys_PKSH, values_PKSH, table_BN, rows.slots_M, rows.positions_M, rows.places_M)
    return jax.lax.platform_dependent(
        *arguments,
        tpu=lambda q, k, v, table, slots, positions, _: kernel(q, k, v, table, slots, positions),
        default=lambda q, k, v, table, *markers: plain(q, k, v, table, Rows(*markers)),
    )


def attend_rows_plain(
    q_MNH: Array,
    keys_PKSH: Array,
    values_PKSH: Array,
    table_BN: Array,
    rows: Rows,
    *,
    rows_per_slot: int,
    window: int | None = None,
) -> Array:
    """`attend_rows` in XLA for every backend: the rows go to their slots, attend, and come back."""
    B = table_BN.shape[0]

    def contiguous(pages_PKSH: Array) -> Array:
        own_BKNSH = jnp.moveaxis(pages_PKSH[table_BN], 2, 1)
        return own_BKNSH.reshape(B, own_BKNSH.shape[1], -1, own_BKNSH.shape[-1])

    def to_slots(x_M: Array, fill) -> Array:
        empty = jnp.full((B, rows_per_slot, *x_M.shape[1:]), fill, x_M.dtype)
        return empty.at[rows.slots_M, rows.places_M].set(x_M, mode="drop")

    keys_BKSH = contiguous(keys_PKSH)
    positions_BT1 = to_slots(rows.positions_M, -1)[..., None]
    key_positions_S = jnp.arange(keys_BKSH.shape[2])
    sees_BTS = key_positions_S <= positions_BT1
    if window is not None:
        sees_BTS &= key_positions_S > positions_BT1 - window
    mixed_BTNH = attend(to_slots(q_MNH, 0), keys_BKSH, contiguous(values_PKSH), sees_BTS)
    return mixed_BTNH.at[rows.slots_M, rows.places_M].get(mode="clip")
