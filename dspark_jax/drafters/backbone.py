"""The parallel backbone: G rows read the target's past features and each other (DSpark eqs. 2, 3)."""

from __future__ import annotations

from collections.abc import Callable

import flax.linen as nn
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from dspark_jax.nn.block import TransformerLayer
from dspark_jax.nn.config import BlockConfig
from dspark_jax.nn.layers import Linear, RMSNorm
from dspark_jax.nn.rope import rope_angles


class Backbone(nn.Module):
    """Features -> context keys and values; anchors -> hidden states of their blocks."""

    config: BlockConfig
    num_layers: int
    num_taps: int
    dtype: DTypeLike = jnp.float32

    def setup(self):
        c = self.config
        self.fc = Linear(self.num_taps * c.width, c.width, ("features", "embed"), dtype=self.dtype)
        self.hidden_norm = RMSNorm(c.width, c.norm_eps)
        self.layers = [TransformerLayer(c, self.dtype) for _ in range(self.num_layers)]
        self.final_norm = RMSNorm(c.width, c.norm_eps)

    def context_rows(self, features_BTCD: Array, positions_BT: Array) -> list[tuple[Array, Array]]:
        """Per layer, keys and values [B, T, K, H] of context positions."""
        flat = features_BTCD.reshape(*features_BTCD.shape[:-2], -1)
        context_BTD = self.hidden_norm(self.fc(flat))
        angles = rope_angles(self.config.rope, self.config.head_dim, positions_BT)
        return [layer.context_keys_values(context_BTD, angles) for layer in self.layers]

    def __call__(
        self,
        embedded: Array,
        positions: Array,
        attend: Callable[[int, Array, Array, Array], Array],
    ) -> Array:
        """Hidden states [..., G, D] after the final norm.

        Args:
          embedded: embeddings [..., G, D] of [anchor, MASK, ...].
          positions: their positions [..., G], anchor + 0..G-1.
          attend: (layer, queries [..., G, N, H], keys and values [..., G, K, H] of the blocks) -> mixed
            values: a block's rows see the context strictly before its anchor, and each other.
        """
        angles = rope_angles(self.config.rope, self.config.head_dim, positions)
        x = embedded.astype(jnp.float32)
        for number, layer in enumerate(self.layers):
            x = layer.output(x, attend(number, *layer.queries_keys_values(x, angles)))
        return self.final_norm(x)
