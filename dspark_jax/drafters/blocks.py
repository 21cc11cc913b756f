"""Training blocks: positions, previous tokens, labels and supervised slots of an anchor (spec section 5)."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax.numpy as jnp
from jax import Array

from dspark_jax.drafters.contract import TrainingRows
from dspark_jax.nn.context_attention import Interval


@flax.struct.dataclass
class Blocks:
    """The A blocks of each sequence; slot k of a block predicts the token at anchor + k + 1.

    Attributes:
      places_BAG: place anchor + k in the sequence, where the target's distribution is the one to match.
      positions_BAG: the same within the document, for RoPE.
      prev_BAG: the true token before each prediction (teacher forcing); the anchor's own in slot 0.
      labels_BAG: the true token to predict; any id where it is not supervised.
      supervised_BAG: slots whose label is supervised; all False for a masked anchor.
      starts_BA: place where the anchor's document starts.
    """

    places_BAG: Array
    positions_BAG: Array
    prev_BAG: Array
    labels_BAG: Array
    supervised_BAG: Array
    starts_BA: Array

    @property
    def context(self) -> Interval:
        """What the blocks see of the context: their document strictly before the anchor."""
        return Interval(low_BA=self.starts_BA, high_BA=self.places_BAG[..., 0])

    @property
    def prefix_BAG(self) -> Array:
        """The supervised slots before the first one that is not."""
        return jnp.cumprod(self.supervised_BAG, axis=-1).astype(bool)

    @property
    def after_a_feature_BAG(self) -> Array:
        """The supervised slots of blocks that some feature stands before."""
        return self.supervised_BAG & (self.positions_BAG[..., :1] > 0)

    def rows(
        self,
        hidden_BAGD: Array,
        mask_BAG: Array,
        *,
        latents_BAGR: Array | None = None,
        w2_RV: Array | None = None,
        confidence_logits_BAG: Array | None = None,
    ) -> TrainingRows:
        """The blocks' predictions for the loss, block by block; the mask says which of them are trained."""

        def per_sequence(x: Any) -> Any:
            return None if x is None else x.reshape(x.shape[0], -1, *x.shape[3:])

        slots_BAG = jnp.broadcast_to(jnp.arange(mask_BAG.shape[-1]), mask_BAG.shape)
        return TrainingRows(
            hidden_BMD=per_sequence(hidden_BAGD),
            latent_BMR=per_sequence(latents_BAGR),
            w2_RV=w2_RV,
            positions_BM=per_sequence(self.places_BAG),
            labels_BM=per_sequence(self.labels_BAG),
            slots_BM=per_sequence(slots_BAG),
            mask_BM=per_sequence(mask_BAG),
            confidence_logits_BM=per_sequence(confidence_logits_BAG),
        )


def make_blocks(
    *,
    tokens_BT: Array,
    loss_mask_BT: Array,
    starts_BT: Array,
    anchors_BA: Array,
    keep_BA: Array,
    block_len: int,
) -> Blocks:
    """Lays out `block_len` predictions behind every anchor; labels stop where the document does."""
    B, T = tokens_BT.shape
    places_BAG = anchors_BA[..., None] + jnp.arange(block_len)
    labels_at = places_BAG + 1

    def gather(x_BT: Array, at: Array) -> Array:
        flat = jnp.minimum(at, T - 1).reshape(B, -1)
        return jnp.take_along_axis(x_BT, flat, axis=1).reshape(at.shape)

    starts_BA = gather(starts_BT, anchors_BA)
    inside = (labels_at < T) & (gather(starts_BT, labels_at) == starts_BA[..., None])
    return Blocks(
        places_BAG=places_BAG,
        positions_BAG=places_BAG - starts_BA[..., None],
        prev_BAG=gather(tokens_BT, places_BAG),
        labels_BAG=gather(tokens_BT, labels_at),
        supervised_BAG=inside & gather(loss_mask_BT, labels_at) & keep_BA[..., None],
        starts_BA=starts_BA,
    )
