"""What all drafters do alike in training: all blocks at once, from the context and the rows of a part."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from dspark_jax.drafters.blocks import make_blocks
from dspark_jax.drafters.contract import Drafter, Params, SharedWeights, TrainingRows


class TrainingView:
    """The part of the contract that follows from the others."""

    def training_rows(
        self: Drafter,
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
        """All blocks under teacher forcing; without `starts_BT` every sequence is one document."""
        starts_BT = jnp.zeros_like(tokens_BT) if starts_BT is None else starts_BT
        context = self.training_context(
            params, shared, tokens_BT=tokens_BT, starts_BT=starts_BT, features_BTCD=features_BTCD
        )
        blocks = make_blocks(
            tokens_BT=tokens_BT,
            loss_mask_BT=loss_mask_BT,
            starts_BT=starts_BT,
            anchors_BA=anchors_BA,
            keep_BA=keep_BA,
            block_len=self.config.block_len,
        )
        return self.block_rows(params, shared, context, blocks)
