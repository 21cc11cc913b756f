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
from dspark_jax.nn.attention import attend, attend_blocks
from dspark_jax.nn.block import TransformerLayer
from dspark_jax.nn.context_attention import attend_causal
from dspark_jax.nn.kv_cache import KVCache, write_rows
from dspark_jax.nn.layers import Linear, RMSNorm
from dspark_jax.nn.rope import rope_angles

Pair = tuple[Array, Array]
"""Keys and values."""


@flax.struct.dataclass
class MTPContext:
    """What is known of the committed tokens.

    Attributes:
      cache: keys and values, one layer per module, position m at index m.
      outputs_BGD: outputs of the modules at the last committed position.
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
        start_B: Array,
        before_BGD: Array,
        cache: KVCache,
    ) -> tuple[list[Array], list[Pair]]:
        """All modules on T positions from start_B on: their outputs [B, T, D], their keys and values.

        Args:
          features_BTCD: features of the positions.
          embedded_BTD: embeddings of the tokens after them.
          start_B: first position.
          before_BGD: outputs at the position before the first.
          cache: earlier positions; the new ones are written into it.
        """
        T = embedded_BTD.shape[1]
        positions_BT = start_B[:, None] + jnp.arange(T)
        mask_BTS = jnp.arange(cache.length) <= positions_BT[..., None]
        pairs = []

        def attention(number: int, queries, keys, values) -> Array:
            old = (cache.keys_BKSH[number], cache.values_BKSH[number])
            keys, values = (write_rows(x, new, start_B) for x, new in zip(old, (keys, values), strict=True))
            pairs.append((keys, values))
            return attend(queries, keys, values, mask_BTS)

        def one_earlier(number: int, output_BTD: Array) -> Array:
            return jnp.concatenate([before_BGD[:, number, None], output_BTD[:, :-1]], axis=1)

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
        mask_BS: Array,
        drafted: Pair | None,
    ) -> tuple[Array, Pair]:
        """Module `number` on one drafted token.

        Args:
          number: which module.
          hidden_BD: output of the module before it at the position before.
          embedded_BD: embedding of the token.
          position_B: the position before the token's own.
          committed: the module's keys and values [B, K, S, H] in the context.
          mask_BS: committed positions.
          drafted: its keys and values [B, 1, F, K, H] of the F drafted tokens before, or None.

        Returns:
          (its output [B, D], keys and values of the drafted tokens with this one).
        """
        module = self.layers[number]
        x_B11D = module.enter(hidden_BD, embedded_BD)[:, None, None]
        queries, *rows = module.queries_keys_values(x_B11D, self.angles(position_B[:, None, None]))
        if drafted is not None:
            rows = [jnp.concatenate(both, axis=2) for both in zip(drafted, rows, strict=True)]
        mixed = attend_blocks(queries, *committed, mask_BS[:, None], *rows)
        return module.output(x_B11D, mixed)[:, 0, 0], (rows[0], rows[1])

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

    def create_context(self, *, batch: int, length: int) -> MTPContext:
        """Empty context for `batch` requests of at most `length` positions."""
        c = self.config
        return MTPContext(
            cache=KVCache.create([c.block] * c.block_len, batch=batch, length=length, dtype=self.dtype),
            outputs_BGD=self._no_outputs(batch),
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
    ) -> MTPContext:
        """Runs all modules on T features and the tokens after them."""
        embedded = shared.embed(next_tokens_BT)
        outputs, pairs = self._apply(
            params, "extend", features_BTCD, embedded, start_B, context.outputs_BGD, context.cache
        )
        last_B11 = (num_rows_B - 1)[:, None, None]
        last = [jnp.take_along_axis(output_BTD, last_B11, axis=1) for output_BTD in outputs]
        keys, values = zip(*pairs, strict=True)
        return MTPContext(cache=KVCache(keys, values), outputs_BGD=jnp.concatenate(last, axis=1))

    def draft(
        self,
        params: Params,
        shared: SharedWeights,
        context: MTPContext,
        anchors_B: Array,
        positions_B: Array,
        sampler: Sampler,
    ) -> DraftBlock:
        """Proposes G tokens behind the context; the anchors are in it already.

        Unrolled rather than scanned: every step runs other modules, and one fewer each time.
        """
        G = self.config.block_len
        mask_BS = jnp.arange(context.cache.length) < positions_B[:, None]
        committed = list(zip(context.cache.keys_BKSH, context.cache.values_BKSH, strict=True))
        drafted: list[Pair | None] = [None] * G
        latest = [context.outputs_BGD[:, number] for number in range(G)]
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
                        mask_BS,
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
