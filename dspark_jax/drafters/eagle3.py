"""Eagle3: one layer that drafts token after token, each time from its own last output (spec section 10).

The feature of position i is paired with the token at i + 1, the anchor for the newest feature. A block starts
there: step 0 reads the last committed feature and the anchor, step s the output of step s - 1 and token s of
the block. It sees the pairs before it and the earlier steps of its own block. Training unrolls the same
steps over true tokens (the training-time test), decoding over sampled ones.

Differs from the reference: rows exist at the sampled anchors only, and a row is supervised when its label is
in the loss. The reference asks whether the two tokens before the label are. So it leaves out the first two
tokens of an answer, which are drafted like all others, and takes in the token behind its end, which never is.
With the mask moved on by two tokens both give the same loss and gradients (`evaluation.golden.check_chains`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from dspark_jax.drafters.blocks import Blocks
from dspark_jax.drafters.config import Eagle3Config
from dspark_jax.drafters.contract import DraftBlock, Params, Sampler, SharedWeights, TrainingRows
from dspark_jax.drafters.training_view import TrainingView
from dspark_jax.nn.block import TransformerLayer
from dspark_jax.nn.context_attention import Interval, attend_context
from dspark_jax.nn.kv_cache import KVCache
from dspark_jax.nn.layers import Linear, RMSNorm
from dspark_jax.nn.paged_cache import Paging, attend_blocks_paged
from dspark_jax.nn.rope import rope_angles


@flax.struct.dataclass
class Eagle3Context:
    """What is known of the committed tokens.

    Attributes:
      cache: keys and values of the pairs (feature i, token i + 1), pair i at position i.
      hidden_BD: projection of the last committed feature of every slot, from which a block starts.
    """

    cache: KVCache
    hidden_BD: Array


@flax.struct.dataclass
class Chains:
    """A blocks of each sequence between two steps.

    Attributes:
      hidden_BAD: what the next step reads beside its token.
      keys_BAGKH: keys of the steps so far, step s at index s.
      values_BAGKH: their values.
    """

    hidden_BAD: Array
    keys_BAGKH: Array
    values_BAGKH: Array


Attention = Callable[[Array, Array, Array, Array], Array]
"""(queries [B, A, 1, N, H], keys and values [B, A, G, K, H] of the block, which of them exist) -> mixed."""


def _attend_context(
    keys_BKSH: Array, values_BKSH: Array, sees: Interval | Array, queries: Array, *own: Array
) -> Array:
    """`Attention` to a context that lies in one piece, as training has it."""
    keys, values, seen_G = own
    return attend_context(queries, keys_BKSH, values_BKSH, sees, keys, values, seen_G)


class Eagle3Layer(TransformerLayer):
    """A transformer layer with the hidden state as its residual, whose attention reads the token too."""

    def setup(self):
        super().setup()
        self.hidden_norm = RMSNorm(self.config.width, self.config.norm_eps)

    def pair(self, hidden: Array, embedded: Array) -> Array:
        """Hidden states and embeddings, both [..., D] -> what attention reads, [..., 2 D]."""
        return jnp.concatenate([self.input_norm(embedded), self.hidden_norm(hidden)], axis=-1)


class Eagle3Network(nn.Module):
    """The projection of the features, the layer and the last norm."""

    config: Eagle3Config
    dtype: DTypeLike = jnp.float32

    def setup(self):
        c = self.config
        self.fc = Linear(len(c.taps) * c.block.width, c.block.width, ("features", "embed"), dtype=self.dtype)
        self.layers = [Eagle3Layer(c.block, self.dtype, 2 * c.block.width)]
        self.final_norm = RMSNorm(c.block.width, c.block.norm_eps)

    def context_rows(
        self, features_BTCD: Array, embedded_BTD: Array, positions_BT: Array
    ) -> tuple[Array, Array, Array]:
        """Projected features [B, T, D]; keys and values [B, T, K, H] of their pairs with the next tokens."""
        (layer,) = self.layers
        hidden_BTD = self.fc(features_BTCD.reshape(*features_BTCD.shape[:-2], -1))
        angles = rope_angles(self.config.block.rope, self.config.block.head_dim, positions_BT)
        return hidden_BTD, *layer.attention.keys_values(layer.pair(hidden_BTD, embedded_BTD), angles)

    def step(
        self,
        chains: Chains,
        embedded_BAD: Array,
        positions_BA: Array,
        slot: Array,
        attend: Attention,
    ) -> tuple[Chains, Array]:
        """One step of every block.

        Args:
          chains: the blocks before it.
          embedded_BAD: embeddings of the tokens that the step reads.
          positions_BA: where it stands.
          slot: its number.
          attend: attention to the context and to the steps so far.

        Returns:
          (the blocks after it, inputs [B, A, D] of the LM head).
        """
        (layer,) = self.layers
        c = self.config.block
        pair_BA1X = layer.pair(chains.hidden_BAD, embedded_BAD)[:, :, None]
        angles = rope_angles(c.rope, c.head_dim, positions_BA[..., None])
        own_keys, own_values = layer.attention.keys_values(pair_BA1X, angles)

        def put(steps_BAGKH: Array, step_BA1KH: Array) -> Array:
            step_BA1KH = step_BA1KH.astype(steps_BAGKH.dtype)
            return jax.lax.dynamic_update_slice_in_dim(steps_BAGKH, step_BA1KH, slot, axis=2)

        own_keys, own_values = put(chains.keys_BAGKH, own_keys), put(chains.values_BAGKH, own_values)
        seen_G = jnp.arange(self.config.block_len) <= slot
        queries = layer.attention.queries(pair_BA1X, angles)
        mixed = attend(queries, own_keys, own_values, seen_G)
        hidden_BAD = layer.output(chains.hidden_BAD, mixed[:, :, 0])
        return Chains(hidden_BAD, own_keys, own_values), self.final_norm(hidden_BAD)

    def empty_chains(self, hidden_BAD: Array) -> Chains:
        """Blocks before their first step, which reads the projected features hidden_BAD."""
        c = self.config
        shape = (*hidden_BAD.shape[:2], c.block_len, c.block.num_kv_heads, c.block.head_dim)
        return Chains(hidden_BAD, jnp.zeros(shape, self.dtype), jnp.zeros(shape, self.dtype))

    def touch(self, features_BTCD: Array, embedded_BTD: Array):
        """Runs every part once, to create the parameters."""
        positions_BT = jnp.zeros(embedded_BTD.shape[:2], jnp.int32)
        hidden, *pair = self.context_rows(features_BTCD, embedded_BTD, positions_BT)
        keys, values = (x.swapaxes(1, 2) for x in pair)
        sees = jnp.ones((*positions_BT.shape, keys.shape[2]), bool)
        first = jnp.zeros((), jnp.int32)
        attend = functools.partial(_attend_context, keys, values, sees)
        return self.step(self.empty_chains(hidden), embedded_BTD, positions_BT, first, attend)


@dataclasses.dataclass(frozen=True)
class Eagle3(TrainingView):
    """The drafter contract (`contract.py`) for Eagle3.

    Attributes:
      config: its dimensions.
      dtype: dtype in which matrix products read their inputs, and of the context's keys and values.
    """

    config: Eagle3Config
    dtype: DTypeLike = jnp.float32

    @property
    def context_in_pages(self) -> bool:
        """The last position alone is kept beside the pages."""
        return True

    @property
    def feature_kernel(self) -> tuple[str, ...]:
        """Path of `fc`, which multiplies the raw features."""
        return ("fc", "kernel")

    def _apply(self, params: Params, method: str, *args) -> Any:
        return Eagle3Network(self.config, self.dtype).apply({"params": params}, *args, method=method)

    def init(self, key: Array) -> Params:
        """Fresh parameters, boxed with their logical axes."""
        c = self.config
        features, embedded = jnp.zeros((1, 1, len(c.taps), c.block.width)), jnp.zeros((1, 1, c.block.width))
        variables: Any = Eagle3Network(c, self.dtype).init(key, features, embedded, method="touch")
        return variables["params"]

    def create_context(self, *, slots: int, num_pages: int, page_len: int) -> Eagle3Context:
        """Empty pages and slots."""
        block = self.config.block
        return Eagle3Context(
            cache=KVCache.create([block], num_pages=num_pages, page_len=page_len, dtype=self.dtype),
            hidden_BD=jnp.zeros((slots, block.width)),
        )

    def extend_context(
        self,
        params: Params,
        shared: SharedWeights,
        context: Eagle3Context,
        *,
        features_BTCD: Array,
        next_tokens_BT: Array,
        start_B: Array,
        num_rows_B: Array,
        paging: Paging | None = None,
    ) -> Eagle3Context:
        """Pairs features with the tokens after them."""
        paging = paging or Paging.whole(start_B, next_tokens_BT.shape[1])
        positions_BT = paging.rows.positions_M.reshape(next_tokens_BT.shape)
        hidden_BTD, *pair = self._apply(
            params, "context_rows", features_BTCD, shared.embed(next_tokens_BT), positions_BT
        )
        last_RD = paging.last_rows(hidden_BTD.reshape(-1, hidden_BTD.shape[-1]), num_rows_B)
        return Eagle3Context(
            cache=context.cache.extended([tuple(pair)], paging),
            hidden_BD=context.hidden_BD.at[paging.slots_R].set(last_RD, mode="drop"),
        )

    def draft(
        self,
        params: Params,
        shared: SharedWeights,
        context: Eagle3Context,
        anchors_B: Array,
        positions_B: Array,
        sampler: Sampler,
        paging: Paging | None = None,
    ) -> DraftBlock:
        """Proposes G tokens after the anchor tokens anchors_B at positions_B."""
        paging = paging or Paging.whole(positions_B, 0)
        (keys,), (values,) = context.cache.keys_PKSH, context.cache.values_PKSH
        newest_B = positions_B - 1

        def attend(queries: Array, *own: Array) -> Array:
            own_keys, own_values, seen_G = own
            # The newest pair's own key is the block's.
            rows = (queries[:, 0], keys, values, paging.table_RN, newest_B, own_keys[:, 0], own_values[:, 0])
            return attend_blocks_paged(*rows, seen_G)[:, None]

        step = self._stepper(params, shared, attend, newest_B[:, None])

        def body(carry, slot):
            chains, tokens_B = carry
            chains, hidden_B1D = step(chains, tokens_B[:, None], slot)
            ids_B, probs_BV = sampler(shared.unembed(hidden_B1D[:, 0], dtype=self.dtype), slot)
            tokens_B = shared.target_ids(ids_B)
            return (chains, tokens_B), (ids_B, tokens_B, probs_BV)

        hidden_RD = context.hidden_BD.at[paging.slots_R].get(mode="clip")
        start = self._apply(params, "empty_chains", hidden_RD[:, None])
        _, block = jax.lax.scan(body, (start, anchors_B), jnp.arange(self.config.block_len))
        ids_BG, tokens_BG, probs_BGV = (x.swapaxes(0, 1) for x in block)
        return DraftBlock(ids_BG, tokens_BG, probs_BGV, jnp.zeros(tokens_BG.shape))

    def _stepper(self, params: Params, shared: SharedWeights, attend: Attention, first_BA: Array):
        """step(chains, tokens [B, A], slot) -> (chains, hidden [B, A, D]); step 0 stands at `first_BA`."""

        def step(chains: Chains, tokens_BA: Array, slot: Array) -> tuple[Chains, Array]:
            rows = (shared.embed(tokens_BA), first_BA + slot, slot, attend)
            return self._apply(params, "step", chains, *rows)

        return step

    def training_context(
        self,
        params: Params,
        shared: SharedWeights,
        *,
        tokens_BT: Array,
        starts_BT: Array,
        features_BTCD: Array,
    ) -> tuple[Array, Array, Array]:
        """Projected features [B, T, D]; keys and values [B, K, T, H] of their pairs with the next tokens."""
        next_tokens_BT = jnp.roll(tokens_BT, -1, axis=1)  # a document's last pair has none and is never seen
        positions_BT = jnp.arange(tokens_BT.shape[1]) - starts_BT
        hidden_BTD, *pairs = self._apply(
            params, "context_rows", features_BTCD, shared.embed(next_tokens_BT), positions_BT
        )
        keys, values = (x.astype(self.dtype).swapaxes(1, 2) for x in pairs)
        return hidden_BTD, keys, values

    def block_rows(
        self, params: Params, shared: SharedWeights, context: tuple[Array, Array, Array], blocks: Blocks
    ) -> TrainingRows:
        """The predictions of some blocks under teacher forcing."""
        hidden_BTD, keys, values = context
        newest_BA = blocks.places_BAG[..., 0] - 1
        # Step 0 stands on the newest pair: its own key takes the place of the pair's in the context.
        sees = Interval(low_BA=blocks.starts_BA, high_BA=newest_BA)
        attend = functools.partial(_attend_context, keys, values, sees)
        step = self._stepper(params, shared, attend, blocks.positions_BAG[..., 0] - 1)
        at_BA1 = jnp.maximum(newest_BA, 0)[..., None]
        start = self._apply(params, "empty_chains", jnp.take_along_axis(hidden_BTD, at_BA1, axis=1))
        by_slot = (jnp.moveaxis(blocks.prev_BAG, -1, 0), jnp.arange(self.config.block_len))
        _, hidden_GBAD = jax.lax.scan(lambda chains, row: step(chains, *row), start, by_slot)
        return blocks.rows(jnp.moveaxis(hidden_GBAD, 0, 2), blocks.after_a_feature_BAG)
