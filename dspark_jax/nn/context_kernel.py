"""`context_attention` as Pallas TPU kernels: forward, gradient of the rows, gradient of the context.

The grid is (sequence, kv head, tile of rows, chunk of context), the innermost axis being the one that is
summed over. How far a tile sees is known before its chunks are fetched (scalar prefetch): chunks outside
repeat one that is there already and are skipped.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dspark_jax.nn.attention import MASKED


def forward(
    tile: int, chunk: int, q: Array, keys: Array, values: Array, low: Array, high: Array, *, interpret=False
) -> tuple[Array, Array]:
    """(mixed values [B, K, R, M, H], log mass [B, K, R, M]), float32.

    Args:
      tile: rows of a tile; divides M.
      chunk: positions of a chunk; divides S.
      q: queries [B, K, R, M, H].
      keys: [B, K, S, H].
      values: [B, K, S, H].
      low: first position that a row sees [B, M].
      high: position behind the last one [B, M].
      interpret: run in Pallas' interpreter, on any backend.
    """
    specs = _Specs(q.shape, keys.shape[2], tile, chunk)
    mixed, log_mass = specs.call(
        _forward_kernel,
        _bounds(tile, chunk, low, high),
        (q, keys, low[..., None], high[..., None], values),
        [specs.rows, specs.context, specs.bound, specs.bound, specs.context],
        outs=[(q.shape, specs.rows), ((*q.shape[:-1], 1), specs.row_scalars)],
        scratch=[pltpu.VMEM((q.shape[2] * tile, 1), jnp.float32)] * 2,
        interpret=interpret,
    )
    return mixed, log_mass[..., 0]


def backward(
    tile: int, chunk: int, q, keys, values, low, high, log_mass, grad_mixed, shift, *, interpret=False
) -> tuple[Array, Array, Array]:
    """Gradients of q, keys and values, float32.

    Args:
      tile: as in `forward`, and so are q, keys, values, low and high.
      chunk: as in `forward`.
      log_mass: what `forward` returned.
      grad_mixed: cotangent of the mixed values.
      shift: what is added to the gradient of each probability [B, K, R, M].
      interpret: run in Pallas' interpreter, on any backend.
    """
    bounds = _bounds(tile, chunk, low, high)
    arrays = (
        q,
        keys,
        values,
        low[..., None],
        high[..., None],
        log_mass[..., None],
        grad_mixed,
        shift[..., None],
    )
    by_row = _Specs(q.shape, keys.shape[2], tile, chunk)
    (grad_q,) = by_row.call(
        _rows_gradient_kernel,
        bounds,
        arrays,
        by_row.all_inputs,
        outs=[(q.shape, by_row.rows)],
        interpret=interpret,
    )
    by_chunk = _Specs(q.shape, keys.shape[2], tile, chunk, chunks_outside=True)
    grad_keys, grad_values = by_chunk.call(
        _context_gradient_kernel,
        bounds,
        arrays,
        by_chunk.all_inputs,
        outs=[(keys.shape, by_chunk.context), (values.shape, by_chunk.context)],
        interpret=interpret,
    )
    return grad_q, grad_keys, grad_values


def _bounds(tile: int, chunk: int, low: Array, high: Array) -> tuple[Array, Array]:
    """First chunk that any row of a tile sees, and the one behind the last: int32 [B tiles] each.

    Flat, because scalar memory pads the last of two axes to 128.
    """
    low_BtT, high_BtT = (x.reshape(x.shape[0], -1, tile) for x in (low, high))
    sees = low_BtT < high_BtT
    first = jnp.min(jnp.where(sees, low_BtT, jnp.iinfo(jnp.int32).max), axis=-1) // chunk
    behind = -(-jnp.max(jnp.where(sees, high_BtT, 0), axis=-1) // chunk)
    return jnp.minimum(first, behind).astype(jnp.int32).ravel(), behind.astype(jnp.int32).ravel()


class _Specs:
    """Grid and blocks: tiles outside and chunks inside, or the other way round."""

    def __init__(self, q_shape, S: int, tile: int, chunk: int, *, chunks_outside: bool = False):
        B, K, R, M, H = q_shape
        tiles, chunks = M // tile, S // chunk
        self.grid = (B, K, chunks, tiles) if chunks_outside else (B, K, tiles, chunks)
        self.kernel_options = dict(tiles=tiles, chunk=chunk, chunks_outside=chunks_outside)

        def places(i, j):
            return (j, i) if chunks_outside else (i, j)

        def rows_at(b, k, i, j, first, behind):
            t, _ = places(i, j)
            return b, k, 0, t, 0

        def bound_at(b, k, i, j, first, behind):
            t, _ = places(i, j)
            return b, t, 0

        def context_at(b, k, i, j, first, behind):
            t, c = places(i, j)
            if not chunks_outside:  # stay at a chunk that is there already instead of fetching an unseen one
                at = b * tiles + t
                c = jnp.clip(c, first[at], jnp.maximum(behind[at] - 1, first[at]))
                c = jnp.minimum(c, chunks - 1)
            return b, k, c, 0

        self.rows = pl.BlockSpec((1, 1, R, tile, H), rows_at)
        self.row_scalars = pl.BlockSpec((1, 1, R, tile, 1), rows_at)
        self.bound = pl.BlockSpec((1, tile, 1), bound_at)
        self.context = pl.BlockSpec((1, 1, chunk, H), context_at)

    @property
    def all_inputs(self) -> list[pl.BlockSpec]:
        """Blocks of what the backward kernels read."""
        scalars, rows, context = self.row_scalars, self.rows, self.context
        return [rows, context, context, self.bound, self.bound, scalars, rows, scalars]

    def call(self, kernel, bounds, arrays, in_specs, *, outs, scratch=(), interpret):
        """Runs a kernel; all results are float32."""
        return pl.pallas_call(
            functools.partial(kernel, **self.kernel_options),
            out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape, _ in outs],
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=self.grid,
                in_specs=in_specs,
                out_specs=[spec for _, spec in outs],
                scratch_shapes=scratch,
            ),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
            ),
            interpret=interpret,
            name=kernel.__name__.strip("_"),
        )(*bounds, *arrays)


def _place(first, behind, tiles: int, chunks_outside: bool):
    """(chunk, whether any row of the tile sees it)."""
    b, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    t, c = (j, i) if chunks_outside else (i, j)
    return c, (c >= first[b * tiles + t]) & (c < behind[b * tiles + t])


def _flat(ref) -> Array:
    """Block [1, 1, R, T, X] -> [R T, X]."""
    _, _, R, T, X = ref.shape
    return ref[0, 0].reshape(R * T, X)


def _scores(q_ref, keys_ref, low_ref, high_ref, c, chunk: int) -> Array:
    """[R T, C]; -1e30 outside a row's interval."""
    R, T = q_ref.shape[2:4]
    scores = _dot(_flat(q_ref), keys_ref[0, 0], 1, 1)
    at = c * chunk + jax.lax.broadcasted_iota(jnp.int32, (T, chunk), 1)
    sees = (at >= low_ref[0]) & (at < high_ref[0])
    sees = jnp.broadcast_to(sees[None], (R, T, chunk)).reshape(R * T, chunk)
    return jnp.where(sees, scores, MASKED)


