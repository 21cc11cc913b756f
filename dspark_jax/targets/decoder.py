"""One decoder network for every family: a family is a table of settings (`families.py`), never a subclass."""

from __future__ import annotations

import flax.linen as nn
import flax.struct
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from dspark_jax.core.errors import InputError
from dspark_jax.nn.attention import attend
from dspark_jax.nn.block import TransformerLayer
from dspark_jax.nn.context_attention import attend_causal
from dspark_jax.nn.kv_cache import KVCache, write_rows
from dspark_jax.nn.layers import Linear, RMSNorm, embed, kernel_init, parameter, soft_cap
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
        self.layers = [TransformerLayer(layer, self.dtype) for layer in c.layers]
        self.final_norm = RMSNorm(c.block.width, c.block.norm_eps)
        if not c.tie_embeddings:
            self.lm_head = Linear(c.block.width, c.vocab_size, ("embed", "vocab"), dtype=self.dtype)

    def __call__(
        self,
        tokens_BT: Array,
        *,
        start_B: Array | None = None,
        cache: KVCache | None = None,
        starts_BT: Array | None = None,
        taps: tuple[int, ...] = (),
    ) -> TargetOutput:
        """Runs T tokens per request at positions start_B .. start_B + T - 1.

        Args:
          tokens_BT: int32 ids. Right padding is harmless: attention is causal.
          start_B: position of the first token, int32; 0 without a cache.
          cache: committed keys and values; the T rows are written into it. None: the T tokens see each
            other only.
          starts_BT: without a cache, where in its row the document of a token starts; None: 0.
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
        if starts_BT is None:
            starts_BT = jnp.zeros((B, T), jnp.int32)
        start_B = jnp.zeros(B, jnp.int32) if start_B is None else start_B
        positions_BT = start_B[:, None] + jnp.arange(T) - starts_BT
        ropes = dict.fromkeys((layer.rope, layer.head_dim) for layer in self.config.layers)
        angles = {rope: rope_angles(*rope, positions_BT) for rope in ropes}
        if cache is not None:
            windows = dict.fromkeys(layer.window for layer in self.config.layers)
            keys_S = jnp.arange(cache.length)
            masks_BTS = {window: _causal_mask(positions_BT, keys_S, window) for window in windows}

        x_BTD = embed(self.embedding, tokens_BT, self.config.scaling.embedding)
        outputs, keys, values = {EMBEDDING_TAP: x_BTD}, [], []
        for i, layer in enumerate(self.layers):
            c = layer.config
            q_BTNH, *rows = layer.queries_keys_values(x_BTD, angles[c.rope, c.head_dim])
            if cache is None:
                pair = [x.astype(self.dtype).swapaxes(1, 2) for x in rows]
                mixed = attend_causal(q_BTNH, *pair, starts_BT, c.window)
            else:
                buffers = (cache.keys_BKSH[i], cache.values_BKSH[i])
                pair = [write_rows(old, new, start_B) for old, new in zip(buffers, rows, strict=True)]
                keys.append(pair[0])
                values.append(pair[1])
                mixed = attend(q_BTNH, *pair, masks_BTS[c.window])
            x_BTD = outputs[i] = layer.output(x_BTD, mixed)
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
        if self.config.tie_embeddings:
            table = self.embedding.astype(self.dtype)
            logits = jnp.einsum(
                "...d,vd->...v", hidden.astype(self.dtype), table, preferred_element_type=jnp.float32
            )
        else:
            logits = self.lm_head(hidden)
        return soft_cap(logits, self.config.scaling.softcap)


def _causal_mask(positions_BT: Array, keys_S: Array, window: int | None) -> Array:
    """True [B, T, S] where a query sees a key: the last `window` positions, its own included, or all."""
    sees_BTS = keys_S <= positions_BT[..., None]
    return sees_BTS if window is None else sees_BTS & (keys_S > positions_BT[..., None] - window)


def embedding_table(params: dict) -> Array:
    """The input embedding [V, D] of a target's parameters, which drafters share."""
    return params["embedding"]


def head_params(params: dict) -> dict:
    """What `Decoder.unembed` reads of a target's parameters."""
    return {name: params[name] for name in ("embedding", "lm_head") if name in params}


def lm_head_kernel(params: dict) -> Array:
    """The LM head [D, V] of a target's parameters, tied or its own, which drafters share."""
    return params["lm_head"]["kernel"] if "lm_head" in params else params["embedding"].T
