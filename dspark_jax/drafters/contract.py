"""What every drafter gives to the trainer and to the engine. Neither knows more than this file.

The frozen embedding and LM head are the target's and arrive as arguments (`SharedWeights`), so drafters never
import targets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import flax.struct
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from dspark_jax.nn.config import BlockConfig, TokenScaling
from dspark_jax.nn.layers import embed, project, soft_cap
from dspark_jax.nn.paged_cache import Paging

if TYPE_CHECKING:  # blocks give TrainingRows
    from dspark_jax.drafters.blocks import Blocks

Params = dict[str, Any]
Context = Any
"""What a drafter keeps of the committed tokens: a pytree of its own, of pages [P, ...] and slots [B, ...]."""
Sampler = Callable[[Array, Array], tuple[Array, Array]]
"""(logits [B, V], row number k) -> (sampled draft ids [B], the probabilities [B, V] they were drawn from)."""


@flax.struct.dataclass
class SharedWeights:
    """The target's frozen weights that a drafter uses.

    Attributes:
      embedding_VD: the whole embedding table.
      head_DV: the LM head, cut to the draft vocabulary.
      draft_to_target_V: target id of every draft id, or None when the vocabularies are the same.
      scaling: what the target does to embeddings and logits; static.
    """

    embedding_VD: Array
    head_DV: Array
    draft_to_target_V: Array | None
    scaling: TokenScaling = flax.struct.field(pytree_node=False)

    @classmethod
    def cut(
        cls, embedding_VD: Array, head_DV: Array, draft_to_target_V: Array | None, scaling: TokenScaling
    ) -> SharedWeights:
        """Cuts the target's LM head [D, V] to the draft vocabulary."""
        head_DV = head_DV if draft_to_target_V is None else head_DV[:, draft_to_target_V]
        return cls(embedding_VD, head_DV, draft_to_target_V, scaling)

    def target_ids(self, draft_ids: Array) -> Array:
        """Draft ids -> target ids."""
        return draft_ids if self.draft_to_target_V is None else self.draft_to_target_V[draft_ids]

    def embed(self, tokens: Array) -> Array:
        """Target ids [...] -> embeddings [..., D]."""
        return embed(self.embedding_VD, tokens, self.scaling.embedding)

    def unembed(self, hidden: Array, *, dtype: DTypeLike) -> Array:
        """Hidden states [..., D] -> draft logits [..., V], read in `dtype`, float32."""
        return soft_cap(project(hidden, self.head_DV, dtype=dtype), self.scaling.softcap)

    def draft_ids(self, target_ids: Array) -> Array:
        """Target ids -> draft ids, -1 where the drafter cannot propose the token."""
        if self.draft_to_target_V is None:
            return target_ids
        table = jnp.full(self.embedding_VD.shape[0], -1, jnp.int32)
        table = table.at[self.draft_to_target_V].set(jnp.arange(len(self.draft_to_target_V), dtype=jnp.int32))
        return table[target_ids]


@flax.struct.dataclass
class DraftBlock:
    """What a drafter proposes in one round.

    Attributes:
      draft_ids_BG: sampled ids in the draft vocabulary.
      tokens_BG: the same as target ids.
      probs_BGV: the distributions that they were really drawn from, over the draft vocabulary.
      confidence_logits_BG: logit of P(accepted | all before accepted); zeros without a confidence head.
    """

    draft_ids_BG: Array
    tokens_BG: Array
    probs_BGV: Array
    confidence_logits_BG: Array


@flax.struct.dataclass
class TrainingRows:
    """Predictions to be trained, M per sequence.

    Attributes:
      hidden_BMD: inputs of the LM head.
      latent_BMR: inputs of W2, or None.
      w2_RV: the head's projection to draft logits, or None.
      positions_BM: place in the sequence whose target distribution the row should equal.
      labels_BM: true next token (target id).
      slots_BM: place of the row in its block, from 0.
      mask_BM: True for supervised rows.
      confidence_logits_BM: or None.
    """

    hidden_BMD: Array
    latent_BMR: Array | None
    w2_RV: Array | None
    positions_BM: Array
    labels_BM: Array
    slots_BM: Array
    mask_BM: Array
    confidence_logits_BM: Array | None

    def logits(self, shared: SharedWeights, *, dtype: DTypeLike) -> Array:
        """Draft logits [B, M, V] of all rows at once, float32: for comparisons, not for training."""
        logits_BMV = shared.unembed(self.hidden_BMD, dtype=dtype)
        if self.latent_BMR is None or self.w2_RV is None:
            return logits_BMV
        return logits_BMV + self.latent_BMR @ self.w2_RV


