"""Attention of many block rows to one shared context, without a score matrix or a mask in memory.

Row m of a sequence sees the context positions low_m <= s < high_m: everything before its anchor, inside its
own document and window. That interval is all that a mask would say, so none is built. Softmax runs online
over chunks of the context, tiles of rows are handled one after the other, and a chunk that no row of a tile
sees costs nothing: anchors are sorted, so that is about half of them. The backward pass computes the scores
again. On TPUs the same arithmetic runs as Pallas kernels (`context_kernel.py`).

The result is a partial softmax: mixed values and the logarithm of their mass, to be joined with other keys by
`join`. (FlashAttention, Dao et al. 2022; the interval in the place of the mask is ours.)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from dspark_jax.nn import context_kernel
from dspark_jax.nn.attention import MASKED, product


def context_attention(
    q_BKRMH: Array,
    keys_BKSH: Array,
    values_BKSH: Array,
    low_BM: Array,
    high_BM: Array,
    *,
    tile: int = 512,
    chunk: int = 512,
) -> tuple[Array, Array]:
    """Softmax attention of every row over its interval of the context.

    Args:
      q_BKRMH: scaled queries of M rows; R query heads for each of K kv heads.
      keys_BKSH: context keys.
      values_BKSH: context values.
      low_BM: first position that a row sees, int32.
      high_BM: position behind the last one; at most `low` for a row that sees nothing.
      tile: rows whose scores exist at the same time.
      chunk: context positions for which they do.

    Returns:
      (mixed values [B, K, R, M, H], log mass [B, K, R, M]), float32. A row that sees nothing has mixed
      values 0 and log mass -1e30.
    """
    M, S = q_BKRMH.shape[3], keys_BKSH.shape[2]
    tile, chunk = min(tile, M), min(chunk, S)

    def padded(x: Array, axis: int, multiple: int) -> Array:
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, -x.shape[axis] % multiple)
        return jnp.pad(x, widths)

    mixed, log_mass = _attention(
        tile,
        chunk,
        padded(q_BKRMH.astype(keys_BKSH.dtype), 3, tile),
        padded(keys_BKSH, 2, chunk),
        padded(values_BKSH, 2, chunk),
        padded(low_BM, 1, tile),
        padded(jnp.minimum(high_BM, S), 1, tile),
    )
    return mixed[..., :M, :], log_mass[..., :M]


def join(parts: list[tuple[Array, Array]]) -> Array:
    """One softmax over several sets of keys, from (mixed values [..., H], log mass [...]) of each."""
    mixed, log_mass = (jnp.stack(of_all) for of_all in zip(*parts, strict=True))
    return (jax.nn.softmax(log_mass, axis=0)[..., None] * mixed).sum(0)


def _forward(tile: int, chunk: int, *arrays):
    return jax.lax.platform_dependent(
        *arrays,
        tpu=lambda *arrays: context_kernel.forward(tile, chunk, *arrays),
        default=lambda *arrays: _plain_forward(tile, chunk, *arrays),
    )


def _backward(tile: int, chunk: int, saved, cotangents):
    q, keys, values, low, high, mixed, log_mass = saved
    grad_mixed, grad_log_mass = cotangents
    # d score = p (d p - sum p d p + d log mass), with sum p d p = mixed . grad_mixed.
    shift = grad_log_mass - (grad_mixed * mixed).sum(-1)
    grad_q, grad_keys, grad_values = jax.lax.platform_dependent(
        q,
        keys,
        values,
        low,
        high,
        log_mass,
        grad_mixed,
        shift,
        tpu=lambda *arrays: context_kernel.backward(tile, chunk, *arrays),
        default=lambda *arrays: _plain_backward(tile, chunk, *arrays),
    )
    return grad_q.astype(q.dtype), grad_keys.astype(keys.dtype), grad_values.astype(values.dtype), None, None


def _plain_forward(tile: int, chunk: int, q, keys, values, low, high):
    """All tiles, one after the other."""

    def one_tile(rows):
        q_tile, low_tile, high_tile = rows
        B, K, R, T, H = q_tile.shape

        def fold(carry, c):
            highest, mass, mixed = carry
            scores = _scores(q_tile, _chunk(keys, c, chunk), low_tile, high_tile, c * chunk)
            new_highest = jnp.maximum(highest, scores.max(-1))
            weights = jnp.where(scores > MASKED, jnp.exp(scores - new_highest[..., None]), 0.0)
            fade = jnp.exp(highest - new_highest)
            mixed = mixed * fade[..., None] + product("bkrts,bksh->bkrth", weights, _chunk(values, c, chunk))
            return new_highest, mass * fade + weights.sum(-1), mixed

        start = (
            jnp.full((B, K, R, T), MASKED),
            jnp.zeros((B, K, R, T)),
            jnp.zeros((B, K, R, T, H)),
        )
        highest, mass, mixed = _over_seen_chunks(fold, start, keys, chunk, low_tile, high_tile)
        seen = mass > 0
        mass = jnp.where(seen, mass, 1.0)
        return mixed / mass[..., None], jnp.where(seen, highest + jnp.log(mass), MASKED)

    mixed, log_mass = jax.lax.map(one_tile, _tiles(tile, q, low, high))
    return _untile(mixed), _untile(log_mass)


def _plain_backward(tile: int, chunk: int, q, keys, values, low, high, log_mass, grad_mixed, shift):
    """All tiles, one after the other; gradients of q, keys and values."""

    def one_tile(totals, rows):
        q_tile, low_tile, high_tile, log_mass_tile, grad_tile, shift_tile = rows

        def fold(carry, c):
            grad_q, grad_keys, grad_values = carry
            keys_c, values_c = _chunk(keys, c, chunk), _chunk(values, c, chunk)
            scores = _scores(q_tile, keys_c, low_tile, high_tile, c * chunk)
            probs = jnp.where(scores > MASKED, jnp.exp(scores - log_mass_tile[..., None]), 0.0)
            grad_scores = probs * (product("bkrth,bksh->bkrts", grad_tile, values_c) + shift_tile[..., None])
            grad_q = grad_q + product("bkrts,bksh->bkrth", grad_scores, keys_c)
            grad_keys = _add(grad_keys, product("bkrts,bkrth->bksh", grad_scores, q_tile), c, chunk)
            grad_values = _add(
                grad_values, product("bkrts,bkrth->bksh", probs, grad_tile.astype(values.dtype)), c, chunk
            )
            return grad_q, grad_keys, grad_values

        start = (jnp.zeros(q_tile.shape), *totals)
        grad_q, *totals = _over_seen_chunks(fold, start, keys, chunk, low_tile, high_tile)
        return tuple(totals), grad_q

    zeros = (jnp.zeros(keys.shape), jnp.zeros(values.shape))
    rows = (*_tiles(tile, q, low, high), *_tiles(tile, log_mass, grad_mixed, shift))
    (grad_keys, grad_values), grad_q = jax.lax.scan(one_tile, zeros, rows)
    return _untile(grad_q), grad_keys, grad_values


def _forward_saving(tile: int, chunk: int, *arrays):
    mixed, log_mass = _forward(tile, chunk, *arrays)
    return (mixed, log_mass), (*arrays, mixed, log_mass)


_attention = jax.custom_vjp(_forward, nondiff_argnums=(0, 1))
_attention.defvjp(_forward_saving, _backward)


def _over_seen_chunks(fold, carry, keys: Array, chunk: int, low_BT: Array, high_BT: Array):
    """Folds the chunks from the first to the last one that any row of the tile sees."""
    sees = low_BT < high_BT
    first = jnp.min(jnp.where(sees, low_BT, keys.shape[2])) // chunk
    behind = -(-jnp.max(jnp.where(sees, high_BT, 0)) // chunk)
    return jax.lax.fori_loop(first, behind, lambda c, carry: fold(carry, c), carry)


def _scores(q: Array, keys: Array, low_BT: Array, high_BT: Array, first: Array) -> Array:
    """[B, K, R, T, S] of one chunk that begins at position `first`; -1e30 outside a row's interval."""
    at_S = first + jnp.arange(keys.shape[2])
    sees_BTS = (at_S >= low_BT[..., None]) & (at_S < high_BT[..., None])
    return jnp.where(sees_BTS[:, None, None], product("bkrth,bksh->bkrts", q, keys), MASKED)


def _chunk(x: Array, c: Array, chunk: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, c * chunk, chunk, axis=2)


def _add(total: Array, part: Array, c: Array, chunk: int) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(total, _chunk(total, c, chunk) + part, c * chunk, axis=2)


def _tiles(tile: int, *arrays: Array) -> tuple[Array, ...]:
    """Cuts the row axis into tiles and puts them first: [B, M] and [B, K, R, M, ...] -> [M / tile, ...]."""

    def cut(x: Array) -> Array:
        axis = 1 if x.ndim == 2 else 3
        shape = (*x.shape[:axis], -1, tile, *x.shape[axis + 1 :])
        return jnp.moveaxis(x.reshape(shape), axis, 0)

    return tuple(map(cut, arrays))


def _untile(x: Array) -> Array:
    """[tiles, B, K, R, T, ...] -> [B, K, R, M, ...]."""
    moved = jnp.moveaxis(x, 0, 3)
    return moved.reshape(*moved.shape[:3], -1, *moved.shape[5:])
