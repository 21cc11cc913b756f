"""Anchor sampling: where the draft blocks of a training sequence start."""

from __future__ import annotations

import numpy as np


def sample_anchors(
    rng: np.random.Generator, loss_mask_T: np.ndarray, num_anchors: int
) -> tuple[np.ndarray, np.ndarray]:
    """Draws anchors uniformly, without replacement, among the positions that supervise a block.

    Position p may be an anchor when p and p + 1 are both in the loss: the anchor itself is a token that the
    target produced, and slot 0 has a label.

    Args:
      rng: source of randomness; the result depends on nothing else but the arguments.
      loss_mask_T: bool [T], true on supervised tokens.
      num_anchors: A, the fixed size of the result.

    Returns:
      positions_A: int32 [A], ascending; padded with 0 where there are fewer valid positions than A.
      keep_A: bool [A], false on the padding.
    """
    valid = np.flatnonzero(loss_mask_T[:-1] & loss_mask_T[1:])
    if len(valid) > num_anchors:
        valid = np.sort(rng.choice(valid, num_anchors, replace=False))
    positions_A = np.zeros(num_anchors, np.int32)
    positions_A[: len(valid)] = valid
    return positions_A, np.arange(num_anchors) < len(valid)