def _dot(a: Array, b: Array, a_axis: int, b_axis: int) -> Array:
    """Product over one axis of each, in the dtype of `b`, accumulated in float32."""
    dimensions = (((a_axis,), (b_axis,)), ((), ()))
    return jax.lax.dot_general(a.astype(b.dtype), b, dimensions, preferred_element_type=jnp.float32)


def _forward_kernel(first, behind, *refs, tiles, chunk, chunks_outside):
    q_ref, keys_ref, low_ref, high_ref, values_ref, mixed_ref, log_mass_ref, highest_ref, mass_ref = refs
    c, needed = _place(first, behind, tiles, chunks_outside)
    shape = mixed_ref.shape

    @pl.when(pl.program_id(3) == 0)
    def _():
        mixed_ref[...] = jnp.zeros(shape, jnp.float32)
        highest_ref[...] = jnp.full(highest_ref.shape, MASKED, jnp.float32)
        mass_ref[...] = jnp.zeros(mass_ref.shape, jnp.float32)

    @pl.when(needed)
    def _():
        scores = _scores(q_ref, keys_ref, low_ref, high_ref, c, chunk)
        highest = jnp.maximum(highest_ref[...], scores.max(-1, keepdims=True))
        weights = jnp.where(scores > MASKED, jnp.exp(scores - highest), 0.0)
        fade = jnp.exp(highest_ref[...] - highest)
        highest_ref[...] = highest
        mass_ref[...] = mass_ref[...] * fade + weights.sum(-1, keepdims=True)
        mixed = _flat(mixed_ref) * fade + _dot(weights, values_ref[0, 0], 1, 0)
        mixed_ref[...] = mixed.reshape(shape)

    @pl.when(pl.program_id(3) == pl.num_programs(3) - 1)
    def _():
        seen = mass_ref[...] > 0
        mass = jnp.where(seen, mass_ref[...], 1.0)
        mixed_ref[...] = (_flat(mixed_ref) / mass).reshape(shape)
        log_mass = jnp.where(seen, highest_ref[...] + jnp.log(mass), MASKED)
        log_mass_ref[...] = log_mass.reshape(log_mass_ref.shape)


