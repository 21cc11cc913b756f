"""One transformer layer, for targets and drafters alike: whom its queries see is the caller's business."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from dspark_jax.core.sharding import divide_batch
from dspark_jax.nn.attention import AttentionProjections
from dspark_jax.nn.config import BlockConfig
from dspark_jax.nn.experts import ExpertsMLP
from dspark_jax.nn.layers import GatedMLP, RMSNorm, parameter


class TransformerLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    The attention itself lies between `queries_keys_values` and `output`. With `branch_norms` the MLP's input
    norm is `pre_mlp_norm`, and `post_attention_norm` and `post_mlp_norm` act on the outputs of the branches.

    Attributes:
      config: the layer's dimensions.
      dtype: dtype in which matrix products read their inputs.
      attention_width: width of what queries, keys and values are made from; None: the residual's.
    """

    config: BlockConfig
    dtype: DTypeLike = jnp.float32
    attention_width: int | None = None

    def setup(self):
        c = self.config
        self.input_norm = RMSNorm(c.width, c.norm_eps)
        self.attention = AttentionProjections(c, self.dtype, self.attention_width)
        self.post_attention_norm = RMSNorm(c.width, c.norm_eps)
        if c.experts is None:
            self.mlp = GatedMLP(c.width, c.mlp_width, c.mlp_bias, self.dtype, c.activation)
        else:
            self.mlp = ExpertsMLP(c.width, c.experts, self.dtype, c.activation)
        if c.branch_norms:
            self.pre_mlp_norm = RMSNorm(c.width, c.norm_eps)
            self.post_mlp_norm = RMSNorm(c.width, c.norm_eps)
        if c.layer_scalar:
            self.layer_scalar = parameter(self, "layer_scalar", nn.initializers.ones, (None,), 1)

    def queries_keys_values(self, x: Array, angles) -> tuple[Array, Array, Array]:
        """[..., T, D] -> queries [..., T, N, H], keys and values [..., T, K, H]."""
        normed = self.input_norm(divide_batch(x))
        return self.attention.queries(normed, angles), *self.attention.keys_values(normed, angles)

    def context_keys_values(self, context: Array, angles) -> tuple[Array, Array]:
        """Keys and values [..., T, K, H] of a context that skips the input norm."""
        return self.attention.keys_values(context, angles)

    def output(self, x: Array, mixed: Array) -> Array:
        """The layer's input [..., T, D] and its mixed values [..., T, N, H] -> the layer's output."""
        branch = self.attention.output(mixed)
        if not self.config.branch_norms:
            x = x + branch
            return self._scaled(x + self.mlp(self.post_attention_norm(x)))
        x = x + self.post_attention_norm(branch)
        return self._scaled(x + self.post_mlp_norm(self.mlp(self.pre_mlp_norm(x))))

    def _scaled(self, x: Array) -> Array:
        x = divide_batch(x)
        return x * jax.lax.stop_gradient(self.layer_scalar) if self.config.layer_scalar else x
