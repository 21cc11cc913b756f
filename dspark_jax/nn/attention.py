"""Grouped-query attention: projections as a module, the softmax as a function.

Who attends to what differs between target, drafter training and drafter decoding; projections, head norms and
RoPE do not. So `AttentionProjections` gives q, k, v and the output map, and the callers join them with
`attend`, `attend_blocks`, or without masks as in `context_attention.py`.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from dspark_jax.nn.config import BlockConfig
from dspark_jax.nn.layers import Linear, RMSNorm, unit_rms
from dspark_jax.nn.rope import apply_rope

# Finite: a row that sees nothing gives a uniform average instead of NaN, and differences are numbers.
MASKED = -1e30


class AttentionProjections(nn.Module):
    """The q, k, v and output projections of one layer, with head norms and RoPE.

    Attributes:
      config: the layer's dimensions.
      dtype: dtype in which matrix products read their inputs.
      input_width: width of what queries, keys and values are made from; None: the residual's (D).
    """

    config: BlockConfig
    dtype: DTypeLike = jnp.float32
    input_width: int | None = None

    def setup(self):
        c = self.config
        queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        width = self.input_width or c.width
        self.q = Linear(width, queries, ("embed", "heads"), c.qkv_bias, self.dtype)
        self.k = Linear(width, keys, ("embed", "kv_heads"), c.qkv_bias, self.dtype)
        if not c.values_from_keys:
            self.v = Linear(width, keys, ("embed", "kv_heads"), c.qkv_bias, self.dtype)
        self.o = Linear(queries, c.width, ("heads", "embed"), c.output_bias, self.dtype)
        if c.qk_norm:
            self.q_norm = RMSNorm(c.head_dim, c.norm_eps)
            self.k_norm = RMSNorm(c.head_dim, c.norm_eps)

    def queries(self, x: Array, angles: tuple[Array, Array]) -> Array:
        """[..., T, D] -> rotated and scaled queries [..., T, N, H]."""
        c = self.config
        q = self.q(x).reshape(*x.shape[:-1], c.num_heads, c.head_dim)
        rotated = apply_rope(self.q_norm(q) if c.qk_norm else q, angles)
        return rotated * (c.head_dim**-0.5 if c.attention_scale is None else c.attention_scale)

    def keys_values(self, x: Array, angles: tuple[Array, Array]) -> tuple[Array, Array]:
        """[..., T, D] -> rotated keys and plain values, both [..., T, K, H]."""
        c = self.config
        shape = (*x.shape[:-1], c.num_kv_heads, c.head_dim)
        k = self.k(x).reshape(shape)
        v = k if c.values_from_keys else self.v(x).reshape(shape)
        v = unit_rms(v, c.norm_eps) if c.v_norm else v
        return apply_rope(self.k_norm(k) if c.qk_norm else k, angles), v

    def output(self, mixed: Array) -> Array:
        """[..., T, N, H] -> [..., T, D]."""
        return self.o(mixed.reshape(*mixed.shape[:-2], -1))


def attend(q_BTNH: Array, keys_BKSH: Array, values_BKSH: Array, mask_BTS: Array) -> Array:
    """softmax(q k) v.

    Args:
      q_BTNH: scaled queries.
      keys_BKSH: keys, as they lie in a cache.
      values_BKSH: values.
      mask_BTS: True where a query may see a key.

    Returns:
      Mixed values [B, T, N, H], float32.
    """
    B, T, N, H = q_BTNH.shape
    q_BKGTH = grouped(q_BTNH, keys_BKSH.shape[1]).transpose(0, 2, 3, 1, 4)
    scores = product("bkgth,bksh->bkgts", q_BKGTH, keys_BKSH)
    weights = jax.nn.softmax(jnp.where(mask_BTS[:, None, None], scores, MASKED), axis=-1)
    mixed = product("bkgts,bksh->bkgth", weights, values_BKSH)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


def attend_blocks(
    q_BAGNH: Array,
    keys_BKSH: Array,
    values_BKSH: Array,
    mask_BAS: Array,
    own_keys_BAGKH: Array,
    own_values_BAGKH: Array,
    own_mask_G: Array | None = None,
) -> Array:
    """Blocks of G queries that see a shared context and every row of their own block (DSpark eq. 3).

    One softmax runs over both; no [A G, S + A G] mask is ever built, since the context mask is the same for
    all rows of a block and other blocks are simply not among the keys.

    Args:
      q_BAGNH: scaled queries of A blocks.
      keys_BKSH: context keys, shared by all blocks of a sequence.
      values_BKSH: context values.
      mask_BAS: True where a block may see a context position.
      own_keys_BAGKH: keys of the blocks; there may be more or fewer of them than queries.
      own_values_BAGKH: values of the blocks.
      own_mask_G: True at own rows that are to be seen; None for all of them.

    Returns:
      Mixed values [B, A, G, N, H], float32.
    """
    S = keys_BKSH.shape[2]
    q = grouped(q_BAGNH, keys_BKSH.shape[1])
    dtype = keys_BKSH.dtype
    context = product("bagkrh,bksh->bkrags", q, keys_BKSH)
    context = jnp.where(mask_BAS[:, None, None, :, None], context, MASKED)
    own = product("bagkrh,bafkh->bkragf", q, own_keys_BAGKH.astype(dtype))
    if own_mask_G is not None:
        own = jnp.where(own_mask_G, own, MASKED)
    weights = jax.nn.softmax(jnp.concatenate([context, own], axis=-1), axis=-1)
    mixed = product("bkrags,bksh->bagkrh", weights[..., :S], values_BKSH)
    mixed += product("bkragf,bafkh->bagkrh", weights[..., S:], own_values_BAGKH.astype(dtype))
    return mixed.reshape(q_BAGNH.shape)


def grouped(q: Array, num_kv_heads: int) -> Array:
    """Queries [..., N, H] -> [..., K, N/K, H]: query heads beside the kv head that they share."""
    *rows, N, H = q.shape
    return q.reshape(*rows, num_kv_heads, N // num_kv_heads, H)


def product(equation: str, a: Array, b: Array) -> Array:
    """einsum in the dtype of `b`, accumulated and returned in float32."""
    return jnp.einsum(equation, a.astype(b.dtype), b, preferred_element_type=jnp.float32)
