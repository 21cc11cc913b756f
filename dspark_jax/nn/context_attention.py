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

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from dspark_jax.core.sharding import by_device, divided_over
from dspark_jax.nn import context_kernel
from dspark_jax.nn.attention import MASKED, attend_blocks, grouped, product


@flax.struct.dataclass
class Interval:
    """The context positions low <= s < high that a block sees; blocks of a sequence in ascending order.

    Attributes:
      low_BA: int32.
      high_BA: int32; at most `low` where nothing is seen.
    """

    low_BA: Array
    high_BA: Array


def attend_context(
    q_BAGNH: Array,
    keys_BKSH: Array,
    values_BKSH: Array,
    sees: Interval | Array,
    own_keys_BAGKH: Array,
    own_values_BAGKH: Array,
    own_mask_G: Array | None = None,
) -> Array:
    """`attend_blocks` for few blocks with a mask (decoding), or for many with an interval each (training).

    Args:
      q_BAGNH: scaled queries of A blocks.
      keys_BKSH: context keys, shared by all blocks of a sequence.
      values_BKSH: context values.
      sees: the intervals of the blocks, or a mask [B, A, S].
      own_keys_BAGKH: keys of the blocks; there may be more or fewer of them than queries.
      own_values_BAGKH: values of the blocks.
      own_mask_G: True at own rows that are to be seen; None for all of them.

    Returns:
      Mixed values [B, A, G, N, H], float32.
    """
    if not isinstance(sees, Interval):
        return attend_blocks(
            q_BAGNH, keys_BKSH, values_BKSH, sees, own_keys_BAGKH, own_values_BAGKH, own_mask_G
        )
    B, A, G, N, H = q_BAGNH.shape
    q_BAGKRH = grouped(q_BAGNH, keys_BKSH.shape[1])

    def by_row(x: Array) -> Array:  # [B, A, G, K, R, ...] -> [B, K, R, A G, ...]
        return jnp.moveaxis(x.reshape(B, A * G, *x.shape[3:]), 1, 3)

    low_BM, high_BM = (jnp.repeat(x, G, axis=1) for x in (sees.low_BA, sees.high_BA))
    context = context_attention(by_row(q_BAGKRH), keys_BKSH, values_BKSH, low_BM, high_BM)

    scores = product("bagkrh,bafkh->bagkrf", q_BAGKRH, own_keys_BAGKH.astype(keys_BKSH.dtype))
    if own_mask_G is not None:
        scores = jnp.where(own_mask_G, scores, MASKED)
    log_mass = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - log_mass[..., None])
    own = product("bagkrf,bafkh->bagkrh", weights, own_values_BAGKH.astype(values_BKSH.dtype))
    mixed_BKRMH = join([context, (by_row(own), by_row(log_mass))])
    return jnp.moveaxis(mixed_BKRMH, 3, 1).reshape(B, A, G, N, H)


def attend_causal(
    q_BTNH: Array, keys_BKTH: Array, values_BKTH: Array, starts_BT: Array, window: int | None = None
) -> Array:
    """Causal attention of sequences, each of which may hold several documents, without a mask in memory.

    Args:
      q_BTNH: scaled queries.
      keys_BKTH: keys.
      values_BKTH: values.
      starts_BT: where the document of a position starts.
      window: positions that a query sees, its own included; None: all of its document.

    Returns:
      Mixed values [B, T, N, H], float32.
    """
    at_T = jnp.arange(q_BTNH.shape[1])
    low_BT = starts_BT if window is None else jnp.maximum(starts_BT, at_T - window + 1)
    q_BKRTH = jnp.moveaxis(grouped(q_BTNH, keys_BKTH.shape[1]), 1, 3)
    high_BT = jnp.broadcast_to(at_T + 1, starts_BT.shape)
    mixed_BKRTH, _ = context_attention(q_BKRTH, keys_BKTH, values_BKTH, low_BT, high_BT)
    return jnp.moveaxis(mixed_BKRTH, 3, 1).reshape(q_BTNH.shape)


def context_attention(
    q_BKRMH: Array,
    keys_BKSH: Array,
    values_BKSH: Array,
    low_BM: Array,
    high_BM: Array,
    *,
    tile: int | None = None,
    chunk: int = 512,
) -> tuple[Array, Array]:
    """Softmax attention of every row over its interval of the context.

    Args:
      q_BKRMH: scaled queries of M rows; R query heads for each of K kv heads.
      keys_BKSH: context keys.
      values_BKSH: context values.
      low_BM: first position that a row sees, int32.
      high_BM: position behind the last one; at most `low` for a row that sees nothing.
      tile: rows whose scores exist at the same time; None: 512 together with their heads.
      chunk: context positions for which they do.

    Returns:
      (mixed values [B, K, R, M, H], log mass [B, K, R, M]), float32. A row that sees nothing has mixed
      values 0 and log mass -1e30.
    """
    R, M, S = q_BKRMH.shape[2], q_BKRMH.shape[3], keys_BKSH.shape[2]
    tile, chunk = min(tile or max(512 // R // 16 * 16, 16), M), min(chunk, S)

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


def _by_device(tile: int, chunk: int, on_tpu, elsewhere, *arrays, outputs: int):
    """Runs one of the two forms on each device's sequences and kv heads, which need nothing of the others."""
    B, K = arrays[0].shape[:2]
    rows = PartitionSpec(divided_over("batch", B) or None)
    heads = PartitionSpec(*rows, divided_over("kv_heads", K) or None)

    def run(*arrays):
        return jax.lax.platform_dependent(
            *arrays,
            tpu=lambda *arrays: on_tpu(tile, chunk, *arrays),
            default=lambda *arrays: elsewhere(tile, chunk, *arrays),
        )

    specs = tuple(rows if x.ndim == 2 else heads for x in arrays)
    return by_device(run, specs, (heads,) * outputs)(*arrays)


def _forward(tile: int, chunk: int, *arrays):
    return _by_device(tile, chunk, context_kernel.forward, _plain_forward, *arrays, outputs=2)


def _backward(tile: int, chunk: int, saved, cotangents):
    q, keys, values, low, high, mixed, log_mass = saved
    grad_mixed, grad_log_mass = cotangents
    # d score = p (d p - sum p d p + d log mass), with sum p d p = mixed . grad_mixed.
    shift = grad_log_mass - (grad_mixed * mixed).sum(-1)
    arrays = (q, keys, values, low, high, log_mass, grad_mixed, shift)
    grad_q, grad_keys, grad_values = _by_device(
        tile, chunk, context_kernel.backward, _plain_backward, *arrays, outputs=3
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
