"""The DSpark drafter: one set of parameters, a training view and a decoding view."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from dspark_jax.core.sharding import whole
from dspark_jax.drafters.backbone import Backbone
from dspark_jax.drafters.blocks import Blocks
from dspark_jax.drafters.confidence import ConfidenceHead
from dspark_jax.drafters.config import DSparkConfig
from dspark_jax.drafters.contract import DraftBlock, Params, Sampler, SharedWeights, TrainingRows
from dspark_jax.drafters.heads import make_head
from dspark_jax.drafters.training_view import TrainingView
from dspark_jax.nn.context_attention import Interval, attend_context
from dspark_jax.nn.kv_cache import KVCache
from dspark_jax.nn.layers import project
from dspark_jax.nn.paged_cache import Paging, attend_blocks_paged


class DSparkNetwork(nn.Module):
    """Backbone, sequential head and confidence head."""

    config: DSparkConfig
    dtype: DTypeLike = jnp.float32

    def setup(self):
        c = self.config
        self.backbone = Backbone(c.block, c.num_layers, len(c.taps), self.dtype)
        if c.head is not None:
            self.head = make_head(
                c.head, target_vocab_size=c.target_vocab_size, vocab_size=c.vocab_size, width=c.block.width
            )
        if c.confidence is not None:
            markov_rank = c.head.rank if c.head is not None and c.confidence.with_markov else 0
            self.confidence = ConfidenceHead(c.block.width + markov_rank)

    def context_rows(self, features_BTCD: Array, positions_BT: Array):
        """Per layer, context keys and values [B, T, K, H]."""
        return self.backbone.context_rows(features_BTCD, positions_BT)

    def block_hidden(self, embedded: Array, positions: Array, attend: Callable[..., Array]) -> Array:
        """Hidden states [..., G, D]."""
        return self.backbone(embedded, positions, attend)

    def confidence_logits(self, hidden: Array, prev: Array) -> Array:
        """Logits [...] for hidden states [..., D] and the tokens before them; zeros without the head."""
        c = self.config.confidence
        if c is None:
            return jnp.zeros(prev.shape, jnp.float32)
        if c.with_markov:
            hidden = jnp.concatenate([hidden, self.head.embed(prev)], axis=-1)
        return self.confidence(hidden)

    def teacher_forced(self, hidden_BAGD: Array, prev_BAG: Array) -> tuple[Array | None, Array | None, Array]:
        """(latents, W2, confidence logits) of blocks whose tokens are known."""
        confidence = self.confidence_logits(hidden_BAGD, prev_BAG)
        if self.config.head is None:
            return None, None, confidence
        return self.head.latents(hidden_BAGD, prev_BAG), self.head.w2, confidence

    def sample_block(
        self, hidden_BGD: Array, shared: SharedWeights, anchors_B: Array, sampler: Sampler
    ) -> DraftBlock:
        """Samples the block left to right with `lax.scan`; q_k is taken after the sequential head."""
        hidden_GBD = whole(hidden_BGD.swapaxes(0, 1))
        base_GBV = shared.unembed(hidden_GBD, dtype=self.dtype)

        def step(carry, row):
            state, prev_B = carry
            hidden_BD, logits_BV, k = row
            confidence_B = self.confidence_logits(hidden_BD, prev_B)
            if self.config.head is not None:
                state, latent_BR = self.head.step(state, hidden_BD, prev_B)
                logits_BV = logits_BV + project(latent_BR, self.head.w2, dtype=self.dtype)
            ids_B, probs_BV = sampler(logits_BV, k)
            tokens_B = shared.target_ids(ids_B)
            return (state, tokens_B), (ids_B, tokens_B, probs_BV, confidence_B)

        state = None if self.config.head is None else self.head.initial_state(anchors_B.shape)
        rows = (hidden_GBD, base_GBV, jnp.arange(self.config.block_len))
        _, block = jax.lax.scan(step, (state, anchors_B), rows)
        return DraftBlock(*(x.swapaxes(0, 1) for x in block))

    def touch(self, features_BTCD: Array, embedded_BAGD: Array, prev_BAG: Array):
        """Runs every part once, to create the parameters."""
        positions = jnp.zeros(prev_BAG.shape, jnp.int32)
        rows = self.context_rows(features_BTCD, jnp.zeros(features_BTCD.shape[:2], jnp.int32))
        context = [(k.swapaxes(1, 2), v.swapaxes(1, 2)) for k, v in rows]
        sees = jnp.ones((*prev_BAG.shape[:2], features_BTCD.shape[1]), bool)
        hidden = self.block_hidden(embedded_BAGD, positions, _attend_context(context, sees))
        return self.teacher_forced(hidden, prev_BAG)


@dataclasses.dataclass(frozen=True)
class DSpark(TrainingView):
    """The drafter contract (`contract.py`) for DSpark and DFlash.

    Attributes:
      config: its dimensions.
      dtype: dtype in which matrix products read their inputs, and of the context's keys and values.
    """

    config: DSparkConfig
    dtype: DTypeLike = jnp.float32

    @property
    def context_in_pages(self) -> bool:
        """All that is kept of a position lies in its page."""
        return True

    @property
    def network(self) -> DSparkNetwork:
        """The module behind the pure functions."""
        return DSparkNetwork(self.config, self.dtype)

    @property
    def feature_kernel(self) -> tuple[str, ...]:
        """Path of `fc`, which multiplies the raw features."""
        return ("backbone", "fc", "kernel")

    def _apply(self, params: Params, method: str, *args) -> Any:
        return self.network.apply({"params": params}, *args, method=method)

    def init(self, key: Array) -> Params:
        """Fresh parameters, boxed with their logical axes."""
        c = self.config
        features = jnp.zeros((1, 1, len(c.taps), c.block.width))
        embedded = jnp.zeros((1, 1, c.block_len, c.block.width))
        prev = jnp.zeros((1, 1, c.block_len), jnp.int32)
        variables: Any = self.network.init(key, features, embedded, prev, method="touch")
        return variables["params"]

    def create_context(self, *, slots: int, num_pages: int, page_len: int) -> KVCache:
        """Empty pages; nothing is kept beside them."""
        del slots
        c = self.config
        return KVCache.create(
            [c.block] * c.num_layers, num_pages=num_pages, page_len=page_len, dtype=self.dtype
        )

    def extend_context(
        self,
        params: Params,
        shared: SharedWeights,
        context: KVCache,
        *,
        features_BTCD: Array,
        next_tokens_BT: Array,
        start_B: Array,
        num_rows_B: Array,
        paging: Paging | None = None,
    ) -> KVCache:
        """Writes the context rows of these positions; the tokens do not matter."""
        paging = paging or Paging.whole(start_B, next_tokens_BT.shape[1])
        positions_BT = paging.rows.positions_M.reshape(next_tokens_BT.shape)
        rows = self._apply(params, "context_rows", features_BTCD, positions_BT)
        return context.extended(rows, paging)

    def draft(
        self,
        params: Params,
        shared: SharedWeights,
        context: KVCache,
        anchors_B: Array,
        positions_B: Array,
        sampler: Sampler,
        paging: Paging | None = None,
    ) -> DraftBlock:
        """Proposes G tokens after the anchor tokens anchors_B at positions_B."""
        hidden_BGD = self.block_hidden(params, shared, context, anchors_B, positions_B, paging)
        return self._apply(params, "sample_block", hidden_BGD, shared, anchors_B, sampler)

    def block_hidden(
        self,
        params: Params,
        shared: SharedWeights,
        context: KVCache,
        anchors_B: Array,
        positions_B: Array,
        paging: Paging | None = None,
    ) -> Array:
        """The backbone alone: hidden states [B, G, D] of one block per request."""
        table_BN = (paging or Paging.whole(positions_B, 0)).table_RN

        def attend(layer: int, queries: Array, own_keys: Array, own_values: Array) -> Array:
            keys, values = context.keys_PKSH[layer], context.values_PKSH[layer]
            return attend_blocks_paged(queries, keys, values, table_BN, positions_B, own_keys, own_values)

        return self._blocks_hidden(params, shared, anchors_B, positions_B, attend)

    def _blocks_hidden(
        self, params: Params, shared: SharedWeights, anchors: Array, positions: Array, attend
    ) -> Array:
        """Hidden states [..., G, D] of the rows that predict, for anchor tokens [...] at positions [...]."""
        c = self.config
        inputs = jnp.full((*anchors.shape, c.block_rows), c.mask_token).at[..., 0].set(anchors)
        positions = positions[..., None] + jnp.arange(c.block_rows)
        hidden = self._apply(params, "block_hidden", shared.embed(inputs), positions, attend)
        return hidden[..., -c.block_len :, :]

    def training_context(
        self,
        params: Params,
        shared: SharedWeights,
        *,
        tokens_BT: Array,
        starts_BT: Array,
        features_BTCD: Array,
    ) -> list[tuple[Array, Array]]:
        """Per layer, keys and values [B, K, T, H] of all positions."""
        positions_BT = jnp.arange(tokens_BT.shape[1]) - starts_BT
        rows = self._apply(params, "context_rows", features_BTCD, positions_BT)
        return [(k.astype(self.dtype).swapaxes(1, 2), v.astype(self.dtype).swapaxes(1, 2)) for k, v in rows]

    def block_rows(
        self, params: Params, shared: SharedWeights, context: list[tuple[Array, Array]], blocks: Blocks
    ) -> TrainingRows:
        """The predictions of some blocks under teacher forcing."""
        anchors_BA, positions_BA = blocks.prev_BAG[..., 0], blocks.positions_BAG[..., 0]
        attend = _attend_context(context, blocks.context)
        hidden = self._blocks_hidden(params, shared, anchors_BA, positions_BA, attend)
        latents, w2, confidence = self._apply(params, "teacher_forced", hidden, blocks.prev_BAG)
        return blocks.rows(
            hidden,
            blocks.prefix_BAG,
            latents_BAGR=latents,
            w2_RV=w2,
            confidence_logits_BAG=None if self.config.confidence is None else confidence,
        )


def _attend_context(context: list[tuple[Array, Array]], sees: Interval | Array) -> Callable[..., Array]:
    """Attention of A blocks per sequence to a context [B, K, S, H] per layer, as training has it."""

    def attend(layer: int, queries: Array, own_keys: Array, own_values: Array) -> Array:
        keys, values = context[layer]
        return attend_context(queries, keys, values, sees, own_keys, own_values)

    return attend
