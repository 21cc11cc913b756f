"""Training blocks: positions, previous tokens, labels and supervised slots of an anchor (spec section 5)."""

from __future__ import annotations

import flax.struct
import jax.numpy as jnp
from jax import Array


@flax.struct.dataclass
class Blocks:
    """The A blocks of each sequence; row k of a block predicts the token at anchor + k + 1.

    Attributes:
      positions_BAG: anchor + k, for RoPE and for the target distribution to match.
      inputs_BAG: ids of [anchor token, MASK, ...].
      prev_BAG: the true token before each prediction (teacher forcing).
      labels_BAG: the true token to predict; any id where the mask is False.
      mask_BAG: the contiguous prefix of slots whose label is supervised; all False for a masked anchor.
      sees_BAS: context positions strictly before the anchor.
    """

    positions_BAG: Array
    inputs_BAG: Array
    prev_BAG: Array
    labels_BAG: Array
    mask_BAG: Array
    sees_BAS: Array


def make_blocks(
    *,
    tokens_BT: Array,
    loss_mask_BT: Array,
    anchors_BA: Array,
    keep_BA: Array,
    block_len: int,
    mask_token: int,
) -> Blocks:
    """Lays out blocks of `block_len` rows behind every anchor."""
    B, T = tokens_BT.shape
    positions_BAG = anchors_BA[..., None] + jnp.arange(block_len)
    label_positions = positions_BAG + 1
    inside = label_positions < T

    def gather(x_BT: Array, at: Array) -> Array:
        flat = jnp.minimum(at, T - 1).reshape(B, -1)
        return jnp.take_along_axis(x_BT, flat, axis=1).reshape(at.shape)

    supervised = inside & gather(loss_mask_BT, label_positions) & keep_BA[..., None]
    inputs = jnp.full(positions_BAG.shape, mask_token, tokens_BT.dtype)
    return Blocks(
        positions_BAG=positions_BAG,
        inputs_BAG=inputs.at[..., 0].set(gather(tokens_BT, anchors_BA)),
        prev_BAG=gather(tokens_BT, positions_BAG),
        labels_BAG=gather(tokens_BT, label_positions),
        mask_BAG=jnp.cumprod(supervised, axis=-1).astype(bool),
        sees_BAS=jnp.arange(T) < anchors_BA[..., None],
    )