def _score_gradients(refs, c, chunk: int) -> tuple[Array, Array]:
    """(probabilities, gradients of the scores), [R T, C] each."""
    q_ref, keys_ref, values_ref, low_ref, high_ref, log_mass_ref, grad_ref, shift_ref = refs
    scores = _scores(q_ref, keys_ref, low_ref, high_ref, c, chunk)
    probs = jnp.where(scores > MASKED, jnp.exp(scores - _flat(log_mass_ref)), 0.0)
    return probs, probs * (_dot(_flat(grad_ref), values_ref[0, 0], 1, 1) + _flat(shift_ref))


def _rows_gradient_kernel(first, behind, *refs, tiles, chunk, chunks_outside):
    *inputs, grad_q_ref = refs
    c, needed = _place(first, behind, tiles, chunks_outside)

    @pl.when(pl.program_id(3) == 0)
    def _():
        grad_q_ref[...] = jnp.zeros(grad_q_ref.shape, jnp.float32)

    @pl.when(needed)
    def _():
        _, grad_scores = _score_gradients(inputs, c, chunk)
        grad_q_ref[...] += _dot(grad_scores, inputs[1][0, 0], 1, 0).reshape(grad_q_ref.shape)


def _context_gradient_kernel(first, behind, *refs, tiles, chunk, chunks_outside):
    *inputs, grad_keys_ref, grad_values_ref = refs
    c, needed = _place(first, behind, tiles, chunks_outside)

    @pl.when(pl.program_id(3) == 0)
    def _():
        grad_keys_ref[...] = jnp.zeros(grad_keys_ref.shape, jnp.float32)
        grad_values_ref[...] = jnp.zeros(grad_values_ref.shape, jnp.float32)

    @pl.when(needed)
    def _():
        q_ref, grad_ref = inputs[0], inputs[6]
        probs, grad_scores = _score_gradients(inputs, c, chunk)
        grad_keys_ref[0, 0] += _dot(grad_scores, _flat(q_ref), 0, 0)
        grad_values_ref[0, 0] += _dot(probs, _flat(grad_ref).astype(q_ref.dtype), 0, 0)
