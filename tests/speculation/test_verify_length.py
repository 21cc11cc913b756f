"""Verify policies: lengths, refusals and non-anticipation."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.core.errors import InputError
from dspark_jax.speculation.verify_length import (
    ConfidenceThreshold,
    FixedLength,
    FullBlock,
    VerifyPolicy,
    verify_lengths,
)

G = 4
POLICIES: list[VerifyPolicy] = [
    FullBlock(),
    FixedLength(length=0),
    FixedLength(length=3),
    ConfidenceThreshold(threshold=0.5),
    ConfidenceThreshold(threshold=0.0),
]


def logit(probability: float) -> float:
    with np.errstate(divide="ignore"):
        return float(np.log(probability) - np.log1p(-probability))


def test_lengths_by_hand():
    confidences = [[0.9, 0.8, 0.7, 0.6], [0.9, 0.4, 0.9, 0.9], [0.1, 0.1, 0.1, 0.1]]
    logits_BG = jnp.array([[logit(c) for c in row] for row in confidences])

    def lengths(policy: VerifyPolicy) -> list[int]:
        return verify_lengths(policy, logits_BG, G).tolist()

    assert lengths(FullBlock()) == [4, 4, 4]
    assert lengths(FixedLength(length=2)) == [2, 2, 2]
    assert lengths(ConfidenceThreshold(threshold=0.65)) == [3, 1, 0]
    assert lengths(ConfidenceThreshold(threshold=-1.0)) == [4, 4, 4]
    assert lengths(ConfidenceThreshold(threshold=0.0)) == [4, 4, 4]


def test_confidence_equal_to_the_threshold_is_verified():
    assert verify_lengths(ConfidenceThreshold(threshold=0.5), jnp.zeros((1, G)), G).tolist() == [G]
    # sigmoid saturates to exactly 1, so a threshold of 1 is not "never".
    assert verify_lengths(ConfidenceThreshold(threshold=1.0), jnp.full((1, G), 50.0), G).tolist() == [G]


def test_nan_confidence_falls_back_to_plain_decoding():
    assert verify_lengths(ConfidenceThreshold(threshold=0.1), jnp.full((1, G), jnp.nan), G).tolist() == [0]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_int32_within_the_block_and_jittable(policy: VerifyPolicy):
    confidence_BG = jax.random.normal(jax.random.key(0), (16, G)) * 3
    lengths_B = jax.jit(verify_lengths, static_argnums=(0, 2))(policy, confidence_BG, G)
    assert (lengths_B.dtype, lengths_B.shape) == (jnp.int32, (16,))
    assert ((lengths_B >= 0) & (lengths_B <= G)).all()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**31), slot=st.integers(1, G))
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_keeping_slot_j_ignores_later_confidences(policy: VerifyPolicy, seed: int, slot: int):
    rng = np.random.default_rng(seed)
    before = rng.normal(size=(8, G)).astype(np.float32) * 2
    after = before.copy()
    after[:, slot:] = rng.normal(size=(8, G - slot)) * 2
    kept, kept_after = (
        np.asarray(verify_lengths(policy, jnp.asarray(c), G)) >= slot for c in (before, after)
    )
    np.testing.assert_array_equal(kept, kept_after)


def test_bad_configurations_are_refused():
    with pytest.raises(InputError, match="0 \\(plain decoding\\) or more"):
        FixedLength(length=-1)
    for threshold in (1.5, float("nan")):
        with pytest.raises(InputError, match="threshold"):
            ConfidenceThreshold(threshold=threshold)
    with pytest.raises(InputError, match="at most the 4 tokens"):
        verify_lengths(FixedLength(length=5), jnp.zeros((1, G)), G)
    with pytest.raises(dataclasses.FrozenInstanceError):
        FixedLength(length=1).length = 2  # pyright: ignore[reportAttributeAccessIssue]
