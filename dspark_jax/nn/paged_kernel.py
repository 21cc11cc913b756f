"""Attention of flattened ragged rows over paged keys and values, as a Pallas TPU kernel.

The grid walks over blocks of rows, then pages, then the rows of a block. Rows of one request are neighbours,
so that consecutive steps ask for the same page and the pipeline fetches it once; pages behind a row's own
position repeat the last one and cost neither a fetch nor arithmetic. Softmax runs online over the pages.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dspark_jax.nn.attention import MASKED

ROWS_PER_BLOCK = 32


def paged_attention_kernel(
    q_MNH: Array,
    keys_PKSH: Array,
    values_PKSH: Array,
    table_BN: Array,
    slots_M: Array,
    positions_M: Array,
    *,
    window: int | None = None,
    interpret: bool = False,
) -> Array:
    """`paged_cache.attend_rows` for TPUs.

    Args:
      q_MNH: scaled queries.
      keys_PKSH: pages of keys.
      values_PKSH: pages of values.
      table_BN: page tables, int32; entries that no row needs may be any legal page.
      slots_M: slot of each row; B or more for padding.
      positions_M: position of each row.
      window: a row sees this many positions, itself included; None: all.
      interpret: run in Pallas' interpreter, on any backend.

    Returns:
      Mixed values [M, N, H], float32; anything at padding rows.
    """
    M, N, H = q_MNH.shape
    B, num_pages = table_BN.shape
    _, K, S, _ = keys_PKSH.shape
    block = min(ROWS_PER_BLOCK, M)
    padding = -M % block
    slots_M = jnp.pad(jnp.minimum(slots_M, B - 1), (0, padding))
    positions_M = jnp.pad(positions_M, (0, padding))
    q_MKGH = jnp.pad(q_MNH.astype(keys_PKSH.dtype), ((0, padding), (0, 0), (0, 0)))
    q_MKGH = q_MKGH.reshape(M + padding, K, N // K, H)

    def page_of(i, page, r, slots, positions, table):
        row = i * block + r
        return table[slots[row], jnp.minimum(page, positions[row] // S)], 0, 0, 0

    def rows_of(i, page, r, slots, positions, table):
        return i, 0, 0, 0

    pages = pl.BlockSpec((1, K, S, H), page_of)
    rows = pl.BlockSpec((block, K, N // K, H), rows_of)
    mixed_MKGH = pl.pallas_call(
        functools.partial(_kernel, block=block, page_len=S, window=window),
        out_shape=jax.ShapeDtypeStruct(q_MKGH.shape, jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=((M + padding) // block, num_pages, block),
            in_specs=[rows, pages, pages],
            out_specs=rows,
            scratch_shapes=[
                pltpu.VMEM((block, K, N // K, 1), jnp.float32),
                pltpu.VMEM((block, K, N // K, 1), jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        interpret=interpret,
        name="paged_attention",
    )(slots_M, positions_M, table_BN, q_MKGH, keys_PKSH, values_PKSH)
    return mixed_MKGH.reshape(M + padding, N, H)[:M]


def _kernel(
    slots,
    positions,
    table,
    q_ref,
    keys_ref,
    values_ref,
    out_ref,
    highest_ref,
    mass_ref,
    *,
    block,
    page_len,
    window,
):
    """One row and one page: folds the page into the row's running softmax, kept in the output block."""
    del slots, table
    page, r = pl.program_id(1), pl.program_id(2)
    position = positions[pl.program_id(0) * block + r]

    @pl.when(page == 0)
    def _():
        out_ref[r] = jnp.zeros(out_ref.shape[1:], jnp.float32)
        highest_ref[r] = jnp.full(highest_ref.shape[1:], MASKED, jnp.float32)
        mass_ref[r] = jnp.zeros(mass_ref.shape[1:], jnp.float32)

    needed = page * page_len <= position
    if window is not None:
        needed &= (page + 1) * page_len > position - window + 1

    @pl.when(needed)
    def _():
        for k in range(keys_ref.shape[1]):
            keys_SH, values_SH = keys_ref[0, k], values_ref[0, k]
            scores_GS = jax.lax.dot_general(
                q_ref[r, k], keys_SH, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
            )
            at_GS = page * page_len + jax.lax.broadcasted_iota(jnp.int32, scores_GS.shape, 1)
            seen_GS = at_GS <= position
            if window is not None:
                seen_GS &= at_GS > position - window
            scores_GS = jnp.where(seen_GS, scores_GS, MASKED)
            before_G1 = highest_ref[r, k]
            highest_G1 = jnp.maximum(before_G1, scores_GS.max(-1, keepdims=True))
            weights_GS = jnp.where(seen_GS, jnp.exp(scores_GS - highest_G1), 0.0)
            fade_G1 = jnp.exp(before_G1 - highest_G1)
            mixed_GH = jax.lax.dot_general(
                weights_GS.astype(values_SH.dtype),
                values_SH,
                (((1,), (0,)), ((), ())),
                preferred_element_type=jnp.float32,
            )
            highest_ref[r, k] = highest_G1
            mass_ref[r, k] = mass_ref[r, k] * fade_G1 + weights_GS.sum(-1, keepdims=True)
            out_ref[r, k] = out_ref[r, k] * fade_G1 + mixed_GH

    @pl.when(page == pl.num_programs(1) - 1)
    def _():
        out_ref[r] = out_ref[r] / mass_ref[r]
