"""MTP-k: k modules in a row, each predicts one token further than the one before (DeepSeek-V3, section 2.2).

Modules and slots count from 0; everything is indexed by the position m BEFORE a known token t_{m+1}. At m
every module reads the embedding of t_{m+1} and predicts t_{m+2}; beside it module 0 reads the target's
feature of m, and each other one the output of the module before it at m - 1 (zeros before the sequence).
Slot k of a block anchored at p is module k at p - 1 + k: the newest feature that reaches it is the one of
p - 1.

A committed token passes through all modules, each with its own keys and values. The token that slot k drafted
passes through the modules behind k only: the others would need features that do not exist yet.

Differs from engines that run DeepSeek's one published module on its own output: here each depth is a module.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import flax.struct
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from dspark_jax.drafters.blocks import Blocks
from dspark_jax.drafters.config import MTPConfig
from dspark_jax.drafters.contract import DraftBlock, Params, Sampler, SharedWeights, TrainingRows
from dspark_jax.drafters.training_view import TrainingView
from dspark_jax.nn.block import TransformerLayer
from dspark_jax.nn.context_attention import attend_causal
from dspark_jax.nn.kv_cache import KVCache, write_and_attend
from dspark_jax.nn.layers import Linear, RMSNorm
from dspark_jax.nn.paged_cache import Paging, attend_blocks_paged
from dspark_jax.nn.rope import rope_angles

Pair = tuple[Array, Array]
"""Keys and values."""


@flax.struct.dataclass
class MTPContext:
    """What is known of the committed tokens.

    Attributes:
      cache: keys and values, one layer per module.
      outputs_BGD: outputs of the modules at the last committed position of every slot.
    """

    cache: KVCache
    outputs_BGD: Array


class MTPModule(TransformerLayer):
    """A transformer layer behind a projection of (embedding, hidden state), and a norm before the head.

    Attributes:
      hidden_width: width X of the hidden states that it reads.
    """

    hidden_width: int = 0

    def setup(self):
        super().setup()
        c = self.config
        self.token_norm = RMSNorm(c.width, c.norm_eps)
        self.state_norm = RMSNorm(self.hidden_width, c.norm_eps)
        joined_width = c.width + self.hidden_width
        self.projection = Linear(joined_width, c.width, ("features", "embed"), dtype=self.dtype)
        self.head_norm = RMSNorm(c.width, c.norm_eps)

    def enter(self, hidden: Array, embedded: Array) -> Array:
        """Hidden states [..., X] and embeddings [..., D] -> the layer's input [..., D]."""
        joined = jnp.concatenate([self.token_norm(embedded), self.state_norm(hidden)], axis=-1)
        return self.projection(joined)


