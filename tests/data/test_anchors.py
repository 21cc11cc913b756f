"""Anchors: sorted, distinct, supervised, and all of them when there are few."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.data.anchors import sample_anchors

masks = st.lists(st.booleans(), max_size=60).map(lambda values: np.asarray(values, np.bool_))


@given(loss_mask_T=masks, num_anchors=st.integers(1, 40), seed=st.integers(0, 2**32 - 1))
def test_anchors_are_sorted_distinct_and_supervised(loss_mask_T, num_anchors, seed):
    positions_A, keep_A = sample_anchors(np.random.default_rng(seed), loss_mask_T, num_anchors)
    assert positions_A.dtype == np.int32 and keep_A.dtype == np.bool_
    assert positions_A.shape == keep_A.shape == (num_anchors,)

    valid = {p for p in range(len(loss_mask_T) - 1) if loss_mask_T[p] and loss_mask_T[p + 1]}
    kept = positions_A[keep_A]
    assert len(kept) == min(num_anchors, len(valid))
    assert set(kept.tolist()) <= valid
    assert np.all(np.diff(kept) > 0)
    assert not positions_A[~keep_A].any()
    assert keep_A.tolist() == sorted(keep_A.tolist(), reverse=True)
    if len(valid) <= num_anchors:
        assert set(kept.tolist()) == valid


def test_every_valid_position_is_drawn_equally_often():
    loss_mask_T = np.asarray([False, True, True, True, True, True, False, True])
    rng = np.random.default_rng(0)
    drawn = np.concatenate([sample_anchors(rng, loss_mask_T, 2)[0] for _ in range(4000)])
    counts = np.bincount(drawn, minlength=8)
    assert counts[[0, 5, 6, 7]].sum() == 0
    # Four valid positions, two of them drawn 4000 times: 2000 each, standard deviation 32.
    assert np.abs(counts[1:5] - 2000).max() < 160
