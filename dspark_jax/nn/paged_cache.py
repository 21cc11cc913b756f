"""Keys and values in pages, and attention over them.

A request's positions lie in pages of fixed length; a table says which. A step works on M rows of any
requests, in any mixture of lengths: markers say whose row it is and where it stands. Dense layers never look
at the markers; only writing and attention do.

In XLA attention walks over the pages with an online softmax, one page of every request at a time, and stops
behind the longest context of the step: its time follows what is there, not what was allocated, and no shape
depends on it.
"""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from dspark_jax.core.sharding import by_device, divided_over
from dspark_jax.nn.attention import MASKED, product
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


@flax.struct.dataclass
class Paging:
    """Where the R requests of a step lie, and which of the step's M rows are theirs.

    Attributes:
      table_RN: page of positions n S .. (n + 1) S - 1 of each request, int32.
      slots_R: the request's index in arrays that have one entry for every slot, int32; out of range for
        padding.
      rows: markers; their slots count requests of the step.
      rows_per_slot: most rows that one request has; static.
    """

    table_RN: Array
    slots_R: Array
    rows: Rows
    rows_per_slot: int = flax.struct.field(pytree_node=False)

    @classmethod
    def whole(cls, starts_B: Array, num_rows: int) -> Paging:
        """The same number of rows for every request, each of which has one page to itself."""
        B = starts_B.shape[0]
        return cls(
            table_RN=jnp.arange(B)[:, None],
            slots_R=jnp.arange(B),
            rows=Rows.ragged(starts_B, jnp.full(B, num_rows), B * num_rows),
            rows_per_slot=num_rows,
        )

    def last_rows(self, x_MD: Array, num_rows_R: Array) -> Array:
        """Row number `num_rows` of every request, counted from 1: [R, D]; anything for padding."""
        R = self.slots_R.shape[0]
        if self.rows_per_slot == 1 and len(x_MD) == R:
            return x_MD
        first_R = jnp.searchsorted(self.rows.slots_M, jnp.arange(R))
        return x_MD.at[first_R + num_rows_R - 1].get(mode="clip")


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
    run = functools.partial(
        jax.lax.platform_dependent,
        tpu=lambda q, k, v, table, slots, positions, _: kernel(q, k, v, table, slots, positions),
        default=lambda q, k, v, table, *markers: plain(q, k, v, table, Rows(*markers)),
    )
    by_head = PartitionSpec(None, divided_over("kv_heads", keys_PKSH.shape[1]) or None)
    specs = (by_head, by_head, by_head, *[PartitionSpec()] * 4)
    return by_device(run, specs, by_head)(*arguments)


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
    B, M = table_BN.shape[0], q_MNH.shape[0]
    # One row for every slot, or all rows of one slot: they lie in order already, with padding at their end.
    in_order = rows_per_slot * B == M and 1 in (rows_per_slot, B)

    def to_slots(x_M: Array, fill) -> Array:
        if in_order:
            return x_M.reshape(B, rows_per_slot, *x_M.shape[1:])
        empty = jnp.full((B, rows_per_slot, *x_M.shape[1:]), fill, x_M.dtype)
        return empty.at[rows.slots_M, rows.places_M].set(x_M, mode="drop")

    part = attend_pages(
        to_slots(q_MNH, 0),
        keys_PKSH,
        values_PKSH,
        table_BN,
        to_slots(rows.positions_M + 1, 0),
        window=window,
    )
    mixed_BTNH = part.mixed()
    if in_order:
        return mixed_BTNH.reshape(q_MNH.shape)
    return mixed_BTNH.at[rows.slots_M, rows.places_M].get(mode="clip")


@flax.struct.dataclass
class SoftmaxPart:
    """Attention to some of the keys, ready to be joined with attention to others.

    Attributes:
      sum_BKGTH: sum of exp(score - highest) times value.
      highest_BKGT: highest score.
      mass_BKGT: sum of exp(score - highest).
    """

    sum_BKGTH: Array
    highest_BKGT: Array
    mass_BKGT: Array

    @classmethod
    def nothing(cls, shape: tuple[int, ...]) -> SoftmaxPart:
        """Attention to no key, for queries [B, K, G, T, H]."""
        return cls(jnp.zeros(shape), jnp.full(shape[:-1], MASKED), jnp.zeros(shape[:-1]))

    def join(self, scores_BKGTS: Array, sees: Array, mix) -> SoftmaxPart:
        """With more keys.

        Args:
          scores_BKGTS: their scores.
          sees: where a query sees a key, in a shape that broadcasts to theirs.
          mix: weights [B, K, G, T, S] -> weighted sums of their values [B, K, G, T, H].
        """
        scores_BKGTS = jnp.where(sees, scores_BKGTS, MASKED)
        highest_BKGT = jnp.maximum(self.highest_BKGT, scores_BKGTS.max(-1))
        weights_BKGTS = jnp.where(sees, jnp.exp(scores_BKGTS - highest_BKGT[..., None]), 0.0)
        fade_BKGT = jnp.exp(self.highest_BKGT - highest_BKGT)
        return SoftmaxPart(
            self.sum_BKGTH * fade_BKGT[..., None] + mix(weights_BKGTS),
            highest_BKGT,
            self.mass_BKGT * fade_BKGT + weights_BKGTS.sum(-1),
        )

    def mixed(self) -> Array:
        """Mixed values [B, T, N, H]; zeros for a query that saw nothing."""
        B, K, G, T, H = self.sum_BKGTH.shape
        mixed_BKGTH = self.sum_BKGTH / jnp.maximum(self.mass_BKGT, 1e-30)[..., None]
        return mixed_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, K * G, H)


