"""The parallel backbone: G rows read the target's past features and each other (DSpark eqs. 2, 3)."""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from dspark_jax.nn.block import TransformerLayer
from dspark_jax.nn.config import BlockConfig
from dspark_jax.nn.context_attention import Interval, attend_context
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
        embedded_BAGD: Array,
        positions_BAG: Array,
        context: list[tuple[Array, Array]],
        sees: Interval | Array,
    ) -> Array:
        """Hidden states [B, A, G, D] after the final norm.

        Args:
          embedded_BAGD: embeddings of [anchor, MASK, ...].
          positions_BAG: their positions, anchor + 0..G-1.
          context: per layer, keys and values [B, K, S, H].
          sees: context positions strictly before the block's anchor: intervals or a mask [B, A, S].
        """
        angles = rope_angles(self.config.rope, self.config.head_dim, positions_BAG)
        x_BAGD = embedded_BAGD.astype(jnp.float32)
        for layer, (keys_BKSH, values_BKSH) in zip(self.layers, context, strict=True):
            q_BAGNH, own_keys, own_values = layer.queries_keys_values(x_BAGD, angles)
            mixed = attend_context(q_BAGNH, keys_BKSH, values_BKSH, sees, own_keys, own_values)
            x_BAGD = layer.output(x_BAGD, mixed)
        return self.final_norm(x_BAGD)