class MTPNetwork(nn.Module):
    """The modules."""

    config: MTPConfig
    dtype: DTypeLike = jnp.float32

    def setup(self):
        c, width = self.config, self.config.block.width
        hidden_widths = [len(c.taps) * width] + [width] * (c.block_len - 1)
        self.layers = [MTPModule(c.block, self.dtype, hidden_width=X) for X in hidden_widths]

    def angles(self, positions: Array) -> tuple[Array, Array]:
        """RoPE angles of positions [..., T]."""
        return rope_angles(self.config.block.rope, self.config.block.head_dim, positions)

    def extend(
        self,
        features_BTCD: Array,
        embedded_BTD: Array,
        before_BGD: Array,
        cache: KVCache,
        paging: Paging,
    ) -> tuple[list[Array], list[Pair]]:
        """All modules on rows of committed tokens: their outputs [B, T, D], their keys and values.

        Args:
          features_BTCD: features of the positions.
          embedded_BTD: embeddings of the tokens after them.
          before_BGD: per request, outputs at the position before its first row.
          cache: earlier positions; the new ones are written into it.
          paging: where the rows lie in the cache.
        """
        B, T, D = embedded_BTD.shape
        positions_BT, places_BT, request_BT = (
            x.reshape(B, T) for x in (paging.rows.positions_M, paging.rows.places_M, paging.rows.slots_M)
        )
        pairs = []

        def attention(number: int, queries, keys, values) -> Array:
            mixed, pair = write_and_attend(cache, number, queries, keys, values, paging)
            pairs.append(pair)
            return mixed

        def one_earlier(number: int, output_BTD: Array) -> Array:
            # The row before is the neighbour, or what the step before has left.
            neighbours = jnp.roll(output_BTD.reshape(-1, D), 1, axis=0).reshape(B, T, D)
            before = before_BGD[:, number].at[request_BT].get(mode="clip")
            return jnp.where(places_BT[..., None] == 0, before, neighbours)

        return self._run(features_BTCD, embedded_BTD, positions_BT, attention, one_earlier), pairs

    def documents(self, features_BTCD: Array, embedded_BTD: Array, starts_BT: Array) -> list[Array]:
        """All modules on whole sequences of documents that start at `starts_BT`: their outputs [B, T, D]."""
        at_T = jnp.arange(embedded_BTD.shape[1])

        def attention(number: int, queries, keys, values) -> Array:
            keys, values = (x.astype(self.dtype).swapaxes(1, 2) for x in (keys, values))
            return attend_causal(queries, keys, values, starts_BT)

        def one_earlier(number: int, output_BTD: Array) -> Array:
            return jnp.where((at_T > starts_BT)[..., None], jnp.roll(output_BTD, 1, axis=1), 0.0)

        return self._run(features_BTCD, embedded_BTD, at_T - starts_BT, attention, one_earlier)

    def _run(
        self, features_BTCD: Array, embedded_BTD: Array, positions_BT: Array, attention, one_earlier
    ) -> list[Array]:
        """Outputs of all modules, each of which reads those of the one before it at the position before."""
        hidden, outputs = features_BTCD.reshape(*embedded_BTD.shape[:2], -1), []
        angles = self.angles(positions_BT)
        for number, module in enumerate(self.layers):
            x_BTD = module.enter(hidden, embedded_BTD)
            mixed = attention(number, *module.queries_keys_values(x_BTD, angles))
            outputs.append(module.output(x_BTD, mixed))
            hidden = one_earlier(number, outputs[-1])
        return outputs

    def step(
        self,
        number: int,
        hidden_BD: Array,
        embedded_BD: Array,
        position_B: Array,
        committed: Pair,
        table_BN: Array,
        ends_B: Array,
        drafted: Pair | None,
    ) -> tuple[Array, Pair]:
        """Module `number` on one drafted token.

        Args:
          number: which module.
          hidden_BD: output of the module before it at the position before.
          embedded_BD: embedding of the token.
          position_B: the position before the token's own.
          committed: the module's pages of keys and values [P, K, S, H].
          table_BN: page tables.
          ends_B: committed positions lie below this one.
          drafted: its keys and values [B, F, K, H] of the F drafted tokens before, or None.

        Returns:
          (its output [B, D], keys and values of the drafted tokens with this one).
        """
        module = self.layers[number]
        x_B1D = module.enter(hidden_BD, embedded_BD)[:, None]
        queries, *rows = module.queries_keys_values(x_B1D, self.angles(position_B[:, None]))
        if drafted is not None:
            rows = [jnp.concatenate(both, axis=1) for both in zip(drafted, rows, strict=True)]
        mixed = attend_blocks_paged(queries, *committed, table_BN, ends_B, *rows)
        return module.output(x_B1D, mixed)[:, 0], (rows[0], rows[1])

    def head_input(self, number: int, output: Array) -> Array:
        """Output [..., D] of module `number` -> input of the LM head."""
        return self.layers[number].head_norm(output)

    def touch(self, features_BTCD: Array, embedded_BTD: Array) -> list[Array]:
        """Runs every part once, to create the parameters."""
        outputs = self.documents(features_BTCD, embedded_BTD, jnp.zeros(embedded_BTD.shape[:2], jnp.int32))
        return [self.head_input(number, output) for number, output in enumerate(outputs)]