class DrafterDimensions(Protocol):
    """What trainer and engine read of a drafter's configuration (`config.py`)."""

    @property
    def target_vocab_size(self) -> int:
        """V of the target."""
        ...

    @property
    def vocab_size(self) -> int:
        """Ids that the drafter can propose."""
        ...

    @property
    def block(self) -> BlockConfig:
        """Dimensions of its layers; the width is the target's."""
        ...

    @property
    def num_layers(self) -> int:
        """Layers."""
        ...

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose outputs are the features."""
        ...

    @property
    def block_len(self) -> int:
        """G, tokens proposed per round."""
        ...

    @property
    def confidence(self) -> Any:
        """The confidence head, or None."""
        ...


class Drafter(Protocol):
    """Pure functions over a plain parameter dict."""

    @property
    def config(self) -> DrafterDimensions:
        """Its dimensions."""
        ...

    @property
    def dtype(self) -> DTypeLike:
        """dtype in which matrix products read their inputs."""
        ...

    @property
    def feature_kernel(self) -> tuple[str, ...] | None:
        """Path of the kernel [C D, D] that multiplies the raw features; None where a norm comes first."""
        ...

    @property
    def context_in_pages(self) -> bool:
        """Whether a prompt may be continued from pages that another request has filled."""
        ...

    def init(self, key: Array) -> Params:
        """Fresh parameters, boxed with their logical axes."""
        ...

    def create_context(self, *, slots: int, num_pages: int, page_len: int) -> Context:
        """Empty context for `slots` requests, in `num_pages` pages of `page_len` positions."""
        ...

    def extend_context(
        self,
        params: Params,
        shared: SharedWeights,
        context: Context,
        *,
        features_BTCD: Array,
        next_tokens_BT: Array,
        start_B: Array,
        num_rows_B: Array,
        paging: Paging | None = None,
    ) -> Context:
        """Takes in T rows of the target from position start_B on, or M rows wherever they stand.

        The rows behind the first `num_rows_B` are padding or rejected: later calls start before them, and
        they leave no trace.

        Args:
          params: parameters.
          shared: the target's frozen weights.
          context: what was committed before; the positions before start_B.
          features_BTCD: the target's features.
          next_tokens_BT: the committed token AFTER each row; behind the last committed row the new anchor.
          start_B: position of each request's first row.
          num_rows_B: committed rows of each request, at least 1.
          paging: whose the rows are; the arrays of rows are then [1, M, ...]. None: every request has one
            page.
        """
        ...

    def draft(
        self,
        params: Params,
        shared: SharedWeights,
        context: Context,
        anchors_B: Array,
        positions_B: Array,
        sampler: Sampler,
        paging: Paging | None = None,
    ) -> DraftBlock:
        """Proposes G tokens after the anchor tokens anchors_B at positions_B, where the context ends.

        `paging` says which requests these are; without it every request has one page.
        """
        ...

    def training_context(
        self,
        params: Params,
        shared: SharedWeights,
        *,
        tokens_BT: Array,
        starts_BT: Array,
        features_BTCD: Array,
    ) -> Context:
        """What all blocks of a sequence read: a pytree of floats, to be differentiated by params.

        Args:
          params: parameters.
          shared: the target's frozen weights.
          tokens_BT: the sequences, each of one document or several.
          starts_BT: place where the document of every token starts, int32.
          features_BTCD: the target's features.
        """
        ...

    def block_rows(
        self, params: Params, shared: SharedWeights, context: Context, blocks: Blocks
    ) -> TrainingRows:
        """The predictions of some blocks under teacher forcing, M = A G rows per sequence, block by block.

        Args:
          params: parameters.
          shared: the target's frozen weights.
          context: what `training_context` returned.
          blocks: the blocks of every sequence, anchors in ascending order.
        """
        ...

    def training_rows(
        self,
        params: Params,
        shared: SharedWeights,
        *,
        tokens_BT: Array,
        loss_mask_BT: Array,
        features_BTCD: Array,
        anchors_BA: Array,
        keep_BA: Array,
        starts_BT: Array | None = None,
    ) -> TrainingRows:
        """`block_rows` of all blocks at once (`training_view.py`)."""
        ...
