"""One decoder network for every family: a family is a table of settings (`families.py`), never a subclass."""

from __future__ import annotations

import flax.linen as nn
import flax.struct
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from dspark_jax.core.errors import InputError
from dspark_jax.nn.attention import AttentionProjections, attend
from dspark_jax.nn.config import BlockConfig
from dspark_jax.nn.kv_cache import KVCache, write_rows
from dspark_jax.nn.layers import GatedMLP, Linear, RMSNorm, kernel_init, parameter
from dspark_jax.nn.rope import rope_angles
from dspark_jax.targets.config import DecoderConfig

EMBEDDING_TAP = -1


@flax.struct.dataclass
class TargetOutput:
    """Everything that somebody needs of a target's forward pass; what is not read, `jit` prunes.

    Attributes:
      logits_BTV: next-token logits, float32.
      hidden_BTD: after the final norm: the input of the LM head.
      features_BTCD: raw outputs of the tapped layers (-1 = embedding), before the final norm, in tap order.
      cache: the given cache with these T rows written, or None.
    """

    logits_BTV: Array
    hidden_BTD: Array
    features_BTCD: Array
    cache: KVCache | None


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    config: BlockConfig
    dtype: DTypeLike = jnp.float32

    def setup(self):
        c = self.config
        self.input_norm = RMSNorm(c.width, c.norm_eps)
        self.attention = AttentionProjections(c, self.dtype)
        self.post_attention_norm = RMSNorm(c.width, c.norm_eps)
        self.mlp = GatedMLP(c.width, c.mlp_width, c.mlp_bias, self.dtype)

    def __call__(
        self, x_BTD: Array, angles, mask_BTS: Array, buffers: tuple[Array, Array] | None, start_B: Array
    ):
        normed = self.input_norm(x_BTD)
        queries = self.attention.queries(normed, angles)
        keys_BTKH, values_BTKH = self.attention.keys_values(normed, angles)
        if buffers is None:
            keys, values = (rows.astype(self.dtype).swapaxes(1, 2) for rows in (keys_BTKH, values_BTKH))
        else:
            keys, values = buffers = (
                write_rows(buffers[0], keys_BTKH, start_B),
                write_rows(buffers[1], values_BTKH, start_B),
            )
        x_BTD = x_BTD + self.attention.output(attend(queries, keys, values, mask_BTS))
        return x_BTD + self.mlp(self.post_attention_norm(x_BTD)), buffers


class Decoder(nn.Module):
    """The target network.

    Attributes:
      config: its dimensions.
      dtype: dtype in which matrix products read their inputs.
    """

    config: DecoderConfig
    dtype: DTypeLike = jnp.float32

    def setup(self):
        c = self.config
        self.embedding = parameter(
            self, "embedding", kernel_init, ("vocab", "embed"), c.vocab_size, c.block.width
        )
        self.layers = [DecoderLayer(c.block, self.dtype) for _ in range(c.num_layers)]
        self.final_norm = RMSNorm(c.block.width, c.block.norm_eps)
        if not c.tie_embeddings:
            self.lm_head = Linear(c.block.width, c.vocab_size, ("embed", "vocab"), dtype=self.dtype)

    def __call__(
        self,
        tokens_BT: Array,
        *,
        start_B: Array | None = None,
        cache: KVCache | None = None,
        taps: tuple[int, ...] = (),
    ) -> TargetOutput:
        """Runs T tokens per request at positions start_B .. start_B + T - 1.

        Args:
          tokens_BT: int32 ids. Right padding is harmless: attention is causal.
          start_B: position of the first token, int32; 0 without a cache.
          cache: committed keys and values; the T rows are written into it. None: the T tokens see each
            other only.
          taps: layers whose raw outputs become `features_BTCD`; -1 is the embedding.

        Raises:
          InputError: a tap that the target does not have.
        """
        if bad := [tap for tap in taps if not EMBEDDING_TAP <= tap < self.config.num_layers]:
            raise InputError(
                given=f"taps {bad}",
                expected=f"layer numbers from -1 (the embedding) to {self.config.num_layers - 1}",
                fix="choose taps that this target has",
            )
        B, T = tokens_BT.shape
        start_B = jnp.zeros(B, jnp.int32) if start_B is None else start_B
        positions_BT = start_B[:, None] + jnp.arange(T)
        keys_S = jnp.arange(T if cache is None else cache.length)
        mask_BTS = keys_S <= positions_BT[..., None]
        angles = rope_angles(self.config.block.rope, self.config.block.head_dim, positions_BT)

        x_BTD = self.embedding[tokens_BT].astype(jnp.float32)
        outputs, keys, values = {EMBEDDING_TAP: x_BTD}, [], []
        for i, layer in enumerate(self.layers):
            buffers = None if cache is None else (cache.keys_BKSH[i], cache.values_BKSH[i])
            x_BTD, buffers = layer(x_BTD, angles, mask_BTS, buffers, start_B)
            outputs[i] = x_BTD
            if buffers is not None:
                keys.append(buffers[0])
                values.append(buffers[1])
        hidden_BTD = self.final_norm(x_BTD)
        no_features = jnp.zeros((B, T, 0, self.config.block.width))
        return TargetOutput(
            logits_BTV=self.unembed(hidden_BTD),
            hidden_BTD=hidden_BTD,
            features_BTCD=jnp.stack([outputs[tap] for tap in taps], axis=2) if taps else no_features,
            cache=None if cache is None else KVCache(tuple(keys), tuple(values)),
        )

    def unembed(self, hidden: Array) -> Array:
        """The LM head: [..., D] -> logits [..., V], float32."""
        if not self.config.tie_embeddings:
            return self.lm_head(hidden)
        table = self.embedding.astype(self.dtype)
        return jnp.einsum(
            "...d,vd->...v", hidden.astype(self.dtype), table, preferred_element_type=jnp.float32
        )


def embedding_table(params: dict) -> Array:
    """The input embedding [V, D] of a target's parameters, which drafters share."""
    return params["embedding"]


def lm_head_kernel(params: dict) -> Array:
    """The LM head [D, V] of a target's parameters, tied or its own, which drafters share."""
    return params["lm_head"]["kernel"] if "lm_head" in params else params["embedding"].T