@dataclasses.dataclass(frozen=True)
class MTP(TrainingView):
    """The drafter contract (`contract.py`) for MTP-k.

    Attributes:
      config: its dimensions.
      dtype: dtype in which matrix products read their inputs, and of the context's keys and values.
    """

    config: MTPConfig
    dtype: DTypeLike = jnp.float32

    @property
    def context_in_pages(self) -> bool:
        """A position needs the outputs at the one before it, which no page has."""
        return False

    @property
    def feature_kernel(self) -> None:
        """Features are normed before anything multiplies them."""
        return None

    def _apply(self, params: Params, method: str, *args) -> Any:
        return MTPNetwork(self.config, self.dtype).apply({"params": params}, *args, method=method)

    def _no_outputs(self, batch: int) -> Array:
        return jnp.zeros((batch, self.config.block_len, self.config.block.width))

    def init(self, key: Array) -> Params:
        """Fresh parameters, boxed with their logical axes."""
        c = self.config
        features, embedded = jnp.zeros((1, 1, len(c.taps), c.block.width)), jnp.zeros((1, 1, c.block.width))
        network = MTPNetwork(c, self.dtype)
        variables: Any = network.init(key, features, embedded, method="touch")
        return variables["params"]

    def create_context(self, *, slots: int, num_pages: int, page_len: int) -> MTPContext:
        """Empty pages and slots."""
        c = self.config
        return MTPContext(
            cache=KVCache.create(
                [c.block] * c.block_len, num_pages=num_pages, page_len=page_len, dtype=self.dtype
            ),
            outputs_BGD=self._no_outputs(slots),
        )

    def extend_context(
        self,
        params: Params,
        shared: SharedWeights,
        context: MTPContext,
        *,
        features_BTCD: Array,
        next_tokens_BT: Array,
        start_B: Array,
        num_rows_B: Array,
        paging: Paging | None = None,
    ) -> MTPContext:
        """Runs all modules on features and the tokens after them."""
        paging = paging or Paging.whole(start_B, next_tokens_BT.shape[1])
        embedded = shared.embed(next_tokens_BT)
        # A slot may still hold what its last request has left.
        begins_R11 = (start_B == 0)[:, None, None]
        before_RGD = jnp.where(begins_R11, 0.0, context.outputs_BGD.at[paging.slots_R].get(mode="clip"))
        outputs, pairs = self._apply(
            params, "extend", features_BTCD, embedded, before_RGD, context.cache, paging
        )
        last = [paging.last_rows(output.reshape(-1, output.shape[-1]), num_rows_B) for output in outputs]
        keys, values = zip(*pairs, strict=True)
        return MTPContext(
            cache=KVCache(keys, values),
            outputs_BGD=context.outputs_BGD.at[paging.slots_R].set(jnp.stack(last, axis=1), mode="drop"),
        )

    def draft(
        self,
        params: Params,
        shared: SharedWeights,
        context: MTPContext,
        anchors_B: Array,
        positions_B: Array,
        sampler: Sampler,
        paging: Paging | None = None,
    ) -> DraftBlock:
        """Proposes G tokens behind the context; the anchors are in it already.

        Unrolled rather than scanned: every step runs other modules, and one fewer each time.
        """
        paging = paging or Paging.whole(positions_B, 0)
        outputs_RGD = context.outputs_BGD.at[paging.slots_R].get(mode="clip")
        G = self.config.block_len
        committed = list(zip(context.cache.keys_PKSH, context.cache.values_PKSH, strict=True))
        drafted: list[Pair | None] = [None] * G
        latest = [outputs_RGD[:, number] for number in range(G)]
        proposed: list[tuple[Array, Array, Array]] = []
        for slot in range(G):
            if proposed:
                embedded_BD, before = shared.embed(proposed[-1][1]), latest[:]
                for number in range(slot, G):
                    latest[number], drafted[number] = self._apply(
                        params,
                        "step",
                        number,
                        before[number - 1],
                        embedded_BD,
                        positions_B - 1 + slot,
                        committed[number],
                        paging.table_RN,
                        positions_B,
                        drafted[number],
                    )
            hidden_BD = self._apply(params, "head_input", slot, latest[slot])
            ids_B, probs_BV = sampler(shared.unembed(hidden_BD, dtype=self.dtype), jnp.asarray(slot))
            proposed.append((ids_B, shared.target_ids(ids_B), probs_BV))
        ids_BG, tokens_BG, probs_BGV = (jnp.stack(x, axis=1) for x in zip(*proposed, strict=True))
        return DraftBlock(ids_BG, tokens_BG, probs_BGV, jnp.zeros(tokens_BG.shape))

    def training_context(
        self,
        params: Params,
        shared: SharedWeights,
        *,
        tokens_BT: Array,
        starts_BT: Array,
        features_BTCD: Array,
    ) -> list[Array]:
        """Outputs [B, T, D] of all modules."""
        embedded = shared.embed(jnp.roll(tokens_BT, -1, axis=1))  # no block sees a document's last one
        return self._apply(params, "documents", features_BTCD, embedded, starts_BT)

    def block_rows(
        self, params: Params, shared: SharedWeights, context: list[Array], blocks: Blocks
    ) -> TrainingRows:
        """The predictions of some blocks under teacher forcing."""
        last = context[0].shape[1] - 1

        def of_blocks(number: int) -> Array:
            at_BA1 = jnp.clip(blocks.places_BAG[..., :1] - 1 + number, 0, last)
            gathered = jnp.take_along_axis(context[number], at_BA1, axis=1)
            return self._apply(params, "head_input", number, gathered)

        hidden_BAGD = jnp.stack([of_blocks(number) for number in range(self.config.block_len)], axis=2)
        return blocks.rows(hidden_BAGD, blocks.after_a_feature_BAG)