def attend_pages(
    q_BTNH: Array,
    keys_PKSH: Array,
    values_PKSH: Array,
    table_BN: Array,
    ends_BT: Array,
    *,
    window: int | None = None,
) -> SoftmaxPart:
    """Queries of every request attend to its positions before `ends`, page by page.

    Args:
      q_BTNH: scaled queries.
      keys_PKSH: pages of keys.
      values_PKSH: pages of values.
      table_BN: page tables.
      ends_BT: positions that a query sees: those below this one; 0 for padding.
      window: of these only so many, the last ones; None: all.
    """
    B, T, N, H = q_BTNH.shape
    _, K, S, _ = keys_PKSH.shape
    q_BKXH = q_BTNH.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4).reshape(B, K, -1, H)
    ends_B11T1 = ends_BT[:, None, None, :, None]

    def fold_page(page: Array, part: SoftmaxPart) -> SoftmaxPart:
        pages_B = jax.lax.dynamic_index_in_dim(table_BN, page, axis=1, keepdims=False)
        # Clipped: entries behind a request's own pages may be anything, and are not seen.
        keys_BKSH, values_BKSH = (x.at[pages_B].get(mode="clip") for x in (keys_PKSH, values_PKSH))
        at_S = page * S + jnp.arange(S)
        sees = at_S < ends_B11T1
        if window is not None:
            sees &= at_S >= ends_B11T1 - window
        scores = product("bkxh,bksh->bkxs", q_BKXH, keys_BKSH).reshape(B, K, N // K, T, S)

        def mix(weights: Array) -> Array:
            mixed = product("bkxs,bksh->bkxh", weights.reshape(B, K, -1, S), values_BKSH)
            return mixed.reshape(B, K, N // K, T, H)

        return part.join(scores, sees, mix)

    num_pages = (jnp.max(ends_BT) + S - 1) // S
    return jax.lax.fori_loop(0, num_pages, fold_page, SoftmaxPart.nothing((B, K, N // K, T, H)))


def attend_blocks_paged(
    q_BGNH: Array,
    keys_PKSH: Array,
    values_PKSH: Array,
    table_BN: Array,
    ends_B: Array,
    own_keys_BFKH: Array,
    own_values_BFKH: Array,
    own_mask_F: Array | None = None,
) -> Array:
    """A block of queries per request sees the request's positions before `ends` and its own block's rows.

    `attention.attend_blocks` over pages, for one block per request.

    Args:
      q_BGNH: scaled queries.
      keys_PKSH: pages of context keys.
      values_PKSH: pages of context values.
      table_BN: page tables.
      ends_B: context positions below this one are seen.
      own_keys_BFKH: keys of the block; there may be more or fewer of them than queries.
      own_values_BFKH: values of the block.
      own_mask_F: True at own rows that are to be seen; None for all of them.

    Returns:
      Mixed values [B, G, N, H], float32.
    """
    heads = divided_over("kv_heads", keys_PKSH.shape[1]) or None
    of_pages, of_rows, same = PartitionSpec(None, heads), PartitionSpec(None, None, heads), PartitionSpec()
    specs = (of_rows, of_pages, of_pages, same, same, of_rows, of_rows, same)
    return by_device(_attend_blocks, specs, of_rows)(
        q_BGNH, keys_PKSH, values_PKSH, table_BN, ends_B, own_keys_BFKH, own_values_BFKH, own_mask_F
    )


def _attend_blocks(
    q_BGNH, keys_PKSH, values_PKSH, table_BN, ends_B, own_keys_BFKH, own_values_BFKH, own_mask_F
) -> Array:
    B, G, N, H = q_BGNH.shape
    K = keys_PKSH.shape[1]
    ends_BG = jnp.broadcast_to(ends_B[:, None], (B, G))
    part = attend_pages(q_BGNH, keys_PKSH, values_PKSH, table_BN, ends_BG)
    own_keys, own_values = (x.astype(keys_PKSH.dtype) for x in (own_keys_BFKH, own_values_BFKH))
    q_BGKRH = q_BGNH.reshape(B, G, K, N // K, H)
    scores = product("bgkrh,bfkh->bkrgf", q_BGKRH, own_keys)
    sees = jnp.ones(scores.shape[-1], bool) if own_mask_F is None else own_mask_F
    part = part.join(scores, sees, lambda weights: product("bkrgf,bfkh->bkrgh", weights, own_values))
    return part.mixed()
